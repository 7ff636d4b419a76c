//! Agents that dial the launcher, one for each rank: where they come in, who they are, and which ranks they get.

use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;
use std::time::{Duration, Instant};

use horovod_settings as settings;
use horovod_transport::agents::Server;
use horovod_transport::{JobKey, Ports};

use crate::events::Event;
use crate::frames::{DialedTask, FromAgent, Variables};
use crate::hosts::{self, Host, HostSlot, HostsError, Placement};
use crate::io::{Interest, wait};
use crate::launch_error::LaunchError;
use crate::link::{HostLink, HostStage};
use crate::mpi::launcher::MpiLauncher;
use crate::options::Options;
use crate::output::Output;
use crate::rendezvous::Reach;
use crate::signals::Signals;
use crate::{environment, remote};

/// A machine that has not answered for so long is given up, unless ranks are more patient.
const SILENCE_MIN: Duration = Duration::from_secs(60);
/// Missing tasks that are named.
const NAMED_MAX: usize = 10;

/// Listens for agents.
pub(crate) fn listen(options: &Options) -> Result<Server, LaunchError> {
    if let Some(port) = options.agents_port {
        let key = environment::user_key();
        let key = key.map_err(|why| LaunchError::Wrong(format!("--agents-port: {why}")))?;
        let reach = Reach::of(false);
        return listen_at(reach, &options.network_interfaces, Ports::One(port), key);
    }
    let key = environment::agents_key().and_then(|hex| JobKey::from_hex(&hex));
    let key = key.ok_or_else(|| {
        LaunchError::Wrong(
            "--dialed-agents: HOROVODRUN_AGENTS_KEY must hold the agents' key, 64 hex digits"
                .to_owned(),
        )
    })?;
    let reach = Reach::of(are_on_this_host(options));
    listen_on(reach, &options.network_interfaces, key)
}

/// Listens for agents that have this key.
pub(crate) fn listen_on(
    reach: Reach,
    interfaces: &[String],
    key: JobKey,
) -> Result<Server, LaunchError> {
    let ports = environment::ports().map_err(|error| LaunchError::Wrong(error.to_string()))?;
    listen_at(reach, interfaces, ports, key)
}

fn listen_at(
    reach: Reach,
    interfaces: &[String],
    ports: Ports,
    key: JobKey,
) -> Result<Server, LaunchError> {
    let bind = reach.addresses(interfaces)?;
    let heartbeat = environment::heartbeat_s();
    let silence_max = heartbeat.map(|s| Duration::from_secs(s.into()).max(SILENCE_MIN));
    Server::start(&bind, ports, key, silence_max).map_err(|error| LaunchError::Cannot {
        what: "agents would have nowhere to dial".to_owned(),
        error,
    })
}

/// Whether every agent runs on this host, as their executor says. Interfaces that the user has named count more.
pub(crate) fn are_on_this_host(options: &Options) -> bool {
    options.network_interfaces.is_empty() && environment::agents_are_on_this_host()
}

/// Where agents are told to dial.
pub(crate) fn addresses(server: &Server) -> Vec<SocketAddr> {
    let mut addresses = server.addrs().to_vec();
    // To another host the loopback is itself.
    if addresses.iter().any(|address| !address.ip().is_loopback()) {
        addresses.retain(|address| !address.ip().is_loopback());
    }
    addresses.sort_by_key(SocketAddr::is_ipv6);
    addresses
}

/// A name that tells people which task on which host this is.
pub(crate) fn name_of(task: &DialedTask) -> String {
    let DialedTask { index, attempt, .. } = task;
    let host = &task.host_name;
    match attempt {
        0 => format!("{host}[task {index}]"),
        _ => format!("{host}[task {index}, attempt {attempt}]"),
    }
}

/// A rank's variables, in which its host is called what its task calls it: ranks of one host must agree on it.
pub(crate) fn with_host_name(mut variables: Variables, task: Option<&DialedTask>) -> Variables {
    if let Some(task) = task {
        let name = settings::HOSTNAME.name;
        variables.push((name.into(), task.host_name.clone().into()));
    }
    variables
}

/// Reason to refuse an agent that has sent its hello.
pub(crate) fn objection(version: &str, task: Option<&DialedTask>) -> Option<String> {
    let Some(task) = task else {
        let other = remote::other_version(version);
        return Some(other.unwrap_or_else(|| "does not say which task it is".to_owned()));
    };
    let wanted = environment::agents_python()?;
    let minor = |text: &str| text.split('.').take(2).collect::<Vec<_>>().join(".");
    (minor(&wanted) != minor(&task.python)).then(|| {
        format!(
            "has Python {}, this host {wanted}: functions and results cannot travel between them; use the same there",
            task.python
        )
    })
}

