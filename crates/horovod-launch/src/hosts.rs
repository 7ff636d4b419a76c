//! Hosts and slots: `-H`, hostfiles, and the place of each rank.

use std::collections::HashMap;
use std::path::Path;
use std::{fmt, io};

use crate::frames::HOST_RANKS_MAX;
use crate::io::read_text;

/// A machine and how many processes it may run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Host {
    /// Name as the user wrote it: `name`, `user@name`, `1.2.3.4` or `[::1]`.
    pub name: String,
    /// Most processes to start there.
    pub slots: u32,
}

impl Host {
    /// The name without a user and without the brackets of an IPv6 address.
    pub fn address(&self) -> &str {
        let host = self
            .name
            .rsplit_once('@')
            .map_or(self.name.as_str(), |(_, host)| host);
        host.strip_prefix('[')
            .and_then(|h| h.strip_suffix(']'))
            .unwrap_or(host)
    }
}

/// Why hosts were refused.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum HostsError {
    /// An item of `-H` is not `name:slots`.
    #[error(
        "Invalid host input {item:?}, please make sure it has format as : worker-0:2,worker-1:2."
    )]
    Item {
        /// The invalid entry.
        item: String,
    },
    /// A line of the hostfile is not understood.
    #[error(
        "{file}, line {line}: {found:?} is not understood ({why}); a line is `name slots=n`, `name:n`, `name` \
         (one slot), a # comment or empty"
    )]
    Line {
        /// The hostfile.
        file: String,
        /// From 1.
        line: usize,
        /// The line.
        found: String,
        /// The error in the line.
        why: String,
    },
    /// The hostfile cannot be read, or has no end.
    #[error("the hostfile {file} cannot be read: {error}")]
    Unread {
        /// The hostfile.
        file: String,
        /// The kind of the error.
        kind: io::ErrorKind,
        /// Its text.
        error: String,
    },
    /// A hostfile without hosts.
    #[error("{file} names no host")]
    Empty {
        /// The hostfile.
        file: String,
    },
    /// More processes than slots.
    #[error(
        "Requested more processes ({wanted}) than there are available slots ({available}) on {hosts}: give the hosts more \
         slots (-H name:slots, or slots=n in the hostfile), or ask for fewer processes with -np"
    )]
    Slots {
        /// `-np`.
        wanted: u32,
        /// All slots together.
        available: u64,
        /// The hosts as `name:slots`.
        hosts: String,
    },
    /// More processes on one host than an agent starts.
    #[error(
        "{count} processes on host {host} are too many; at most {HOST_RANKS_MAX} can be started on one host"
    )]
    TooManyHere {
        /// The host.
        host: String,
        /// Processes it was to get.
        count: u32,
    },
}

/// Characters of a user's words that an error repeats.
const QUOTED_MAX: usize = 200;

pub(crate) fn quoted(text: &str) -> String {
    text.chars().take(QUOTED_MAX).collect()
}

/// Reads `a:2,b:1`, with or without a comma at the end; a host named twice gets the sum of its slots. Without a number
/// of slots an item may only be a name that `cores_of` knows, which is this machine's.
pub fn parse_hosts(
    text: &str,
    cores_of: impl Fn(&str) -> Option<u32>,
) -> Result<Vec<Host>, HostsError> {
    parse_items(text, cores_of).map(merge)
}

/// As `parse_hosts`; a host named twice is there twice.
pub fn parse_items(
    text: &str,
    cores_of: impl Fn(&str) -> Option<u32>,
) -> Result<Vec<Host>, HostsError> {
    let bare = |name: &str| {
        let slots = is_host_name(name).then(|| cores_of(name)).flatten()?;
        Some(Host {
            name: name.to_owned(),
            slots,
        })
    };
    without_last_comma(text)
        .split(',')
        .map(|item| {
            let host = named_slots(item.trim()).or_else(|| bare(item.trim()));
            host.ok_or_else(|| HostsError::Item { item: quoted(item) })
        })
        .collect()
}

/// A list as programs write it that put a comma after each item.
pub(crate) fn without_last_comma(list: &str) -> &str {
    let list = list.trim_end();
    list.strip_suffix(',').unwrap_or(list)
}

