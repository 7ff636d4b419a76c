//! Tests of the rendezvous of ranks, and of refused settings.

use super::*;
use crate::config::Started;

const KEY: &str = "00112233445566778899aabbccddeeff00112233445566778899aabbccddeeff";

fn started(by: &'static str) -> Started {
    Started {
        by,
        rank: 1,
        size: 4,
        one_host: false,
        job: vec!["tcp://a:1".to_owned(), "7".to_owned()],
        ancestor: None,
        secret: None,
        rank0: None,
        size_variable: "SIZE",
        starts_mpi: false,
    }
}

fn config(started: Option<Started>) -> Config {
    let mut config = Config::solo();
    (config.ranks.rank, config.ranks.size) = (1, 4);
    config.start.started = started;
    config.start.bootstrap.temporary = "/tmp".into();
    config
}

#[track_caller]
fn locator(config: &Config) -> (Locator, bool) {
    let plan = plan(config).unwrap();
    (plan.locator, plan.key.is_some())
}

#[track_caller]
fn refused(config: &Config, with: &[&str]) {
    let error = plan(config).unwrap_err().to_string();
    for text in with {
        assert!(error.contains(text), "{text}: {error}");
    }
}

#[test]
fn what_connects_ranks_already_is_asked_where_nothing_else_says_how_to_meet() {
    struct Map(Vec<(&'static str, &'static str)>);
    impl Environment for Map {
        fn get(&self, name: &str) -> Option<String> {
            let found = self.0.iter().find(|(known, _)| *known == name);
            found.map(|(_, value)| (*value).to_owned())
        }
        fn names(&self) -> Vec<String> {
            self.0.iter().map(|(name, _)| (*name).to_owned()).collect()
        }
    }
    let open_mpi = |size, local_size, more: &[(&'static str, &'static str)]| {
        let mut vars = vec![
            ("OMPI_COMM_WORLD_RANK", "0"),
            ("OMPI_COMM_WORLD_SIZE", size),
            ("OMPI_COMM_WORLD_LOCAL_SIZE", local_size),
            ("PMIX_NAMESPACE", "77"),
        ];
        vars.extend(more);
        lacks_rendezvous(&Map(vars))
    };
    assert!(open_mpi("4", "2", &[]), "several hosts");
    assert!(
        open_mpi("4", "2", &[("HOROVOD_JOB_KEY", KEY)]),
        "a key, no address"
    );
    assert!(!open_mpi("4", "4", &[]), "one host");
    assert!(!open_mpi("1", "1", &[]), "one process");
    for more in [
        ("HOROVOD_RENDEZVOUS_DIR", "/shared"),
        ("HOROVOD_RANK0_ADDRESS", "a:1"),
        ("HOROVOD_RENDEZVOUS", "127.0.0.1:1"),
        ("HOROVOD_JOB_KEY", "no key"),
    ] {
        assert!(!open_mpi("4", "2", &[more]), "{more:?}");
    }
    let of_mpi = config(Some(Started {
        starts_mpi: true,
        ..started("Open MPI")
    }));
    refused(&of_mpi, &["import mpi4py.MPI before hvd.init()"]);
}

#[test]
fn ranks_of_one_host_meet_through_a_private_file() {
    let config = config(Some(Started {
        one_host: true,
        ..started("Open MPI")
    }));
    let uid = rustix::process::geteuid().as_raw();
    let path = format!("/tmp/horovod-{uid}/horovod-OpenMPI-tcp---a-1-7-4");
    let file = Locator::File {
        path: path.into(),
        on_this_host: true,
    };
    assert_eq!(locator(&config), (file, false));
}

#[test]
fn each_list_of_ranks_has_a_file_of_its_own() {
    let path = |listed: Option<Vec<i64>>| {
        let mut config = config(Some(Started {
            one_host: true,
            ..started("Open MPI")
        }));
        config.ranks.listed = listed;
        match locator(&config).0 {
            Locator::File { path, .. } => path,
            other => panic!("{other:?}"),
        }
    };
    let lists = [
        None,
        Some(vec![0, 1]),
        Some(vec![1, 0]),
        Some(vec![2, 3]),
        Some(vec![0, 2]),
    ];
    let paths: std::collections::BTreeSet<_> = lists.iter().cloned().map(path).collect();
    assert_eq!(paths.len(), lists.len());
    assert_eq!(path(Some(vec![0, 1])), path(Some(vec![0, 1])));
}

#[test]
fn the_schedulers_address_is_that_of_its_own_rank_0() {
    let mut config = config(Some(Started {
        rank0: Some(("n1".into(), 29_501)),
        ..started("torchrun")
    }));
    config.start.job_key = Some(KEY.into());
    config.ranks.listed = Some(vec![0, 1]);
    assert!(matches!(locator(&config).0, Locator::Address { .. }));
    config.ranks.listed = Some(vec![1, 0]);
    refused(&config, &["HOROVOD_RENDEZVOUS_DIR"]);
}

