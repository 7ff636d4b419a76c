//! A trace of the next seconds of a running job, for a program that waits for it.

use std::fs::{DirBuilder, File};
use std::io::{self, Read, Write};
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use horovod_transport::LocalConnection;

use crate::periodic::End;
use crate::status::random_hex;
use crate::{http, lock};

/// Longest trace.
pub const TRACE_MAX: Duration = Duration::from_secs(600);
/// Time in which the program has to take each piece of the file. Once the job ends, it has as long for all that is left.
const PIECE_LIMIT: Duration = Duration::from_secs(5);
const PIECE_BYTES: usize = 1 << 16;
/// Time between two checks whether the program still waits.
const CHECK_PERIOD: Duration = Duration::from_millis(250);
/// Traces that are recorded or sent at once; one at a time is recorded.
const THREADS_MAX: usize = 8;
/// The engine writes the last events of all ranks in this time; the program may wait as long after the trace.
pub(crate) const LAST_EVENTS_LIMIT: Duration = Duration::from_secs(45);

/// Records the operations of all ranks into a file.
pub trait Tracer: Send + Sync + std::fmt::Debug {
    /// Begins to record into this file.
    ///
    /// # Errors
    /// The text says why nothing is recorded.
    fn start(&self, path: &Path) -> Result<(), String>;

    /// Ends what `start` has begun with this file, which then has all events.
    ///
    /// # Errors
    /// The text says why the file is not whole.
    fn stop(&self, path: &Path) -> Result<(), String>;
}

/// The traces of one job, each on a thread of its own. One at a time is recorded.
#[derive(Debug)]
pub(crate) struct Traces {
    tracer: Arc<dyn Tracer>,
    job_end: Arc<End>,
    is_recording: Arc<AtomicBool>,
    threads: Mutex<Vec<JoinHandle<()>>>,
}

impl Traces {
    pub(crate) fn new(tracer: Arc<dyn Tracer>) -> Self {
        Self {
            tracer,
            job_end: Arc::default(),
            is_recording: Arc::default(),
            threads: Mutex::default(),
        }
    }

    /// Records for so long, or until the job ends, and answers with the trace. Does not wait for it.
    pub(crate) fn answer(&self, mut to: LocalConnection, lasting: Duration) -> io::Result<()> {
        let mut threads = lock(&self.threads);
        threads.retain(|thread| !thread.is_finished());
        if self.job_end.has_come() {
            return http::answer_refusal(&mut to, "the job ends\n");
        }
        if threads.len() >= THREADS_MAX {
            return http::answer_refusal(&mut to, "too many traces are being sent\n");
        }
        if self.is_recording.swap(true, Ordering::SeqCst) {
            return http::answer_refusal(&mut to, "another trace is being recorded\n");
        }
        let recording = Recording(self.is_recording.clone());
        let (tracer, job_end) = (self.tracer.clone(), self.job_end.clone());
        let started = std::thread::Builder::new()
            .name("hvd-trace".into())
            .spawn(move || {
                if let Err(e) = serve(&*tracer, &job_end, recording, to, lasting) {
                    tracing::debug!("trace: {e}");
                }
            });
        threads.push(started?);
        Ok(())
    }

    #[cfg(test)]
    pub(crate) fn is_recording(&self) -> bool {
        self.is_recording.load(Ordering::SeqCst)
    }

    /// Ends the trace that is being recorded, and waits until all are sent.
    pub(crate) fn end(&self) {
        self.job_end.come();
        let threads = std::mem::take(&mut *lock(&self.threads));
        for thread in threads {
            if thread.join().is_err() {
                tracing::error!("the thread that records a trace ended by a panic");
            }
        }
    }
}

/// The right to record, which another trace gets when this is dropped.
struct Recording(Arc<AtomicBool>);

impl Drop for Recording {
    fn drop(&mut self) {
        self.0.store(false, Ordering::SeqCst);
    }
}

/// Why there is no trace.
enum Failure {
    /// It was not recorded, for this reason.
    Refused(String),
    /// It was not recorded whole, for this reason.
    Broken(String),
    /// Nobody waits for it.
    HungUp,
}

