//! Which variables reach ranks.

use super::*;

struct Heartbeat(&'static str);

impl Environment for Heartbeat {
    fn get(&self, name: &str) -> Option<String> {
        (name == "HOROVOD_HEARTBEAT_TIMEOUT_SECONDS").then(|| self.0.to_owned())
    }

    fn names(&self) -> Vec<String> {
        Vec::new()
    }
}

#[test]
fn understands_the_heartbeat_as_the_ranks_do() {
    for (text, expected) in [
        ("", Some(30)),
        ("300", Some(300)),
        (" 2.5 ", Some(3)),
        ("0", None),
        ("soon", Some(30)),
        ("1e9", Some(30)),
    ] {
        assert_eq!(heartbeat_of(&Heartbeat(text)), expected, "{text:?}");
    }
}

#[test]
fn forwards_all_but_identity_and_what_is_true_only_here() {
    const EVERYWHERE: [bool; 2] = [true, true];
    const HERE_ONLY: [bool; 2] = [true, false];
    const NOWHERE: [bool; 2] = [false, false];
    for (name, expected) in [
        ("PATH", EVERYWHERE),
        ("PYTHONPATH", EVERYWHERE),
        ("HOROVOD_FUSION_THRESHOLD", EVERYWHERE),
        ("HOROVOD_RANK", NOWHERE),
        ("HOROVOD_JOB_KEY", NOWHERE),
        ("CUDA_VISIBLE_DEVICES", HERE_ONLY),
        ("NVIDIA_CUDA_VISIBLE_DEVICES", HERE_ONLY),
        ("BASH_FUNC_module%%", HERE_ONLY),
        ("OLDPWD", HERE_ONLY),
        ("SSH_AUTH_SOCK", HERE_ONLY),
        ("HOSTNAME", HERE_ONLY),
    ] {
        let found = [true, false].map(|to_this_host| is_forwarded(OsStr::new(name), to_this_host));
        assert_eq!(found, expected, "{name}");
    }
}

#[test]
fn details_of_autotuning_reach_the_ranks_only_when_it_is_on() {
    let detail = ("HOROVOD_AUTOTUNE_LOG", "a.csv".to_owned());
    let other = ("HOROVOD_CYCLE_TIME", "3.0".to_owned());
    let on = ("HOROVOD_AUTOTUNE", "1".to_owned());
    let names = |knobs: &[(&'static str, String)], in_environment| -> Vec<&'static str> {
        let acting = acting(knobs, in_environment);
        acting.map(|(name, _)| *name).collect()
    };
    let off = [detail.clone(), other.clone()];
    assert_eq!(names(&off, false), [other.0]);
    assert_eq!(names(&off, true), [detail.0, other.0]);
    let turned_off = ("HOROVOD_AUTOTUNE", "0".to_owned());
    assert_eq!(
        names(&[detail.clone(), turned_off.clone()], true),
        [turned_off.0]
    );
    assert_eq!(
        names(&[detail.clone(), on.clone()], false),
        [detail.0, on.0]
    );
}

#[test]
fn gives_ranks_their_place_and_the_rendezvous() {
    let host = Host {
        name: "u@[fe80::1]".to_owned(),
        slots: 2,
    };
    let slot = HostSlot {
        rank: 5,
        size: 7,
        local_rank: 1,
        local_size: 2,
        cross_rank: 3,
        cross_size: 4,
    };
    let rank = of_rank(&host, slot);
    assert!(rank.contains(&("HOROVOD_CROSS_SIZE".into(), "4".into())));
    assert!(rank.contains(&("HOROVOD_HOSTNAME".into(), "fe80::1".into())));

    let places = [
        "10.0.0.1:5".parse().expect("v4"),
        "[::1]:6".parse().expect("v6"),
    ];
    let nics = ["eth0".to_owned(), "ib0".to_owned()];
    let job = of_job(
        &places,
        "00ff",
        &nics,
        &[("HOROVOD_CYCLE_TIME", "3.0".to_owned())],
    );
    for (name, value) in [
        ("HOROVOD_RENDEZVOUS", "10.0.0.1:5,[::1]:6"),
        ("HOROVOD_GLOO_RENDEZVOUS_ADDR", "10.0.0.1"),
        ("HOROVOD_GLOO_RENDEZVOUS_PORT", "5"),
        ("HOROVOD_GLOO_IFACE", "eth0,ib0"),
        ("HOROVOD_CYCLE_TIME", "3.0"),
        ("HOROVOD_CONTROLLER", "gloo"),
    ] {
        assert!(
            job.contains(&(name.into(), value.into())),
            "{name}: {job:?}"
        );
    }
}
