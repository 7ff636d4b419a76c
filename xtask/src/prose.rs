//! The check of prose: comments and docstrings without sentences that begin with a relative Who, Whoever or What.
//!
//! Such a sentence names its subject last. A noun does it first: "The sender.", not "Who sends it.".

use std::path::{Path, PathBuf};

/// Beginnings of sentences that are refused in comments and docstrings.
const BEGINNINGS: &[&str] = &["Who", "Whoever", "What"];

/// Texts of former names that strings, scripts and pages may not use, and the name to use.
const TEXTS: &[(&str, &str)] = &[
    ("HOROVODRUN_LEASH", "HOROVODRUN_PARENT_WATCH"),
    ("horovod-rs meeting", "horovod-rs rendezvous"),
    ("horovod-meeting", "horovod-rendezvous"),
];

/// Files that may use the former names: this one, and records of renames.
const MAY_NAME: &[&str] = &["xtask/src/prose.rs", "CHANGELOG.md", "CONTRIBUTING.md"];

/// Complaints about the sentences in all source files, and about former names in all files.
pub(crate) fn check(root: &Path, tracked: &[PathBuf]) -> Vec<String> {
    let mut complaints = Vec::new();
    for path in tracked {
        let Ok(text) = std::fs::read_to_string(root.join(path)) else {
            continue; // not text
        };
        let name = path.display().to_string();
        complaints.extend(check_sentences(&name, &text));
        complaints.extend(check_names(&name, &text));
    }
    complaints
}

fn check_sentences(name: &str, text: &str) -> Vec<String> {
    let prose = match name.rsplit_once('.') {
        Some((_, "rs")) => comments(text),
        Some((_, "py" | "pyi")) => comments_and_docstrings(text),
        _ => Vec::new(),
    };
    let mut complaints = Vec::new();
    for (number, line) in prose {
        if let Some(word) = beginning(line) {
            complaints.push(format!(
                "{name}:{number}: a sentence begins with \"{word}\": name its subject first"
            ));
        }
    }
    complaints
}

fn check_names(name: &str, text: &str) -> Vec<String> {
    let mut complaints = Vec::new();
    if MAY_NAME.contains(&name) {
        return complaints;
    }
    for (number, line) in text.lines().enumerate() {
        for (former, instead) in TEXTS.iter().filter(|(former, _)| line.contains(former)) {
            let at = number + 1;
            complaints.push(format!("{name}:{at}: \"{former}\" is now \"{instead}\""));
        }
    }
    complaints
}

/// Lines that are only a comment, with their numbers, without the marks of the comment.
fn comments(text: &str) -> Vec<(usize, &str)> {
    fn of_comment((at, line): (usize, &str)) -> Option<(usize, &str)> {
        let rest = line.trim_start().strip_prefix("//")?;
        Some((at + 1, rest.trim_start_matches(['/', '!'])))
    }
    text.lines().enumerate().filter_map(of_comment).collect()
}

/// Lines of comments and docstrings, with their numbers, without their marks. A docstring begins its line.
fn comments_and_docstrings(text: &str) -> Vec<(usize, &str)> {
    const QUOTES: &str = "\"\"\"";
    let mut lines = Vec::new();
    let mut is_inside = false;
    let mut is_program = false;
    for (at, line) in text.lines().enumerate() {
        let begin = line.trim_start();
        let quotes = line.matches(QUOTES).count();
        if is_inside {
            lines.push((at + 1, begin));
            is_inside = quotes % 2 == 0;
        } else if is_program {
            is_program = quotes % 2 == 0;
        } else if let Some(rest) = begin.strip_prefix('#') {
            lines.push((at + 1, rest.trim_start_matches(':')));
        } else if let Some(rest) = begin.strip_prefix(QUOTES) {
            lines.push((at + 1, rest));
            is_inside = quotes % 2 == 1;
        } else {
            is_program = quotes % 2 == 1;
        }
    }
    lines
}

/// The refused word that begins a sentence in this line. Questions are not refused.
fn beginning(line: &str) -> Option<&'static str> {
    let ends = [". ", ": ", "; ", "! "];
    let starts = ends
        .iter()
        .flat_map(|end| line.match_indices(end).map(|(at, end)| at + end.len()));
    let mut starts = std::iter::once(0).chain(starts);
    starts.find_map(|start| {
        let sentence = line[start..].trim_start();
        let word = sentence.split(|c: char| !c.is_alphanumeric()).next()?;
        let is_question = sentence.contains('?');
        BEGINNINGS
            .iter()
            .copied()
            .find(|beginning| *beginning == word && !is_question)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lines_of(name: &str, text: &str) -> Vec<usize> {
        let number = |complaint: &String| complaint.split(':').nth(1)?.parse().ok();
        let mut complaints = check_sentences(name, text);
        complaints.extend(check_names(name, text));
        complaints.iter().filter_map(number).collect()
    }

    #[test]
    fn refuses_sentences_in_comments_of_rust() {
        let text =
            "//! What it is.\nfn f() {} // Who\n    /// Ends. Whoever waits is woken.\n// Whole.\n";
        assert_eq!(lines_of("a.rs", text), [1, 3]);
        assert_eq!(
            lines_of("a.rs", "// What is it? It is one.\nlet a = \"What\";\n"),
            [0; 0]
        );
    }

    #[test]
    fn refuses_sentences_in_comments_and_docstrings_of_python() {
        let text = "\"\"\"What a module.\n\nWho reads.\n\"\"\"\n#: What it is.\nx = \"\"\"\nWhat a program.\n# Who\n\"\"\"\n";
        assert_eq!(lines_of("a.py", text), [1, 3, 5]);
        assert_eq!(lines_of("a.py", "\"\"\"One.\"\"\"\nWhat = 1\n"), [0; 0]);
    }

    #[test]
    fn refuses_former_names_everywhere_but_in_records() {
        let text = "set HOROVODRUN_LEASH_FD\n";
        assert_eq!(lines_of("docs/a.md", text), [1]);
        assert_eq!(lines_of("CHANGELOG.md", text), [0; 0]);
    }
}
