//! Hints of other launchers: variables that tell of several members, but not enough to find the others.
//!
//! Only what is set per process counts. An allocation's variables (`SLURM_NTASKS`) and an array job's
//! (`SLURM_ARRAY_TASK_ID`) are also there where one process is all there is.

use serde_json::Value;

use crate::reader::Reader;

/// Meaning of a variable's value.
enum Meaning {
    /// It is a rank: there are others, or it would not be needed.
    Rank,
    /// It is a rank that a single process has too: only from 1 on it says something.
    RankFromOne,
    /// It is the number of members, or `least:most` of them.
    Size,
}

struct Hint {
    name: &'static str,
    meaning: Meaning,
    /// If this is set, too, the hint says nothing new.
    unless: Option<&'static str>,
    by: &'static str,
    /// Completes the sentence "it is not known ...".
    unknown: &'static str,
    /// Settings needed to train together.
    cure: &'static str,
}

const SIZE: &str = "HOROVOD_SIZE to the number of processes";
const PLACE: &str = "HOROVOD_RANK and HOROVOD_SIZE in every process";
const TORCH: &str = "RANK and WORLD_SIZE in every process";
const TORCHRUN: &str =
    "RANK and WORLD_SIZE in every process (torchrun does when it starts the script)";
const WHICH: &str = "which of them this is";
const NEITHER: &str =
    "which of them this is and how many there are (RANK and WORLD_SIZE are not set)";
const HINTS: &[Hint] = &[
    Hint {
        name: "HOROVOD_RANK",
        meaning: Meaning::Rank,
        unless: Some("HOROVOD_SIZE"),
        by: "a launcher of Horovod's",
        unknown: "of how many (HOROVOD_SIZE is not set)",
        cure: SIZE,
    },
    Hint {
        name: "HOROVOD_LOCAL_SIZE",
        meaning: Meaning::Size,
        unless: Some("HOROVOD_SIZE"),
        by: "a launcher of Horovod's",
        unknown: WHICH,
        cure: PLACE,
    },
    Hint {
        name: "SLURM_STEP_NUM_TASKS",
        meaning: Meaning::Size,
        unless: None,
        by: "Slurm's srun",
        unknown: "which of them this is (SLURM_PROCID and SLURM_STEP_ID are not both set)",
        cure: "them",
    },
    Hint {
        name: "SLURM_PROCID",
        meaning: Meaning::RankFromOne,
        unless: None,
        by: "Slurm's srun",
        unknown: "of how many (SLURM_STEP_NUM_TASKS and SLURM_STEP_ID are not both set)",
        cure: "them",
    },
    Hint {
        name: "WORLD_SIZE",
        meaning: Meaning::Size,
        unless: None,
        by: "a launcher of PyTorch's",
        unknown: "which of them this is (RANK is not set)",
        cure: "RANK",
    },
    Hint {
        name: "RANK",
        meaning: Meaning::Rank,
        unless: Some("WORLD_SIZE"),
        by: "a launcher of PyTorch's",
        unknown: "of how many (WORLD_SIZE is not set)",
        cure: "WORLD_SIZE",
    },
    Hint {
        name: "LOCAL_WORLD_SIZE",
        meaning: Meaning::Size,
        unless: Some("WORLD_SIZE"),
        by: "a launcher of PyTorch's",
        unknown: NEITHER,
        cure: TORCH,
    },
    Hint {
        name: "LOCAL_RANK",
        meaning: Meaning::RankFromOne,
        unless: Some("WORLD_SIZE"),
        by: "a launcher of PyTorch's",
        unknown: NEITHER,
        cure: TORCH,
    },
    Hint {
        name: "NODE_RANK",
        meaning: Meaning::RankFromOne,
        unless: Some("WORLD_SIZE"),
        by: "a launcher of PyTorch's",
        unknown: NEITHER,
        cure: TORCH,
    },
    // Set by an operator for torchrun, which is to run in each pod.
    Hint {
        name: "PET_NNODES",
        meaning: Meaning::Size,
        unless: Some("WORLD_SIZE"),
        by: "an operator, for torchrun",
        unknown: NEITHER,
        cure: TORCHRUN,
    },
    Hint {
        name: "PET_NODE_RANK",
        meaning: Meaning::RankFromOne,
        unless: Some("WORLD_SIZE"),
        by: "an operator, for torchrun",
        unknown: NEITHER,
        cure: TORCHRUN,
    },
    Hint {
        name: "JAX_NUM_PROCESSES",
        meaning: Meaning::Size,
        unless: None,
        by: "a launcher of JAX's",
        unknown: "which of them this is (JAX_PROCESS_ID is not set)",
        cure: "JAX_PROCESS_ID",
    },
    Hint {
        name: "JAX_PROCESS_ID",
        meaning: Meaning::Rank,
        unless: Some("JAX_NUM_PROCESSES"),
        by: "a launcher of JAX's",
        unknown: "of how many (JAX_NUM_PROCESSES is not set)",
        cure: "JAX_NUM_PROCESSES",
    },
    Hint {
        name: "DMLC_NUM_WORKER",
        meaning: Meaning::Size,
        unless: None,
        by: "MXNet's launcher",
        unknown: WHICH,
        cure: PLACE,
    },
    Hint {
        name: "PMIX_RANK",
        meaning: Meaning::Rank,
        unless: None,
        by: "a launcher with PMIx",
        unknown: "of how many",
        cure: SIZE,
    },
    Hint {
        name: "PALS_RANKID",
        meaning: Meaning::Rank,
        unless: None,
        by: "PALS",
        unknown: "of how many",
        cure: SIZE,
    },
    Hint {
        name: "JOB_COMPLETION_INDEX",
        meaning: Meaning::Rank,
        unless: None,
        by: "a Kubernetes indexed job",
        unknown: "of how many, or whether its pods train together at all",
        cure: "HOROVOD_SIZE to the job's completions",
    },
    Hint {
        name: "VC_TASK_INDEX",
        meaning: Meaning::RankFromOne,
        unless: None,
        by: "Volcano",
        unknown: "of how many",
        cure: PLACE,
    },
];

