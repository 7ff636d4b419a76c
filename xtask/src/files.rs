//! The check of source files: an opening sentence, a bounded length, no left-overs, bounds with names.

use std::path::{Path, PathBuf};
use std::process::Command;

/// Longer files hold more than one thing.
const FILE_LINES_MAX: usize = 600;

/// Files that may be longer, each with its reason.
const MAY_BE_LONGER: &[(&str, &str)] = &[];

/// All files that git knows or would add, relative to the root.
pub(crate) fn tracked(root: &Path) -> Result<Vec<PathBuf>, String> {
    let output = Command::new("git")
        .args(["ls-files", "--cached", "--others", "--exclude-standard"])
        .current_dir(root)
        .output()
        .map_err(|e| format!("git ls-files: {e}"))?;
    if !output.status.success() {
        return Err(format!(
            "git ls-files: {}",
            String::from_utf8_lossy(&output.stderr)
        ));
    }
    let text = String::from_utf8_lossy(&output.stdout);
    let mut found: Vec<PathBuf> = text
        .lines()
        .map(PathBuf::from)
        .filter(|path| root.join(path).is_file())
        .collect();
    found.sort();
    found.dedup();
    Ok(found)
}

/// Complaints about single files.
pub(crate) fn check(root: &Path, tracked: &[PathBuf]) -> Vec<String> {
    let mut complaints = Vec::new();
    for path in tracked {
        let Ok(text) = std::fs::read_to_string(root.join(path)) else {
            continue; // not text
        };
        let name = path.display().to_string();
        complaints.extend(check_text(&name, &text));
    }
    for (name, _) in MAY_BE_LONGER {
        let is_long = std::fs::read_to_string(root.join(name))
            .is_ok_and(|text| text.lines().count() > FILE_LINES_MAX);
        if !is_long {
            complaints.push(format!(
                "{name}: no longer needs its place in MAY_BE_LONGER"
            ));
        }
    }
    complaints
}

fn check_text(name: &str, text: &str) -> Vec<String> {
    let mut complaints = Vec::new();
    let is_rust = name.ends_with(".rs");
    let is_python = name.ends_with(".py") || name.ends_with(".pyi");
    if is_rust && !text.starts_with("//! ") {
        complaints.push(format!("{name}: does not open with a sentence (`//! ...`)"));
    }
    if is_python && !text.trim().is_empty() && !opens_with_docstring(text) {
        complaints.push(format!("{name}: does not open with a docstring"));
    }
    let lines = text.lines().count();
    let may_be_longer = MAY_BE_LONGER.iter().any(|(known, _)| *known == name);
    if (is_rust || is_python) && lines > FILE_LINES_MAX && !may_be_longer {
        complaints.push(format!("{name}: {lines} lines, more than {FILE_LINES_MAX}"));
    }
    if name == "xtask/src/files.rs" {
        return complaints; // names the words below
    }
    for (number, line) in text.lines().enumerate() {
        for word in ["FIXME", "XXX", "todo!(", "unimplemented!("] {
            if (is_rust || is_python) && line.contains(word) {
                complaints.push(format!("{name}:{}: left-over {word}", number + 1));
            }
        }
        // A TODO may stay when it names its condition: `TODO(when ...)`.
        if (is_rust || is_python) && line.contains("TODO") && !line.contains("TODO(when ") {
            complaints.push(format!("{name}:{}: TODO without its condition", number + 1));
        }
        for path in ["/work/", "/.library", "/tmp/target", "shared/DESIGN"] {
            if line.contains(path) {
                let at = number + 1;
                complaints.push(format!("{name}:{at}: a path of one machine: {path}"));
            }
        }
    }
    complaints
}

fn opens_with_docstring(text: &str) -> bool {
    let start = text
        .lines()
        .find(|line| !line.trim().is_empty() && !line.starts_with('#'));
    start.is_some_and(|line| line.starts_with("\"\"\"") || line.starts_with("r\"\"\""))
}

/// Every named bound (`*_MAX`) of the shipped crates, as `file: NAME`.
pub(crate) fn limits(root: &Path, tracked: &[PathBuf]) -> Vec<String> {
    let mut found = Vec::new();
    for path in tracked {
        if !path.starts_with("crates") || path.extension().is_none_or(|e| e != "rs") {
            continue;
        }
        let text = std::fs::read_to_string(root.join(path)).unwrap_or_default();
        for line in text.lines() {
            let Some((_, rest)) = line.split_once("const ") else {
                continue;
            };
            let name = rest.split(':').next().unwrap_or_default();
            if name.ends_with("_MAX") || name.contains("_MAX_") {
                found.push(format!("{}: {name}", path.display()));
            }
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::check_text;

    #[test]
    fn accepts_a_file_that_says_what_it_is() {
        assert!(check_text("a.rs", "//! Owns a.\nfn a() {}\n").is_empty());
        assert!(check_text("a.py", "#!/bin/env python\n\"\"\"Owns a.\"\"\"\n").is_empty());
        assert!(check_text("a/__init__.py", "").is_empty());
    }

    #[test]
    fn complains_about_each_kind_of_mess() {
        let cases = [
            ("a.rs", "fn a() {}\n".to_owned(), "does not open"),
            ("a.py", "import os\n".to_owned(), "docstring"),
            ("a.rs", format!("//! A.\n{}", "\n".repeat(600)), "lines"),
            ("a.rs", "//! A.\n// FIXME\n".to_owned(), "left-over"),
            ("a.rs", "//! A.\n// TODO later\n".to_owned(), "TODO"),
            ("a.md", "see /work/x\n".to_owned(), "one machine"),
        ];
        for (name, text, expected) in cases {
            let complaints = check_text(name, &text);
            assert_eq!(complaints.len(), 1, "{complaints:?}");
            assert!(complaints[0].contains(expected), "{complaints:?}");
        }
    }
}
