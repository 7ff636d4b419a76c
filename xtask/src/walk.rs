//! The check of the walk: the list of files in which one gradient can be followed names what is there, and stays short.

use std::path::Path;

/// The page with the list, in a table whose rows are numbered.
const PAGE: &str = "docs/walk.md";
/// A newcomer reads so many files at most.
const FILES_MAX: usize = 15;
/// The part of the map that names the same files.
const MAP: &str = "ARCHITECTURE.md";
const MAP_SECTION: &str = "## Where to start reading";

/// One row: a file and the functions to read in it.
#[derive(Debug, PartialEq, Eq)]
struct WalkStep<'a> {
    number: usize,
    file: &'a str,
    functions: Vec<&'a str>,
}

/// Complaints about the list, and about the map where it differs.
pub(crate) fn check(root: &Path) -> Vec<String> {
    let read = |path: &str| std::fs::read_to_string(root.join(path)).ok();
    let Some(page) = read(PAGE) else {
        return vec![format!("{PAGE}: missing")];
    };
    let steps = steps(&page);
    let mut complaints = check_steps(&steps, read);
    let map = read(MAP).unwrap_or_default();
    let (in_map, in_list) = (section_files(&map), steps.iter().map(|step| step.file));
    if !in_map.iter().copied().eq(in_list) {
        complaints.push(format!(
            "{MAP}: \"{MAP_SECTION}\" names other files than {PAGE}, or in another order"
        ));
    }
    complaints
}

fn check_steps(steps: &[WalkStep<'_>], read: impl Fn(&str) -> Option<String>) -> Vec<String> {
    let mut complaints = Vec::new();
    if steps.is_empty() {
        complaints.push(format!("{PAGE}: no list"));
    }
    if steps.len() > FILES_MAX {
        let files = steps.len();
        complaints.push(format!("{PAGE}: {files} files, more than {FILES_MAX}"));
    }
    for (at, step) in steps.iter().enumerate() {
        let file = step.file;
        if step.number != at + 1 {
            complaints.push(format!("{PAGE}: {file} has the number {}", step.number));
        }
        if steps[..at].iter().any(|before| before.file == file) {
            complaints.push(format!("{PAGE}: enters {file} twice"));
        }
        if step.functions.is_empty() {
            complaints.push(format!("{PAGE}: names no function of {file}"));
        }
        let Some(text) = read(file) else {
            complaints.push(format!("{PAGE}: names {file}, which does not exist"));
            continue;
        };
        let keyword = if file.ends_with(".py") { "def" } else { "fn" };
        for function in &step.functions {
            if !defines(&text, keyword, function) {
                complaints.push(format!("{PAGE}: {file} has no function `{function}`"));
            }
        }
    }
    complaints
}

/// The rows of the table: `| number | file | functions | what happens |`.
fn steps(page: &str) -> Vec<WalkStep<'_>> {
    let rows = page.lines().filter_map(|line| {
        let mut cells = line.strip_prefix('|')?.split('|').map(str::trim);
        let number = cells.next()?.parse().ok()?;
        let file = quoted(cells.next()?).next()?;
        let functions = quoted(cells.next()?).collect();
        Some(WalkStep {
            number,
            file,
            functions,
        })
    });
    rows.collect()
}

/// The files that the map's section names.
fn section_files(map: &str) -> Vec<&str> {
    let section = map.split(MAP_SECTION).nth(1).unwrap_or_default();
    let section = section.split("\n## ").next().unwrap_or_default();
    quoted(section)
        .filter(|word| word.contains('/') && (word.ends_with(".rs") || word.ends_with(".py")))
        .collect()
}

/// The parts of `text` in back quotes.
fn quoted(text: &str) -> impl Iterator<Item = &str> {
    text.split('`').skip(1).step_by(2)
}

/// Whether some line of code begins the definition of this function.
fn defines(text: &str, keyword: &str, function: &str) -> bool {
    let is_comment = |line: &str| line.trim_start().starts_with(['/', '#']);
    text.lines().filter(|line| !is_comment(line)).any(|line| {
        let mut words = line.split_whitespace();
        let name = words.find(|word| *word == keyword).and(words.next());
        let name = name.and_then(|name| name.split(['(', '<']).next());
        name == Some(function)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const GOOD: &str = "# A walk\n\n| | file | functions | what happens |\n| --- | --- | --- | --- |\n\
        | 1 | `a.py` | `hook`, `send` | It begins with `other`. |\n| 2 | `b.rs` | `take` | It ends. |\n";

    fn complaints(page: &str) -> Vec<String> {
        check_steps(&steps(page), |path| match path {
            "a.py" => Some("# def other\n    def hook(self):\ndef send(x): pass\n".into()),
            "b.rs" => Some("/// fn send\npub(super) unsafe fn take<T>(x: T) {}\n".into()),
            _ => None,
        })
    }

    #[test]
    fn a_list_that_fits_is_accepted() {
        assert_eq!(complaints(GOOD), [""; 0]);
        assert_eq!(steps(GOOD)[0].functions, ["hook", "send"]);
    }

    #[test]
    fn each_kind_of_wrong_list_is_refused() {
        for (from, to, expected) in [
            ("`b.rs`", "`c.rs`", "does not exist"),
            ("`b.rs` | `take`", "`a.py` | `hook`", "twice"),
            ("`send`", "`other`", "has no function `other`"),
            ("`take`", "`tak`", "has no function `tak`"),
            ("`take`", "`send`", "has no function `send`"),
            ("`take`", "all", "names no function"),
            ("| 2 |", "| 3 |", "has the number 3"),
        ] {
            let found = complaints(&GOOD.replace(from, to));
            assert_eq!(found.len(), 1, "{to}: {found:?}");
            assert!(found[0].contains(expected), "{to}: {found:?}");
        }
        assert!(complaints("# No table\n")[0].contains("no list"));
    }

    #[test]
    fn a_list_of_too_many_files_is_refused() {
        let row = |n: usize| format!("| {n} | `{n}.rs` | `f` | It goes on. |\n");
        let text = |_: &str| Some("fn f() {}".to_owned());
        let page = |files: usize| (1..=files).map(row).collect::<String>();
        assert_eq!(check_steps(&steps(&page(FILES_MAX)), text), [""; 0]);
        let found = check_steps(&steps(&page(FILES_MAX + 1)), text);
        let complaint = format!("{} files", FILES_MAX + 1);
        assert!(
            found.len() == 1 && found[0].contains(&complaint),
            "{found:?}"
        );
    }

    #[test]
    fn the_files_of_a_section_are_those_up_to_the_next_heading() {
        let map = format!(
            "`x/a.rs`\n{MAP_SECTION}\n1. `x/b.rs`, `f`\n2. `x/c.py`\n\n## Next\n`x/d.rs`\n"
        );
        assert_eq!(section_files(&map), ["x/b.rs", "x/c.py"]);
    }
}
