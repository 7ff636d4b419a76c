//! Findings on single hosts, and on where they differ.

use std::collections::BTreeMap;

use super::super::chart::{Chart, JobPlan, Patient, Skew};
use super::super::facts::{HostFacts, Python, Space};
use super::{Findings, Severity, bytes, gpus};
use crate::check_build;

const MIB: u64 = 1 << 20;
const GIB: u64 = 1 << 30;
/// Memory of a rank that has imported PyTorch, without its model.
const RANK_MEMORY: u64 = 400 * MIB;
/// Below this, batches of data loaders soon fill it.
const SHM_WANTED: u64 = GIB;
/// Below this, programs that write temporary files fail soon.
const TMP_WANTED: u64 = 256 * MIB;
/// Descriptors that a rank has open before it meets another one, and some that imports need for a moment.
const FILES_OF_RANK: u64 = 14;
/// Open files of the launcher, before and for each host.
const FILES_OF_LAUNCHER: (u64, u64) = (20, 4);
/// Open files of an agent before it has ranks.
const FILES_OF_AGENT: u64 = 12;
/// Room for the open files of a training script: data, workers of data loaders.
const FILES_FOR_SCRIPT: u64 = 256;
/// Threads of a rank beyond those that compute.
const THREADS: u64 = 16;
/// Clocks that differ by more than this make logs of several hosts hard to read.
const SKEW_NS: u64 = 1_000_000_000;

/// Looks at one host.
pub(super) fn judge(chart: &Chart, host: &Patient, found: &mut Findings) {
    let (plan, name) = (&chart.plan, &host.name);
    if let Some(why) = &host.absent {
        found.add(Severity::Fatal, name, why, fix_of_absence(why));
        return;
    }
    if let Some(skew) = host.skew {
        judge_clock(name, skew, found);
    }
    let Some(facts) = &host.facts else {
        let what = "the agent runs, but could not say in time what the host is like";
        let fix = "look whether it is overloaded or a file system there hangs (`uptime`, `df`)";
        return found.add(Severity::Risk, name, what, fix);
    };
    if host.slots == 0 {
        return; // only the launcher runs there
    }
    judge_programs(plan, name, facts, found);
    judge_memory(plan, host.slots, name, facts, found);
    judge_files(chart, host, facts, found);
    judge_threads(host.slots, name, facts, found);
    judge_processors(host.slots, name, facts, found);
    gpus::judge(host.slots, name, facts, found);
    if chart.hosts.len() > 1 {
        judge_names(chart, name, facts, found);
    }
}

/// Advice for a host that cannot be examined; `why` is the text at the start of a job, too.
fn fix_of_absence(why: &str) -> &'static str {
    const FIXES: &[(&str, &str)] = &[
        (
            "has horovod-rs",
            "install the same wheels of horovod-rs there as here",
        ),
        (
            "does not resolve",
            "check the spelling; else add the name to DNS, /etc/hosts or ~/.ssh/config",
        ),
        (
            "no key that it accepts",
            "ssh-copy-id to it, or name the right key with -i; `ssh -v` to it says which keys are tried",
        ),
        (
            "too many keys",
            "name the right key with -i, with `IdentitiesOnly yes` in ~/.ssh/config",
        ),
        (
            "host key is not",
            "if it was installed anew: `ssh-keygen -R` with its name, then connect once by hand",
        ),
        (
            "nothing listens on its ssh port",
            "start sshd there (`systemctl start ssh`), or name its port with -p",
        ),
        (
            "no route to it",
            "check its address and the routes (`ip route get`); it may be switched off",
        ),
        (
            "network cannot be reached",
            "check this machine's routes (`ip route`): it has none to that network",
        ),
        (
            "did not answer ssh in time",
            "check that it runs and that no firewall drops packets to its ssh port (`ping`, `nc -vz`)",
        ),
        (
            "no answer within",
            "check that it runs and that no firewall drops packets to its ssh port; \
             `ssh` to it by hand shows where it hangs",
        ),
        (
            "not installed there",
            "install the wheels of horovod-rs there, at the same path or on the PATH of non-interactive shells",
        ),
    ];
    let fix = FIXES.iter().find(|(sign, _)| why.contains(sign));
    let other =
        "run `ssh` to it by hand: a start-up file of the shell there may print or ask something";
    fix.map_or(other, |(_, fix)| fix)
}

