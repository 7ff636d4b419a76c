//! Messages of the negotiation, one by one.

use horovod_protocol::{ToCoordinator, ToWorker};

/// Any bytes are a message or an error; a message survives being written and read again, also into the memory of
/// another one.
pub(crate) fn messages(bytes: &[u8]) {
    let (first, rest) = bytes.split_at(bytes.len().min(1));
    if first == [0] {
        let mut reused = ToCoordinator::empty();
        let cut = rest.len() / 2;
        let _ = reused.decode_from(&rest[..cut]);
        let Ok(message) = ToCoordinator::decode(rest) else {
            assert!(reused.decode_from(rest).is_err());
            return;
        };
        assert_eq!(reused.decode_from(rest), Ok(()));
        assert_eq!(reused, message);
        let mut again = Vec::new();
        message.encode(&mut again);
        assert_eq!(ToCoordinator::decode(&again), Ok(message));
    } else {
        let mut reused = ToWorker::empty();
        let cut = rest.len() / 2;
        let _ = reused.decode_from(&rest[..cut]);
        let Ok(message) = ToWorker::decode(rest) else {
            assert!(reused.decode_from(rest).is_err());
            return;
        };
        assert_eq!(reused.decode_from(rest), Ok(()));
        assert_eq!(reused, message);
        let mut again = Vec::new();
        message.encode(&mut again);
        assert_eq!(ToWorker::decode(&again), Ok(message));
    }
}
