//! The number of threads that a rank's libraries may use: the cores that this agent may use, divided by the ranks of
//! its host.
//!
//! Where no variable says otherwise, OpenMP, BLAS, TensorFlow and rayon (candle) each take a thread per core in every rank.
//! With as many ranks as cores these threads wait for each other most of the time. So the agent sets the variables that
//! the user has not set.

use std::ffi::OsStr;

use crate::frames::{RankSpec, Variables};

/// The variable that the others of linear algebra follow by themselves.
pub(crate) const OPENMP: &str = "OMP_NUM_THREADS";
/// Set with [`OPENMP`]: libraries built without it, and those that a program may have been told about before.
const LINEAR_ALGEBRA: &[&str] = &["OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"];
/// TensorFlow has threads of its own, which look at no other variable.
const TENSORFLOW: &str = "TF_NUM_INTRAOP_THREADS";
/// rayon, with which candle computes, also reads only a variable of its own.
const RAYON: &str = "RAYON_NUM_THREADS";

/// Cores available to a process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Share {
    /// Cores in its affinity mask: what libraries take by themselves.
    pub(crate) visible: u32,
    /// Of these, what its control groups let it use at a time; never 0.
    pub(crate) usable: u32,
}

impl Share {
    /// This process's.
    pub(crate) fn of_this_process() -> Self {
        // Affinity mask, and quotas of control groups of both versions, rounded down but to at least 1.
        let usable = std::thread::available_parallelism().map_or(1, usize::from);
        let usable = u32::try_from(usable).unwrap_or(u32::MAX);
        let visible = crate::platform::cores_in_mask().unwrap_or(usable);
        Self {
            visible: visible.max(usable),
            usable,
        }
    }

    /// Threads for each of a host's ranks; `None` if libraries decide well without being told.
    pub(crate) fn per_rank(self, ranks: u32) -> Option<u32> {
        let threads = (self.usable / ranks.max(1)).max(1);
        // Where one rank has all that it sees, what a library takes by itself may be better (a thread per physical
        // core).
        (ranks > 1 || threads < self.visible).then_some(threads)
    }
}

/// Variables to set in ranks with this environment: none that the user has set, nor those that derive from it.
pub(crate) fn to_set(env: &Variables) -> Vec<&'static str> {
    let is_set = |name: &&str| env.iter().any(|(known, _)| known == OsStr::new(name));
    let mut names = Vec::new();
    if !is_set(&OPENMP) {
        names.push(OPENMP);
        names.extend(LINEAR_ALGEBRA.iter().filter(|name| !is_set(name)));
    }
    names.extend([TENSORFLOW, RAYON].iter().filter(|name| !is_set(name)));
    names
}

/// Number of ranks on the host of this one, as its environment tells it.
pub(crate) fn ranks_beside(spec: &RankSpec) -> u32 {
    let local_size = spec
        .env
        .iter()
        .rev()
        .find(|(name, _)| name == crate::environment::LOCAL_SIZE);
    let local_size = local_size.and_then(|(_, value)| value.to_str()?.parse().ok());
    local_size.unwrap_or(1)
}

/// Notes for the user: one line, and another where hosts differ.
pub(crate) fn news(decided: &[(String, Threads)], verbose: bool) -> Vec<String> {
    let mut noted: Vec<u32> = Vec::new();
    let mut lines = Vec::new();
    // A user who has set OpenMP's number needs no note.
    for (host, threads) in decided.iter().filter(|(_, t)| t.is_openmp || verbose) {
        if !noted.contains(&threads.threads) {
            noted.push(threads.threads);
            lines.push(format!("note: {}", threads.describe(host)));
        }
    }
    lines
}

/// An agent's decision on threads, for the user.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct Threads {
    /// Per rank.
    pub threads: u32,
    /// That its host's agent may use.
    pub cores: u32,
    /// On its host.
    pub ranks: u32,
    /// OpenMP's is among the variables that were set.
    pub is_openmp: bool,
}