#[test]
fn several_hosts_need_a_shared_folder_or_address_and_key() {
    let mut config = config(Some(started("Slurm")));
    refused(
        &config,
        &[
            "rank 1 of 4 started by Slurm",
            "HOROVOD_RENDEZVOUS_DIR",
            "HOROVOD_RANK0_ADDRESS=host:port (where rank 0 can listen), and HOROVOD_JOB_KEY",
        ],
    );
    config.start.bootstrap.directory = Some("/shared".into());
    let file = Locator::File {
        path: "/shared/horovod-Slurm-tcp---a-1-7-4".into(),
        on_this_host: false,
    };
    assert_eq!(locator(&config), (file, false));
    config.start.bootstrap.directory = None;
    config.start.bootstrap.rank0_address = Some("[fe80::1]:99".into());
    refused(&config, &["they have no common key", "openssl rand"]);
    config.start.job_key = Some(KEY.into());
    let address = Locator::Address {
        host: "fe80::1".into(),
        port: 99,
    };
    assert_eq!(locator(&config), (address, true));
    config.start.bootstrap.rank0_address = Some("n1".into());
    refused(&config, &["HOROVOD_RANK0_ADDRESS=n1: expected host:port"]);
    config.start.job_key = Some("short".into());
    refused(&config, &["HOROVOD_JOB_KEY is not 64 hex digits"]);
}

#[test]
fn what_the_scheduler_knows_need_not_be_said() {
    let mut config = config(Some(Started {
        rank0: Some(("n1".into(), 29_501)),
        ..started("torchrun")
    }));
    let error = plan(&config).unwrap_err().to_string();
    assert!(!error.contains("HOROVOD_RANK0_ADDRESS"), "{error}");
    assert!(error.contains("HOROVOD_JOB_KEY"), "{error}");
    config.start.job_key = Some(KEY.into());
    let address = Locator::Address {
        host: "n1".into(),
        port: 29_501,
    };
    assert_eq!(locator(&config), (address, true));

    let mut config = self::config(Some(Started {
        secret: Some("e408a1fc79e43123-321a39edb652c409".into()),
        ..started("Open MPI")
    }));
    let error = plan(&config).unwrap_err().to_string();
    assert!(!error.contains("HOROVOD_JOB_KEY "), "{error}");
    config.start.bootstrap.rank0_address = Some("n1:7".into());
    let plan = plan(&config).unwrap();
    assert!(
        plan.key
            .unwrap()
            .to_hex()
            .starts_with("e408a1fc79e43123321a39edb652c409")
    );
}

#[test]
fn a_secret_that_is_too_short_is_none() {
    assert!(of_secret("e408a1fc79e43123").is_none());
    assert!(of_secret("").is_none());
}

#[test]
fn no_authentication_takes_the_whole_sentence() {
    let mut config = config(None);
    config.start.bootstrap.rank0_address = Some("n1:7".into());
    config.start.bootstrap.unauthenticated = Some("1".into());
    refused(
        &config,
        &["it must be \"anybody-who-reaches-my-ports-may-join\""],
    );
    config.start.bootstrap.unauthenticated = Some(OPT_OUT.into());
    assert!(locator(&config).1);
}

#[test]
fn without_anything_that_tells_jobs_apart_a_folder_is_needed() {
    // Kubernetes: every pod is a host.
    let mut config = config(Some(Started {
        job: Vec::new(),
        one_host: true,
        ..started("a Kubernetes indexed job")
    }));
    refused(
        &config,
        &["HOROVOD_RENDEZVOUS_DIR", "HOROVOD_RANK0_ADDRESS"],
    );
    config.start.bootstrap.directory = Some("/shared".into());
    let file = Locator::File {
        path: "/shared/horovod-rendezvous-4".into(),
        on_this_host: false,
    };
    assert_eq!(locator(&config), (file, false));
}

#[test]
fn the_launchers_store_is_used_where_nothing_else_says_how_to_meet() {
    let found = horovod_pmi::Found::Pmi1(9);
    let with_store = |started| {
        let mut config = config(Some(started));
        config.start.store = Some(found.clone());
        config
    };
    let mpich = with_store(started("MPICH"));
    assert_eq!(locator(&mpich), (Locator::Store(found.clone()), false));
    let mut keyed = with_store(started("MPICH"));
    keyed.start.job_key = Some(KEY.to_owned());
    assert_eq!(locator(&keyed), (Locator::Store(found.clone()), true));
    // One host needs nobody who passes on texts.
    let here = with_store(Started {
        one_host: true,
        ..started("MPICH")
    });
    assert!(matches!(locator(&here).0, Locator::File { .. }));
    // The user's choice, and what is wrong with it.
    let mut named = with_store(started("MPICH"));
    named.start.bootstrap.rank0_address = Some("n1:5".to_owned());
    refused(&named, &["they have no common key"]);
    // Others of the launcher's ranks would not come to the fence.
    let mut listed = with_store(started("MPICH"));
    listed.ranks.listed = Some(vec![0, 1]);
    refused(&listed, &["cannot find each other safely"]);
    let mut wrong = with_store(started("MPICH"));
    wrong.start.job_key = Some("short".to_owned());
    refused(&wrong, &["HOROVOD_JOB_KEY is not 64 hex digits"]);
}
