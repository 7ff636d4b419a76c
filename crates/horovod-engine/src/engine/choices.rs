//! The choices of an engine at its start and their reasons, as lines of rank 0's log at level DEBUG.

use horovod_collectives::select::{self, AllreduceAlgorithm};
use horovod_collectives::{SetLayout, Tuning};
use horovod_protocol::Rank;
use horovod_settings as settings;
use horovod_transport::Topology;
use tracing::Level;

use crate::config::Config;

/// Hosts that the log names.
const HOSTS_MAX: usize = 16;

/// Logs the choices, on rank 0: they are the same on all ranks.
pub(super) fn log(config: &Config, topology: &Topology) {
    if topology.rank != Rank(0) || !tracing::enabled!(Level::DEBUG) {
        return;
    }
    for line in lines(config, topology) {
        tracing::debug!("{line}");
    }
}

fn lines(config: &Config, topology: &Topology) -> Vec<String> {
    let everyone: Vec<Rank> = topology.peers.iter().map(|peer| peer.rank).collect();
    let layout = SetLayout::new(topology, &everyone);
    let tuning = &config.algorithms.tuning;
    let mut lines = vec![hosts(topology), allreduce(&layout, tuning)];
    if layout.hosts() > 1 {
        lines.push(between_hosts(&layout, tuning));
    }
    lines.push(format!(
        "fusion: tensors of up to {} bytes run as one operation ({})",
        config.negotiation.fusion_threshold,
        settings::FUSION_THRESHOLD.name
    ));
    lines.push(match config.negotiation.cache_capacity {
        0 => format!("cache: off ({}=0)", settings::CACHE_CAPACITY.name),
        entries => format!(
            "cache: {entries} operations are known by a number and not described again ({})",
            settings::CACHE_CAPACITY.name
        ),
    });
    if config.observers.autotune.is_none() {
        lines.push(format!("tuner: off ({} is not 1)", settings::AUTOTUNE.name));
    }
    lines
}

/// The hosts and their ranks.
fn hosts(topology: &Topology) -> String {
    let mut groups: Vec<(u32, &str, Vec<u32>)> = Vec::new();
    for peer in &topology.peers {
        match groups.iter_mut().find(|(host, ..)| *host == peer.host.0) {
            Some((.., ranks)) => ranks.push(peer.rank.0),
            None => groups.push((peer.host.0, &peer.hostname, vec![peer.rank.0])),
        }
    }
    let named = groups.iter().take(HOSTS_MAX).map(|(_, name, ranks)| {
        let ranks: Vec<String> = ranks.iter().map(u32::to_string).collect();
        format!("{name} has {}", ranks.join(" "))
    });
    let more = groups.len().saturating_sub(HOSTS_MAX);
    let more = match more {
        0 => String::new(),
        more => format!("; and {more} more"),
    };
    format!(
        "hosts: {} ranks on {}, by the identity of each machine: {}{more}",
        topology.size,
        groups.len(),
        named.collect::<Vec<_>>().join("; ")
    )
}

/// The algorithm for each class of sizes.
fn allreduce(layout: &SetLayout, tuning: &Tuning) -> String {
    let classes = select::allreduce_classes(layout, tuning);
    let all: Vec<String> = classes
        .iter()
        .map(|(most, algorithm)| match most {
            Some(most) => format!("up to {most} bytes {}", algorithm.stage_name()),
            None if classes.len() == 1 => format!("always {}", algorithm.stage_name()),
            None => format!("above {}", algorithm.stage_name()),
        })
        .collect();
    let reason = reason(layout, tuning, classes.last().map(|(_, chosen)| *chosen));
    format!("allreduce: {}, because {reason}", all.join(", "))
}

fn reason(layout: &SetLayout, tuning: &Tuning, chosen: Option<AllreduceAlgorithm>) -> String {
    use select::Across::Ring;
    let (members, groups) = (layout.members(), layout.hosts());
    let ends = match chosen {
        Some(AllreduceAlgorithm::Hierarchical(_)) => groups,
        _ => members,
    };
    if members == 1 {
        "there is one rank".to_owned()
    } else if tuning.allreduce.is_some() {
        format!("{} names it", settings::ALLREDUCE_ALGORITHM.name)
    } else if groups == 1 {
        // Each rank stages small operands by a limit of its own, which depends on its cores.
        "all ranks share memory (limits without pre-staging)".to_owned()
    } else {
        let inside = match chosen {
            Some(AllreduceAlgorithm::Hierarchical(_)) => {
                "ranks that share memory add up first".to_owned()
            }
            _ if groups == members => "no ranks share memory".to_owned(),
            _ => format!("{} is 0", settings::HIERARCHICAL_ALLREDUCE.name),
        };
        let most = tuning.pairwise_max_hosts;
        let between = match chosen {
            Some(AllreduceAlgorithm::Hierarchical(Ring) | AllreduceAlgorithm::Flat(Ring)) => "more",
            _ => "not more",
        };
        let name = settings::PAIRWISE_MAX_HOSTS.name;
        format!("{inside} and {ends} ends are {between} than {most} ({name})")
    }
}

fn between_hosts(layout: &SetLayout, tuning: &Tuning) -> String {
    let gather = match select::allgather_by_host(layout, tuning) {
        true => "inside each host first",
        false => "between all ranks at once",
    };
    format!(
        "broadcast between hosts: below {} bytes down a tree, from there along a chain; allgather: {gather}",
        tuning.chain_min_bytes
    )
}

#[cfg(test)]
mod tests {
    use horovod_transport::testing::Cluster;

    use super::*;

    fn of(hosts: &[usize], tuning: impl FnOnce(&mut Tuning)) -> String {
        let meshes = Cluster::new(hosts.len()).hosts(hosts).build();
        let mut config = Config::solo();
        tuning(&mut config.algorithms.tuning);
        lines(&config, &meshes[0].topology).join("\n")
    }

    #[test]
    fn classes_of_sizes_and_the_reason_are_logged() {
        let text = of(&[0, 0], |t| t.direct_max_bytes = 4096);
        assert!(
            text.contains(
                "allreduce: up to 4096 bytes DIRECT_ALLREDUCE, above STAGED_ALLREDUCE, because all ranks share memory (limits without pre-staging)"
            ),
            "{text}"
        );
        assert!(text.contains("cache: 1024 operations"), "{text}");
        assert!(text.contains("tuner: off"), "{text}");
        let alone = of(&[0], |_| ());
        assert!(
            alone.contains("always LOCAL_ALLREDUCE, because there is one rank"),
            "{alone}"
        );
    }

    #[test]
    fn hosts_are_logged_with_their_ranks() {
        let text = of(&[0, 0, 1], |_| ());
        assert!(text.starts_with("hosts: 3 ranks on 2, "), "{text}");
        assert!(
            text.contains(" has 0 1; ") && text.contains(" has 2\n"),
            "{text}"
        );
        assert!(
            text.contains("ranks that share memory add up first"),
            "{text}"
        );
        assert!(text.contains("broadcast between hosts: "), "{text}");
    }

    #[test]
    fn an_algorithm_that_the_user_names_is_the_reason() {
        let text = of(&[0, 1], |t| {
            t.allreduce = Some(select::AlgorithmOverride::Across(select::Across::Ring));
        });
        assert!(
            text.contains("always RING_ALLREDUCE, because HOROVOD_ALLREDUCE_ALGORITHM names it"),
            "{text}"
        );
    }
}
