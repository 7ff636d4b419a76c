//! The processes of the job, where the script names them: a list of the launcher's ranks, or a group of processes that
//! exchanged rank, address and key before init, such as those of a communicator of MPI.

use std::net::SocketAddr;
use std::time::Duration;

use horovod_settings as settings;

use horovod_scheduler::detect;

use super::{Config, Environment};
use crate::bootstrap;
use crate::error::Error;

/// Set to `mpi` by `horovodrun --mpi` and `--jsrun`.
const CONTROLLER: &str = "HOROVOD_CONTROLLER";

/// Which processes form the job.
#[derive(Clone, Debug, Default)]
pub enum Members {
    /// All that the launcher started.
    #[default]
    All,
    /// These ranks of the launcher; the position in the list is the rank in the job.
    Listed(Vec<i64>),
    /// A group with a rendezvous of its own, whatever launchers have set.
    Group(Group),
}

/// One process of a group with a rendezvous of its own.
#[derive(Clone, Debug)]
pub struct Group {
    /// Its rank.
    pub rank: u32,
    /// Number of processes.
    pub size: u32,
    /// Where the rendezvous listens; empty for a single process.
    pub addresses: Vec<SocketAddr>,
    /// The job's key as 64 hex digits.
    pub key: String,
}

/// Where settings of a launcher's job are hidden: the process is one of a group.
struct InGroup<'a>(&'a dyn Environment);

impl InGroup<'_> {
    /// Variables by which our launchers give a process its part in a job, and by which jobs without a launcher meet.
    fn hides(name: &str) -> bool {
        [
            settings::RANK.name,
            settings::LOCAL_RANK.name,
            settings::LOCAL_SIZE.name,
            settings::CROSS_RANK.name,
            settings::CROSS_SIZE.name,
            settings::HOSTNAME.name,
            settings::RENDEZVOUS.name,
            settings::AGENT_SOCKET.name,
            settings::JOB_KEY.name,
            settings::ELASTIC.name,
            settings::ELASTIC_WORKER.name,
            settings::RANK0_ADDRESS.name,
            settings::RENDEZVOUS_DIR.name,
        ]
        .contains(&name)
    }
}

impl Environment for InGroup<'_> {
    fn get(&self, name: &str) -> Option<String> {
        // A size of 1 also says that no scheduler's variables count.
        match name == settings::SIZE.name {
            true => Some("1".to_owned()),
            false => (!Self::hides(name)).then(|| self.0.get(name))?,
        }
    }

    fn names(&self) -> Vec<String> {
        let mut names = self.0.names();
        names.retain(|name| !Self::hides(name));
        names
    }
}

impl Config {
    /// As [`Config::from_environment`], for the processes that the script names.
    pub fn of_members(env: &dyn Environment, members: &Members) -> Result<Self, Error> {
        match members {
            Members::All => Self::from_environment(env),
            Members::Listed(ranks) => Self::from_environment(env)?.of_list(ranks),
            Members::Group(group) => {
                let mut config = Self::from_environment(&InGroup(env))?;
                (config.ranks.rank, config.ranks.size) = (group.rank, group.size);
                config.start.rendezvous.clone_from(&group.addresses);
                config.start.job_key = Some(group.key.clone());
                config.ranks.places_follow = true;
                Ok(config)
            }
        }
    }

    /// Whether a running job consists of these ranks of its launcher.
    pub fn has_members(&self, ranks: &[i64]) -> bool {
        match &self.ranks.listed {
            Some(listed) => listed == ranks,
            None => ranks.iter().copied().eq(0..i64::from(self.ranks.size)),
        }
    }

