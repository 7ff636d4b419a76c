//! The check of paths: every one that the map and the docs name must exist, for maps rot.

use std::path::Path;

/// Pages whose back-quoted paths are checked.
const PAGES: &[&str] = &["ARCHITECTURE.md", "CONTRIBUTING.md", "README.md"];
const ARCHITECTURE_LINES_MAX: usize = 200;
/// First parts of a path that lie in this repository.
const TOPS: &[&str] = &[
    "bench/",
    "build_backend/",
    "crates/",
    "docs/",
    "examples/",
    "python/",
    "tests/",
    "xtask/",
    ".ci/",
];

/// Complaints about the pages.
pub(crate) fn check(root: &Path) -> Vec<String> {
    let mut complaints = Vec::new();
    let mut pages: Vec<String> = PAGES.iter().map(|page| (*page).to_owned()).collect();
    if let Ok(docs) = std::fs::read_dir(root.join("docs")) {
        pages.extend(
            docs.flatten()
                .filter_map(|entry| entry.file_name().into_string().ok())
                .filter(|name| name.ends_with(".md"))
                .map(|name| format!("docs/{name}")),
        );
    }
    pages.sort();
    for page in &pages {
        let Ok(text) = std::fs::read_to_string(root.join(page)) else {
            complaints.push(format!("{page}: missing"));
            continue;
        };
        for path in paths(&text).map(|path| path.split("::").next().unwrap_or(path)) {
            if !root.join(path).exists() {
                complaints.push(format!("{page}: names {path}, which does not exist"));
            }
        }
        let folder = Path::new(page).parent().unwrap_or(Path::new(""));
        for link in links(&text) {
            if !root.join(folder).join(link).exists() {
                complaints.push(format!("{page}: links to {link}, which does not exist"));
            }
        }
        let lines = text.lines().count();
        if page == "ARCHITECTURE.md" && lines >= ARCHITECTURE_LINES_MAX {
            complaints.push(format!("{page}: {lines} lines, not a map any more"));
        }
    }
    complaints
}

/// Back-quoted words that look like paths of this repository; patterns and placeholders are none.
fn paths(text: &str) -> impl Iterator<Item = &str> {
    text.split('`').skip(1).step_by(2).filter(|word| {
        TOPS.iter().any(|top| word.starts_with(top)) && !word.contains(['*', '<', '{', ' ', '…'])
    })
}

/// Targets of Markdown links to files.
fn links(text: &str) -> impl Iterator<Item = &str> {
    text.split("](")
        .skip(1)
        .filter_map(|rest| rest.split(')').next())
        .map(|target| target.split('#').next().unwrap_or_default())
        .filter(|target| !target.is_empty() && !target.contains("://") && !target.contains(' '))
}

#[cfg(test)]
mod tests {
    use super::{links, paths};

    #[test]
    fn finds_paths_and_skips_patterns() {
        let text = "see `crates/a/src/lib.rs`, `tests/<x>/y`, `python` and `docs/*.md`";
        assert_eq!(paths(text).collect::<Vec<_>>(), ["crates/a/src/lib.rs"]);
    }

    #[test]
    fn finds_links_to_files_only() {
        let text = "[a](docs/a.md#part) [b](https://b) [c](#here)";
        assert_eq!(links(text).collect::<Vec<_>>(), ["docs/a.md"]);
    }
}
