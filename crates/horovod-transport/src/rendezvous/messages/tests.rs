//! Messages of the rendezvous on the wire.

use proptest::prelude::*;

use super::*;

#[test]
fn every_message_survives_the_wire() {
    for message in samples::to_server() {
        assert_eq!(ToServer::decode(&message.encode()), Ok(message));
    }
    for message in samples::to_client() {
        assert_eq!(ToClient::decode(&message.encode()), Ok(message));
    }
}

#[test]
fn long_texts_are_cut_between_characters() {
    let text = "é".repeat(TEXT_MAX);
    let sent = ToServer::Failed { text }.encode();
    let Ok(ToServer::Failed { text }) = ToServer::decode(&sent) else {
        panic!("refused")
    };
    assert_eq!(text.len(), TEXT_MAX);
}

proptest! {
    #[test]
    fn any_bytes_are_a_message_or_an_error(bytes in prop::collection::vec(any::<u8>(), 0..300)) {
        let _ = ToServer::decode(&bytes);
        let _ = ToClient::decode(&bytes);
    }
}
