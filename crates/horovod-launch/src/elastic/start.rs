//! The start of an elastic job, from its options.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use super::agents::Agents;
use super::discovery::{Discovery, Source};
use super::events::Policy;
use super::job::ElasticJob;
use super::supervisor::Supervisor;
use crate::events::Events;
use crate::hosts::{Host, assign};
use crate::job::PING_INTERVAL;
use crate::launch::{ssh_of, start_timeout_of, wanted_hosts};
use crate::launch_error::LaunchError;
use crate::options::Options;
use crate::output::Output;
use crate::rendezvous::{Reach, Rendezvous};
use crate::signals::Signals;
use crate::{dialed, environment, parent_watch, platform, remote};

/// Runs the job and returns the exit code.
pub(crate) fn run(options: &Options, events: &Events) -> Result<u8, LaunchError> {
    let np = options.num_proc.unwrap_or(1);
    let start_timeout = start_timeout_of(options);
    let ssh = ssh_of(options)?;
    let elastic = &options.elastic;
    let server = options
        .dialed
        .then(|| dialed::listen(options))
        .transpose()?;
    let source = match &elastic.script {
        Some(command) => Source::Script {
            command: command.clone(),
            default_slots: elastic.slots_per_host,
        },
        None if options.dialed => Source::Fixed(Vec::new()),
        None => {
            let hosts = wanted_hosts(options, np)?;
            // Fails if the fixed hosts have too few slots, because no others will be added.
            assign(&hosts, np)?;
            Source::Fixed(hosts)
        }
    };
    let all_local = match &source {
        // Any host may be added later, unless the executor has only this one.
        _ if options.dialed => dialed::are_on_this_host(options),
        Source::Script { .. } => false,
        Source::Fixed(hosts) => {
            let hosts: Vec<&Host> = hosts.iter().collect();
            let local = remote::are_local(&hosts, start_timeout);
            local.iter().all(|local| *local)
        }
    };
    let cwd = std::env::current_dir().map_err(|error| {
        LaunchError::Other(format!(
            "the working directory cannot be found (was it removed?): {error}"
        ))
    })?;
    // From here on Ctrl-C ends the job in order.
    let signals = Signals::watch()?;
    parent_watch::watch();
    let mut output = Output::new(0, options.prefix_timestamp)?;
    output.show_log(options)?;
    output.show_ranks(options.output_ranks.clone());
    output.show_events(events);
    if let Some(server) = &server {
        dialed::announce(&output, server);
    }
    output
        .open_files_of(options, elastic.max_np.unwrap_or(np))
        .map_err(LaunchError::Other)?;
    platform::adopt_orphans();
    let rendezvous = Rendezvous::start_elastic(Reach::of(all_local), &options.network_interfaces)?;
    let wait_timeout = elastic.timeout.filter(|seconds| *seconds > 0);
    let wait_timeout = wait_timeout.unwrap_or_else(environment::elastic_timeout);
    let seconds = |s: u32| Duration::from_secs(s.into());
    let policy = Policy {
        first_np: np,
        min_np: elastic.min_np.unwrap_or(np),
        max_np: elastic.max_np.unwrap_or(u32::MAX),
        wait_timeout: seconds(wait_timeout),
        start_grace: start_timeout,
        reset_limit: elastic.reset_limit,
        cooldown: elastic.cooldown.map(|(a, b)| (seconds(a), seconds(b))),
        slot_failures_max: environment::elastic_slot_failures(),
        has_fixed_hosts: elastic.script.is_none() && !options.dialed,
    };
    let agents = Agents {
        options,
        output,
        start_timeout,
        program: std::env::current_exe()?,
        ssh: ssh.clone(),
        cwd,
        listed: BTreeMap::new(),
        links: Vec::new(),
        workers: BTreeMap::new(),
        threads: Vec::new(),
        tails: BTreeMap::new(),
        asked: None,
        ping_at: Instant::now() + PING_INTERVAL,
    };
    let mut supervisor = Supervisor::new(policy, rendezvous, &options.network_interfaces, agents);
    if options.dialed {
        supervisor.expect_hosts();
    }
    let job = ElasticJob {
        supervisor,
        signals,
        discovery: match server {
            None => Some(Discovery::start(source, ssh)?),
            Some(_) => None,
        },
        server,
        has_listed: false,
        last_complaint: None,
        interrupted_by: None,
    };
    Ok(job.run()?)
}
