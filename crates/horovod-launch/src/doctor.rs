//! `horovodrun --doctor`: an examination of a job's hosts before there is a job, and what to mend.
//!
//! The launcher starts its agents as for a job (`visit`); each looks at its own host (`gather`) and, with the others,
//! at the network (`examiner`, over the transport's probes). The result is a `chart` of plain data, from which
//! `findings` are concluded; `render` shows both. Everything together takes at most 15 s.

mod chart;
pub(crate) mod examiner;
pub(crate) mod facts;
mod findings;
mod gather;
mod render;
pub(crate) mod talk;
mod tournament;
mod visit;
pub(crate) mod wire;

use std::time::{Duration, Instant};

use horovod_transport::JobKey;

use self::chart::{Chart, Patient};
use self::visit::{Asked, Visit};
use crate::args::Options;
use crate::hosts::{self, Host, Placement};
use crate::launch::{LaunchError, open_links, ssh_of, wanted_hosts};
use crate::signals::Signals;
use crate::{parent_watch, platform, remote};

/// How long a name server may take to say which hosts are this machine.
const RESOLVE_TIME: Duration = Duration::from_secs(2);
/// How long the script that lists the hosts of an elastic job may take.
const SCRIPT_TIME: Duration = Duration::from_secs(3);
/// How long ssh may try to connect.
const SSH_TIME_S: u32 = 5;

/// How to show what was found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Form {
    /// For people.
    Text,
    /// For programs.
    Json,
}

/// Examines the hosts and prints the result; 0 if nothing would stop a job.
pub(crate) fn run(options: &Options, form: Form) -> Result<u8, LaunchError> {
    examine(options, form).map_err(|error| match error {
        error if error.is_out_of_files() => LaunchError::Other(format!(
            "{error}: the limit of open files is too low for the launcher itself, \
             see `ulimit -n`; try `ulimit -n 1024`"
        )),
        error => error,
    })
}

fn examine(options: &Options, form: Form) -> Result<u8, LaunchError> {
    let begun = Instant::now();
    let (hosts, size) = hosts_of(options)?;
    let mut placements = hosts::assign(&hosts, size)?;
    let mut ssh = ssh_of(options)?;
    ssh.connect_timeout_s = ssh.connect_timeout_s.min(SSH_TIME_S);
    let signals = Signals::watch()?;
    parent_watch::watch();
    platform::adopt_orphans();
    let named: Vec<&Host> = placements.iter().map(|placement| &placement.host).collect();
    let mut are_local = remote::are_local(&named, RESOLVE_TIME);
    if !are_local.contains(&true) {
        // Every rank connects to the launcher, wherever that runs.
        placements.push(Placement {
            host: Host {
                name: "localhost".to_owned(),
                slots: 0,
            },
            slots: Vec::new(),
        });
        are_local.push(true);
    }
    let cwd = std::env::current_dir()?;
    let patients = placements.iter().zip(&are_local);
    let patients = patients.map(|(placement, is_local)| Patient {
        name: placement.host.name.clone(),
        slots: u32::try_from(placement.slots.len()).unwrap_or(u32::MAX),
        is_local: *is_local,
        ..Patient::default()
    });
    let chart = Chart {
        plan: visit::plan(options, size, cwd),
        hosts: patients.collect(),
        ..Chart::default()
    };
    let visit = Visit {
        options,
        begun,
        signals,
        asked: vec![Asked::default(); placements.len()],
        links: open_links(placements, &are_local, &ssh)?,
        chart,
        key: JobKey::random()?,
        interrupted_by: None,
    };
    let (chart, interrupted_by) = visit.run()?;
    if let Some(signal) = interrupted_by {
        return Ok((128 + signal) as u8);
    }
    let findings = findings::of(&chart);
    crate::show(&match form {
        Form::Text => render::text(&chart, &findings),
        Form::Json => render::json(&chart, &findings),
    });
    Ok(u8::from(findings::would_stop(&findings)))
}

/// The hosts of the job, and how many ranks it would have.
fn hosts_of(options: &Options) -> Result<(Vec<Host>, u32), LaunchError> {
    let all = |hosts: &[Host]| {
        hosts
            .iter()
            .fold(0, |sum: u32, h| sum.saturating_add(h.slots))
    };
    let Some(script) = &options.elastic.script else {
        let hosts = wanted_hosts(options, options.num_proc.unwrap_or(1))?;
        let size = options.num_proc.unwrap_or_else(|| all(&hosts));
        return Ok((hosts, size));
    };
    let mut shell = std::process::Command::new("/bin/sh");
    shell.arg("-c").arg(script);
    let what = format!("the host discovery script ({script})");
    let (_, listed, _) =
        gather::output_of(shell, Instant::now() + SCRIPT_TIME).map_err(|error| {
            let what = what.clone();
            LaunchError::Cannot { what, error }
        })?;
    let hosts = hosts::parse_discovered(&listed, options.elastic.slots_per_host)
        .map_err(|why| LaunchError::Other(format!("{what}: {why}")))?;
    let size = all(&hosts).min(options.elastic.max_np.unwrap_or(u32::MAX));
    Ok((hosts, size))
}