/// Reads a hostfile.
pub fn read_hostfile(file: &Path) -> Result<Vec<Host>, HostsError> {
    let name = file.display().to_string();
    match read_text(file) {
        Ok(content) => parse_hostfile(&name, &content),
        Err(error) => Err(HostsError::Unread {
            file: name,
            kind: error.kind(),
            error: error.to_string(),
        }),
    }
}

/// Reads the content of a hostfile; `file` is its name for messages.
pub fn parse_hostfile(file: &str, content: &str) -> Result<Vec<Host>, HostsError> {
    let mut hosts = Vec::new();
    for (index, full) in content.lines().enumerate() {
        let line = full.split('#').next().unwrap_or_default().trim();
        if line.is_empty() {
            continue;
        }
        hosts.push(hostfile_line(line).map_err(|why| HostsError::Line {
            file: file.to_owned(),
            line: index + 1,
            found: quoted(full.trim()),
            why: quoted(&why),
        })?);
    }
    if hosts.is_empty() {
        return Err(HostsError::Empty {
            file: file.to_owned(),
        });
    }
    Ok(merge(hosts))
}

fn hostfile_line(line: &str) -> Result<Host, String> {
    let (first, settings) = line.split_once(char::is_whitespace).unwrap_or((line, ""));
    let settings = settings.trim();
    if settings.is_empty() {
        if let Some(host) = named_slots(first) {
            return Ok(host);
        }
        return if is_host_name(first) {
            Ok(Host {
                name: first.to_owned(),
                slots: 1,
            })
        } else {
            Err(format!("{first:?} is not a host name"))
        };
    }
    if !is_host_name(first) {
        return Err(format!("{first:?} is not a host name"));
    }
    let mut slots = None;
    // `slots = 2` is as good as `slots=2`.
    let joined = settings
        .split('=')
        .map(str::trim)
        .collect::<Vec<_>>()
        .join("=");
    for setting in joined.split_whitespace() {
        let (key, value) = setting
            .split_once('=')
            .ok_or_else(|| format!("{setting:?} is not slots=n"))?;
        let number = whole(value).ok_or_else(|| format!("{value:?} is not a whole number"))?;
        match key {
            "slots" if slots.is_none() => slots = Some(number),
            "slots" => return Err("slots is given twice".to_owned()),
            // An upper bound for oversubscription, which never happens here.
            "max-slots" | "max_slots" => {}
            _ => return Err(format!("unknown setting {key:?}")),
        }
    }
    Ok(Host {
        name: first.to_owned(),
        slots: slots.unwrap_or(1),
    })
}

/// Reads the output of a host discovery script: `name:slots` or `name`, which has `default_slots`. Order is kept.
pub fn parse_discovered(content: &str, default_slots: Option<u32>) -> Result<Vec<Host>, String> {
    let mut hosts = Vec::new();
    let lines = content.lines().map(str::trim);
    for line in lines.filter(|line| !line.is_empty()) {
        let host = named_slots(line).or_else(|| {
            let name = line.to_owned();
            (is_host_name(line)).then_some(Host {
                name,
                slots: default_slots?,
            })
        });
        let Some(host) = host else {
            let (is_name, line) = (is_host_name(line), quoted(line));
            return Err(match is_name {
                true => format!(
                    "the line {line:?} gives no number of slots: print `name:slots`, or give --slots-per-host"
                ),
                false => format!("the line {line:?} is neither `name` nor `name:slots`"),
            });
        };
        if host.slots as usize > HOST_RANKS_MAX {
            return Err(format!(
                "the line {line:?} has more slots than the {HOST_RANKS_MAX} that a host may have"
            ));
        }
        hosts.push(host);
    }
    Ok(merge(hosts))
}

/// `name:slots`.
fn named_slots(item: &str) -> Option<Host> {
    let (name, slots) = item.rsplit_once(':')?;
    let slots = whole(slots)?;
    is_host_name(name).then(|| Host {
        name: name.to_owned(),
        slots,
    })
}

/// Digits only: no sign, no spaces.
pub(crate) fn whole(text: &str) -> Option<u32> {
    if text.is_empty() || !text.bytes().all(|b| b.is_ascii_digit()) {
        return None;
    }
    text.parse().ok()
}

