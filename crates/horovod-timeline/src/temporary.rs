//! Temporary files and a message, for tests.

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};

/// The message of a batch with so many events, and one that was dropped.
pub(crate) fn batch(events: usize) -> Vec<u8> {
    use super::batch::{Encoder, Message};
    use super::report::{Event, Span, Text};

    let mut encoder = Encoder::default();
    for at in 0..events as u64 {
        encoder.add(Event::Span(Span {
            name: Text::Static("something"),
            thread: 1,
            begin: at,
            end: at + 1,
            detail: "for some reason".into(),
        }));
    }
    let batch = encoder.finish(1, |_| None);
    Message::Batch { epoch: 7, batch }.encode()
}

/// A path of its own, removed at the end.
pub(super) struct TempFile(PathBuf);

impl TempFile {
    pub(super) fn new() -> Self {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let n = NEXT.fetch_add(1, Ordering::Relaxed);
        let name = format!("horovod-timeline-test-{}-{n}.json", std::process::id());
        Self(std::env::temp_dir().join(name))
    }

    pub(super) fn path(&self) -> &Path {
        &self.0
    }
}

impl Drop for TempFile {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.0); // a test may not have made it
    }
}
