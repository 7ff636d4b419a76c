//! The file through which ranks meet, with any content, for fuzzing.

use super::file::{ADDRESSES_MAX, parse, text_of};
use super::parse_key;

/// Reads the content of a rendezvous file (of a key file, if the first byte is 0): understood or not, and what was
/// understood can be written and read again.
///
/// # Panics
/// If not, or if more than the allowed number of addresses is taken over.
pub fn rendezvous_file(bytes: &[u8]) {
    let [kind, content @ ..] = bytes else { return };
    let Ok(text) = std::str::from_utf8(content) else {
        return;
    };
    if *kind == 0 {
        match parse_key(text.trim(), "the content") {
            Ok(key) => assert!(key.to_hex().eq_ignore_ascii_case(text.trim())),
            // A mistyped key may still be a secret: the error does not quote it.
            Err(error) => {
                let always = parse_key("", "the content").map_err(|error| error.to_string());
                assert_eq!(Some(error.to_string()), always.err());
            }
        }
        return;
    }
    let Some((addresses, key)) = parse(text) else {
        return;
    };
    assert!((1..=ADDRESSES_MAX).contains(&addresses.len()));
    let again = parse(&text_of(&addresses, &key)).map(|(found, key)| (found, key.to_hex()));
    assert_eq!(again, Some((addresses, key.to_hex())));
}