/// The place of each task, in the order of tasks: hosts follow each other as their first tasks do, so task 0 is rank 0.
fn places(tasks: &BTreeMap<u32, DialedTask>) -> Result<BTreeMap<u32, Placement>, HostsError> {
    let mut by_host: Vec<(&str, Vec<u32>)> = Vec::new();
    for (index, task) in tasks {
        match by_host.iter_mut().find(|(host, _)| *host == task.host) {
            Some((_, indexes)) => indexes.push(*index),
            None => by_host.push((&task.host, vec![*index])),
        }
    }
    let hosts: Vec<Host> = by_host
        .iter()
        .map(|(host, indexes)| Host {
            name: (*host).to_owned(),
            slots: indexes.len() as u32,
        })
        .collect();
    let placements = hosts::assign(&hosts, tasks.len() as u32)?;
    let of_tasks = by_host
        .iter()
        .zip(placements)
        .flat_map(|((_, indexes), all)| {
            indexes.iter().zip(all.slots).map(|(index, slot)| {
                let host = Host {
                    name: name_of(&tasks[index]),
                    slots: 1,
                };
                let slots = vec![slot];
                (*index, Placement { host, slots })
            })
        });
    Ok(of_tasks.collect())
}

/// The place of each task whose index is its rank.
fn places_of_ranks(tasks: &BTreeMap<u32, DialedTask>) -> BTreeMap<u32, Placement> {
    let mut by_host: BTreeMap<&str, Vec<u32>> = BTreeMap::new();
    for (rank, task) in tasks {
        by_host.entry(&task.host).or_default().push(*rank);
    }
    // Hosts in the order of their first ranks.
    let mut groups: Vec<&Vec<u32>> = by_host.values().collect();
    groups.sort();
    let place = |(rank, task): (&u32, &DialedTask)| {
        let of_host = &by_host[task.host.as_str()];
        let local = of_host.iter().position(|other| other == rank);
        let local = local.unwrap_or_default();
        let with_local = groups.iter().filter(|group| group.len() > local);
        let before = with_local.clone().take_while(|group| **group != of_host);
        let slot = HostSlot {
            rank: *rank,
            size: tasks.len() as u32,
            local_rank: local as u32,
            local_size: of_host.len() as u32,
            cross_rank: before.count() as u32,
            cross_size: with_local.count() as u32,
        };
        let host = Host {
            name: task.host_name.clone(),
            slots: 1,
        };
        let slots = vec![slot];
        (*rank, Placement { host, slots })
    };
    tasks.iter().map(place).collect()
}

/// Which rank a task gets.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Order {
    /// The ranks of a host follow each other.
    HostsTogether,
    /// That of its index, as its starter has numbered it.
    Indexes,
}

/// Agents that are to come.
pub(crate) struct Expected<'a> {
    pub(crate) size: u32,
    pub(crate) within: Duration,
    pub(crate) order: Order,
    /// A child of this process that starts them.
    pub(crate) started: Option<&'a mut MpiLauncher>,
}

/// How waiting for agents has ended.
pub(crate) enum Gathered {
    /// All are there, in the order of ranks.
    All(Vec<HostLink>),
    /// A signal came.
    Interrupted(i32),
    /// Why not.
    Failed(String),
}

/// Waits until an agent of each task has come and said who it is.
pub(crate) fn gather(
    server: &Server,
    mut expected: Expected<'_>,
    output: &mut Output,
    signals: &mut Signals,
    is_verbose: bool,
) -> Result<Gathered, LaunchError> {
    let size = expected.size;
    let deadline = Instant::now() + expected.within;
    let mut links: Vec<HostLink> = Vec::new();
    loop {
        let mut interests = vec![
            Interest::read(signals.as_fd()),
            Interest::read(output.as_fd()),
            Interest::read(server.as_fd()),
        ];
        for link in &links {
            interests.extend(link.interests(true));
        }
        interests.extend(expected.started.as_ref().map(|started| started.interest()));
        wait(&interests, Some(deadline))?;
        if let Some(signal) = signals.take().first() {
            return Ok(Gathered::Interrupted(*signal));
        }
        // Takes down that the log has been written.
        let _ = output.has_room();
        for arrival in server.take() {
            links.push(HostLink::dialed(arrival.index, arrival.stream)?);
        }
        for link in &mut links {
            let (messages, result) = link.exchange(true);
            for message in messages {
                if let Some(why) = greet(link, message, size) {
                    return Ok(Gathered::Failed(format!("{} {why}", link.name())));
                }
            }
            if result.is_err() {
                link.kill();
                link.stage = HostStage::Lost;
                if is_verbose {
                    let text = format!("horovodrun: {} has gone again", link.name());
                    output.note(&text);
                }
            }
        }
        if expected.order == Order::Indexes
            && let Some(why) = twice(&links)
        {
            return Ok(Gathered::Failed(why));
        }
        drop_outdated(&mut links);
        links.retain(|link| !link.is_over());
        let tasks: BTreeMap<u32, DialedTask> = links
            .iter()
            .filter_map(|link| link.task.clone())
            .map(|task| (task.index, task))
            .collect();
        if tasks.len() == size as usize {
            let places = match expected.order {
                Order::HostsTogether => places(&tasks)?,
                Order::Indexes => places_of_ranks(&tasks),
            };
            return Ok(Gathered::All(place_all(links, places)));
        }
        if let Some(started) = &mut expected.started
            && let Some(why) = started.failure()
        {
            return Ok(Gathered::Failed(why));
        }
        if Instant::now() >= deadline {
            return Ok(Gathered::Failed(shortage(&expected, &tasks)));
        }
    }
}

