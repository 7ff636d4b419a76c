//! The check of names: words of the former dialect, which identifiers and files may not use again.
//!
//! Only code is read, without its comments and strings.

use std::path::{Path, PathBuf};

/// Words of which no identifier and no file name is made, whatever stands beside them; and what to say instead.
const PARTS: &[(&str, &str)] = &[
    ("seat", "driver lock, rank assignment"),
    ("glance", "poll_once"),
    ("bell", "notifier"),
    ("doorbell", "notifier"),
    ("patience", "wait policy, timeout"),
    ("company", "oversubscription"),
    ("crowd", "oversubscription"),
    ("crowded", "oversubscribed"),
    ("ticket", "operation tag"),
    ("aside", "out-of-band message"),
    ("letter", "out-of-band message"),
    ("mail", "out-of-band message, outbox"),
    ("parcel", "payload"),
    ("courier", "payload client"),
    ("meeting", "rendezvous"),
    ("door", "waiting set"),
    ("estate", "shm segment"),
    ("heir", "attaching rank"),
    ("leash", "parent watch"),
    ("board", "readiness bitmap"),
    ("wish", "override"),
    ("hopeless", "deadlocked, failed for good"),
    ("standstill", "stall"),
    ("duel", "A/B comparison"),
    ("last_words", "final notification, error lines"),
    ("stage_early", "prestage"),
    ("early_area", "prestaged area"),
    ("said_twice", "marked twice"),
    ("give_way", "yield"),
    ("parked", "suspended"),
    ("speaking", "sending"),
];

/// Words that mean something else inside a longer name, but stand for nothing alone; types and modules in any case.
const WHOLE: &[(&str, &str)] = &[
    ("rest", "thread state"),
    ("ticks", "periodic polling"),
    ("turn", "progress, time slice"),
    ("turns", "polls"),
    ("spread", "core migration"),
    ("early", "pre-staged"),
    ("content", "request signature"),
    ("agreement", "validation, capabilities"),
    ("agreements", "capabilities"),
    ("way", "route, direction, algorithm, variant"),
    ("ways", "routes, directions, mechanisms"),
    ("means", "execution context, scratch"),
    ("lists", "scratch"),
    ("room", "waiting set, space"),
    ("say", "mark ready"),
];

/// Words of which no identifier of a few parts is made, and what to say instead. Longer names are sentences.
const IN_SHORT_NAMES: &[(&str, &str)] = &[
    ("told", "sent, reported, announced"),
    ("hear", "receive, handle"),
    ("hears", "receives, handles"),
    ("heard", "received, handled"),
    ("say", "send, note, print"),
    ("says", "sends, prints"),
    ("said", "sent, printed, text"),
    ("look", "poll, check, search"),
    ("looks", "polls, checks"),
    ("looked", "polled, checked"),
    ("held", "kept, owned, training state"),
    ("moment", "time, timestamp"),
    ("flight", "execution, operation; `in_flight` is a term"),
    ("attend", "join, serve"),
];

/// Names of more parts are sentences.
const NAME_PARTS_MAX: usize = 4;

/// Types that stood for several things each: the one file that may still define one, or `""` for none.
const TYPES: &[(&str, &str)] = &[
    ("Worker", "crates/horovod-protocol/src/worker.rs"),
    ("Slot", "crates/horovod-protocol/src/message.rs"),
    ("Plan", ""),
    ("Shared", ""),
    ("Seat", ""),
];

/// Names that stood for several types of Rust each, and the one file that may still define one, or `""` for none.
const RUST_TYPES: &[(&str, &str)] = &[
    ("Kind", "crates/horovod-settings/src/kinds.rs"),
    ("Operand", ""),
    ("Outcome", ""),
    ("Phase", ""),
    ("Place", ""),
    ("Stage", ""),
    ("State", ""),
    ("Step", ""),
    ("Waiting", ""),
    ("Work", "crates/horovod-collectives/src/local.rs"),
];

/// Where an ordinary sense stays: a beginning of paths, the identifier in lower case, and why.
const ALLOWED: &[(&str, &str, &str)] = &[
    ("examples/keras", "patience", "Keras' name of an argument"),
    (
        "python/horovod/spark/common/store.py",
        "kerb_ticket",
        "an argument's name for a ticket of Kerberos",
    ),
    (
        "python/horovod/spark/keras/remote.py",
        "tensor_board",
        "Keras' name of a callback",
    ),
    (
        "tests/integration/test_spark_keras_estimator.py",
        "tensor_board",
        "Keras' name of a callback",
    ),
];

