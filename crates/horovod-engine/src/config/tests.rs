//! Settings from variables: defaults, refusals, what is unknown.

use horovod_timeline::TimelineSetting;
use horovod_transport::Congestion;

use super::*;

pub(in crate::config) struct Map(pub(in crate::config) Vec<(&'static str, &'static str)>);
impl Environment for Map {
    fn get(&self, name: &str) -> Option<String> {
        self.0
            .iter()
            .find(|(k, _)| *k == name)
            .map(|(_, v)| (*v).into())
    }
    fn names(&self) -> Vec<String> {
        self.0.iter().map(|(k, _)| (*k).into()).collect()
    }
}

fn read(vars: &[(&'static str, &'static str)]) -> Result<Config, Error> {
    Config::from_environment(&Map(vars.to_vec()))
}

#[test]
fn no_variables_mean_one_process_with_defaults() {
    let c = read(&[]).unwrap();
    assert_eq!(
        (
            c.ranks.rank,
            c.ranks.size,
            c.negotiation.fusion_threshold,
            c.negotiation.cache_capacity
        ),
        (0, 1, 128 << 20, 1024)
    );
    assert_eq!(c.stalls.check, Some(Duration::from_secs(60)));
    assert_eq!(c.stalls.shutdown, None);
}

#[test]
fn a_bad_value_is_refused_with_its_name_and_value() {
    for (name, value) in [
        ("HOROVOD_SIZE", "two"),
        ("HOROVOD_CACHE_CAPACITY", "-1"),
        ("HOROVOD_CYCLE_TIME", "-3"),
        ("HOROVOD_RENDEZVOUS", "nowhere"),
        ("HOROVOD_SHM_BYTES_PER_RANK", "1"),
        ("HOROVOD_SHM", "maybe"),
        ("HOROVOD_AUTOTUNE_STEPS_PER_SAMPLE", "0"),
        ("HOROVOD_AUTOTUNE_WARMUP_SAMPLES", "-2"),
        ("HOROVOD_AUTOTUNE_GAUSSIAN_PROCESS_NOISE", "1.5"),
    ] {
        let e = read(&[(name, value)]).unwrap_err().to_string();
        assert!(e.contains(name) && e.contains(value), "{e}");
    }
}

#[test]
fn autotuning_is_off_unless_asked_for_and_knows_what_the_user_fixed() {
    assert_eq!(read(&[]).unwrap().observers.autotune, None);
    let on = |vars: &[(&'static str, &'static str)]| {
        let all = [vars, &[("HOROVOD_AUTOTUNE", "1")]].concat();
        read(&all).unwrap().observers.autotune.unwrap()
    };
    let plain = on(&[]);
    assert_eq!(
        (
            plain.warmup_samples,
            plain.steps_per_sample,
            plain.bayes_opt_max_samples,
            plain.gaussian_process_noise
        ),
        (3, 10, 20, None)
    );
    let fixed = on(&[
        ("HOROVOD_FUSION_THRESHOLD", "1000"),
        ("HOROVOD_AUTOTUNE_GAUSSIAN_PROCESS_NOISE", "0.8"),
    ]);
    assert_eq!(fixed.gaussian_process_noise, Some(0.8));
    assert!(fixed.explicit.contains(&"HOROVOD_FUSION_THRESHOLD"));
    assert!(!fixed.explicit.contains(&"HOROVOD_CYCLE_TIME"));
}

#[test]
fn a_rank_outside_the_size_is_refused() {
    let e = read(&[("HOROVOD_RANK", "2"), ("HOROVOD_SIZE", "2")])
        .unwrap_err()
        .to_string();
    assert!(e.contains("HOROVOD_RANK=2"), "{e}");
}

