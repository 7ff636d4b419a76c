//! The table as a whole, and what each kind accepts.

use std::collections::BTreeSet;

use super::*;

struct One(&'static str, &'static str);

impl Environment for One {
    fn get(&self, name: &str) -> Option<String> {
        (name == self.0).then(|| self.1.to_owned())
    }

    fn names(&self) -> Vec<String> {
        vec![self.0.to_owned()]
    }
}

#[test]
fn every_default_that_is_shown_is_the_one_that_counts() {
    for declared in TABLE {
        let (name, text) = (declared.name(), declared.default_text());
        if declared.has_default() {
            assert_eq!(declared.check(&text), Ok(()), "{name}");
            assert!(declared.is_default(&text), "{name}={text}");
        } else {
            assert!(!text.is_empty() && !declared.is_default(&text), "{name}");
        }
    }
}

#[test]
fn names_and_descriptions_are_complete_and_on_one_line() {
    let names: BTreeSet<_> = SETTINGS.iter().map(|setting| setting.name).collect();
    assert_eq!(names.len(), TABLE.len());
    for setting in SETTINGS.iter() {
        assert!(setting.name.starts_with("HOROVOD_"), "{setting:?}");
        assert!(find(setting.name).is_some(), "{setting:?}");
        assert!(
            !setting.doc.is_empty()
                && !setting.doc.contains(['\n', '|'])
                && !setting.doc.contains("  "),
            "{setting:?}"
        );
        assert!(!setting.doc.starts_with(' '), "{setting:?}");
    }
}

#[test]
fn limits_are_in_the_description_and_in_the_error() {
    #[track_caller]
    fn check(declared: &dyn Declared, text: &str, limits: &str, error: &str) {
        let description = declared.description();
        assert!(description.contains(limits), "{description}");
        let refused = declared.check(text).unwrap_err().to_string();
        assert_eq!(refused, error);
    }
    check(
        &CONTROL_FAN_OUT,
        "1",
        "; 2 to 65536; rank 0's value counts",
        "HOROVOD_CONTROL_FAN_OUT=1: expected 2 to 65536",
    );
    check(
        &HEARTBEAT_TIMEOUT_SECONDS,
        "0.5",
        "1 to 86400, or 0 for never",
        "HOROVOD_HEARTBEAT_TIMEOUT_SECONDS=0.5: expected 1 to 86400, or 0 for never",
    );
    check(
        &AUTOTUNE_STEPS_PER_SAMPLE,
        "0",
        "at least 1",
        "HOROVOD_AUTOTUNE_STEPS_PER_SAMPLE=0: expected at least 1",
    );
    check(
        &AUTOTUNE_GAUSSIAN_PROCESS_NOISE,
        "1.5",
        "; 0 to 1",
        "HOROVOD_AUTOTUNE_GAUSSIAN_PROCESS_NOISE=1.5: expected a number from 0 to 1",
    );
    check(
        &CONSISTENCY_ACTION,
        "stop",
        "; warn or error; rank 0",
        "HOROVOD_CONSISTENCY_ACTION=\"stop\": expected warn or error",
    );
    check(
        &CACHE_CAPACITY,
        "-1",
        "",
        "HOROVOD_CACHE_CAPACITY=\"-1\": expected a number of at least 0",
    );
    check(
        &CYCLE_TIME,
        "nan",
        "",
        "HOROVOD_CYCLE_TIME=NaN: expected a number from 0 to 1e9",
    );
    check(&SHM, "maybe", "", "HOROVOD_SHM=\"maybe\": expected 1 or 0");
    check(
        &RENDEZVOUS,
        "127.0.0.1:1,nowhere",
        "",
        "HOROVOD_RENDEZVOUS=\"nowhere\": expected addresses of the form ip:port",
    );
}

