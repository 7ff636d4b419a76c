//! `--config-file`: settings of the ranks as YAML.
//!
//! A key stands for an option; an option given on the command line wins. The environment loses to both, but counts more
//! than the default files of the site and the user.

use std::path::Path;

use saphyr::{LoadableYamlNode, Scalar, Yaml};

use crate::environment;
use crate::io::read_text;
use crate::options::{self, Form, OptionSpec};
use crate::options::{Options, UsageError};

/// The only setting that is in no section.
const CONTROLLER: &str = "controller";
/// Choices of `controller`; both mean the same transport here.
const CONTROLLERS: [&str; 2] = ["gloo", "mpi"];
/// Given without this key, the section still says something.
const STALL_CHECK: &str = "stall_check";

/// Options that take precedence over a file that is read later.
pub(crate) struct Given<'a> {
    options: &'a [&'static OptionSpec],
    /// Of files that were read before.
    keys: Vec<String>,
}

impl<'a> Given<'a> {
    /// The options of the command line.
    pub(crate) fn on_command_line(options: &'a [&'static OptionSpec]) -> Self {
        let keys = Vec::new();
        Self { options, keys }
    }

    fn has(&self, key: &str) -> bool {
        let is_key = |spec: &&&OptionSpec| spec.in_file.is_some_and(|f| f.key == key);
        self.keys.iter().any(|known| known == key) || self.options.iter().any(|s| is_key(&s))
    }
}

/// Reads the file and does what it says, unless the command line said otherwise.
pub(crate) fn merge(
    options: &mut Options,
    given: &mut Given<'_>,
    file: &Path,
) -> Result<(), UsageError> {
    let text = read_text(file).map_err(|error| of_file(file, &cannot_read(&error)))?;
    take(options, given, &text, |_| false).map_err(|why| of_file(file, &why))
}

/// The same for the files that exist without being asked for: the environment counts more than they do.
pub(crate) fn merge_defaults(
    options: &mut Options,
    given: &mut Given<'_>,
) -> Result<(), UsageError> {
    for file in environment::config_files() {
        let text = match read_text(&file) {
            Ok(text) => text,
            Err(error) if is_absent(&error) => continue,
            // A home folder of another user must not stop every call.
            Err(error) => {
                options.notes.push(of_file(&file, &cannot_read(&error)).0);
                continue;
            }
        };
        let noted = options.notes.len();
        take(options, given, &text, has_variable).map_err(|why| of_file(&file, &why))?;
        for note in &mut options.notes[noted..] {
            *note = format!("{}: {note}", file.display());
        }
        if options.verbose {
            let note = format!("settings from {}", file.display());
            options.notes.push(note);
        }
    }
    Ok(())
}

fn is_absent(error: &std::io::Error) -> bool {
    use std::io::ErrorKind::{NotADirectory, NotFound};
    matches!(error.kind(), NotFound | NotADirectory)
}

fn cannot_read(error: &std::io::Error) -> String {
    format!("cannot be read: {error}")
}

fn of_file(file: &Path, why: &str) -> UsageError {
    UsageError(format!("the config file {}: {why}", file.display()))
}

fn take(
    options: &mut Options,
    given: &mut Given<'_>,
    text: &str,
    is_overruled: fn(&str) -> bool,
) -> Result<(), String> {
    let mut taken = Vec::new();
    for (key, value) in settings_of(text)?.into_iter().map(under_its_key) {
        if !given.has(&key) && !is_overruled(&key) {
            set(options, &key, &value)?;
            taken.push(key);
        }
    }
    given.keys.append(&mut taken);
    Ok(())
}

/// Whether a variable says what a key says.
fn has_variable(key: &str) -> bool {
    let specs = options::all().filter(|spec| spec.in_file.is_some_and(|f| f.key == key));
    specs
        .filter_map(OptionSpec::variable)
        .any(environment::is_set)
}

/// A value of the file, told apart as YAML does.
#[derive(Clone, Debug, PartialEq)]
enum Value {
    Flag(bool),
    Number(String),
    Text(String),
    /// A list or a mapping.
    Several,
}