/// Why this process may not train alone in silence; `None` if nothing tells of others.
pub(crate) fn of_several(r: &Reader<'_>) -> Option<String> {
    for hint in HINTS {
        let Some(text) = r.text(hint.name) else {
            continue;
        };
        let most = match hint.meaning {
            Meaning::Size => text.rsplit(':').next().unwrap_or_default(),
            Meaning::Rank | Meaning::RankFromOne => &text,
        };
        let Ok(value) = most.trim().parse::<u32>() else {
            continue;
        };
        let meaning = match hint.meaning {
            Meaning::Rank => true,
            Meaning::RankFromOne => value > 0,
            Meaning::Size => value > 1,
        };
        if meaning && hint.unless.is_none_or(|name| r.text(name).is_none()) {
            return Some(format!(
                "{}={text} (from {}) says that this process is one of several, but it is not known {}: set {} to \
                 train together, or HOROVOD_SIZE=1 to train alone",
                hint.name, hint.by, hint.unknown, hint.cure
            ));
        }
    }
    let listed = |name: &str, (members, place): (usize, Option<usize>)| {
        let place = place.map_or_else(
            || "HOROVOD_RANK (0 to the number less one)".to_owned(),
            |place| format!("HOROVOD_RANK={place}"),
        );
        format!(
            "{name} names {members} members that train, but says nothing of how they meet here: set \
             HOROVOD_SIZE={members} and {place} to train together, on several hosts also HOROVOD_RENDEZVOUS_DIR (a \
             folder that all share), or HOROVOD_SIZE=1 to train alone"
        )
    };
    let tf_config = r.text("TF_CONFIG").and_then(|text| tf_config(&text));
    let sm_hosts = || Some(text_list(&r.text("SM_HOSTS")?)?.len()).filter(|hosts| *hosts > 1);
    tf_config
        .map(|found| listed("TF_CONFIG", found))
        .or_else(|| Some(sm_host_unknown(sm_hosts()?)))
}

/// SageMaker's hosts without this one; with it they are a job.
fn sm_host_unknown(hosts: usize) -> String {
    format!(
        "SM_HOSTS names {hosts} hosts that train, but SM_CURRENT_HOST is none of them: set it to the name that this host \
         has there to train together, or HOROVOD_SIZE=1 to train alone"
    )
}

/// The texts of a JSON list; `None` if it holds anything else.
pub(crate) fn text_list(text: &str) -> Option<Vec<String>> {
    serde_json::from_str(text).ok()
}

