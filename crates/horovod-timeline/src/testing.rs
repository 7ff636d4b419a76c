//! Messages of ranks, for fuzzing and for tests of the crates above.

use std::io::Read;

use horovod_protocol::Rank;

use super::batch::{Batch, Encoder, Message};
use super::layout::{Cast, Layout, Member};
use super::temporary::{self, TempFile};

/// The message of a batch with so many events, and one that was dropped.
pub fn batch(events: usize) -> Vec<u8> {
    temporary::batch(events)
}

/// Reads a message of the timeline; for a batch, the file that it becomes.
///
/// # Panics
/// If a message does not survive being written and read again, or a batch cannot be written to a file.
pub fn timeline(bytes: &[u8]) -> Option<Vec<u8>> {
    let message = Message::decode(bytes).ok()?;
    assert_eq!(Message::decode(&message.encode()), Ok(message.clone()));
    let Message::Batch { batch, .. } = message else {
        return None;
    };
    let batch = Batch::decode(&batch).ok()?;
    let mut encoder = Encoder::default();
    for event in &batch.events {
        encoder.add(event.clone());
    }
    let again = Batch::decode(&encoder.finish(batch.dropped, |_| None));
    assert_eq!(again.map(|again| again.events), Ok(batch.events.clone()));

    let file = TempFile::new();
    let member = |n| Member {
        hostname: "host".into(),
        pid: n,
    };
    let cast = Cast {
        ranks: (0..3).map(member).collect(),
        epoch_micros: 1,
    };
    let mut document = Vec::new();
    let written = Layout::create(file.path(), cast).and_then(|mut layout| {
        layout.batch(Rank(1), batch.clone(), -5)?;
        layout.batch(Rank(2), batch, 1 << 40)?;
        layout.close()?;
        std::fs::File::open(file.path())?.read_to_end(&mut document)
    });
    assert!(written.is_ok(), "{written:?}");
    Some(document)
}
