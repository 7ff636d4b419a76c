//! SageMaker's training jobs: the script runs once on each host, and the list of hosts makes ranks.

use crate::Started;
use crate::hints::text_list;
use crate::reader::Reader;

/// Where rank 0 listens, in a container of its own.
const PORT: u16 = 29_600;

/// The job of several hosts, one process on each; `None` in any other place, or if this host is not in the list.
pub(crate) fn started(r: &Reader<'_>) -> Option<Started> {
    let mut hosts = text_list(&r.text("SM_HOSTS")?)?;
    if hosts.len() < 2 {
        return None;
    }
    hosts.sort();
    let current = r.text("SM_CURRENT_HOST")?;
    let rank = hosts.iter().position(|host| *host == current)?;
    Some(Started {
        by: "SageMaker",
        rank: u32::try_from(rank).ok()?,
        size: u32::try_from(hosts.len()).ok()?,
        one_host: false,
        job: Vec::new(),
        ancestor: None,
        secret: None,
        rank0: hosts.into_iter().next().map(|first| (first, PORT)),
        size_variable: "SM_HOSTS",
        starts_mpi: false,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tests::Map;

    fn found(hosts: &'static str, current: &'static str) -> Option<Started> {
        let env = Map(vec![("SM_HOSTS", hosts), ("SM_CURRENT_HOST", current)]);
        started(&Reader { env: &env })
    }

    #[test]
    fn the_sorted_list_of_hosts_makes_ranks() {
        let hosts = r#"["algo-2", "algo-1", "algo-3"]"#;
        let ranks = ["algo-1", "algo-2", "algo-3"].map(|current| {
            let started = found(hosts, current).unwrap();
            assert_eq!(started.rank0, Some(("algo-1".to_owned(), PORT)));
            (started.rank, started.size)
        });
        assert_eq!(ranks, [(0, 3), (1, 3), (2, 3)]);
    }

    #[test]
    fn one_host_and_lists_without_this_host_are_no_job() {
        for (hosts, current) in [
            (r#"["algo-1"]"#, "algo-1"),
            (r#"["algo-1", "algo-2"]"#, "algo-3"),
            (r#"["algo-1", 2]"#, "algo-1"),
            ("algo-1", "algo-1"),
        ] {
            assert_eq!(found(hosts, current), None, "{hosts}");
        }
    }
}
