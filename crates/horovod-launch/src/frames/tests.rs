//! Every message survives its way; nothing that is no message does.

use super::*;

#[test]
fn messages_survive_one_byte_at_a_time() {
    let sent = samples::to_agent();
    let mut bytes = Vec::new();
    sent.iter().for_each(|message| message.encode(&mut bytes));
    let mut buffer = FrameBuffer::default();
    let mut got = Vec::new();
    for byte in bytes {
        buffer.push(&[byte]);
        while let Some(frame) = buffer.next_frame().expect("short") {
            got.push(ToAgent::decode(frame).expect("valid"));
        }
    }
    assert_eq!(got, sent);
}

#[test]
fn answers_survive() {
    let sent = samples::from_agent(env!("CARGO_PKG_VERSION"));
    let mut bytes = Vec::new();
    sent.iter().for_each(|message| message.encode(&mut bytes));
    let mut buffer = FrameBuffer::default();
    buffer.push(&bytes);
    for want in sent {
        let frame = buffer.next_frame().expect("short").expect("complete");
        assert_eq!(FromAgent::decode(frame), Ok(want));
    }
}

#[test]
fn refuses_garbage_without_believing_its_lengths() {
    let mut buffer = FrameBuffer::default();
    buffer.push(b"Welcome to this machine!");
    assert!(matches!(
        buffer.next_frame(),
        Err(DecodeError::TooLong { .. })
    ));
    assert!(ToAgent::decode(&[10]).is_err());
    assert!(FromAgent::decode(&[5, 1, 7, 0]).is_err());
    assert!(FromAgent::decode(&[7, 7]).is_err());
    assert!(ToAgent::decode(&[0, 0, 0xff, 0xff, 0xff, 0x7f]).is_err());
}
