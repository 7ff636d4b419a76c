//! Keys of a terminal from the bytes that it sends.

/// A key that the view knows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Key {
    Quit,
    Sort,
    Reverse,
    Up,
    Down,
    PageUp,
    PageDown,
    First,
    Last,
}

const CTRL_C: u8 = 3;
const ESCAPE: u8 = 0x1b;

/// The keys in some bytes. Others are left out.
pub(super) fn keys(mut bytes: &[u8]) -> Vec<Key> {
    let mut found = Vec::new();
    while let Some((first, rest)) = bytes.split_first() {
        let (key, length) = match (*first, rest) {
            (ESCAPE, [b'[' | b'O', sequence @ ..]) => {
                let (key, length) = escaped(sequence);
                (key, length + 2)
            }
            (byte, _) => (plain(byte), 1),
        };
        found.extend(key);
        bytes = &bytes[length.min(bytes.len())..];
    }
    found
}

fn plain(byte: u8) -> Option<Key> {
    Some(match byte {
        b'q' | b'Q' | CTRL_C => Key::Quit,
        b's' => Key::Sort,
        b'r' => Key::Reverse,
        b'k' => Key::Up,
        b'j' => Key::Down,
        b' ' => Key::PageDown,
        b'b' => Key::PageUp,
        b'g' => Key::First,
        b'G' => Key::Last,
        _ => return None,
    })
}

/// The key of a sequence after its introducer, and the length of the sequence.
fn escaped(sequence: &[u8]) -> (Option<Key>, usize) {
    let parameters = sequence
        .iter()
        .take_while(|byte| byte.is_ascii_digit() || **byte == b';');
    let parameters = parameters.count();
    let key = match (sequence.get(parameters), &sequence[..parameters]) {
        (Some(b'A'), _) => Some(Key::Up),
        (Some(b'B'), _) => Some(Key::Down),
        (Some(b'H'), _) | (Some(b'~'), b"1" | b"7") => Some(Key::First),
        (Some(b'F'), _) | (Some(b'~'), b"4" | b"8") => Some(Key::Last),
        (Some(b'~'), b"5") => Some(Key::PageUp),
        (Some(b'~'), b"6") => Some(Key::PageDown),
        _ => None,
    };
    (key, parameters + 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn plain_keys_arrows_and_pages_are_known() {
        use Key::{Down, First, Last, PageDown, PageUp, Quit, Reverse, Sort, Up};
        assert_eq!(keys(b"sr\x03"), [Sort, Reverse, Quit]);
        assert_eq!(keys(b"\x1b[A\x1b[B\x1bOA"), [Up, Down, Up]);
        assert_eq!(
            keys(b"\x1b[5~\x1b[6~\x1b[H\x1b[4~"),
            [PageUp, PageDown, First, Last]
        );
        assert_eq!(keys(b"kjgG b"), [Up, Down, First, Last, PageDown, PageUp]);
    }

    #[test]
    fn other_bytes_are_left_out() {
        assert_eq!(keys(b"xyz\x1b[3~\x1b[1;5C\xff"), []);
        assert_eq!(keys(b"\x1b[3~q"), [Key::Quit]);
        for cut in [&b"\x1b"[..], b"\x1b[", b"\x1b[5", b"\x1bO"] {
            assert_eq!(keys(cut), []);
        }
    }
}
