//! A trace of the next seconds of a running job, for a program that waits for it.

use std::fs::{DirBuilder, File};
use std::io::{self, Read, Write};
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::Duration;

use horovod_transport::LocalConnection;

use crate::periodic::End;
use crate::status::random_hex;
use crate::{http, lock};

/// Longest trace.
pub const TRACE_MAX: Duration = Duration::from_secs(600);
/// Time in which the program has to take each piece of the file. The end of the job waits for no program that is stopped.
const PIECE_LIMIT: Duration = Duration::from_secs(5);
const PIECE_BYTES: usize = 1 << 16;
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
    fn stop(&self, path: &Path);
}

/// The traces of one job, one at a time, each on a thread of its own.
#[derive(Debug)]
pub(crate) struct Traces {
    tracer: Arc<dyn Tracer>,
    job_end: Arc<End>,
    thread: Mutex<Option<JoinHandle<()>>>,
}

impl Traces {
    pub(crate) fn new(tracer: Arc<dyn Tracer>) -> Self {
        Self {
            tracer,
            job_end: Arc::default(),
            thread: Mutex::default(),
        }
    }

    /// Records for so long, or until the job ends, and answers with the trace. Does not wait for it.
    pub(crate) fn answer(&self, mut to: LocalConnection, lasting: Duration) -> io::Result<()> {
        let mut thread = lock(&self.thread);
        if thread.as_ref().is_some_and(|thread| !thread.is_finished()) {
            return http::answer_refusal(&mut to, "another trace is being recorded\n");
        }
        if self.job_end.has_come() {
            return http::answer_refusal(&mut to, "the job ends\n");
        }
        let (tracer, job_end) = (self.tracer.clone(), self.job_end.clone());
        let started = std::thread::Builder::new()
            .name("hvd-trace".into())
            .spawn(move || {
                if let Err(e) = record(&*tracer, &job_end, to, lasting) {
                    tracing::debug!("trace: {e}");
                }
            });
        *thread = Some(started?);
        Ok(())
    }

    #[cfg(test)]
    pub(crate) fn is_recording(&self) -> bool {
        lock(&self.thread).is_some()
    }

    /// Ends the trace that is being recorded, and waits until it is sent.
    pub(crate) fn end(&self) {
        self.job_end.come();
        if let Some(thread) = lock(&self.thread).take()
            && thread.join().is_err()
        {
            tracing::error!("the thread that records a trace ended by a panic");
        }
    }
}

fn record(
    tracer: &dyn Tracer,
    job_end: &End,
    mut to: LocalConnection,
    lasting: Duration,
) -> io::Result<()> {
    // The names of tensors are not for other users of the host.
    let folder = PrivateFolder::new()?;
    let path = folder.0.join("trace.json");
    if let Err(why) = tracer.start(&path) {
        return http::answer_refusal(&mut to, &format!("{why}\n"));
    }
    job_end.wait(lasting);
    tracer.stop(&path);
    let mut file = File::open(&path)?;
    to.extend(PIECE_LIMIT);
    http::answer_head(
        &mut to,
        "200 OK",
        "application/json",
        file.metadata()?.len(),
    )?;
    let mut piece = vec![0; PIECE_BYTES];
    loop {
        let n = file.read(&mut piece)?;
        if n == 0 {
            return Ok(());
        }
        to.extend(PIECE_LIMIT);
        to.write_all(&piece[..n])?;
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