/// Complaints about the names of files and in their code.
pub(crate) fn check(root: &Path, tracked: &[PathBuf]) -> Vec<String> {
    let mut complaints = Vec::new();
    for path in tracked {
        let name = path.display().to_string();
        let is_code = [".rs", ".py", ".pyi"].iter().any(|end| name.ends_with(end));
        if !is_code {
            continue;
        }
        let text = std::fs::read_to_string(root.join(path)).unwrap_or_default();
        complaints.extend(check_text(&name, &text));
    }
    complaints
}

fn check_text(name: &str, text: &str) -> Vec<String> {
    let mut complaints = Vec::new();
    let stem = Path::new(name).file_stem().unwrap_or_default();
    let stem = stem.to_string_lossy();
    if let Some((word, instead)) = forbidden(name, &stem, true) {
        complaints.push(format!("{name}: a file named by \"{word}\": {instead}"));
    }
    let is_rust = name.ends_with(".rs");
    let code = code_of(text, is_rust);
    let rust_types: &[_] = if is_rust { RUST_TYPES } else { &[] };
    for (number, line) in code.lines().enumerate() {
        let mut before = "";
        for identifier in identifiers(line) {
            let at = number + 1;
            let defines = ["struct", "enum", "trait", "type", "class", "mod"].contains(&before);
            if let Some((word, instead)) = forbidden(name, identifier, defines) {
                complaints.push(format!("{name}:{at}: {identifier}: \"{word}\": {instead}"));
            }
            let mut types = TYPES.iter().chain(rust_types);
            let other = types.find(|(kind, _)| *kind == identifier);
            if defines && other.is_some_and(|(_, home)| *home != name) {
                complaints.push(format!(
                    "{name}:{at}: another type named {identifier}: say of what"
                ));
            }
            before = identifier;
        }
    }
    complaints
}

/// The word of the list in this identifier, if its place does not allow it.
fn forbidden(path: &str, identifier: &str, defines: bool) -> Option<(&'static str, &'static str)> {
    let parts = parts_of(identifier);
    let whole = parts.join("_");
    let padded = format!("_{whole}_");
    let is_part = |word: &str| {
        [format!("_{word}_"), format!("_{word}s_")]
            .iter()
            .any(|part| padded.contains(part))
    };
    let in_flight = parts.windows(2).any(|pair| pair == ["in", "flight"]);
    let is_short = parts.len() <= NAME_PARTS_MAX;
    let in_short = |word: &str| {
        let is_term = word == "flight" && in_flight;
        is_short && !is_term && parts.iter().any(|part| part == word)
    };
    let found = PARTS
        .iter()
        .find(|(word, _)| is_part(word))
        .or_else(|| IN_SHORT_NAMES.iter().find(|(word, _)| in_short(word)))
        .or_else(|| WHOLE.iter().find(|(word, _)| defines && *word == whole))?;
    let is_allowed = ALLOWED
        .iter()
        .any(|(place, word, _)| path.starts_with(place) && is_part(word));
    (!is_allowed).then_some(*found)
}

/// `SeatIsFree`, `seat_is_free` and `SEAT_IS_FREE` as `seat`, `is`, `free`.
fn parts_of(identifier: &str) -> Vec<String> {
    let mut parts = vec![String::new()];
    let characters: Vec<char> = identifier.chars().collect();
    for (at, character) in characters.iter().enumerate() {
        let before = at.checked_sub(1).map(|at| characters[at]);
        let begins = character.is_uppercase()
            && (before.is_some_and(|c| !c.is_uppercase())
                || characters.get(at + 1).is_some_and(|c| c.is_lowercase()));
        if (*character == '_' || begins) && parts.last().is_some_and(|part| !part.is_empty()) {
            parts.push(String::new());
        }
        if let (true, Some(part)) = (*character != '_', parts.last_mut()) {
            part.extend(character.to_lowercase());
        }
    }
    parts.retain(|part| !part.is_empty());
    parts
}

fn identifiers(line: &str) -> impl Iterator<Item = &str> {
    line.split(|c: char| !c.is_alphanumeric() && c != '_')
        .filter(|word| word.starts_with(|c: char| c.is_alphabetic() || c == '_'))
}

/// The text with comments and strings blanked; its lines stay where they are.
pub(crate) fn code_of(text: &str, is_rust: bool) -> String {
    let mut code = String::with_capacity(text.len());
    let mut rest = text;
    while let Some(first) = rest.chars().next() {
        let length = match skipped(rest, &code, is_rust) {
            Some(length) => {
                code.push(' ');
                code.extend(rest[..length].chars().filter(|c| *c == '\n'));
                length
            }
            None => {
                code.push(first);
                first.len_utf8()
            }
        };
        rest = &rest[length..];
    }
    code
}

