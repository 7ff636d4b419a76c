//! `horovodrun --trace 5s [JOB]`: the next seconds of a running job as a timeline file.

use std::ffi::OsString;
use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use horovod_metrics::TRACE_MAX;
use rustix::event::{PollFd, PollFlags, poll};

use crate::options::Wanted;
use crate::platform;
use crate::signals::Signals;
use crate::status::{self, ChoiceError};

/// Traces that may begin in one second in one folder.
const TRACES_MAX: u32 = 100;

/// Why there is no trace.
#[derive(Debug, thiserror::Error)]
pub(crate) enum TraceError {
    #[error("--trace: {0}")]
    Choice(#[from] ChoiceError),
    #[error("--trace: cannot create {path}: {error}")]
    File { path: String, error: io::Error },
    #[error("--trace: cannot watch signals: {0}")]
    Signals(io::Error),
    #[error("--trace: job {job} gives no trace: {error}")]
    Job { job: u32, error: io::Error },
}

/// A time as an option has it: `5s`, `500ms`, `2m`, or a number of seconds.
pub(crate) fn parse_time(text: &str) -> Result<Duration, String> {
    let split = text.find(|c: char| c.is_ascii_alphabetic());
    let (number, unit) = text.split_at(split.unwrap_or(text.len()));
    let factor = match unit {
        "ms" => Some(0.001),
        "" | "s" => Some(1.0),
        "m" => Some(60.0),
        _ => None,
    };
    let seconds = number.parse::<f64>().ok().zip(factor);
    let seconds = seconds.map(|(number, factor)| number * factor);
    seconds
        .filter(|seconds| *seconds >= 0.001 && *seconds <= TRACE_MAX.as_secs_f64())
        .map(Duration::from_secs_f64)
        .ok_or_else(|| {
            let most = TRACE_MAX.as_secs();
            format!("must be a time such as 5s or 500ms, up to {most}s, got {text:?}")
        })
}

/// The job that the words after the option name.
pub(crate) fn parse_job(words: &[OsString]) -> Result<Wanted, String> {
    match words {
        [] => Ok(Wanted::All),
        [word] => {
            let number = word.to_str().and_then(|word| word.parse().ok());
            number.map(Wanted::Process).ok_or_else(|| {
                format!("the word at the end must be the number of rank 0's process, got {word:?}")
            })
        }
        [_, second, ..] => Err(format!("there is one job at most, got {second:?} besides")),
    }
}

/// Records so much of the job into a new file here; the text for the user.
pub(crate) fn run(wanted: Wanted, lasting: Duration) -> Result<String, TraceError> {
    let job = status::choose(wanted, "--trace 5s JOB")?;
    let seconds = lasting.as_secs_f64();
    crate::complain(&format!("records {seconds} s of job {}", job.pid));
    let signals = Signals::watch().map_err(TraceError::Signals)?;
    let (part, path) = new_file(Path::new("."), job.pid)?;
    let name = part.path.clone();
    let watch = std::thread::Builder::new().name("trace-signals".into());
    let watch = watch.spawn(move || end_at_signal(signals, &name));
    watch.map_err(TraceError::Signals)?;
    job.trace(lasting, &mut &part.file)
        .map_err(|error| TraceError::Job {
            job: job.pid,
            error,
        })?;
    std::fs::rename(&part.path, &path).map_err(|error| TraceError::File {
        path: path.display().to_string(),
        error,
    })?;
    let shown = path.strip_prefix(".").unwrap_or(&path).display();
    Ok(format!(
        "{shown}\nOpen it in https://ui.perfetto.dev or in chrome://tracing.\n"
    ))
}

/// Removes the file and ends this process at the first signal.
fn end_at_signal(mut signals: Signals, part: &Path) {
    loop {
        let mut fds = [PollFd::from_borrowed_fd(signals.as_fd(), PollFlags::IN)];
        match poll(&mut fds, None) {
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(_) => return,
        }
        if let Some(signal) = signals.take().first() {
            let _ = std::fs::remove_file(part);
            std::process::exit(128 + signal);
        }
    }
}

/// A file while it is written. It is removed at the end, unless it was renamed: half a file is of no use.
struct Part {
    path: PathBuf,
    file: File,
}

impl Drop for Part {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.path);
    }
}

/// A file to write, and a name for it that no file has.
fn new_file(folder: &Path, job: u32) -> Result<(Part, PathBuf), TraceError> {
    let stamp = platform::compact_time(SystemTime::now());
    let mut tried = 0;
    loop {
        let suffix = match tried {
            0 => String::new(),
            n => format!("-{n}"),
        };
        let path = folder.join(format!("horovod-trace-{job}-{stamp}{suffix}.json"));
        let part = path.with_extension("json.part");
        let file = File::create_new(&part).map(|file| Part { path: part, file });
        match file {
            // In this order: another command may rename its own part meanwhile.
            Ok(part) if !path.exists() => return Ok((part, path)),
            Ok(_) if tried < TRACES_MAX => {}
            Err(e) if e.kind() == io::ErrorKind::AlreadyExists && tried < TRACES_MAX => {}
            other => {
                let path = path.display().to_string();
                let error = other.err();
                let error = error.unwrap_or_else(|| io::ErrorKind::AlreadyExists.into());
                return Err(TraceError::File { path, error });
            }
        }
        tried += 1;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_have_units() {
        for (text, ms) in [("5s", 5000), ("500ms", 500), ("2m", 120_000), ("1.5", 1500)] {
            assert_eq!(parse_time(text), Ok(Duration::from_millis(ms)), "{text}");
        }
        for wrong in [
            "", "s", "0", "-1s", "5h", "601s", "1e9", "nan", "inf", "5 s", "5steps",
        ] {
            let error = parse_time(wrong).expect_err(wrong);
            assert!(error.contains("such as 5s"), "{error}");
        }
    }

    #[test]
    fn one_word_names_the_job() {
        let words = |words: &[&str]| -> Vec<OsString> { words.iter().map(Into::into).collect() };
        assert_eq!(parse_job(&[]), Ok(Wanted::All));
        assert_eq!(parse_job(&words(&["4711"])), Ok(Wanted::Process(4711)));
        assert!(parse_job(&words(&["python"])).is_err());
        assert!(parse_job(&words(&["1", "2"])).is_err());
    }

    #[test]
    fn a_trace_never_replaces_another_one() {
        let folder =
            std::env::temp_dir().join(format!("horovod-trace-test-{}", std::process::id()));
        std::fs::create_dir_all(&folder).expect("a folder");
        let made = [0, 1, 2].map(|at| {
            let (part, path) = new_file(&folder, 7).expect("a file");
            if at == 0 {
                std::fs::rename(&part.path, &path).expect("one folder");
            }
            (part, path)
        });
        let names = [0, 1, 2].map(|at| made[at].1.clone());
        assert!(names[0] != names[1] && names[1] != names[2] && names[0] != names[2]);
        drop(made);
        let left: Vec<_> = std::fs::read_dir(&folder).expect("a folder").collect();
        std::fs::remove_dir_all(&folder).expect("it is ours");
        assert_eq!(left.len(), 1, "only what was renamed is left: {left:?}");
    }
}
