//! Targets for what the runtime itself reads from other ranks.

use horovod_engine::testing::settings;
use horovod_timeline::testing::timeline;

/// The first byte chooses: 0, rank 0's settings of the data plane; else a message of the timeline, and what rank 0
/// makes of a batch is a JSON document.
pub(crate) fn messages(bytes: &[u8]) {
    let document = match bytes {
        [] => return,
        [0, values @ ..] => return settings(values),
        [_, message @ ..] => timeline(message),
    };
    let Some(document) = document else { return };
    let parsed: Result<serde_json::Value, _> = serde_json::from_slice(&document);
    if let Err(error) = parsed {
        panic!("{error}: {}", String::from_utf8_lossy(&document));
    }
}
