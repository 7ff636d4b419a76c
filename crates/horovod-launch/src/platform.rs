//! Facilities of the operating system, and portable code where there are none.
//!
//! The `unsafe` of this crate is here: the C library's conversion to local time, and a flag of a descriptor known by number.

use std::time::{Duration, SystemTime};

#[cfg(all(target_os = "linux", not(horovod_portable)))]
pub(crate) use linux::*;
#[cfg(not(all(target_os = "linux", not(horovod_portable))))]
pub(crate) use portable::*;

#[cfg(all(target_os = "linux", not(horovod_portable)))]
mod linux {
    use std::collections::HashMap;
    use std::io;
    use std::os::fd::OwnedFd;

    use rustix::process::{Pid, Signal};

    /// Whether [`descendants`] finds all of them.
    pub(crate) const SEES_DESCENDANTS: bool = true;

    /// Orphans among this process's descendants become its children, so that none is lost.
    pub(crate) fn adopt_orphans() {
        // Without it (an odd sandbox) orphans go to init, and only process groups can be ended.
        let _ = rustix::process::set_child_subreaper(Some(rustix::process::getpid()));
    }

    /// This process is killed when its parent, which must be `parent`, ends.
    pub(crate) fn die_with_parent(parent: u32) -> io::Result<()> {
        rustix::process::set_parent_process_death_signal(Some(Signal::KILL))?;
        let now = rustix::process::getppid().map(|pid| pid.as_raw_nonzero().get());
        if now != i32::try_from(parent).ok() {
            return Err(io::Error::other("its agent has ended"));
        }
        Ok(())
    }

    /// All living processes below this one, itself not included.
    pub(crate) fn descendants() -> Vec<Pid> {
        let mut children = living_by_parent();
        let mut found = Vec::new();
        let mut open = vec![own_pid()];
        while let Some(pid) = open.pop() {
            for child in children.remove(&pid).unwrap_or_default() {
                found.extend(Pid::from_raw(child));
                open.push(child);
            }
        }
        found
    }

    /// The living children of this process: those that it started, and orphans.
    pub(crate) fn children() -> Vec<Pid> {
        let found = living_by_parent().remove(&own_pid()).unwrap_or_default();
        found.into_iter().filter_map(Pid::from_raw).collect()
    }

    /// The name of a process's program, for a message.
    pub(crate) fn name_of(pid: Pid) -> String {
        let name = std::fs::read_to_string(format!("/proc/{}/comm", pid.as_raw_nonzero()));
        name.unwrap_or_default().trim().to_owned()
    }

    fn own_pid() -> i32 {
        rustix::process::getpid().as_raw_nonzero().get()
    }

    fn living_by_parent() -> HashMap<i32, Vec<i32>> {
        let mut children: HashMap<i32, Vec<i32>> = HashMap::new();
        let Ok(entries) = std::fs::read_dir("/proc") else {
            return children;
        };
        for entry in entries.flatten() {
            let name = entry.file_name();
            let Some(pid) = name.to_str().and_then(|name| name.parse().ok()) else {
                continue;
            };
            if let Some((state, parent)) = state_and_parent(pid)
                && state != 'Z'
            {
                children.entry(parent).or_default().push(pid);
            }
        }
        children
    }

    fn state_and_parent(pid: i32) -> Option<(char, i32)> {
        let stat = std::fs::read(format!("/proc/{pid}/stat")).ok()?;
        let stat = String::from_utf8_lossy(&stat);
        // The name in parentheses may hold anything; state and parent follow the last one.
        let mut fields = stat.rsplit(')').next()?.split_whitespace();
        let state = fields.next()?.chars().next()?;
        Some((state, fields.next()?.parse().ok()?))
    }

    /// On how many cores this process may run.
    pub(crate) fn cores_in_mask() -> Option<u32> {
        let mask = rustix::thread::sched_getaffinity(None).ok()?;
        Some(mask.count())
    }

    /// Whether a signal has stopped the process, so that no other but SIGKILL and SIGCONT reaches it.
    pub(crate) fn is_stopped(pid: Pid) -> bool {
        let found = state_and_parent(pid.as_raw_nonzero().get());
        found.is_some_and(|(state, _)| state == 'T')
    }