fn judge_clock(name: &str, skew: Skew, found: &mut Findings) {
    let ahead = skew.ahead_ns.unsigned_abs();
    if ahead.saturating_sub(skew.uncertain_ns) <= SKEW_NS {
        return;
    }
    let direction = match skew.ahead_ns > 0 {
        true => "ahead of",
        false => "behind",
    };
    let what = format!(
        "the clock is {:.1} s {direction} the launcher's: times in logs and timelines do not compare",
        ahead as f64 / 1e9
    );
    let fix = "let chrony, ntpd or systemd-timesyncd set the clock there";
    found.add(Severity::Note, name, what, fix);
}

fn judge_programs(plan: &JobPlan, name: &str, facts: &HostFacts, found: &mut Findings) {
    if let Some(why) = &facts.command_problem {
        let fix =
            "install it there, share the folder it is in, or give a path that exists on every host";
        found.add(Severity::Fatal, name, why, fix);
    }
    if !facts.has_cwd {
        let what = format!(
            "the working directory {} does not exist there: ranks would start in the home directory",
            plan.cwd.display()
        );
        let fix =
            "share the folder between the hosts, or use only absolute paths in command and script";
        found.add(Severity::Risk, name, what, fix);
    }
    judge_python(plan, name, facts, found);
    match &facts.tmp {
        Err(why) => {
            let what = format!(
                "the folder for temporary files, {}, cannot be used: {why}",
                facts.tmp_folder
            );
            let fix = "set TMPDIR to a folder that exists there";
            found.add(Severity::Risk, name, what, fix);
        }
        Ok(space) if space.free < TMP_WANTED => {
            let what = format!("{} has only {} free", facts.tmp_folder, bytes(space.free));
            let fix = "make room there, or set TMPDIR to another disk";
            found.add(Severity::Risk, name, what, fix);
        }
        Ok(_) => {}
    }
}

fn judge_python(plan: &JobPlan, name: &str, facts: &HostFacts, found: &mut Findings) {
    let severity = match plan.runs_python {
        true => Severity::Fatal,
        false => Severity::Risk,
    };
    let python = match &facts.python {
        Ok(python) => python,
        Err(why) => {
            let what = format!("Python does not answer: {why}");
            let fix = "install Python and horovod-rs there, at the same path as here";
            return found.add(severity, name, what, fix);
        }
    };
    let program = &python.program;
    if let Some(wrong) = &python.mixed {
        // It explains a failing import or another version, too.
        let is_well = python.horovod.as_ref() == Ok(&plan.version);
        let severity = if is_well { Severity::Risk } else { severity };
        let what = format!("{program} has a mixed installation: {wrong}");
        let fix = check_build::cure(program, &plan.version);
        return found.add(severity, name, what, fix);
    }
    let fix = check_build::install(program, &plan.version);
    match &python.horovod {
        Err(why) => {
            let what = format!("{program} cannot import horovod: {why}");
            found.add(severity, name, what, fix);
        }
        Ok(version) if *version != plan.version => {
            let own = &plan.version;
            let what = format!("{program} has horovod-rs {version}, this launcher is {own}");
            found.add(severity, name, what, fix);
        }
        Ok(_) => {}
    }
}

