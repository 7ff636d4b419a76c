//! Options that become environment variables of the ranks, and their keys in a `--config-file`.

use std::ffi::OsStr;

use super::{Action, Form, OptionSpec, Wrong, at_least_zero, number, option, too_large, whole};
use crate::args::text;

const TUNING: &str = "settings of the ranks";

/// Only passed on with a file to record into.
pub(crate) const TIMELINE_MARK_CYCLES: &str = "HOROVOD_TIMELINE_MARK_CYCLES";

const NO_MPI: &str = "no effect, MPI is not used";
const LEVELS: [&str; 6] = ["TRACE", "DEBUG", "INFO", "WARNING", "ERROR", "FATAL"];
const CONSISTENCY_ACTIONS: [&str; 2] = ["warn", "error"];

/// A word of a few.
fn one_of<'a>(word: &'a OsStr, known: &[&str]) -> Result<&'a str, Wrong> {
    let word = text(word)?;
    if known.contains(&word) {
        return Ok(word);
    }
    let known = known.join(", ");
    Err(format!("invalid choice: {word:?} (choose from {known})").into())
}

/// A number for a variable.
const fn count(
    names: &'static [&'static str],
    meta: &'static str,
    variable: &'static str,
    key: &'static str,
    help: &'static str,
) -> OptionSpec {
    option(TUNING, names, Action::Count(meta, variable), help).file(key, Form::Number)
}

/// One of two opposites; `value` is what the variable becomes, `is` what the file says.
const fn switch(
    names: &'static [&'static str],
    (variable, value): (&'static str, &'static str),
    (key, is): (&'static str, bool),
    help: &'static str,
) -> OptionSpec {
    option(TUNING, names, Action::Sets(variable, value), help)
        .only(key)
        .file(key, Form::Is(is))
}