impl Threads {
    /// One line.
    pub(crate) fn describe(&self, host: &str) -> String {
        let of = |count: u32, what: &str| match count {
            1 => format!("1 {what}"),
            n => format!("{n} {what}s"),
        };
        let (threads, cores) = (of(self.threads, "thread"), of(self.cores, "core"));
        let ranks = of(self.ranks, "rank");
        match self.is_openmp {
            true => format!(
                "{threads} for each rank ({cores} for {ranks} on {host}): {OPENMP} was not set; set it for another number"
            ),
            false => format!(
                "{threads} for each rank ({cores} for {ranks} on {host}) in those of {TENSORFLOW} and {RAYON} that were not set"
            ),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cores_are_divided_by_ranks() {
        let all = |cores| Share {
            visible: cores,
            usable: cores,
        };
        for (share, ranks, threads) in [
            (all(2), 2, Some(1)),
            (all(2), 4, Some(1)),
            (all(8), 2, Some(4)),
            (all(8), 3, Some(2)),
            (all(1), 4, Some(1)),
            // It has the host for itself, or less than it sees.
            (all(8), 1, None),
            (
                Share {
                    visible: 64,
                    usable: 4,
                },
                1,
                Some(4),
            ),
            (
                Share {
                    visible: 64,
                    usable: 4,
                },
                2,
                Some(2),
            ),
            (
                Share {
                    visible: 64,
                    usable: 1,
                },
                2,
                Some(1),
            ),
            (all(2), 0, None),
        ] {
            assert_eq!(share.per_rank(ranks), threads, "{share:?} {ranks}");
        }
        let here = Share::of_this_process();
        assert!(1 <= here.usable && here.usable <= here.visible, "{here:?}");
    }

    #[test]
    fn what_the_user_has_set_stays_and_what_follows_it_follows() {
        let set = |names: &[&str]| -> Vec<&'static str> {
            let env: Variables = names.iter().map(|name| (name.into(), "3".into())).collect();
            to_set(&env)
        };
        let all = [
            OPENMP,
            "OPENBLAS_NUM_THREADS",
            "MKL_NUM_THREADS",
            TENSORFLOW,
            RAYON,
        ];
        assert_eq!(set(&["PATH"]), all);
        assert_eq!(set(&[OPENMP]), [TENSORFLOW, RAYON]);
        assert_eq!(set(&["MKL_NUM_THREADS"]), [all[0], all[1], all[3], all[4]]);
        assert_eq!(set(&[TENSORFLOW, RAYON]), all[..3]);
        assert_eq!(set(&[OPENMP, TENSORFLOW]), [RAYON]);
        assert!(set(&[OPENMP, TENSORFLOW, RAYON]).is_empty());
    }

    #[test]
    fn is_said_in_one_line() {
        let mut threads = Threads {
            threads: 1,
            cores: 2,
            ranks: 2,
            is_openmp: true,
        };
        assert_eq!(
            threads.describe("h"),
            "1 thread for each rank (2 cores for 2 ranks on h): OMP_NUM_THREADS was not set; set it for another number"
        );
        let equal = ("g".to_owned(), threads.clone());
        let hosts = [
            ("h".to_owned(), threads.clone()),
            equal,
            (
                "i".to_owned(),
                Threads {
                    threads: 4,
                    ..threads.clone()
                },
            ),
        ];
        let lines = news(&hosts, false);
        assert_eq!(lines.len(), 2, "{lines:?}");
        assert!(
            lines[1].starts_with("note: 4 threads for each rank") && lines[1].contains(" on i)")
        );
        threads.is_openmp = false;
        let hosts = [("h".to_owned(), threads)];
        assert!(news(&hosts, false).is_empty());
        assert!(news(&hosts, true)[0].contains("TF_NUM_INTRAOP_THREADS"));
    }
}