fn serve(
    tracer: &dyn Tracer,
    job_end: &End,
    recording: Recording,
    mut to: LocalConnection,
    lasting: Duration,
) -> io::Result<()> {
    // The names of tensors are not for other users of the host.
    let recorded = PrivateFolder::new()
        .map_err(|e| Failure::Broken(format!("cannot create a folder for the trace: {e}")))
        .and_then(|folder| {
            let file = record(tracer, job_end, &folder.0, &to, lasting)?;
            Ok((folder, file))
        });
    // Before the program has all of it: it may ask for the next one at once.
    drop(recording);
    to.extend(PIECE_LIMIT);
    match recorded {
        Ok((_folder, file)) => send(file, job_end, &mut to),
        Err(Failure::Refused(why)) => http::answer_refusal(&mut to, &format!("{why}\n")),
        Err(Failure::Broken(why)) => http::answer_failure(&mut to, &format!("{why}\n")),
        Err(Failure::HungUp) => Ok(()),
    }
}

/// Records for so long, until the job ends, or until the program has hung up.
fn record(
    tracer: &dyn Tracer,
    job_end: &End,
    folder: &Path,
    to: &LocalConnection,
    lasting: Duration,
) -> Result<File, Failure> {
    let path = folder.join("trace.json");
    tracer.start(&path).map_err(Failure::Refused)?;
    let until = Instant::now() + lasting;
    let mut left = lasting;
    while !left.is_zero() && !job_end.has_come() && !to.has_hung_up() {
        job_end.wait(left.min(CHECK_PERIOD));
        left = until.saturating_duration_since(Instant::now());
    }
    let stopped = tracer.stop(&path);
    if to.has_hung_up() {
        return Err(Failure::HungUp);
    }
    stopped.map_err(|why| Failure::Broken(format!("the trace is not whole: {why}")))?;
    File::open(&path).map_err(|e| Failure::Broken(format!("the trace cannot be read: {e}")))
}

fn send(mut file: File, job_end: &End, to: &mut LocalConnection) -> io::Result<()> {
    let begin = Instant::now();
    http::answer_head(to, "200 OK", "application/json", file.metadata()?.len())?;
    let mut piece = vec![0; PIECE_BYTES];
    loop {
        let n = file.read(&mut piece)?;
        if n == 0 {
            return Ok(());
        }
        to.extend(limit_of_piece(begin, job_end.came(), Instant::now()));
        to.write_all(&piece[..n])?;
    }
}

/// Time for the next piece of a file that is sent since `begin`. The end of the job waits for no slow program.
fn limit_of_piece(begin: Instant, job_end: Option<Instant>, now: Instant) -> Duration {
    match job_end {
        Some(came) => (came.max(begin) + PIECE_LIMIT).saturating_duration_since(now),
        None => PIECE_LIMIT,
    }
}

/// A folder of this user alone, removed at the end.
struct PrivateFolder(PathBuf);

impl PrivateFolder {
    fn new() -> io::Result<Self> {
        let name = format!("horovod-trace-{}", random_hex::<8>()?);
        let path = std::env::temp_dir().join(name);
        DirBuilder::new().mode(0o700).create(&path)?;
        Ok(Self(path))
    }
}

impl Drop for PrivateFolder {
    fn drop(&mut self) {
        if let Err(e) = std::fs::remove_dir_all(&self.0) {
            tracing::warn!("{} is left behind: {e}", self.0.display());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn once_the_job_ends_all_pieces_share_one_limit() {
        let begin = Instant::now();
        let at = |seconds| begin + Duration::from_secs(seconds);
        assert_eq!(limit_of_piece(begin, None, at(100)), PIECE_LIMIT);
        let left = |now| limit_of_piece(begin, Some(at(100)), at(now)).as_secs();
        assert_eq!([100, 102, 105, 106].map(left), [5, 3, 0, 0]);
        // The end has come while the trace was recorded.
        let left = limit_of_piece(at(100), Some(begin), at(101));
        assert_eq!(left.as_secs(), 4);
    }
}