pub(crate) fn is_host_name(name: &str) -> bool {
    let (user, host) = name
        .split_once('@')
        .map_or((None, name), |(u, h)| (Some(u), h));
    let word = |text: &str| {
        !text.is_empty()
            && !text.starts_with('-')
            && text
                .chars()
                .all(|c| c.is_alphanumeric() || matches!(c, '_' | '.' | '-'))
    };
    let bracketed = host
        .strip_prefix('[')
        .and_then(|h| h.strip_suffix(']'))
        .is_some_and(|h| h.parse::<std::net::Ipv6Addr>().is_ok());
    user.is_none_or(word) && (bracketed || word(host))
}

/// A host named twice gets the sum of its slots.
pub(crate) fn merge(hosts: Vec<Host>) -> Vec<Host> {
    let mut merged: Vec<Host> = Vec::new();
    let mut place = HashMap::new();
    for host in hosts {
        match place.get(&host.name) {
            Some(&at) => {
                let known: &mut Host = &mut merged[at];
                known.slots = known.slots.saturating_add(host.slots);
            }
            None => {
                place.insert(host.name.clone(), merged.len());
                merged.push(host);
            }
        }
    }
    merged
}

/// One rank's place in the job.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HostSlot {
    /// Position in the whole job.
    pub rank: u32,
    /// Ranks of the job.
    pub size: u32,
    /// Position on its host.
    pub local_rank: u32,
    /// Ranks on its host.
    pub local_size: u32,
    /// Position of its host among the hosts that have this local rank.
    pub cross_rank: u32,
    /// Number of such hosts.
    pub cross_size: u32,
}

/// A host that takes part, with its ranks in order.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Placement {
    /// The host.
    pub host: Host,
    /// Its ranks, at least one.
    pub slots: Vec<HostSlot>,
}

/// Fills the hosts in order with as many ranks as they have slots: at least `least`, at most `most`. A host may be named
/// twice.
pub fn assign_between(
    hosts: Vec<Host>,
    least: u32,
    most: Option<u32>,
) -> Result<Vec<Placement>, HostsError> {
    let hosts = merge(hosts);
    let slots = hosts.iter().map(|host| host.slots);
    let available = slots.fold(0, u32::saturating_add);
    let count = if available < least {
        least
    } else {
        available.min(most.unwrap_or(available))
    };
    assign(&hosts, count)
}

/// Fills the hosts in order, all slots of one before the next, with exactly `count` ranks.
pub fn assign(hosts: &[Host], count: u32) -> Result<Vec<Placement>, HostsError> {
    let available: u64 = hosts.iter().map(|host| u64::from(host.slots)).sum();
    if available < u64::from(count) {
        return Err(HostsError::Slots {
            wanted: count,
            available,
            hosts: list(hosts),
        });
    }
    let mut left = count;
    let used: Vec<(&Host, u32)> = hosts
        .iter()
        .map(|host| {
            let here = host.slots.min(left);
            left -= here;
            (host, here)
        })
        .filter(|(_, here)| *here > 0)
        .collect();
    if let Some((host, here)) = used.iter().find(|(_, n)| *n as usize > HOST_RANKS_MAX) {
        return Err(HostsError::TooManyHere {
            host: host.name.clone(),
            count: *here,
        });
    }
    let mut next = 0;
    let placements = used.iter().enumerate().map(|(index, &(host, here))| {
        let slots = (0..here).map(|local_rank| {
            let among = |hosts: &[(&Host, u32)]| {
                hosts
                    .iter()
                    .filter(|(_, n)| *n > local_rank)
                    .fold(0, |n: u32, _| n + 1)
            };
            let rank = next + local_rank;
            HostSlot {
                rank,
                size: count,
                local_rank,
                local_size: here,
                cross_rank: among(&used[..index]),
                cross_size: among(&used),
            }
        });
        let placement = Placement {
            host: host.clone(),
            slots: slots.collect(),
        };
        next += here;
        placement
    });
    Ok(placements.collect())
}

fn list(hosts: &[Host]) -> String {
    hosts
        .iter()
        .map(ToString::to_string)
        .collect::<Vec<_>>()
        .join(",")
}

impl fmt::Display for Host {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", self.name, self.slots)
    }
}

#[cfg(test)]
mod tests;
