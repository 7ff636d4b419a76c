//! LSF: a file with a line for each slot, or a variable with names and counts.

use horovod_settings::{Environment, text_of};

use super::{Found, lines, of_file};
use crate::hosts::{Host, merge, quoted};

pub(super) fn read(env: &dyn Environment) -> Found {
    text_of(env, "LSB_JOBID")?;
    of_file(env, "LSB_DJOB_HOSTFILE", lines::one_per_slot)
        .or_else(|| Some(names_and_counts(&text_of(env, "LSB_MCPU_HOSTS")?)))
}

/// `host1 4 host2 4`.
fn names_and_counts(words: &str) -> Result<Vec<Host>, String> {
    let words: Vec<&str> = words.split_whitespace().collect();
    let hosts = words.chunks(2).map(|pair| {
        let count = pair.get(1).copied().unwrap_or_default();
        lines::host(pair[0], count)
            .ok_or_else(|| format!("LSB_MCPU_HOSTS at {:?}", quoted(&pair.join(" "))))
    });
    Ok(merge(hosts.collect::<Result<_, _>>()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_names_and_counts() {
        let hosts = names_and_counts("a 2 b 1 a 1").unwrap();
        assert_eq!(
            hosts.iter().map(ToString::to_string).collect::<Vec<_>>(),
            ["a:3", "b:1"]
        );
        let error = names_and_counts("a 2 b").unwrap_err();
        assert!(error.contains("LSB_MCPU_HOSTS at \"b\""), "{error}");
        assert!(names_and_counts("a two").is_err());
    }
}