impl std::fmt::Display for Value {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Flag(is) => write!(f, "{is}"),
            Self::Number(number) => f.write_str(number),
            Self::Text(text) => write!(f, "the text {text:?}"),
            Self::Several => f.write_str("several values"),
        }
    }
}

/// `section.key` and value of everything in the file; what is null counts as not there.
fn settings_of(text: &str) -> Result<Vec<(String, Value)>, String> {
    let documents = Yaml::load_from_str(text).map_err(|error| format!("is no YAML: {error}"))?;
    let Some(document) = documents.first().filter(|d| !is_null(d)) else {
        return Ok(Vec::new());
    };
    let top = document.as_mapping().ok_or(
        "a mapping of sections (params, autotune, timeline, ...) was expected at the top level",
    )?;
    let mut settings = Vec::new();
    for (name, content) in top {
        let name = &text_of(name);
        if is_null(content) {
            continue;
        }
        let Some(section) = content.as_mapping().filter(|_| name != CONTROLLER) else {
            if is_section(name) {
                return Err(format!("{name}: a mapping of settings was expected"));
            }
            settings.push((name.clone(), value_of(content)));
            continue;
        };
        let is_silent = |key: &str| section.iter().all(|(k, _)| k.as_str() != Some(key));
        if name == STALL_CHECK && is_silent("enabled") {
            settings.push(("stall_check.enabled".to_owned(), Value::Flag(true)));
        }
        for (key, value) in section {
            if !is_null(value) {
                settings.push((format!("{name}.{}", text_of(key)), value_of(value)));
            }
        }
    }
    Ok(settings)
}

fn is_null(node: &Yaml<'_>) -> bool {
    matches!(node, Yaml::Value(Scalar::Null))
}

fn value_of(node: &Yaml<'_>) -> Value {
    match node {
        Yaml::Value(Scalar::Boolean(is)) => Value::Flag(*is),
        Yaml::Value(Scalar::Integer(number)) => Value::Number(number.to_string()),
        Yaml::Value(Scalar::FloatingPoint(number)) => {
            Value::Number(number.into_inner().to_string())
        }
        Yaml::Value(Scalar::String(text)) => Value::Text(text.to_string()),
        _ => Value::Several,
    }
}

/// A key, which most often is text.
fn text_of(key: &Yaml<'_>) -> String {
    match value_of(key) {
        Value::Text(text) => text,
        other => other.to_string(),
    }
}

/// Whether the table has keys in this section.
fn is_section(name: &str) -> bool {
    let mut keys = options::all().filter_map(|spec| spec.in_file.map(|f| f.key));
    keys.any(|key| {
        key.split_once('.')
            .is_some_and(|(section, _)| section == name)
    })
}

fn set(options: &mut Options, key: &str, value: &Value) -> Result<(), String> {
    if key == CONTROLLER {
        return set_controller(options, value);
    }
    let mut specs = options::all().filter(|spec| spec.in_file.is_some_and(|f| f.key == key));
    let Some(first) = specs.next() else {
        options.notes.push(format!(
            "the config file has a key {key} that means nothing{}",
            nearest(key)
        ));
        return Ok(());
    };
    let fails = |expected: &str| Err(format!("{key}: {expected} was expected, found {value}"));
    if *value == Value::Several {
        return fails("one value");
    }
    let spec = match first.in_file.map(|f| f.form) {
        Some(Form::Is(_)) => {
            let Some(wanted) = boolean(value) else {
                return fails("true or false");
            };
            let is = |spec: &&OptionSpec| spec.in_file.is_some_and(|f| f.form == Form::Is(wanted));
            std::iter::once(first)
                .chain(specs)
                .find(is)
                .unwrap_or(first)
        }
        _ => first,
    };
    let form = spec.in_file.map(|f| f.form);
    let text = match (form, value) {
        (Some(Form::Is(_)), _) => String::new(),
        (Some(Form::Number | Form::Words), Value::Number(number)) => number.clone(),
        (Some(Form::Text | Form::Words), Value::Text(text)) if key == "logging.level" => {
            text.to_uppercase()
        }
        (Some(Form::Text | Form::Words), Value::Text(text)) => text.clone(),
        (Some(Form::Number), _) => return fails("a number"),
        (Some(Form::Text), _) => return fails("text"),
        _ => return fails("a number or text"),
    };
    spec.apply(options, text.as_ref())
        .map_err(|wrong| format!("{key}: {}", wrong.text(&spec.dest())))
}

