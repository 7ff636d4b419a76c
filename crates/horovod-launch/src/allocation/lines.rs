//! Files of batch systems with one host per line.

use crate::hosts::{Host, is_host_name, merge, quoted, whole};

/// A host's name once for each of its slots.
pub(super) fn one_per_slot(text: &str) -> Result<Vec<Host>, String> {
    hosts_of(text, |line| host(line, "1"))
}

/// A host's name, its slots, and more that does not matter.
pub(super) fn names_and_slots(text: &str) -> Result<Vec<Host>, String> {
    hosts_of(text, |line| {
        let mut words = line.split_whitespace();
        host(words.next()?, words.next()?)
    })
}

fn hosts_of(text: &str, read: fn(&str) -> Option<Host>) -> Result<Vec<Host>, String> {
    let lines = text.lines().map(str::trim).filter(|line| !line.is_empty());
    let hosts = lines.map(|line| {
        read(line).ok_or_else(|| format!("{:?} names no host with slots", quoted(line)))
    });
    Ok(merge(hosts.collect::<Result<_, _>>()?))
}

/// A host, unless the name or the number is none.
pub(super) fn host(name: &str, slots: &str) -> Option<Host> {
    let slots = whole(slots)?;
    is_host_name(name).then(|| Host {
        name: name.to_owned(),
        slots,
    })
}