    /// Readable once this process's parent, which must be `parent`, has ended; `None` where that cannot be watched.
    pub(crate) fn watch_parent(parent: u32) -> Option<OwnedFd> {
        let pid = rustix::process::getppid()?;
        if u32::try_from(pid.as_raw_nonzero().get()) != Ok(parent) {
            return None;
        }
        rustix::process::pidfd_open(pid, rustix::process::PidfdFlags::empty()).ok()
    }

    /// Whether whoever started this process made it ignore the signal (`nohup`, a shell's `&`).
    pub(crate) fn is_ignored(signal: i32) -> bool {
        let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
        status
            .lines()
            .find_map(|line| line.strip_prefix("SigIgn:"))
            .and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok())
            .is_some_and(|mask| mask >> (signal - 1) & 1 == 1)
    }
}

#[cfg(not(all(target_os = "linux", not(horovod_portable))))]
mod portable {
    use std::io;
    use std::os::fd::OwnedFd;

    use rustix::process::Pid;

    /// Only the ranks' process groups can be found.
    pub(crate) const SEES_DESCENDANTS: bool = false;

    /// Not to be had: what the parent holds tells its end.
    pub(crate) fn watch_parent(_parent: u32) -> Option<OwnedFd> {
        None
    }

    /// Not to be had: only process groups can be ended.
    pub(crate) fn adopt_orphans() {}

    /// Not to be had: ranks outlive an agent that is killed with SIGKILL.
    pub(crate) fn die_with_parent(_parent: u32) -> io::Result<()> {
        Ok(())
    }

    /// Not to be had without reading the process table.
    pub(crate) fn descendants() -> Vec<Pid> {
        Vec::new()
    }

    /// Not to be had without reading the process table.
    pub(crate) fn children() -> Vec<Pid> {
        Vec::new()
    }

    /// Not to be had without reading the process table.
    pub(crate) fn name_of(_pid: Pid) -> String {
        String::new()
    }

    /// Not to be had: what control groups allow counts.
    pub(crate) fn cores_in_mask() -> Option<u32> {
        None
    }

    /// Not to be had without reading the process table: such a process is killed a little later.
    pub(crate) fn is_stopped(_pid: Pid) -> bool {
        false
    }

    /// Not to be had safely; `nohup` has no effect.
    pub(crate) fn is_ignored(_signal: i32) -> bool {
        false
    }
}

/// Programs that are executed from here on do not get this descriptor.
#[expect(unsafe_code, reason = "a borrowed descriptor must be known to be open")]
pub(crate) fn close_on_exec(fd: u32) {
    if let Ok(fd) = libc::c_int::try_from(fd) {
        // SAFETY: no memory is touched; of a descriptor that is not open the call says so.
        unsafe { libc::fcntl(fd, libc::F_SETFD, libc::FD_CLOEXEC) };
    }
}

/// Two files per rank may be more than the usual limit; agents were started before, so ranks keep theirs.
pub(crate) fn raise_file_limit() {
    use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
    let limit = getrlimit(Resource::Nofile);
    let _ = setrlimit(
        Resource::Nofile,
        Rlimit {
            current: limit.maximum,
            maximum: limit.maximum,
        },
    );
}

/// Local time in a form that sorts and is a file's name: `20261121-002804`.
pub(crate) fn compact_time(time: SystemTime) -> String {
    match local_time(time) {
        Ok(parts) => format!(
            "{:04}{:02}{:02}-{:02}{:02}{:02}",
            1900 + parts.tm_year,
            1 + parts.tm_mon,
            parts.tm_mday,
            parts.tm_hour,
            parts.tm_min,
            parts.tm_sec
        ),
        Err(seconds) => seconds.to_string(),
    }
}

/// The parts of a local time; where there is none, the seconds since 1970.
#[expect(unsafe_code, reason = "the standard library knows no time zones")]
fn local_time(time: SystemTime) -> Result<libc::tm, libc::time_t> {
    let seconds = time
        .duration_since(SystemTime::UNIX_EPOCH)
        .unwrap_or(Duration::ZERO)
        .as_secs();
    let seconds = libc::time_t::try_from(seconds).unwrap_or(libc::time_t::MAX);
    // SAFETY: `tm` is plain data for which all zeroes is a valid value.
    let mut parts: libc::tm = unsafe { std::mem::zeroed() };
    // SAFETY: both pointers are to live locals of the right type; nothing is kept. This program never
    // changes its environment, so reading TZ cannot race.
    let done = unsafe { libc::localtime_r(&seconds, &mut parts) };
    if done.is_null() {
        return Err(seconds);
    }
    Ok(parts)
}