#[test]
fn both_ends_of_every_range_are_accepted_and_nothing_beyond() {
    for declared in TABLE {
        let check = |text: String, is_accepted: bool| {
            let found = declared.check(&text).is_ok();
            assert_eq!(found, is_accepted, "{}={text}", declared.name());
        };
        match declared.accepts() {
            Accepts::Whole { least, most } => {
                check(least.to_string(), true);
                check(format!("{}", i128::from(least) - 1), false);
                check(
                    most.map_or(u128::MAX, |most| u128::from(most) + 1)
                        .to_string(),
                    false,
                );
                check(most.unwrap_or(least).to_string(), true);
            }
            Accepts::Decimal { least, most, .. } => {
                check(least.to_string(), true);
                check(most.to_string(), true);
                check((most + 1.0).to_string(), false);
                check("-0.1".to_owned(), false);
                check("inf".to_owned(), false);
            }
            Accepts::Words(words) => {
                for word in words {
                    check(format!(" {} ", word.to_ascii_lowercase()), true);
                }
                check("neither".to_owned(), false);
            }
            Accepts::Flag => {
                for word in ["1", "0", "yes", "NO", "true", "off", "-1", "7"] {
                    check(word.to_owned(), true);
                }
            }
            Accepts::PortRange => {
                for range in ["29000-29100", "2000:2000", "1024 - 65535"] {
                    check(range.to_owned(), true);
                }
                for range in ["29000", "29100-29000", "80-90", "1024-65536", "a-b", ""] {
                    check(range.to_owned(), false);
                }
            }
            Accepts::Addresses | Accepts::Text => {}
        }
    }
}

#[test]
fn what_is_set_to_nothing_is_not_set() {
    let blank = One("HOROVOD_CACHE_CAPACITY", "  ");
    assert_eq!(CACHE_CAPACITY.read(&blank), Ok(1024));
    assert!(!CACHE_CAPACITY.is_set(&blank));
    let setting = One("HOROVOD_CACHE_CAPACITY", " 7 ");
    assert_eq!(CACHE_CAPACITY.read(&setting), Ok(7));
    assert!(CACHE_CAPACITY.is_set(&setting));
    let nonsense = One("HOROVOD_CACHE_CAPACITY", "many");
    assert!(CACHE_CAPACITY.read(&nonsense).is_err());
    assert_eq!(CACHE_CAPACITY.read_or_default(&nonsense), 1024);
}

#[test]
fn variables_of_the_originals_build_are_known() {
    for name in [
        "HOROVOD_WITH_PYTORCH",
        "HOROVOD_WITHOUT_MPI",
        "HOROVOD_GPU_ALLREDUCE",
        "HOROVOD_NCCL_LINK",
    ] {
        assert!(steers_a_build(name), "{name}");
    }
    for name in [
        "HOROVOD_NUM_NCCL_STREAMS",
        "HOROVOD_GPU_OPERATIONS",
        "HOROVOD_NCCL_HOME",
        "HOROVOD_TIMELINE",
        "PATH",
    ] {
        assert!(!steers_a_build(name), "{name}");
    }
}

#[test]
fn misspelt_names_are_unknown_whatever_they_begin_with() {
    for name in [
        "HOROVOD_FUSION_TRESHOLD",
        "HOROVOD_GPU_OPERATION",
        "HOROVOD_GPU_TIMOUT",
        "HOROVOD_SPARK_START_TIMEOT",
    ] {
        assert_eq!(unknown_settings(&One(name, "1")), [name]);
    }
    for name in [
        "HOROVOD_GPU_OPERATIONS",
        "HOROVOD_NCCL_HOME",
        "HOROVOD_RAY_LOG_KEY",
        "HOROVOD_SPARK_WORK_DIR",
        "HOROVOD_WITH_PYTORCH",
        // Without effect here, and not misspelt.
        "HOROVOD_ADASUM_MPI_CHUNK_SIZE",
        "HOROVOD_BATCH_D2D_MEMCOPIES",
        "HOROVOD_CCL_CACHE",
        "HOROVOD_DISABLE_NVTX_RANGES",
        "HOROVOD_ENABLE_XLA_OPS",
        "HOROVOD_NUM_NCCL_STREAMS",
        "PATH",
    ] {
        assert!(unknown_settings(&One(name, "1")).is_empty(), "{name}");
    }
}

#[test]
fn a_misspelt_setting_is_told_what_it_may_have_been() {
    for (typed, meant) in [
        ("HOROVOD_FUSION_TRESHOLD", Some("HOROVOD_FUSION_THRESHOLD")),
        ("HOROVOD_GPU_TIMOUT", Some("HOROVOD_GPU_TIMEOUT")),
        ("HOROVOD_GPU_OPERATION", Some("HOROVOD_GPU_OPERATIONS")),
        ("HOROVOD_FOO", None),
        ("HOROVOD_", None),
    ] {
        assert_eq!(nearest_setting(typed), meant, "{typed}");
    }
}
