//! Hosts and slots of a batch job, as LSF tells them.

use super::{Host, is_host_name, merge, whole};

/// LSF's file: a host's name once for each of its slots.
pub(crate) fn one_line_per_slot(text: &str) -> Result<Vec<Host>, String> {
    let hosts = text
        .lines()
        .map(str::trim)
        .filter(|line| !line.is_empty())
        .map(|name| batch_host(name, "1"))
        .collect::<Result<_, _>>()?;
    Ok(merge(hosts))
}

/// LSF's variable: `host1 4 host2 4`.
pub(crate) fn names_and_counts(words: &str) -> Result<Vec<Host>, String> {
    let words: Vec<&str> = words.split_whitespace().collect();
    let hosts = words
        .chunks(2)
        .map(|pair| batch_host(pair[0], pair.get(1).copied().unwrap_or_default()))
        .collect::<Result<_, _>>()?;
    Ok(merge(hosts))
}

fn batch_host(name: &str, count: &str) -> Result<Host, String> {
    match whole(count) {
        Some(slots) if is_host_name(name) => Ok(Host {
            name: name.to_owned(),
            slots,
        }),
        _ => Err(format!(
            "LSF's list of hosts is not understood at {:?}; say -H or --hostfile",
            format!("{name} {count}").trim()
        )),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_the_hosts_of_lsf() {
        let host = |name: &str, slots| Host {
            name: name.to_owned(),
            slots,
        };
        let want = vec![host("a", 2), host("b", 1)];
        assert_eq!(one_line_per_slot("a\na\n\nb\n"), Ok(want.clone()));
        assert_eq!(names_and_counts("a 2 b 1"), Ok(want));
        let error = names_and_counts("a 2 b").expect_err("half a pair");
        assert!(error.contains("\"b\""), "{error}");
        assert!(names_and_counts("a two").is_err());
    }
}