/// An agent's first message; what is wrong with it.
fn greet(link: &mut HostLink, message: FromAgent, size: u32) -> Option<String> {
    let FromAgent::Hello {
        version,
        hostname,
        task,
    } = message
    else {
        return None;
    };
    let was = std::mem::take(&mut link.placement.host.name);
    link.placement.host.name = format!("{was} on host {hostname}");
    if let Some(why) = objection(&version, task.as_ref()) {
        return Some(why);
    }
    if let Some(task) = &task
        && task.index >= size
    {
        return Some(format!("is none of the {size} tasks of this job"));
    }
    link.stage = HostStage::Greeted;
    link.task = task;
    None
}

/// Which rank two processes have, if any.
fn twice(links: &[HostLink]) -> Option<String> {
    let mut known: BTreeMap<u32, &DialedTask> = BTreeMap::new();
    for task in links.iter().filter_map(|link| link.task.as_ref()) {
        let first = known.entry(task.index).or_insert(task);
        if (&first.host, first.pid) != (&task.host, task.pid) {
            return Some(format!(
                "MPI's launcher calls two processes rank {}: {} on host {} and {} on host {}; it is not the launcher \
                 that --version names, or the processes have variables of another one",
                task.index, first.pid, first.host_name, task.pid, task.host_name
            ));
        }
    }
    None
}

/// Of two agents of one task the one of the later attempt stays, or who came first.
fn drop_outdated(links: &mut [HostLink]) {
    let mut best: BTreeMap<u32, (u32, usize)> = BTreeMap::new();
    for (at, link) in links.iter().enumerate().filter(|(_, l)| !l.is_over()) {
        if let Some(task) = &link.task {
            let known = best.entry(task.index).or_insert((task.attempt, at));
            if task.attempt > known.0 {
                *known = (task.attempt, at);
            }
        }
    }
    let kept: BTreeSet<usize> = best.values().map(|(_, at)| *at).collect();
    for (at, link) in links.iter_mut().enumerate() {
        if link.task.is_some() && !kept.contains(&at) {
            link.kill();
            link.stage = HostStage::Lost;
        }
    }
}

fn place_all(links: Vec<HostLink>, mut places: BTreeMap<u32, Placement>) -> Vec<HostLink> {
    let mut placed = Vec::new();
    for mut link in links {
        let index = link.task.as_ref().map(|task| task.index);
        match index.and_then(|index| places.remove(&index)) {
            Some(place) => {
                link.placement = place;
                placed.push(link);
            }
            None => link.kill(),
        }
    }
    placed.sort_by_key(|link| link.placement.slots.first().map(|slot| slot.rank));
    placed
}

fn shortage(expected: &Expected<'_>, tasks: &BTreeMap<u32, DialedTask>) -> String {
    let size = expected.size;
    let missing = (0..size).filter(|index| !tasks.contains_key(index));
    let missing: Vec<String> = missing.map(|index| index.to_string()).collect();
    let more = missing.len().saturating_sub(NAMED_MAX);
    let mut names = missing[..missing.len().min(NAMED_MAX)].join(", ");
    if more > 0 {
        names.push_str(&format!(" and {more} more"));
    }
    let plural = if missing.len() == 1 { "" } else { "s" };
    let (come, seconds) = (tasks.len(), expected.within.as_secs());
    match &expected.started {
        None => format!(
            "{come} of {size} tasks have come within {seconds} s, missing: task{plural} {names}; are there too few \
             free slots? Give them more time with start_timeout (--start-timeout), or ask for fewer with num_proc (-np)"
        ),
        Some(started) => format!(
            "{come} of {size} ranks have come within {seconds} s (see --start-timeout), missing: rank{plural} \
             {names}{}",
            started.output_text()
        ),
    }
}

/// Tells whoever starts the agents where they can dial.
pub(crate) fn announce(output: &Output, server: &Server) {
    output.emit(&Event::Listening(addresses(server)));
}

#[cfg(test)]
mod tests {
    use super::*;