fn judge_memory(plan: &JobPlan, slots: u32, name: &str, facts: &HostFacts, found: &mut Findings) {
    let ranks = u64::from(slots);
    if let Some(why) = facts.memfd_problem.as_ref().filter(|_| slots > 1) {
        let what = format!("shared memory cannot be made (memfd_create: {why})");
        let fix =
            "allow memfd_create in the sandbox or seccomp profile, or set HOROVOD_SHM=0 (slower)";
        found.add(Severity::Fatal, name, what, fix);
    }
    let whole = facts.memory.map(|space| (space, "of its memory"));
    let group = facts
        .memory_limit
        .map(|space| (space, "of its control group's limit"));
    let tightest = whole
        .into_iter()
        .chain(group)
        .min_by_key(|(space, _)| space.free);
    if let Some((Space { free, .. }, of)) = tightest {
        let staging = plan.staging * ranks;
        let fix = "end other programs, raise the memory limit of the container or batch job, \
                   or start fewer ranks there";
        if slots > 1 && staging > free {
            let what = format!(
                "{ranks} ranks need {} of shared memory, {} {of} is free",
                bytes(staging),
                bytes(free)
            );
            let fix = format!("{fix}; or lower HOROVOD_SHM_BYTES_PER_RANK");
            found.add(Severity::Fatal, name, what, fix);
        } else if RANK_MEMORY * ranks + staging > free {
            let what = format!(
                "only {} {of} is free: {ranks} rank{} with PyTorch take about {} before any model",
                bytes(free),
                plural(ranks),
                bytes(RANK_MEMORY * ranks + staging)
            );
            found.add(Severity::Risk, name, what, fix);
        }
    }
    judge_shm(name, facts, found);
}

fn judge_shm(name: &str, facts: &HostFacts, found: &mut Findings) {
    let python = facts.python.as_ref();
    let has_torch = python.is_ok_and(|python| python.torch.is_some());
    let have = match facts.shm {
        Some(space) if space.free >= SHM_WANTED => return,
        Some(space) => format!(
            "/dev/shm has {} free of {}",
            bytes(space.free),
            bytes(space.size)
        ),
        None => "there is no /dev/shm".to_owned(),
    };
    if has_torch {
        let what = format!(
            "{have}: workers of PyTorch's DataLoader pass batches through it and die with `bus error` \
             when it is full (horovod-rs itself does not use it)"
        );
        let fix = "docker run --shm-size=8g (or --ipc=host); Kubernetes: an emptyDir with medium Memory \
                   on /dev/shm; else mount -o remount,size=8g /dev/shm; or num_workers=0";
        found.add(Severity::Risk, name, what, fix);
    }
}

fn judge_files(chart: &Chart, host: &Patient, facts: &HostFacts, found: &mut Findings) {
    let (plan, name, ranks) = (&chart.plan, &host.name, u64::from(host.slots));
    let elsewhere = u64::from(plan.size.saturating_sub(host.slots));
    // Two per neighbour on the host, and its connections to all others.
    let rank = FILES_OF_RANK + 2 * ranks + elsewhere * u64::from(plan.connections.max(1));
    let (some, each) = FILES_OF_LAUNCHER;
    let launcher = some + each * chart.hosts.len() as u64;
    let agent = FILES_OF_AGENT + 2 * ranks;
    let needed = match host.is_local {
        true => rank.max(agent).max(launcher),
        false => rank.max(agent),
    };
    if let Some(limit) = facts.limits.nofile {
        let wanted = (needed + FILES_FOR_SCRIPT).next_power_of_two();
        let fix = match facts.limits.nofile_hard.is_none_or(|hard| hard >= wanted) {
            true => format!(
                "`ulimit -n {wanted}` in the start-up file of the shell there, `nofile` in \
                 /etc/security/limits.conf, or docker run --ulimit nofile={wanted}"
            ),
            false => format!(
                "raise the hard limit, as root: `* hard nofile {wanted}` in /etc/security/limits.conf, \
                 or docker run --ulimit nofile={wanted}"
            ),
        };
        let what =
            format!("ulimit -n is {limit}: a process of the job needs about {needed} open files");
        if limit < needed {
            let what = format!("{what} for itself and its connections");
            found.add(Severity::Fatal, name, what, fix);
        } else if limit < needed + FILES_FOR_SCRIPT {
            let left = limit - needed;
            let what = format!("{what}, which leaves {left} for data and its loaders");
            found.add(Severity::Risk, name, what, fix);
        }
    }
}

fn judge_threads(slots: u32, name: &str, facts: &HostFacts, found: &mut Findings) {
    let ranks = u64::from(slots);
    // Without a value `horovodrun` sets the share for each of several ranks.
    let unset = if slots > 1 {
        share(slots, facts)
    } else {
        facts.cpus
    };
    let threads = ranks * (u64::from(threads_set(facts).unwrap_or(unset)) + THREADS);
    if let Some(limit) = facts.limits.nproc.filter(|limit| *limit < threads) {
        let what = format!(
            "ulimit -u is {limit}: {ranks} rank{} start about {threads} threads",
            plural(ranks)
        );
        let fix =
            "raise `nproc` in /etc/security/limits.conf (docker run --ulimit nproc, --pids-limit)";
        found.add(Severity::Risk, name, what, fix);
    }
}