/// Local time as C's `asctime` writes it: `Sat Nov 21 00:28:04 2026`.
pub(crate) fn asctime(time: SystemTime) -> String {
    const DAYS: [&str; 7] = ["Sun", "Mon", "Tue", "Wed", "Thu", "Fri", "Sat"];
    const MONTHS: [&str; 12] = [
        "Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec",
    ];
    let parts = match local_time(time) {
        Ok(parts) => parts,
        Err(seconds) => return seconds.to_string(),
    };
    let name = |names: &'static [&str], index: libc::c_int| {
        usize::try_from(index)
            .ok()
            .and_then(|i| names.get(i))
            .copied()
            .unwrap_or("???")
    };
    format!(
        "{} {}{:3} {:02}:{:02}:{:02} {}",
        name(&DAYS, parts.tm_wday),
        name(&MONTHS, parts.tm_mon),
        parts.tm_mday,
        parts.tm_hour,
        parts.tm_min,
        parts.tm_sec,
        1900 + parts.tm_year
    )
}

/// `SIGKILL` for 9.
pub(crate) fn signal_name(number: i32) -> &'static str {
    match number {
        libc::SIGHUP => "SIGHUP",
        libc::SIGINT => "SIGINT",
        libc::SIGQUIT => "SIGQUIT",
        libc::SIGILL => "SIGILL",
        libc::SIGTRAP => "SIGTRAP",
        libc::SIGABRT => "SIGABRT",
        libc::SIGBUS => "SIGBUS",
        libc::SIGFPE => "SIGFPE",
        libc::SIGKILL => "SIGKILL",
        libc::SIGUSR1 => "SIGUSR1",
        libc::SIGSEGV => "SIGSEGV",
        libc::SIGUSR2 => "SIGUSR2",
        libc::SIGPIPE => "SIGPIPE",
        libc::SIGALRM => "SIGALRM",
        libc::SIGTERM => "SIGTERM",
        libc::SIGXCPU => "SIGXCPU",
        libc::SIGXFSZ => "SIGXFSZ",
        libc::SIGSYS => "SIGSYS",
        _ => "another signal",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn writes_the_time_as_asctime_does() {
        let at = |seconds| asctime(SystemTime::UNIX_EPOCH + Duration::from_secs(seconds));
        // The time zone is the machine's: look at the shape and at what no zone changes.
        let text = at(1_795_219_684);
        assert_eq!(text.len(), "Sat Nov 21 00:28:04 2026".len(), "{text}");
        assert!(
            text.contains(" Nov 2") && text.ends_with(":04 2026"),
            "{text}"
        );
        assert_eq!(at(1_793_620_800).len(), "Mon Nov  2 12:00:00 2026".len());
    }

    #[test]
    fn names_signals() {
        assert_eq!(signal_name(9), "SIGKILL");
        assert_eq!(signal_name(15), "SIGTERM");
    }

    #[cfg(all(target_os = "linux", not(horovod_portable)))]
    #[test]
    fn finds_children_of_children() {
        use std::io::{BufRead, BufReader};
        use std::process::{Command, Stdio};
        let mut shell = Command::new("sh")
            .args(["-c", "sleep 1000 & echo $!; wait"])
            .stdout(Stdio::piped())
            .spawn()
            .expect("sh starts");
        let mut line = String::new();
        BufReader::new(shell.stdout.take().expect("piped"))
            .read_line(&mut line)
            .expect("a pid");
        let inner = rustix::process::Pid::from_raw(line.trim().parse().expect("a pid"));
        let outer = rustix::process::Pid::from_child(&shell);
        let found = descendants();
        rustix::process::kill_process(inner.expect("positive"), rustix::process::Signal::KILL)
            .expect("still there");
        shell.wait().expect("reaped");
        assert!(
            found.contains(&outer) && found.contains(&inner.expect("positive")),
            "{found:?}"
        );
    }
}
