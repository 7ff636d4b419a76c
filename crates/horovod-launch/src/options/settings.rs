//! Options that become environment variables of the ranks, and their keys in a `--config-file`.

use horovod_settings::{self as settings, Declared};

use super::given::text;
use super::{Action, Form, OptionSpec, Written, Wrong, option, whole};

const TUNING: &str = "settings of the ranks";

const MPI_THREADS_DISABLE: &str = "HOROVOD_MPI_THREADS_DISABLE";
const MPI_THREADS_KEY: &str = "library_options.mpi_threads_disable";
const NO_MPI: &str = "no effect, MPI carries no tensors";

/// A value for a setting.
const fn value(
    names: &'static [&'static str],
    meta: &'static str,
    setting: &'static dyn Declared,
    written: Written,
    key: &'static str,
) -> OptionSpec {
    let form = match written {
        Written::Text => Form::Text,
        Written::Whole | Written::Decimal | Written::Mebibytes => Form::Number,
    };
    option(TUNING, names, Action::Setting(meta, setting, written), "").file(key, form)
}

/// One of two opposites; `value` is what the setting becomes, `is` what the file says.
const fn switch(
    names: &'static [&'static str],
    setting: &'static dyn Declared,
    value: &'static str,
    key: &'static str,
    is: bool,
    help: &'static str,
) -> OptionSpec {
    option(TUNING, names, Action::Turns(setting, value), help)
        .only(key)
        .file(key, Form::Is(is))
}