pub(super) static OPTIONS: &[OptionSpec] = &[
    option(
        TUNING,
        &["--fusion-threshold-mb"],
        Action::Value("MB", |o, v| {
            let bytes = at_least_zero(v)?
                .checked_mul(1 << 20)
                .ok_or_else(|| too_large(v))?;
            o.knobs
                .push(("HOROVOD_FUSION_THRESHOLD", bytes.to_string()));
            Ok(())
        }),
        "most bytes of tensors that travel together (128)",
    )
    .file("params.fusion_threshold_mb", Form::Number),
    option(
        TUNING,
        &["--cycle-time-ms"],
        Action::Value("MS", |o, v| {
            let ms = number(v)?;
            if !ms.is_finite() || ms < 0.0 {
                return Err(Wrong::Range(ms.to_string(), "must be >= 0"));
            }
            // `{:?}` writes 3 as 3.0, as Horovod does.
            o.knobs.push(("HOROVOD_CYCLE_TIME", format!("{ms:?}")));
            Ok(())
        }),
        "longest wait to batch more tensors",
    )
    .file("params.cycle_time_ms", Form::Number),
    count(
        &["--cache-capacity"],
        "N",
        "HOROVOD_CACHE_CAPACITY",
        "params.cache_capacity",
        "tensors whose negotiation is remembered (1024); 0 turns it off",
    ),
    switch(
        &["--hierarchical-allreduce"],
        ("HOROVOD_HIERARCHICAL_ALLREDUCE", "1"),
        ("params.hierarchical_allreduce", true),
        "add up inside each host before passing results between hosts (this is the default)",
    ),
    switch(
        &["--no-hierarchical-allreduce"],
        ("HOROVOD_HIERARCHICAL_ALLREDUCE", "0"),
        ("params.hierarchical_allreduce", false),
        "take no account of hosts",
    ),
    switch(
        &["--hierarchical-allgather"],
        ("HOROVOD_HIERARCHICAL_ALLGATHER", "1"),
        ("params.hierarchical_allgather", true),
        "gather inside each host before passing blocks between hosts (this is the default)",
    ),
    switch(
        &["--no-hierarchical-allgather"],
        ("HOROVOD_HIERARCHICAL_ALLGATHER", "0"),
        ("params.hierarchical_allgather", false),
        "take no account of hosts",
    ),
    switch(
        &["--torus-allreduce"],
        ("HOROVOD_TORUS_ALLREDUCE", "1"),
        ("params.torus_allreduce", true),
        "the same as --hierarchical-allreduce",
    ),
    switch(
        &["--no-torus-allreduce"],
        ("HOROVOD_TORUS_ALLREDUCE", "0"),
        ("params.torus_allreduce", false),
        "",
    )
    .hide(),
    switch(
        &["--autotune"],
        ("HOROVOD_AUTOTUNE", "1"),
        ("autotune.enabled", true),
        "try settings out while the job runs, keep what is clearly faster",
    ),
    switch(
        &["--no-autotune"],
        ("HOROVOD_AUTOTUNE", "0"),
        ("autotune.enabled", false),
        "",
    )
    .hide(),
    option(
        TUNING,
        &["--autotune-log-file"],
        Action::Text("FILE", "HOROVOD_AUTOTUNE_LOG"),
        "write the scores there as CSV",
    )
    .file("autotune.log_file", Form::Text),
    count(
        &["--autotune-warmup-samples"],
        "N",
        "HOROVOD_AUTOTUNE_WARMUP_SAMPLES",
        "autotune.warmup_samples",
        "rounds of five samples to throw away at the start (3)",
    ),
    count(
        &["--autotune-steps-per-sample"],
        "N",
        "HOROVOD_AUTOTUNE_STEPS_PER_SAMPLE",
        "autotune.steps_per_sample",
        "training steps to measure at a time (10)",
    ),
    count(
        &["--autotune-bayes-opt-max-samples"],
        "N",
        "HOROVOD_AUTOTUNE_BAYES_OPT_MAX_SAMPLES",
        "autotune.bayes_opt_max_samples",
        "settings to try (20)",
    ),
    option(
        TUNING,
        &["--autotune-gaussian-process-noise"],
        Action::Value("SHARE", |o, v| {
            let noise = number(v)?;
            if !(0.0..=1.0).contains(&noise) {
                return Err(Wrong::Range(noise.to_string(), "must be in [0, 1]"));
            }
            o.knobs
                .push(("HOROVOD_AUTOTUNE_GAUSSIAN_PROCESS_NOISE", noise.to_string()));
            Ok(())
        }),
        "noise of scores as a share of their spread, 0 to 1 (measured)",
    )
    .file("autotune.gaussian_process_noise", Form::Number),
    option(
        TUNING,
        &["--timeline-filename"],
        Action::Text("FILE", "HOROVOD_TIMELINE"),
        "record what happens to each tensor into FILE of rank 0's host",
    )
    .file("timeline.filename", Form::Text),
    switch(
        &["--timeline-mark-cycles"],
        (TIMELINE_MARK_CYCLES, "1"),
        ("timeline.mark_cycles", true),
        "mark each batch of answers of the coordinator in it",
    ),
    switch(
        &["--no-timeline-mark-cycles"],
        (TIMELINE_MARK_CYCLES, "0"),
        ("timeline.mark_cycles", false),
        "",
    )
    .hide(),
    switch(
        &["--no-stall-check"],
        ("HOROVOD_STALL_CHECK_DISABLE", "1"),
        ("stall_check.enabled", false),
        "do not warn about ranks that are late",
    ),
    switch(
        &["--stall-check"],
        ("HOROVOD_STALL_CHECK_DISABLE", "0"),
        ("stall_check.enabled", true),
        "",
    )
    .hide(),
    count(
        &["--stall-check-warning-time-seconds"],
        "SECONDS",
        "HOROVOD_STALL_CHECK_TIME_SECONDS",
        "stall_check.warning_time_seconds",
        "when to warn about ranks that are late (60)",
    ),
    count(
        &["--stall-check-shutdown-time-seconds"],
        "SECONDS",
        "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS",
        "stall_check.shutdown_time_seconds",
        "when to give up on them (0: never)",
    ),
    count(
        &["--check-consistency"],
        "STEPS",
        "HOROVOD_CHECK_CONSISTENCY",
        "consistency_check.steps",
        "compare the ranks' parameters every so many steps of an optimizer (0: never)",
    ),
    option(
        TUNING,
        &["--consistency-action"],
        Action::Value("ACTION", |o, v| {
            let action = one_of(v, &CONSISTENCY_ACTIONS)?;
            o.knobs
                .push(("HOROVOD_CONSISTENCY_ACTION", action.to_owned()));
            Ok(())
        }),
        "what a difference between them is: warn or error (warn)",
    )
    .file("consistency_check.action", Form::Text),
    count(
        &["--gloo-timeout-seconds"],
        "SECONDS",
        "HOROVOD_GLOO_TIMEOUT_SECONDS",
        "library_options.gloo_timeout_seconds",
        "until all ranks must have met (30)",
    ),
    option(
        TUNING,
        &["--log-level"],
        Action::Value("LEVEL", |o, v| {
            let level = one_of(v, &LEVELS)?;
            o.knobs.push(("HOROVOD_LOG_LEVEL", level.to_owned()));
            Ok(())
        }),
        "TRACE, DEBUG, INFO, WARNING, ERROR or FATAL",
    )
    .file("logging.level", Form::Text),
    switch(
        &["--log-without-timestamp"],
        ("HOROVOD_LOG_HIDE_TIME", "1"),
        ("logging.with_timestamp", false),
        "log lines without the time",
    ),
    switch(
        &["--log-with-timestamp"],
        ("HOROVOD_LOG_HIDE_TIME", "0"),
        ("logging.with_timestamp", true),
        "",
    )
    .hide(),
    switch(
        &["--log-hide-timestamp"],
        ("HOROVOD_LOG_HIDE_TIME", "1"),
        ("logging.with_timestamp", false),
        "",
    )
    .hide()
    .note("deprecated, use --log-without-timestamp"),
    switch(
        &["--no-log-hide-timestamp"],
        ("HOROVOD_LOG_HIDE_TIME", "0"),
        ("logging.with_timestamp", true),
        "",
    )
    .hide()
    .note("deprecated, use --log-with-timestamp"),
    switch(
        &["--mpi-threads-disable"],
        ("HOROVOD_MPI_THREADS_DISABLE", "1"),
        ("library_options.mpi_threads_disable", true),
        "accepted with a note, as all that follow",
    )
    .note(NO_MPI),
    switch(
        &["--no-mpi-threads-disable"],
        ("HOROVOD_MPI_THREADS_DISABLE", "0"),
        ("library_options.mpi_threads_disable", false),
        "",
    )
    .hide()
    .note(NO_MPI),
    option(
        TUNING,
        &["--mpi-args"],
        Action::Value("ARGS", |_, _| Ok(())),
        "arguments of mpirun",
    )
    .note(NO_MPI),
    option(
        TUNING,
        &["--binding-args"],
        Action::Value("ARGS", |_, _| Ok(())),
        "how mpirun pins processes",
    )
    .note("no effect, ranks are not pinned to processors"),
    option(
        TUNING,
        &["--tcp"],
        Action::Sets("NCCL_IB_DISABLE", "1"),
        "TCP instead of InfiniBand",
    )
    .note("hosts talk over TCP in any case; NCCL_IB_DISABLE=1 is set for programs that use NCCL"),
    count(
        &["--num-nccl-streams"],
        "N",
        "HOROVOD_NUM_NCCL_STREAMS",
        "library_options.num_nccl_streams",
        "streams of NCCL",
    )
    .note("no effect, NCCL is not used"),
    option(
        TUNING,
        &["--thread-affinity"],
        Action::Value("CORE[,CORE...]", |o, v| {
            let text = text(v)?;
            for core in text.split(',') {
                if whole(core.trim().as_ref())? < 0 {
                    return Err(Wrong::Range(text.to_owned(), "must be >= 0"));
                }
            }
            o.knobs.push(("HOROVOD_THREAD_AFFINITY", text.to_owned()));
            Ok(())
        }),
        "processor of the background thread",
    )
    .file("library_options.thread_affinity", Form::Words)
    .note("no effect, no thread is pinned to a processor"),
];