    fn of_list(mut self, ranks: &[i64]) -> Result<Self, Error> {
        let (rank, size) = (i64::from(self.ranks.rank), i64::from(self.ranks.size));
        if ranks.iter().copied().eq(0..size) {
            return Ok(self);
        }
        let refused = |why: String| Err(Error::Init(format!("init(comm={ranks:?}): {why}")));
        if !self.start.rendezvous.is_empty() {
            return refused(format!(
                "in a job of horovodrun only the list of all ranks, [0..{size}) in order, is supported; use process \
                 sets for subsets, or start the script with mpirun"
            ));
        }
        if let Some(wrong) = ranks.iter().find(|rank| !(0..size).contains(*rank)) {
            return refused(format!(
                "{wrong} is no rank; the launcher started the ranks [0..{size})"
            ));
        }
        if let Some(twice) = (1..ranks.len()).find(|&at| ranks[..at].contains(&ranks[at])) {
            return refused(format!("rank {} is listed twice", ranks[twice]));
        }
        let Some(position) = ranks.iter().position(|listed| *listed == rank) else {
            return refused(format!(
                "this process is rank {rank} of {size} and not in the list, so it has no part in this job: it may \
                 go on without Horovod, or call init with a list that contains {rank}"
            ));
        };
        self.ranks.rank = u32::try_from(position).unwrap_or(u32::MAX);
        self.ranks.size = u32::try_from(ranks.len()).unwrap_or(u32::MAX);
        self.ranks.listed = Some(ranks.to_vec());
        Ok(self)
    }
}

/// The launcher of this process, as far as a communicator of MPI depends on the launcher.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Launcher {
    /// Its name, for messages.
    pub by: &'static str,
    /// This process's rank.
    pub rank: u32,
    /// Number of processes.
    pub size: u32,
    /// The variable that tells the number.
    pub size_variable: &'static str,
    /// Whether an MPI library in its processes finds the others by itself.
    pub starts_mpi: bool,
}

impl Launcher {
    /// `None`: no launcher is known, or the process is to be alone.
    pub fn of_process(env: &dyn Environment) -> Result<Option<Self>, Error> {
        if settings::RENDEZVOUS.is_set(env) {
            return Ok(Some(Self {
                by: "horovodrun",
                rank: settings::RANK.read(env)?,
                size: settings::SIZE.read(env)?,
                size_variable: settings::SIZE.name,
                starts_mpi: env.get(CONTROLLER).as_deref() == Some("mpi"),
            }));
        }
        let started = detect(env)?;
        Ok(started.map(|started| Self {
            by: started.by,
            rank: started.rank,
            size: started.size,
            size_variable: started.size_variable,
            starts_mpi: started.starts_mpi,
        }))
    }
}

/// Data that the processes of a group need for their rendezvous.
#[derive(Clone, Debug)]
pub struct GroupSettings {
    /// Limit for all of init.
    pub timeout: Duration,
    /// Network interfaces to use between hosts; empty: all.
    pub interfaces: Vec<String>,
    /// The user's key as 64 hex digits.
    pub key: Option<String>,
    /// Equal on processes of one host only.
    pub host: String,
}

