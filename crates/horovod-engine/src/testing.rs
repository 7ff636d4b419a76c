//! Parsers of the runtime, for fuzzing: any bytes may be given to these, and a broken promise
//! panics.

use horovod_collectives::Tuning;

use crate::config::{Algorithms, JoinAverage};

pub use crate::bootstrap::harness::rendezvous_file;

/// Settings as rank 0 sends them: what is taken over can be passed on.
///
/// # Panics
/// If it cannot.
pub fn settings(bytes: &[u8]) {
    let mut algorithms = Algorithms {
        tuning: Tuning::default(),
        connections: 1,
        join_average: JoinAverage::default(),
    };
    if algorithms.adopt(bytes).is_err() {
        return;
    }
    assert!(algorithms.tuning.chunk_bytes > 0 && algorithms.tuning.wire_chunk_bytes > 0);
    let mut other = algorithms.clone();
    assert!(other.adopt(&algorithms.common()).is_ok());
    assert_eq!(algorithms, other);
}