/// The length of the comment or string that begins here, if one does.
fn skipped(rest: &str, before: &str, is_rust: bool) -> Option<usize> {
    let until = |opening: usize, closing: &str| {
        let end = rest[opening..].find(closing);
        end.map_or(rest.len(), |at| opening + at + closing.len())
    };
    let line = || rest.find('\n').unwrap_or(rest.len());
    if !is_rust {
        return match rest.as_bytes()[0] {
            b'#' => Some(line()),
            b'"' if rest.starts_with("\"\"\"") => Some(until(3, "\"\"\"")),
            b'\'' if rest.starts_with("'''") => Some(until(3, "'''")),
            quote @ (b'"' | b'\'') => Some(quoted(rest, quote)),
            _ => None,
        };
    }
    if rest.starts_with("//") {
        return Some(line());
    }
    if rest.starts_with("/*") {
        return Some(until(2, "*/"));
    }
    if rest.starts_with('"') {
        return Some(quoted(rest, b'"'));
    }
    let in_word = before.ends_with(|c: char| c.is_alphanumeric() || c == '_');
    if rest.starts_with('r') && (!in_word || before.ends_with('b')) {
        let hashes = rest[1..].bytes().take_while(|b| *b == b'#').count();
        if rest[1 + hashes..].starts_with('"') {
            let closing = format!("\"{}", "#".repeat(hashes));
            return Some(until(2 + hashes, &closing));
        }
    }
    // A character, but not a lifetime.
    let after = rest.strip_prefix('\'')?;
    let one = after.chars().next()?;
    if one == '\\' {
        return Some(quoted(rest, b'\''));
    }
    after[one.len_utf8()..]
        .starts_with('\'')
        .then(|| 2 + one.len_utf8())
}

/// The length of a string with escapes.
fn quoted(rest: &str, quote: u8) -> usize {
    let mut bytes = rest.bytes().enumerate().skip(1);
    while let Some((at, byte)) = bytes.next() {
        if byte == b'\\' {
            bytes.next();
        } else if byte == quote {
            return at + 1;
        }
    }
    rest.len()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn finds_words_in_every_way_of_writing_them() {
        for (code, word) in [
            ("fn seat_is_free() {}", "seat"),
            ("const GOODBYE_PATIENCE: u8 = 1;", "patience"),
            ("struct EventsBells;", "bell"),
            ("let last_words = 1;", "last_words"),
            ("mod spread;", "spread"),
            ("enum Rest {}", "rest"),
        ] {
            let complaints = check_text("crates/a/src/lib.rs", code);
            assert_eq!(complaints.len(), 1, "{code}: {complaints:?}");
            assert!(
                complaints[0].contains(&format!("\"{word}\"")),
                "{complaints:?}"
            );
        }
        assert_eq!(check_text("crates/a/src/leash.rs", "").len(), 1);
        assert_eq!(
            check_text("a/_parcels.py", "meeting = 1  # at the door\n").len(),
            2
        );
    }

    #[test]
    fn ordinary_words_comments_and_strings_pass() {
        for code in [
            "let rest = &bytes[1..]; // the seat",
            "let spread = max - min; /* a duel */ call(\"mail\", r#\"a \" bell\"#, '\"', b'\\'');",
            "fn of<'a>(turn: &'a str) -> Outdoor<'a> { both_ways(clipboard) }",
        ] {
            assert_eq!(check_text("crates/a/src/lib.rs", code), [""; 0]);
        }
        let python = "\"\"\"A meeting.\n\"\"\"\nx = 'a door'  # bell\n";
        assert_eq!(check_text("a.py", python), [""; 0]);
    }

    #[test]
    fn what_stands_for_one_thing_is_defined_once() {
        let code = "pub struct Worker;\n";
        assert!(check_text("crates/horovod-protocol/src/worker.rs", code).is_empty());
        assert_eq!(
            check_text("crates/horovod-launch/src/agent.rs", code).len(),
            1
        );
        assert_eq!(check_text("a.rs", "struct Plan;").len(), 1);
        assert_eq!(check_text("a.rs", "enum Phase {}").len(), 1);
        assert!(check_text("a.py", "class Phase: pass").is_empty());
    }

    #[test]
    fn words_of_short_names_may_stand_in_sentences() {
        let code =
            "let told = is_told(in_flight); fn what_is_told_is_not_meant() { lookup(flight) }";
        assert_eq!(check_text("a.rs", code).len(), 3);
    }

    #[test]
    fn a_place_may_allow_a_word() {
        let code = "patience = 3\n";
        assert!(check_text("examples/keras/a.py", code).is_empty());
        assert_eq!(check_text("examples/torch/a.py", code).len(), 1);
    }
}