/// Variables that number the elements of job arrays: name, batch system, value outside of an array.
const JOB_ARRAYS: &[(&str, &str, &str)] = &[
    ("SLURM_ARRAY_TASK_ID", "Slurm", ""),
    ("PBS_ARRAY_INDEX", "PBS", ""),
    ("PBS_ARRAYID", "PBS", ""),
    ("LSB_JOBINDEX", "LSF", "0"),
    ("SGE_TASK_ID", "Grid Engine", "undefined"),
];

/// Hint for an element of a job array whose ranks were given by hand and do not make a job; to be appended to
/// an error.
pub(crate) fn job_array(r: &Reader<'_>) -> Option<String> {
    JOB_ARRAYS.iter().find_map(|(name, by, outside)| {
        let text = r.text(name).filter(|text| text.trim() != *outside)?;
        Some(format!(
            ". This runs in a job array of {by} ({name}={text}): its elements are jobs of their own, which need not run \
             at the same time, and their numbers are no ranks. Submit one job with as many tasks as ranks, without an \
             array; HOROVOD_SIZE=1 makes each element train alone"
        ))
    })
}

/// How many members of TensorFlow's cluster train, if more than one, and this process's place among them; `None` if it
/// is not one of them (a parameter server, an evaluator) or the text is none of TensorFlow's.
fn tf_config(text: &str) -> Option<(usize, Option<usize>)> {
    let all: Value = serde_json::from_str(text).ok()?;
    let cluster = all.get("cluster")?;
    let count = |kind: &str| cluster.get(kind).map_or(0, count_of);
    let chiefs = count("chief") + count("master");
    let members = chiefs + count("worker");
    if members <= 1 {
        return None;
    }
    let task = all.get("task");
    let index = task.and_then(|t| t.get("index")).and_then(number_of);
    let place = match task.and_then(|t| t.get("type")) {
        None => None,
        Some(Value::String(kind)) if kind == "chief" || kind == "master" => index,
        Some(Value::String(kind)) if kind == "worker" => index.map(|index| index + chiefs),
        Some(_) => return None,
    };
    Some((members, place))
}

/// Members of a list or of an object.
fn count_of(value: &Value) -> usize {
    value.as_object().map_or_else(
        || value.as_array().map_or(0, Vec::len),
        |members| members.len(),
    )
}

/// A whole number, which some write as text.
fn number_of(value: &Value) -> Option<usize> {
    match value {
        Value::String(text) => text.parse().ok(),
        value => usize::try_from(value.as_u64()?).ok(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tests::Map;

    fn hint_of(text: &'static str) -> Option<String> {
        let env = Map(vec![("TF_CONFIG", text)]);
        of_several(&Reader { env: &env })
    }

    #[test]
    fn tensorflows_cluster_of_several_workers_is_no_single_process() {
        let text_of_worker = hint_of(
            r#"{"cluster": {"chief": ["a:1"], "worker": ["b:1", "c\"\\:1"], "ps": ["d:1"]},
                "task": {"type": "worker", "index": 1}, "environment": "cloud"}"#,
        );
        let text = text_of_worker.expect("several");
        for part in [
            "TF_CONFIG",
            "HOROVOD_SIZE=3",
            "HOROVOD_RANK=2",
            "HOROVOD_SIZE=1 ",
        ] {
            assert!(text.contains(part), "{part} in: {text}");
        }
        let text =
            hint_of(r#"{"cluster": {"worker": {"0": "a:1", "1": "b:1"}}}"#).expect("several");
        assert!(
            text.contains("HOROVOD_SIZE=2") && text.contains("HOROVOD_RANK ("),
            "{text}"
        );
    }

    #[test]
    fn other_clusters_of_tensorflow_say_nothing() {
        for text in [
            r#"{"cluster": {"worker": ["a:1"]}, "task": {"type": "worker", "index": 0}}"#,
            r#"{"cluster": {"worker": ["a:1", "b:1"]}, "task": {"type": "ps", "index": 0}}"#,
            r#"{"cluster": {"worker": ["a:1", "b:1"]}, "task": {"type": "evaluator", "index": 0}}"#,
            r#"{"task": {"type": "worker", "index": 0}}"#,
            "{}",
            "no json",
            r#"{"cluster": {"worker": ["a:1", "b:1""#,
            r#"{"cluster": {"worker": "a"}}"#,
        ] {
            assert_eq!(hint_of(text), None, "{text}");
        }
        let deep = "[".repeat(100_000);
        assert!(tf_config(&deep).is_none() && text_list(&deep).is_none());
    }
}