/// The key and value of today for those that Horovod renamed.
fn under_its_key((key, value): (String, Value)) -> (String, Value) {
    match (key.as_str(), boolean(&value)) {
        ("logging.hide_timestamp", Some(is)) => {
            ("logging.with_timestamp".to_owned(), Value::Flag(!is))
        }
        _ => (key, value),
    }
}

/// YAML 1.1, which Horovod's parser reads, also knows these words.
fn boolean(value: &Value) -> Option<bool> {
    match value {
        Value::Flag(is) => Some(*is),
        Value::Text(word) => match word.to_lowercase().as_str() {
            "yes" | "on" => Some(true),
            "no" | "off" => Some(false),
            _ => None,
        },
        Value::Number(_) | Value::Several => None,
    }
}

fn set_controller(options: &mut Options, value: &Value) -> Result<(), String> {
    let name = match value {
        Value::Text(name) => name.to_lowercase(),
        other => other.to_string(),
    };
    if !CONTROLLERS.contains(&name.as_str()) {
        return Err(format!(
            "No such controller supported: {name} (gloo or mpi)"
        ));
    }
    let option = format!("--{name}");
    let spec = options::all().find(|spec| spec.names.contains(&option.as_str()));
    if let Some(spec) = spec {
        spec.apply(options, "".as_ref())
            .map_err(|wrong| wrong.text("controller"))?;
    }
    Ok(())
}