fn plural(count: u64) -> &'static str {
    if count == 1 { "" } else { "s" }
}

/// `OMP_NUM_THREADS`, where it is set to a number.
fn threads_set(facts: &HostFacts) -> Option<u32> {
    facts.omp_threads.as_ref()?.trim().parse().ok()
}

/// A rank's share of the processors.
fn share(slots: u32, facts: &HostFacts) -> u32 {
    (facts.cpus / slots.max(1)).max(1)
}

fn judge_processors(slots: u32, name: &str, facts: &HostFacts, found: &mut Findings) {
    let cpus = facts.cpus;
    let processors = format!("{cpus} processor{}", plural(cpus.into()));
    if let Some(load) = facts.load.filter(|load| *load > f64::from(cpus)) {
        let what = format!("others compute there: load {load:.0} on {processors}");
        let fix = "see who with `top`; a step takes as long as on the slowest host";
        found.add(Severity::Slow, name, what, fix);
    }
    if slots > cpus {
        let what = format!("{slots} ranks share {processors}");
        let fix = format!("give this host at most {cpus} slots, unless its ranks compute on GPUs");
        found.add(Severity::Slow, name, what, fix);
    }
    let share = share(slots, facts);
    if let Some(threads) =
        threads_set(facts).filter(|threads| slots > 1 && cpus > 1 && *threads > share)
    {
        let what = format!(
            "OMP_NUM_THREADS is {threads}: {slots} ranks with {threads} threads each on {processors}"
        );
        let fix = format!("export OMP_NUM_THREADS={share} before horovodrun");
        found.add(Severity::Slow, name, what, fix);
    }
}

fn judge_names(chart: &Chart, name: &str, facts: &HostFacts, found: &mut Findings) {
    let unknown: Vec<&str> = facts
        .names
        .iter()
        .filter(|(_, result)| result.is_err())
        .map(|(unknown, _)| unknown.as_str())
        .filter(|unknown| {
            // That a host cannot be reached at all is said already.
            let mut absent = chart.hosts.iter().filter(|host| host.absent.is_some());
            !absent.any(|host| host.name.ends_with(unknown))
        })
        .collect();
    if !unknown.is_empty() {
        let what = format!(
            "names that do not resolve there: {} (horovod-rs does not need them, torch.distributed and MPI do)",
            unknown.join(", ")
        );
        let fix = "add them to DNS or to /etc/hosts there";
        found.add(Severity::Note, name, what, fix);
    }
}

/// Versions that should be the same everywhere.
pub(super) fn compare(chart: &Chart, found: &mut Findings) {
    differ(chart, found, "Python", |python| {
        let parts: Vec<&str> = python.version.split('.').take(2).collect();
        parts.join(".")
    });
    differ(chart, found, "PyTorch", |python| {
        python.torch.clone().unwrap_or_else(|| "none".to_owned())
    });
}

fn differ(chart: &Chart, found: &mut Findings, what: &str, version: impl Fn(&Python) -> String) {
    let mut have: BTreeMap<String, Vec<&str>> = BTreeMap::new();
    for host in chart.hosts.iter().filter(|host| host.slots > 0) {
        let facts = host.facts.as_ref();
        if let Some(python) = facts.and_then(|facts| facts.python.as_ref().ok()) {
            have.entry(version(python)).or_default().push(&host.name);
        }
    }
    if have.len() < 2 {
        return;
    }
    let list: Vec<String> = have
        .iter()
        .map(|(version, hosts)| format!("{version} on {}", hosts.join(", ")))
        .collect();
    let text = format!("different versions of {what}: {}", list.join("; "));
    let fix = "install the same everywhere: replicas that compute differently diverge, \
               and pickled objects may not load";
    for host in have.values().flatten() {
        found.add(Severity::Risk, host, &*text, fix);
    }
}