#[test]
fn a_timeline_has_a_file_or_waits_to_be_started() {
    assert_eq!(read(&[]).unwrap().observers.timeline, None);
    for (value, setting) in [
        ("DYNAMIC", TimelineSetting::Dynamic),
        ("dynamic", TimelineSetting::File("dynamic".into())),
        ("/tmp/t.json", TimelineSetting::File("/tmp/t.json".into())),
    ] {
        let c = read(&[("HOROVOD_TIMELINE", value)]).unwrap();
        assert_eq!(c.observers.timeline, Some(setting));
    }
}

#[test]
fn a_congestion_control_is_automatic_the_systems_or_named() {
    assert_eq!(read(&[]).unwrap().links.congestion, Congestion::Auto);
    for (value, choice) in [
        ("auto", Congestion::Auto),
        (" System ", Congestion::System),
        ("bbr", Congestion::Named("bbr".into())),
    ] {
        let c = read(&[("HOROVOD_TCP_CONGESTION", value)]).unwrap();
        assert_eq!(c.links.congestion, choice);
    }
}

#[test]
fn ranks_of_a_scheduler_are_its_own() {
    let c = read(&[("OMPI_COMM_WORLD_RANK", "2"), ("OMPI_COMM_WORLD_SIZE", "4")]).unwrap();
    assert_eq!((c.ranks.rank, c.ranks.size), (2, 4));
    let e = read(&[("HOROVOD_SIZE", "4")]).unwrap_err().to_string();
    assert!(e.contains("HOROVOD_RANK is not"), "{e}");
}

#[test]
fn a_shutdown_time_below_the_warning_time_is_ignored() {
    let c = read(&[("HOROVOD_STALL_SHUTDOWN_TIME_SECONDS", "5")]).unwrap();
    assert_eq!(c.stalls.shutdown, None);
    let c = read(&[("HOROVOD_STALL_SHUTDOWN_TIME_SECONDS", "90")]).unwrap();
    assert_eq!(c.stalls.shutdown, Some(Duration::from_secs(90)));
}

#[test]
fn misspelt_settings_are_listed_and_what_others_read_is_not() {
    let env = Map(vec![
        ("HOROVOD_FUSION_TRESHOLD", "1"),
        ("HOROVOD_WITH_PYTORCH", "1"),
        ("HOROVOD_GPU_OPERATIONS", "NCCL"),
        ("HOROVOD_RAY_LOG_KEY", "x"),
        ("HOROVOD_RANK", "0"),
    ]);
    assert_eq!(unknown_settings(&env), ["HOROVOD_FUSION_TRESHOLD"]);
}
#[test]
fn the_number_of_an_element_of_a_job_array_is_no_rank() {
    let refused =
        |vars: &[(&'static str, &'static str)]| read(vars).expect_err("no job").to_string();
    for (name, outside) in [
        ("SLURM_ARRAY_TASK_ID", " "),
        ("PBS_ARRAY_INDEX", " "),
        ("LSB_JOBINDEX", "0"),
        ("SGE_TASK_ID", "undefined"),
    ] {
        // Arrays often begin with 1: the last element has no rank.
        let by_hand = [("HOROVOD_RANK", "4"), ("HOROVOD_SIZE", "4")];
        let error = refused(&[&by_hand[..], &[(name, "4")]].concat());
        assert!(
            error.contains(name) && error.contains("job array"),
            "{error}"
        );
        let error = refused(&[&by_hand[..], &[(name, outside)]].concat());
        assert!(!error.contains("job array"), "{error}");
        let error = refused(&[("HOROVOD_SIZE", "4"), (name, "4")]);
        assert!(error.contains(name), "{error}");
        // Alone it says nothing, and in a launcher's job neither.
        assert_eq!(read(&[(name, "4")]).expect("one process").ranks.size, 1);
        let launched = [
            ("HOROVOD_RANK", "1"),
            ("HOROVOD_SIZE", "4"),
            ("HOROVOD_RENDEZVOUS", "127.0.0.1:5"),
            (name, "4"),
        ];
        assert_eq!(read(&launched).expect("a job").start.job_array, None);
    }
}