impl GroupSettings {
    /// From the environment of a process that is to be one of a group.
    pub fn read(env: &dyn Environment) -> Result<Self, Error> {
        let config = Config::from_environment(&InGroup(env))?;
        let key = match settings::JOB_KEY.is_set(env) {
            // The key of horovodrun's own job belongs to no other.
            true if settings::RENDEZVOUS.is_set(env) => None,
            true => Some(bootstrap::parse_key(
                &settings::JOB_KEY.read(env)?.unwrap_or_default(),
                settings::JOB_KEY.name,
            )?),
            false => bootstrap::user_key(&config)?,
        };
        Ok(Self {
            timeout: config.start.connect_timeout,
            host: horovod_transport::host_identity(&config.ranks.hostname),
            interfaces: config.start.interfaces,
            key: key.map(|key| key.to_hex()),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::Map;
    use super::*;

    const OPEN_MPI: [(&str, &str); 4] = [
        ("OMPI_COMM_WORLD_RANK", "2"),
        ("OMPI_COMM_WORLD_SIZE", "4"),
        ("OMPI_COMM_WORLD_LOCAL_SIZE", "4"),
        ("PMIX_NAMESPACE", "77"),
    ];

    fn listed(vars: &[(&'static str, &'static str)], ranks: &[i64]) -> Result<Config, String> {
        let members = Members::Listed(ranks.to_vec());
        Config::of_members(&Map(vars.to_vec()), &members).map_err(|error| error.to_string())
    }

    #[test]
    fn the_position_in_the_list_is_the_rank() {
        for (ranks, expected) in [
            (vec![0, 1, 2, 3], (2, 4)),
            (vec![3, 2, 1, 0], (1, 4)),
            (vec![2, 0], (0, 2)),
            (vec![2], (0, 1)),
        ] {
            let config = listed(&OPEN_MPI, &ranks).unwrap();
            assert_eq!(
                (config.ranks.rank, config.ranks.size),
                expected,
                "{ranks:?}"
            );
            assert!(config.has_members(&ranks));
            assert!(!config.has_members(&[7]));
        }
    }

    #[test]
    fn mistakes_in_a_list_are_named() {
        for (ranks, expected) in [
            (vec![0, 1], "rank 2 of 4 and not in the list"),
            (vec![2, 2], "rank 2 is listed twice"),
            (vec![2, 4], "4 is no rank"),
            (vec![-1, 2], "-1 is no rank"),
        ] {
            let error = listed(&OPEN_MPI, &ranks).unwrap_err();
            assert!(error.contains(expected), "{error}");
        }
        let horovodrun = [
            ("HOROVOD_RANK", "0"),
            ("HOROVOD_SIZE", "2"),
            ("HOROVOD_RENDEZVOUS", "127.0.0.1:5"),
        ];
        assert!(listed(&horovodrun, &[0, 1]).is_ok());
        for ranks in [vec![0], vec![1, 0], vec![0, 1, 77]] {
            let error = listed(&horovodrun, &ranks).unwrap_err();
            assert!(error.contains("use process sets for subsets"), "{error}");
        }
    }

    #[test]
    fn a_group_counts_whatever_launchers_have_set() {
        let mut vars = OPEN_MPI.to_vec();
        vars.extend([
            ("HOROVOD_RANK", "1"),
            ("HOROVOD_SIZE", "9"),
            ("HOROVOD_ELASTIC", "1"),
            ("HOROVOD_RENDEZVOUS", "127.0.0.1:5"),
            ("HOROVOD_FUSION_THRESHOLD", "7"),
        ]);
        let group = Group {
            rank: 3,
            size: 5,
            addresses: vec!["10.0.0.1:6".parse().unwrap()],
            key: "ab".repeat(32),
        };
        let config = Config::of_members(&Map(vars), &Members::Group(group)).unwrap();
        assert_eq!((config.ranks.rank, config.ranks.size), (3, 5));
        assert_eq!(config.start.rendezvous, ["10.0.0.1:6".parse().unwrap()]);
        assert!(
            !config.membership.elastic
                && config.start.started.is_none()
                && config.ranks.places_follow
        );
        assert_eq!(config.negotiation.fusion_threshold, 7);
    }

    #[test]
    fn who_started_the_process() {
        let of = |vars: &[(&'static str, &'static str)]| {
            let found = Launcher::of_process(&Map(vars.to_vec())).unwrap();
            found.map(|l| (l.by, l.rank, l.size, l.size_variable, l.starts_mpi))
        };
        assert_eq!(of(&[]), None);
        assert_eq!(
            of(&OPEN_MPI),
            Some(("Open MPI", 2, 4, "OMPI_COMM_WORLD_SIZE", true))
        );
        let horovodrun = [
            ("HOROVOD_RANK", "1"),
            ("HOROVOD_SIZE", "2"),
            ("HOROVOD_RENDEZVOUS", "127.0.0.1:5"),
        ];
        let expected = Some(("horovodrun", 1, 2, "HOROVOD_SIZE", false));
        assert_eq!(of(&[&horovodrun[..], &OPEN_MPI[..]].concat()), expected);
    }
}