    fn task(index: u32, attempt: u32, host: &str) -> DialedTask {
        DialedTask {
            index,
            attempt,
            host: format!("boot|{host}"),
            host_name: host.to_owned(),
            pid: 1,
            python: "3.11.7".to_owned(),
        }
    }

    #[test]
    fn tasks_of_a_host_are_contiguous_and_task_0_is_rank_0() {
        let tasks = [(0, "b"), (1, "a"), (2, "b"), (3, "a"), (4, "c")];
        let tasks = tasks.map(|(index, host)| (index, task(index, 0, host)));
        let places = places(&BTreeMap::from(tasks)).expect("enough slots");
        let of = |index: u32| {
            let place = &places[&index];
            let slot = place.slots[0];
            (
                slot.rank,
                slot.local_rank,
                slot.local_size,
                slot.cross_rank,
                slot.cross_size,
            )
        };
        assert_eq!(of(0), (0, 0, 2, 0, 3));
        assert_eq!(of(2), (1, 1, 2, 0, 2));
        assert_eq!(of(1), (2, 0, 2, 1, 3));
        assert_eq!(of(3), (3, 1, 2, 1, 2));
        assert_eq!(of(4), (4, 0, 1, 2, 3));
        assert_eq!(places[&3].host.name, "a[task 3]");
    }

    #[test]
    fn a_rank_of_mpi_stays_what_its_launcher_calls_it() {
        let tasks = ["a", "b", "a", "b", "a"].into_iter().zip(0..);
        let tasks: BTreeMap<u32, DialedTask> = tasks
            .map(|(host, index)| (index, task(index, 0, host)))
            .collect();
        let places = places_of_ranks(&tasks);
        for (rank, local, local_size, cross, cross_size) in [
            (0, 0, 3, 0, 2),
            (1, 0, 2, 1, 2),
            (2, 1, 3, 0, 2),
            (3, 1, 2, 1, 2),
            (4, 2, 3, 0, 1),
        ] {
            let slot = places[&rank].slots[0];
            let expected = HostSlot {
                rank,
                size: 5,
                local_rank: local,
                local_size,
                cross_rank: cross,
                cross_size,
            };
            assert_eq!(slot, expected, "rank {rank}");
        }
        assert_eq!(places[&3].host.name, "b");
    }

    #[test]
    fn names_tell_later_attempts() {
        assert_eq!(name_of(&task(3, 0, "h")), "h[task 3]");
        assert_eq!(name_of(&task(3, 2, "h")), "h[task 3, attempt 2]");
    }

    #[test]
    fn too_few_tasks_are_counted_and_the_missing_named() {
        let tasks = BTreeMap::from([(1, task(1, 0, "h"))]);
        let of = |size| Expected {
            size,
            within: Duration::from_secs(9),
            order: Order::HostsTogether,
            started: None,
        };
        let text = shortage(&of(3), &tasks);
        assert!(
            text.starts_with("1 of 3 tasks have come within 9 s, missing: tasks 0, 2;"),
            "{text}"
        );
        let text = shortage(&of(20), &tasks);
        assert!(text.contains("9, 10 and 9 more;"), "{text}");
    }

    #[test]
    fn another_version_is_refused() {
        let why = objection("0.0.1", None).expect("another version");
        assert!(why.starts_with("has horovod-rs 0.0.1"), "{why}");
        assert!(objection(env!("CARGO_PKG_VERSION"), None).is_some());
        assert_eq!(
            objection(env!("CARGO_PKG_VERSION"), Some(&task(0, 0, "h"))),
            None
        );
    }

    #[test]
    fn two_processes_of_one_rank_are_named() {
        let link = |pid| {
            let (ours, _theirs) = std::os::unix::net::UnixStream::pair().expect("a pair");
            let mut link = HostLink::dialed(1, ours).expect("a stream");
            link.task = Some(DialedTask {
                pid,
                ..task(1, 0, "h")
            });
            link
        };
        assert_eq!(twice(&[link(5), link(5)]), None);
        let why = twice(&[link(5), link(6)]).expect("two");
        assert!(
            why.contains("rank 1: 5 on host h and 6 on host h;"),
            "{why}"
        );
    }

    #[test]
    fn the_later_attempt_stays() {
        let stream = || {
            std::os::unix::net::UnixStream::pair()
                .map(|(ours, theirs)| {
                    drop(theirs);
                    ours
                })
                .expect("a pair")
        };
        let link = |attempt| {
            let mut link = HostLink::dialed(1, stream()).expect("a stream");
            link.stage = HostStage::Greeted;
            link.task = Some(task(1, attempt, "h"));
            link
        };
        let mut links = [link(0), link(2), link(1)];
        drop_outdated(&mut links);
        assert_eq!(links.each_ref().map(HostLink::is_over), [true, false, true]);
    }
}
