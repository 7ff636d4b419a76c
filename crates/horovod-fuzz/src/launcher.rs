//! Targets for what launcher and agents read: each other's frames, command lines, lists of hosts.

use std::ffi::{OsStr, OsString};
use std::fmt::Write as _;
use std::os::unix::ffi::OsStrExt;

use horovod_launch::args;
use horovod_launch::frames::{FrameBuffer, FromAgent, ToAgent, samples};
use horovod_launch::hosts::{assign, parse_discovered, parse_hostfile, parse_hosts};

/// A stream of frames, in pieces: the first byte says from whom, the second how long the pieces are.
pub(crate) fn frames(bytes: &[u8]) {
    let [side, piece, stream @ ..] = bytes else {
        return;
    };
    let mut buffer = FrameBuffer::default();
    for part in stream.chunks(usize::from(*piece) + 1) {
        buffer.push(part);
        loop {
            match buffer.next_frame() {
                Ok(None) => break,
                Err(_) => return,
                Ok(Some(frame)) if *side == 0 => to_agent(frame),
                Ok(Some(frame)) => from_agent(frame),
            }
        }
    }
}

fn to_agent(frame: &[u8]) {
    let Ok(message) = ToAgent::decode(frame) else {
        return;
    };
    let mut again = Vec::new();
    message.encode(&mut again);
    assert_eq!(ToAgent::decode(&again[4..]), Ok(message));
}

fn from_agent(frame: &[u8]) {
    let Ok(message) = FromAgent::decode(frame) else {
        return;
    };
    let mut again = Vec::new();
    message.encode(&mut again);
    assert_eq!(FromAgent::decode(&again[4..]), Ok(message));
}

/// Valid inputs of [`frames`]: all kinds of messages of each side, in large and in small pieces.
pub(crate) fn frames_seeds() -> Vec<Vec<u8>> {
    let mut streams = [Vec::new(), Vec::new()];
    let [to, from] = &mut streams;
    (samples::to_agent().iter()).for_each(|message| message.encode(to));
    (samples::from_agent("1").iter()).for_each(|message| message.encode(from));
    let sides = (0u8..).zip(&streams);
    sides
        .flat_map(|(side, stream)| [0, 255].map(|piece| [&[side, piece], &stream[..]].concat()))
        .collect()
}

/// Parses text that users write. The first byte chooses the kind: a command line (words between zero bytes), a list of
/// hosts, a file of settings, a discovery script's output, or a file of hosts.
pub(crate) fn words(bytes: &[u8]) {
    let Some((kind, rest)) = bytes.split_first() else {
        return;
    };
    let text = String::from_utf8_lossy(rest);
    let hosts = match kind {
        0 => {
            let words: Vec<OsString> = rest
                .split(|byte| *byte == 0)
                .map(|word| OsStr::from_bytes(word).to_owned())
                .collect();
            match args::parse(&words) {
                Ok(options) => options
                    .hosts
                    .and_then(|hosts| parse_hosts(&hosts, |_| None).ok()),
                Err(error) => {
                    assert!(!error.to_string().is_empty());
                    None
                }
            }
        }
        1 => parse_hosts(&text, |_| None).ok(),
        2 => return config_file(rest),
        4 => parse_discovered(&text, None).ok(),
        5 => parse_discovered(&text, Some(3)).ok(),
        _ => parse_hostfile("hosts", &text).ok(),
    };
    let Some(hosts) = hosts else { return };
    // Parsed hosts can be written and parsed again.
    let mut text_again = String::new();
    for host in &hosts {
        let comma = if text_again.is_empty() { "" } else { "," };
        write!(text_again, "{comma}{host}").expect("memory");
    }
    if !hosts.is_empty() {
        assert_eq!(
            parse_hosts(&text_again, |_| None).as_ref(),
            Ok(&hosts),
            "{text_again}"
        );
    }
    let slots: u64 = hosts.iter().map(|host| u64::from(host.slots)).sum();
    let count = slots.min(64) as u32;
    let placed = assign(&hosts, count).expect("there are enough slots");
    let ranks: Vec<u32> = placed
        .iter()
        .flat_map(|placement| placement.slots.iter().map(|slot| slot.rank))
        .collect();
    assert_eq!(ranks, (0..count).collect::<Vec<_>>());
}

/// A file of settings: understood, or refused with a text that names it.
pub(crate) fn config_file(content: &[u8]) {
    let file = std::env::temp_dir().join(format!("horovod-fuzz-{}.yaml", std::process::id()));
    std::fs::write(&file, content).expect("a temporary file");
    let words: [OsString; 5] = [
        "--config-file".into(),
        file.clone().into(),
        "-np".into(),
        "2".into(),
        "true".into(),
    ];
    if let Err(error) = args::parse(&words) {
        assert!(error.to_string().contains(".yaml"), "{error}");
    }
    let _ = std::fs::remove_file(file);
}
