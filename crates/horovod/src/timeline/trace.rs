//! A file in Chrome's trace format that is valid JSON after every write.
//!
//! The file is one array. Every write starts at its closing bracket, adds whole events and ends with the bracket
//! again, so nobody ever sees an open end. A write stays within one page of the file wherever an event allows:
//! such a write is carried out as a whole or not at all, even if the process is killed in it.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::Path;

/// Granularity in which the system copies a write into a file.
const PAGE: u64 = 4096;
/// What closes the array.
const CLOSING: &[u8] = b"\n]";

/// An open trace.
#[derive(Debug)]
pub(super) struct Trace {
    file: File,
    /// Where the closing stands in the file, and the next write begins.
    at: u64,
    /// Events not written yet, separators included.
    pending: Vec<u8>,
    any: bool,
}

impl Trace {
    /// Creates the file, or empties it.
    pub(super) fn create(path: &Path) -> io::Result<Self> {
        let file = File::create(path)?;
        let mut trace = Self {
            file,
            at: 0,
            pending: b"[".to_vec(),
            any: false,
        };
        trace.flush()?;
        Ok(trace)
    }

    /// Adds one event, a whole JSON object. On an error the file holds what it held before.
    pub(super) fn event(&mut self, object: &[u8]) -> io::Result<()> {
        let separator: &[u8] = if self.any { b",\n" } else { b"\n" };
        let added = (separator.len() + object.len() + CLOSING.len()) as u64;
        if !self.pending.is_empty() && self.crosses(self.pending.len() as u64 + added) {
            self.flush()?;
        }
        self.pending.extend_from_slice(separator);
        self.pending.extend_from_slice(object);
        self.any = true;
        if self.crosses((self.pending.len() + CLOSING.len()) as u64) {
            // Does not fit into the page: the next one begins a page of its own.
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

    /// Whether a write of this many bytes would cross from one page to the next.
    fn crosses(&self, len: u64) -> bool {
        len > 0 && self.at / PAGE != (self.at + len - 1) / PAGE
    }
}

/// Appends text as a JSON string, quotes included.
pub(super) fn push_string(out: &mut Vec<u8>, text: &str) {
    out.push(b'"');
    let mut rest = 0;
    let bytes = text.as_bytes();
    for (i, &b) in bytes.iter().enumerate() {
        if b >= 0x20 && b != b'"' && b != b'\\' {
            continue;
        }
        out.extend_from_slice(&bytes[rest..i]);
        rest = i + 1;
        match b {
            b'"' | b'\\' => out.extend_from_slice(&[b'\\', b]),
            b'\n' => out.extend_from_slice(b"\\n"),
            b'\t' => out.extend_from_slice(b"\\t"),
            _ => {
                const HEX: &[u8; 16] = b"0123456789abcdef";
                out.extend_from_slice(b"\\u00");
                out.push(HEX[usize::from(b >> 4)]);
                out.push(HEX[usize::from(b & 15)]);
            }
        }
    }
    out.extend_from_slice(&bytes[rest..]);
    out.push(b'"');
}

/// Appends a whole number.
pub(super) fn push_number(out: &mut Vec<u8>, mut n: u64) {
    let mut digits = [0u8; 20];
    let mut start = digits.len();
    loop {
        start -= 1;
        digits[start] = b'0' + (n % 10) as u8;
        n /= 10;
        if n == 0 {
            break;
        }
    }
    out.extend_from_slice(&digits[start..]);
}

/// Appends nanoseconds as microseconds with three decimals, the unit of the format.
pub(super) fn push_micros(out: &mut Vec<u8>, ns: u64) {
    push_number(out, ns / 1000);
    let rest = (ns % 1000) as u32;
    out.extend_from_slice(&[
        b'.',
        b'0' + (rest / 100) as u8,
        b'0' + (rest / 10 % 10) as u8,
        b'0' + (rest % 10) as u8,
    ]);
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

    fn event(name: &str) -> Vec<u8> {
        let mut out = b"{\"name\":".to_vec();
        push_string(&mut out, name);
        out.push(b'}');
        out
    }

    #[test]
    fn is_valid_from_the_start_and_after_every_event() {
        let file = TempFile::new();
        let mut trace = Trace::create(file.path()).unwrap();
        assert!(read(file.path()).is_empty());
        for i in 0..200 {
            // Some longer than a page.
            let name = "x".repeat(i * 37 % 5000);
            trace.event(&event(&name)).unwrap();
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
            trace.event(&event(&format!("event {i}"))).unwrap();
            // Only what filled a page is there, and that is whole.
            assert!(read(file.path()).len() <= i + 1);
        }
        trace.flush().unwrap();
        assert_eq!(read(file.path()).len(), 2000);
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
        trace.event(&event("kept")).unwrap();
        trace.flush().unwrap();
        let full = File::options().write(true).open("/dev/full").unwrap();
        let real = std::mem::replace(&mut trace.file, full);
        trace.event(&event("lost")).unwrap();
        let error = trace.flush().unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::StorageFull);
        // What a write that was carried out in part leaves behind.
        trace.file = real;
        trace
            .file
            .write_all_at(b",\n{\"name\": \"lo", trace.at)
            .unwrap();
        trace.take_back();
        assert_eq!(read(file.path()).len(), 1);
        trace.event(&event("after")).unwrap();
        trace.flush().unwrap();
        assert_eq!(read(file.path())[1]["name"], "after");
    }

    #[test]
    fn numbers_and_times_have_their_usual_form() {
        for n in [0, 9, 10, 12_345, u64::MAX] {
            let mut out = Vec::new();
            push_number(&mut out, n);
            assert_eq!(out, n.to_string().into_bytes());
        }
        let mut out = Vec::new();
        push_micros(&mut out, 1_234_056);
        assert_eq!(out, b"1234.056");
    }

    proptest! {
        #[test]
        fn any_name_is_read_back_as_it_was(names in proptest::collection::vec(any::<String>(), 0..20)) {
            let file = TempFile::new();
            let mut trace = Trace::create(file.path()).unwrap();
            for name in &names {
                trace.event(&event(name)).unwrap();
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