/// Suggestion for an unknown key.
fn nearest(key: &str) -> String {
    let known = || options::all().filter_map(|spec| spec.in_file.map(|f| f.key));
    // Its section may be missing.
    let in_section = known().find(|known| known.split_once('.').is_some_and(|(_, k)| k == key));
    in_section
        .or_else(|| horovod_settings::nearest_of(key, known()))
        .map(|name| format!(" (did you mean {name}?)"))
        .unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::args::parse;
    use crate::options::Starter;

    fn with_file(yaml: &str, words: &str) -> Result<Options, String> {
        let folder = std::env::temp_dir().join(format!(
            "horovodrun-yaml-{}-{:?}",
            std::process::id(),
            std::thread::current().id()
        ));
        std::fs::create_dir_all(&folder).expect("a folder");
        let file = folder.join("c.yaml");
        std::fs::write(&file, yaml).expect("written");
        let line = format!("-np 1 --config-file {} {words} x", file.display());
        let words: Vec<_> = line.split_whitespace().map(Into::into).collect();
        let parsed = parse(&words).map_err(|error| error.0);
        std::fs::remove_dir_all(folder).expect("removed");
        parsed
    }

    #[track_caller]
    fn sets(yaml: &str, want: &[(&str, &str)]) {
        let knobs = with_file(yaml, "").expect(yaml).knobs;
        let found: Vec<_> = knobs.iter().map(|(n, v)| (*n, v.as_str())).collect();
        assert_eq!(found, want, "{yaml}");
    }

    #[track_caller]
    fn fails(yaml: &str, with: &str) {
        let error = with_file(yaml, "").expect_err(yaml);
        assert!(error.contains(with), "{yaml}: {error}");
    }

    #[test]
    fn every_section_is_read() {
        sets(
            "params:\n  fusion_threshold_mb: 32\n  cycle_time_ms: 10\n  cache_capacity: 2048\n  \
             hierarchical_allreduce: true\n  hierarchical_allgather: false\n  torus_allreduce: yes\n",
            &[
                ("HOROVOD_FUSION_THRESHOLD", "33554432"),
                ("HOROVOD_CYCLE_TIME", "10.0"),
                ("HOROVOD_CACHE_CAPACITY", "2048"),
                ("HOROVOD_HIERARCHICAL_ALLREDUCE", "1"),
                ("HOROVOD_HIERARCHICAL_ALLGATHER", "0"),
                ("HOROVOD_TORUS_ALLREDUCE", "1"),
            ],
        );
        sets(
            "autotune:\n  enabled: true\n  log_file: log.csv\n  warmup_samples: 4\n  steps_per_sample: 5\n  \
             bayes_opt_max_samples: 6\n  gaussian_process_noise: 0.5\n",
            &[
                ("HOROVOD_AUTOTUNE", "1"),
                ("HOROVOD_AUTOTUNE_LOG", "log.csv"),
                ("HOROVOD_AUTOTUNE_WARMUP_SAMPLES", "4"),
                ("HOROVOD_AUTOTUNE_STEPS_PER_SAMPLE", "5"),
                ("HOROVOD_AUTOTUNE_BAYES_OPT_MAX_SAMPLES", "6"),
                ("HOROVOD_AUTOTUNE_GAUSSIAN_PROCESS_NOISE", "0.5"),
            ],
        );
        sets(
            "timeline:\n  filename: t.json\n  mark_cycles: on\nlogging:\n  level: info\n  with_timestamp: false\n",
            &[
                ("HOROVOD_TIMELINE", "t.json"),
                ("HOROVOD_TIMELINE_MARK_CYCLES", "1"),
                ("HOROVOD_LOG_LEVEL", "INFO"),
                ("HOROVOD_LOG_HIDE_TIME", "1"),
            ],
        );
        sets(
            "stall_check:\n  enabled: false\n  warning_time_seconds: 5\n  shutdown_time_seconds: 6\n\
             library_options:\n  gloo_timeout_seconds: 7\n  mpi_threads_disable: true\n  num_nccl_streams: 2\n  \
             thread_affinity: 1,3\n",
            &[
                ("HOROVOD_STALL_CHECK_DISABLE", "1"),
                ("HOROVOD_STALL_CHECK_TIME_SECONDS", "5"),
                ("HOROVOD_STALL_SHUTDOWN_TIME_SECONDS", "6"),
                ("HOROVOD_GLOO_TIMEOUT_SECONDS", "7"),
                ("HOROVOD_MPI_THREADS_DISABLE", "1"),
                ("HOROVOD_NUM_NCCL_STREAMS", "2"),
                ("HOROVOD_THREAD_AFFINITY", "1,3"),
            ],
        );
        sets(
            "consistency_check:\n  steps: 100\n  action: error\n",
            &[
                ("HOROVOD_CHECK_CONSISTENCY", "100"),
                ("HOROVOD_CONSISTENCY_ACTION", "error"),
            ],
        );
        // Horovod's older name.
        sets(
            "logging:\n  hide_timestamp: true\n",
            &[("HOROVOD_LOG_HIDE_TIME", "1")],
        );
        sets(
            "logging:\n  hide_timestamp: no\n",
            &[("HOROVOD_LOG_HIDE_TIME", "0")],
        );
        // A section without `enabled` says that the check is on.
        sets(
            "stall_check:\n  warning_time_seconds: 5\n",
            &[
                ("HOROVOD_STALL_CHECK_DISABLE", "0"),
                ("HOROVOD_STALL_CHECK_TIME_SECONDS", "5"),
            ],
        );
        sets("", &[]);
        sets("params:\n  cycle_time_ms:\ntimeline:\n", &[]);
    }

    #[test]
    fn every_key_of_the_table_is_read_from_a_file() {
        for spec in options::all() {
            let Some(in_file) = spec.in_file.filter(|f| f.key.contains('.')) else {
                continue;
            };
            let (section, key) = in_file.key.split_once('.').expect("two parts");
            let value = match in_file.form {
                Form::Is(is) => is.to_string(),
                Form::Number | Form::Words => "1".to_owned(),
                Form::Text if section == "consistency_check" => "error".to_owned(),
                Form::Text => "DEBUG".to_owned(),
            };
            let yaml = format!("timeline:\n  filename: t\n{section}:\n  {key}: {value}\n");
            let yaml = if section == "timeline" {
                format!("timeline:\n  filename: t\n  {key}: {value}\n")
                    .replace("  filename: DEBUG\n", "")
            } else {
                yaml
            };
            let knobs = with_file(&yaml, "").expect(&yaml).knobs;
            assert!(
                knobs.len() > usize::from(section != "timeline"),
                "{yaml}: {knobs:?}"
            );
        }
    }

    #[test]
    fn the_command_line_wins_whatever_the_order_and_for_the_opposite_too() {
        let yaml = "params:\n  cycle_time_ms: 10\nautotune:\n  enabled: true\ncontroller: mpi\n";
        let options = with_file(yaml, "--cycle-time-ms 2 --no-autotune --gloo").expect("valid");
        assert_eq!(
            options.knobs,
            [
                ("HOROVOD_CYCLE_TIME", "2.0".to_owned()),
                ("HOROVOD_AUTOTUNE", "0".to_owned())
            ]
        );
        assert_eq!(options.notes, [""; 0]);
        assert_eq!(options.mpi.starter, Starter::Own);
    }

    #[test]
    fn values_of_the_wrong_type_are_refused_with_their_key() {
        fails(
            "params:\n  cycle_time_ms: '3'\n",
            "c.yaml: params.cycle_time_ms: a number was expected, found the text \"3\"",
        );
        fails(
            "params:\n  fusion_threshold_mb: 1.5\n",
            "params.fusion_threshold_mb: invalid whole number",
        );
        fails(
            "params:\n  cache_capacity: -1\n",
            "cache_capacity=-1 must be >= 0",
        );
        fails(
            "autotune:\n  enabled: 1\n",
            "autotune.enabled: true or false was expected, found 1",
        );
        fails("timeline:\n  filename: 3\n", "text was expected, found 3");
        fails("params: 3\n", "params: a mapping");
        fails("- a\n", "a mapping of sections");
        fails("params:\n  - cycle_time_ms\n", "params: a mapping");
        fails("params:\n  cache_capacity: [1]\n", "one value");
        fails("a: [\n", "is no YAML");
        fails("controller: ddl\n", "No such controller supported: ddl");
        let error = parse(&["-np", "1", "--config-file", "/no/such", "x"].map(Into::into));
        let error = error.expect_err("no file").0;
        assert!(
            error.contains("/no/such: cannot be read: No such file"),
            "{error}"
        );
    }

    #[test]
    fn what_means_nothing_is_noted() {
        let options = with_file(
            "parms:\n  x: 1\nparams:\n  cycle_time: 1\ncontroller: MPI\n",
            "",
        )
        .expect("valid");
        assert_eq!(options.notes.len(), 2, "{:?}", options.notes);
        assert!(options.notes[1].contains("did you mean params.cycle_time_ms?"));
        assert_eq!(options.mpi.starter, Starter::Mpi);
    }

    #[test]
    fn an_unknown_key_is_noted_whatever_its_value_is() {
        for (yaml, key) in [
            ("num_proc: 4\n", "num_proc"),
            ("hosts: [a, b]\n", "hosts"),
            ("job: {name: [x], other: {a: 1}}\n", "job.name"),
            ("params:\n  more: [1, 2]\n", "params.more"),
            ("1: x\n", "1"),
            ("params:\n  2: x\n", "params.2"),
        ] {
            let options = with_file(&format!("{yaml}timeline: {{filename: t}}\n"), "");
            let options = options.expect(yaml);
            let note = format!("the config file has a key {key} that means nothing");
            assert_eq!(options.notes[0], note, "{yaml}");
            assert_eq!(options.knobs.len(), 1, "what follows is read: {yaml}");
        }
        let options = with_file("cycle_time_ms: 3\n", "").expect("valid");
        assert!(options.notes[0].ends_with("(did you mean params.cycle_time_ms?)"));
        fails("controller: [gloo]\n", "No such controller supported");
    }
}
