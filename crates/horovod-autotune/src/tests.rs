//! The tuner as a whole, fed with executions as the engine feeds it.

use std::sync::Arc;

use horovod_protocol::{
    DType, Device, ExecItem, Execution, Op, ProcessSetId, Rank, ReduceOp, Scale, Seq, TensorMeta,
    Time,
};

use super::{AutotuneSettings, Autotuner, Parameter, Values};

fn allreduce(set: ProcessSetId, name: &str, elems: u64) -> Execution {
    Execution {
        seq: Seq(1),
        set,
        members: Arc::from([Rank(0), Rank(1)]),
        op: Op::Allreduce {
            op: ReduceOp::Sum,
            scale: Scale::NONE,
        },
        device: Device::Cpu,
        tag: None,
        contributors: 2,
        items: vec![ExecItem {
            entry: None,
            name: Arc::from(name),
            tensors: Arc::from([TensorMeta::new(DType::F32, [elems])]),
            reordered: false,
            first_dims: Vec::new(),
        }],
    }
}

fn tuner(log: Option<std::path::PathBuf>, tunable: &[Parameter]) -> Autotuner {
    let settings = AutotuneSettings {
        log,
        warmup_samples: 1,
        steps_per_sample: 2,
        bayes_opt_max_samples: 8,
        gaussian_process_noise: None,
        explicit: Vec::new(),
    };
    Autotuner::new(&settings, defaults(), tunable, true)
}

fn defaults() -> Values {
    Values::new(|p| match p {
        Parameter::FusionThreshold => 128 << 20,
        Parameter::Chunk => 64 << 10,
        _ => 0,
    })
}

/// Runs a job whose steps take as long as the values in force make them, until tuning has ended.
fn run(tuner: &mut Autotuner, step: impl Fn(&Values) -> u64) -> Values {
    let (mut now, mut values) = (0, defaults());
    for _ in 0..10_000 {
        now += step(&values);
        let execution = allreduce(ProcessSetId::GLOBAL, "gradient", 1 << 20);
        if let Some(next) = tuner.observe(Time(now), &execution) {
            // Executions under the old values do not count.
            now += 1;
            assert_eq!(tuner.observe(Time(now), &execution), None);
            values = next;
            tuner.applied();
        }
        if tuner.is_finished() {
            return values;
        }
    }
    panic!("tuning does not end");
}

#[test]
fn finds_a_faster_chunk_and_writes_the_log() {
    let path = std::env::temp_dir().join(format!("autotune-{}.csv", std::process::id()));
    let mut tuner = tuner(Some(path.clone()), &[Parameter::Chunk]);
    let best = run(&mut tuner, |values| {
        if values.get(Parameter::Chunk) == 256 << 10 {
            800_000
        } else {
            1_000_000
        }
    });
    assert_eq!(best.get(Parameter::Chunk), 256 << 10);
    let text = std::fs::read_to_string(&path).unwrap();
    let _ = std::fs::remove_file(&path);
    let rows: Vec<Vec<&str>> = text.lines().map(|l| l.split(',').collect()).collect();
    assert!(rows.iter().all(|r| r.len() == rows[0].len()), "{text}");
    let (first, last) = (&rows[1], &rows[rows.len() - 1]);
    // 4 MiB in a millisecond.
    assert_eq!(first[6..8], ["4194.304000", "65536"]);
    assert_eq!(last[6..8], ["5242.880000", "262144"]);
    assert_eq!(last.last(), Some(&"best"));
}

#[test]
fn a_setting_far_below_the_defaults_costs_little_time() {
    // One proposal makes each step a hundred times slower; impatience ends its samples.
    let mut tuner = tuner(None, &[Parameter::CycleTime]);
    let slow = std::cell::Cell::new(0);
    let best = run(&mut tuner, |values| {
        if values.get(Parameter::CycleTime) >= 1000 {
            slow.set(slow.get() + 1);
            100_000_000
        } else {
            1_000_000
        }
    });
    assert_eq!(best, defaults());
    assert!(slow.get() <= 2 * 4, "{} slow steps", slow.get());
}

#[test]
fn a_job_that_is_too_short_says_so_and_one_that_has_tuned_does_not() {
    let expect_text = |tuner: &Autotuner, what: &str| {
        let text = tuner.unfinished().unwrap();
        assert!(text.contains(what) && !text.contains('\n'), "{text}");
    };
    let mut short = tuner(None, &[Parameter::Chunk]);
    expect_text(&short, "warmed up (rounds remaining: 1)");
    let execution = allreduce(ProcessSetId::GLOBAL, "gradient", 1 << 20);
    let mut steps = (1..100).map(|n| Time(n * 1_000_000));
    while short.unfinished().unwrap().contains("warmed up") {
        assert_eq!(short.observe(steps.next().unwrap(), &execution), None);
    }
    expect_text(&short, "tried settings out (0 tried)");

    let mut long = tuner(None, &[Parameter::Chunk]);
    run(&mut long, |_| 1_000_000);
    assert_eq!(long.unfinished(), None);
}

#[test]
fn other_process_sets_and_barriers_do_not_count() {
    let mut tuner = tuner(None, &[Parameter::Chunk]);
    let other = allreduce(ProcessSetId(1), "a", 1 << 10);
    let mut barrier = allreduce(ProcessSetId::GLOBAL, "barrier", 0);
    barrier.op = Op::Barrier;
    for t in 0..1000 {
        assert_eq!(tuner.observe(Time(2 * t), &other), None);
        assert_eq!(tuner.observe(Time(2 * t + 1), &barrier), None);
    }
    assert!(!tuner.is_finished());
}

#[test]
fn a_job_without_repetition_is_left_alone() {
    let mut tuner = tuner(None, &[Parameter::Chunk]);
    for t in 0..10_000 {
        let once = allreduce(ProcessSetId::GLOBAL, &format!("noname.{t}"), 1);
        assert_eq!(tuner.observe(Time(t), &once), None);
    }
}
