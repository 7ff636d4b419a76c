//! The check of paths: every one that the map and the docs name must exist, for maps rot.

use std::path::Path;

/// Pages whose back-quoted paths are checked.
const PAGES: &[&str] = &[
    "ARCHITECTURE.md",
    "CODE_OF_CONDUCT.md",
    "CONTRIBUTING.md",
    "GOVERNANCE.md",
    "README.md",
    "SECURITY.md",
];
const MAP: &str = "ARCHITECTURE.md";
const MAP_LINES_MAX: usize = 150;
const MAP_COLUMNS_MAX: usize = 120;
/// Rows of its table "you look for … | file".
const MAP_ROWS_MIN: usize = 20;
const MAP_TABLE: &str = "| you look for |";
/// Folders of further pages.
const FOLDERS: &[&str] = &["docs", "docs/internals"];
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
    for folder in FOLDERS {
        let Ok(docs) = std::fs::read_dir(root.join(folder)) else {
            complaints.push(format!("{folder}: missing"));
            continue;
        };
        let names = docs
            .flatten()
            .filter_map(|entry| entry.file_name().into_string().ok());
        let found = names.filter(|name| name.ends_with(".md"));
        pages.extend(found.map(|name| format!("{folder}/{name}")));
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
        if page == MAP {
            complaints.extend(check_size(&text).map(|complaint| format!("{page}: {complaint}")));
        }
    }
    complaints
}

/// Complaints about a map that is too large to be read at once, or whose table is too small.
fn check_size(text: &str) -> impl Iterator<Item = String> {
    let lines = text.lines().count();
    let is_long = lines > MAP_LINES_MAX;
    let long = is_long.then(|| format!("{lines} lines, more than {MAP_LINES_MAX}"));
    let wide = text.lines().zip(1..).filter_map(|(line, number)| {
        let columns = line.chars().count();
        (columns > MAP_COLUMNS_MAX)
            .then(|| format!("line {number} has {columns} columns, more than {MAP_COLUMNS_MAX}"))
    });
    let table = text.lines().skip_while(|line| !line.starts_with(MAP_TABLE));
    let rows = table
        .take_while(|line| line.starts_with('|'))
        .count()
        .saturating_sub(2);
    let small = (rows < MAP_ROWS_MIN)
        .then(|| format!("the table {MAP_TABLE:?} has {rows} rows, fewer than {MAP_ROWS_MIN}"));
    let wide: Vec<String> = wide.collect();
    long.into_iter().chain(wide).chain(small)
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
    use super::{check_size, links, paths};

    #[test]
    fn a_map_is_short_and_narrow_and_has_its_table() {
        let rows = "| a | `b` |\n".repeat(20);
        let map = format!("# Map\n\n| you look for | file |\n| --- | --- |\n{rows}");
        assert_eq!(check_size(&map).count(), 0);
        let long = format!("{map}{}", "\n".repeat(150));
        assert_eq!(check_size(&long).count(), 1);
        let wide = format!("{map}{}", "x".repeat(121));
        assert_eq!(check_size(&wide).count(), 1);
        let small = map.replacen("| a | `b` |\n", "", 1);
        assert_eq!(check_size(&small).count(), 1);
    }

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
