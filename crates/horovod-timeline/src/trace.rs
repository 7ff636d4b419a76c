//! A file in Chrome's trace format that is valid JSON after every write.
//!
//! The file is one array. Every write starts at its closing bracket, adds whole events and ends with the bracket
//! again, so nobody ever sees an open end. The system copies a write page by page, and a process that is killed may
//! leave part of them. So a write ends with the page in which most of it lies. It may begin on the page before, with a few
//! bytes.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::Path;

use horovod_transport::output_file::{self, OpenMode};

use super::object::Object;

/// Granularity in which the system copies a write into a file.
const PAGE: u64 = 4096;
/// A page with less room than this is left with the first event of the next.
const REST: u64 = 512;
/// End of the array.
const CLOSING: &[u8] = b"\n]";

/// An open trace.
#[derive(Debug)]
pub(super) struct Trace {
    file: File,
    /// Where the closing stands in the file, and the next write begins.
    at: u64,
    /// Events not written yet, separators included.
    pending: Vec<u8>,
    /// Takes the last of them while the others are written.
    spare: Vec<u8>,
    any: bool,
}

impl Trace {
    /// Creates the file, or empties it.
    pub(super) fn create(path: &Path) -> io::Result<Self> {
        let file = output_file::open(path, OpenMode::Truncate)?;
        let mut trace = Self {
            file,
            at: 0,
            pending: b"[".to_vec(),
            spare: Vec::new(),
            any: false,
        };
        trace.flush()?;
        Ok(trace)
    }

    /// Adds one event, an object of these fields. On an error the file holds what it held before.
    pub(super) fn event(&mut self, fields: impl FnOnce(&mut Object<'_>)) -> io::Result<()> {
        let start = self.pending.len();
        let separator: &[u8] = if self.any { b",\n" } else { b"\n" };
        self.pending.extend_from_slice(separator);
        Object::write(&mut self.pending, fields);
        self.any = true;
        if start > 0 && self.is_over() {
            // The page ends with the events before this one.
            self.spare.clear();
            self.spare.extend_from_slice(&self.pending[start..]);
            self.pending.truncate(start);
            let written = self.flush();
            std::mem::swap(&mut self.pending, &mut self.spare);
            written?;
        }
        if self.is_over() {
            // Longer than a page's rest.
            self.flush()?;
        }
        Ok(())
    }

    /// Writes what has been added.
    pub(super) fn flush(&mut self) -> io::Result<()> {
        if self.pending.is_empty() {
            return Ok(());
        }
        self.pending.extend_from_slice(CLOSING);
        let written = self.file.write_all_at(&self.pending, self.at);
        match &written {
            Ok(()) => self.at += (self.pending.len() - CLOSING.len()) as u64,
            Err(_) => self.take_back(),
        }
        self.pending.clear();
        written
    }

    /// A write that failed may have overwritten the closing: put it back. The space for it is there already.
    fn take_back(&self) {
        if self.at > 0 {
            // Both are attempts: the caller reports the write that failed first.
            let _ = self.file.write_all_at(CLOSING, self.at);
            let _ = self.file.set_len(self.at + CLOSING.len() as u64);
        }
    }

    /// Whether a write of what is pending would go beyond the page that it is meant to fill.
    fn is_over(&self) -> bool {
        let len = (self.pending.len() + CLOSING.len()) as u64;
        self.at + len > (self.at + REST) / PAGE * PAGE + PAGE
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use serde_json::Value;

    use super::super::temporary::TempFile;
    use super::*;

    fn read(path: &Path) -> Vec<Value> {
        let text = std::fs::read(path).unwrap();
        match serde_json::from_slice(&text) {
            Ok(Value::Array(events)) => events,
            other => panic!("{other:?}: {}", String::from_utf8_lossy(&text)),
        }
    }

    fn add(trace: &mut Trace, name: &str) {
        let added = trace.event(|o| {
            o.text("name", name);
        });
        added.unwrap();
    }

    #[test]
    fn is_valid_from_the_start_and_after_every_event() {
        let file = TempFile::new();
        let mut trace = Trace::create(file.path()).unwrap();
        assert!(read(file.path()).is_empty());
        for i in 0..200 {
            // Some longer than a page.
            let name = "x".repeat(i * 37 % 5000);
            add(&mut trace, &name);
            trace.flush().unwrap();
            let events = read(file.path());
            assert_eq!(events.len(), i + 1);
            assert_eq!(events[i]["name"], name);
        }
    }

    #[test]
    fn is_valid_after_every_write_of_many_events() {
        let file = TempFile::new();
        let mut trace = Trace::create(file.path()).unwrap();
        for i in 0..2000 {
            add(&mut trace, &format!("event {i}"));
            // Only what filled a page is there, and that is whole.
            assert!(read(file.path()).len() <= i + 1);
        }
        trace.flush().unwrap();
        assert_eq!(read(file.path()).len(), 2000);
    }

    #[test]
    fn a_page_costs_one_write_and_crosses_into_the_next_after_few_bytes() {
        let file = TempFile::new();
        let mut trace = Trace::create(file.path()).unwrap();
        let (mut writes, mut at) = (0, trace.at);
        for i in 0..2000 {
            add(&mut trace, &format!("event {i}"));
            if trace.at != at {
                let before = at.next_multiple_of(PAGE) - at;
                assert!(at + before + PAGE >= trace.at && (before < REST || at < PAGE));
                (writes, at) = (writes + 1, trace.at);
            }
        }
        assert_eq!(writes, at.div_ceil(PAGE));
    }

    #[test]
    fn an_existing_file_is_emptied() {
        let file = TempFile::new();
        std::fs::write(file.path(), "x".repeat(10_000)).unwrap();
        Trace::create(file.path()).unwrap();
        assert!(read(file.path()).is_empty());
    }

    #[test]
    fn a_disk_that_fills_up_fails_the_event_and_leaves_the_file_valid() {
        // A file that may be written but not grow stands for a full disk.
        let file = TempFile::new();
        let mut trace = Trace::create(file.path()).unwrap();
        add(&mut trace, "kept");
        trace.flush().unwrap();
        let full = File::options().write(true).open("/dev/full").unwrap();
        let real = std::mem::replace(&mut trace.file, full);
        add(&mut trace, "lost");
        let error = trace.flush().unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::StorageFull);
        // A write that was carried out in part leaves this behind.
        trace.file = real;
        trace
            .file
            .write_all_at(b",\n{\"name\": \"lo", trace.at)
            .unwrap();
        trace.take_back();
        assert_eq!(read(file.path()).len(), 1);
        add(&mut trace, "after");
        trace.flush().unwrap();
        assert_eq!(read(file.path())[1]["name"], "after");
    }

    proptest! {
        #[test]
        fn any_name_is_read_back_as_it_was(names in proptest::collection::vec(any::<String>(), 0..20)) {
            let file = TempFile::new();
            let mut trace = Trace::create(file.path()).unwrap();
            for name in &names {
                add(&mut trace, name);
            }
            trace.flush().unwrap();
            let read: Vec<String> = read(file.path())
                .iter()
                .map(|e| e["name"].as_str().unwrap().to_owned())
                .collect();
            prop_assert_eq!(read, names);
        }
    }
}