pub(super) static OPTIONS: &[OptionSpec] = &[
    value(
        &["--fusion-threshold-mb"],
        "MB",
        &settings::FUSION_THRESHOLD,
        Written::Mebibytes,
        "params.fusion_threshold_mb",
    ),
    value(
        &["--cycle-time-ms"],
        "MS",
        &settings::CYCLE_TIME,
        Written::Decimal,
        "params.cycle_time_ms",
    ),
    value(
        &["--cache-capacity"],
        "N",
        &settings::CACHE_CAPACITY,
        Written::Whole,
        "params.cache_capacity",
    ),
    switch(
        &["--hierarchical-allreduce"],
        &settings::HIERARCHICAL_ALLREDUCE,
        "1",
        "params.hierarchical_allreduce",
        true,
        "add up inside each host before passing results between hosts",
    ),
    switch(
        &["--no-hierarchical-allreduce"],
        &settings::HIERARCHICAL_ALLREDUCE,
        "0",
        "params.hierarchical_allreduce",
        false,
        "",
    ),
    switch(
        &["--hierarchical-allgather"],
        &settings::HIERARCHICAL_ALLGATHER,
        "1",
        "params.hierarchical_allgather",
        true,
        "gather inside each host before passing blocks between hosts",
    ),
    switch(
        &["--no-hierarchical-allgather"],
        &settings::HIERARCHICAL_ALLGATHER,
        "0",
        "params.hierarchical_allgather",
        false,
        "",
    ),
    switch(
        &["--torus-allreduce"],
        &settings::TORUS_ALLREDUCE,
        "1",
        "params.torus_allreduce",
        true,
        "the same as --hierarchical-allreduce",
    ),
    switch(
        &["--no-torus-allreduce"],
        &settings::TORUS_ALLREDUCE,
        "0",
        "params.torus_allreduce",
        false,
        "",
    )
    .hide(),
    switch(
        &["--autotune"],
        &settings::AUTOTUNE,
        "1",
        "autotune.enabled",
        true,
        "",
    ),
    switch(
        &["--no-autotune"],
        &settings::AUTOTUNE,
        "0",
        "autotune.enabled",
        false,
        "",
    )
    .hide(),
    value(
        &["--autotune-log-file"],
        "FILE",
        &settings::AUTOTUNE_LOG,
        Written::Text,
        "autotune.log_file",
    ),
    value(
        &["--autotune-warmup-samples"],
        "N",
        &settings::AUTOTUNE_WARMUP_SAMPLES,
        Written::Whole,
        "autotune.warmup_samples",
    ),
    value(
        &["--autotune-steps-per-sample"],
        "N",
        &settings::AUTOTUNE_STEPS_PER_SAMPLE,
        Written::Whole,
        "autotune.steps_per_sample",
    ),
    value(
        &["--autotune-bayes-opt-max-samples"],
        "N",
        &settings::AUTOTUNE_BAYES_OPT_MAX_SAMPLES,
        Written::Whole,
        "autotune.bayes_opt_max_samples",
    ),
    value(
        &["--autotune-gaussian-process-noise"],
        "SHARE",
        &settings::AUTOTUNE_GAUSSIAN_PROCESS_NOISE,
        Written::Decimal,
        "autotune.gaussian_process_noise",
    ),
    value(
        &["--metrics-port"],
        "PORT",
        &settings::METRICS_PORT,
        Written::Whole,
        "metrics.port",
    ),
    value(
        &["--metrics-textfile"],
        "FILE",
        &settings::METRICS_TEXTFILE,
        Written::Text,
        "metrics.textfile",
    ),
    value(
        &["--timeline-filename"],
        "FILE",
        &settings::TIMELINE,
        Written::Text,
        "timeline.filename",
    ),
    switch(
        &["--timeline-mark-cycles"],
        &settings::TIMELINE_MARK_CYCLES,
        "1",
        "timeline.mark_cycles",
        true,
        "",
    ),
    switch(
        &["--no-timeline-mark-cycles"],
        &settings::TIMELINE_MARK_CYCLES,
        "0",
        "timeline.mark_cycles",
        false,
        "",
    )
    .hide(),
    switch(
        &["--no-stall-check"],
        &settings::STALL_CHECK_DISABLE,
        "1",
        "stall_check.enabled",
        false,
        "",
    ),
    switch(
        &["--stall-check"],
        &settings::STALL_CHECK_DISABLE,
        "0",
        "stall_check.enabled",
        true,
        "",
    )
    .hide(),
    value(
        &["--stall-check-warning-time-seconds"],
        "SECONDS",
        &settings::STALL_CHECK_TIME_SECONDS,
        Written::Whole,
        "stall_check.warning_time_seconds",
    ),
    value(
        &["--stall-check-shutdown-time-seconds"],
        "SECONDS",
        &settings::STALL_SHUTDOWN_TIME_SECONDS,
        Written::Whole,
        "stall_check.shutdown_time_seconds",
    ),
    value(
        &["--check-consistency"],
        "STEPS",
        &settings::CHECK_CONSISTENCY,
        Written::Whole,
        "consistency_check.steps",
    ),
    value(
        &["--consistency-action"],
        "ACTION",
        &settings::CONSISTENCY_ACTION,
        Written::Text,
        "consistency_check.action",
    ),
    value(
        &["--check-replicas"],
        "ACTION",
        &settings::CHECK_REPLICAS,
        Written::Text,
        "consistency_check.at_start",
    ),
    value(
        &["--gloo-timeout-seconds"],
        "SECONDS",
        &settings::GLOO_TIMEOUT_SECONDS,
        Written::Whole,
        "library_options.gloo_timeout_seconds",
    ),
    option(
        TUNING,
        &["--log-level"],
        Action::Setting("LEVEL", &settings::LOG_LEVEL, Written::Text),
        "least severe messages that are logged",
    )
    .file("logging.level", Form::Text),
    switch(
        &["--log-without-timestamp"],
        &settings::LOG_HIDE_TIME,
        "1",
        "logging.with_timestamp",
        false,
        "",
    ),
    switch(
        &["--log-with-timestamp"],
        &settings::LOG_HIDE_TIME,
        "0",
        "logging.with_timestamp",
        true,
        "",
    )
    .hide(),
    switch(
        &["--log-hide-timestamp"],
        &settings::LOG_HIDE_TIME,
        "1",
        "logging.with_timestamp",
        false,
        "",
    )
    .hide()
    .note("deprecated, use --log-without-timestamp"),
    switch(
        &["--no-log-hide-timestamp"],
        &settings::LOG_HIDE_TIME,
        "0",
        "logging.with_timestamp",
        true,
        "",
    )
    .hide()
    .note("deprecated, use --log-with-timestamp"),
    option(
        TUNING,
        &["--mpi-threads-disable"],
        Action::Sets(MPI_THREADS_DISABLE, "1"),
        "accepted with a note, as all that follow",
    )
    .only(MPI_THREADS_KEY)
    .file(MPI_THREADS_KEY, Form::Is(true))
    .note(NO_MPI),
    option(
        TUNING,
        &["--no-mpi-threads-disable"],
        Action::Sets(MPI_THREADS_DISABLE, "0"),
        "",
    )
    .only(MPI_THREADS_KEY)
    .file(MPI_THREADS_KEY, Form::Is(false))
    .hide()
    .note(NO_MPI),
    option(
        TUNING,
        &["--num-nccl-streams"],
        Action::Count("N", "HOROVOD_NUM_NCCL_STREAMS"),
        "streams of NCCL",
    )
    .file("library_options.num_nccl_streams", Form::Number)
    .note("no effect: operations on a GPU have one stream, in the order that all ranks agreed on"),
    option(
        TUNING,
        &["--thread-affinity"],
        Action::Value("CORE[,CORE...]", |o, v| {
            let text = text(v)?;
            for core in text.split(',') {
                if whole(core.trim().as_ref())? < 0 {
                    return Err(Wrong::Range(text.to_owned(), "must be >= 0".to_owned()));
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
