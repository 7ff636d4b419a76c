//! The check of imports between the modules of a crate: a circle has three modules at most.
//!
//! A module may use those above it (`super`, the crate's root), because it is a part of them: such a use does not count.
//! A use of a name that another module re-exports counts as a use of the module that the name is from. Some uses are not
//! found: a name that its module re-exports and also uses, a path that begins with an imported module, a private import
//! that a child uses, a re-export under another name or by a glob.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use crate::names::code_of;

/// Modules of one circle at most.
const CIRCLE_MODULES_MAX: usize = 3;

/// Names from the crate's root to a module; the root has none.
type Module = Vec<String>;

/// The text of one module, taken apart.
#[derive(Default)]
struct Source {
    /// Modules in files of their own.
    children: BTreeSet<String>,
    /// Paths in code, as they are written; tests are left out.
    uses: Vec<Vec<String>>,
    /// Names that are re-exported, and where from.
    exports: BTreeMap<String, Vec<String>>,
}

/// Complaints about the crates.
pub(crate) fn check(root: &Path, tracked: &[PathBuf]) -> Vec<String> {
    let mut crates: BTreeMap<String, BTreeMap<Module, Source>> = BTreeMap::new();
    for path in tracked {
        let Some((name, module)) = module_of(&path.display().to_string()) else {
            continue;
        };
        let Ok(text) = std::fs::read_to_string(root.join(path)) else {
            continue;
        };
        let modules = crates.entry(name).or_default();
        modules.insert(module, Source::parse(&text));
    }
    let all = crates.iter().flat_map(|(name, modules)| {
        let circles = circles(&graph(modules)).into_iter();
        circles.map(move |circle| (name, circle))
    });
    all.filter(|(_, circle)| circle.len() > CIRCLE_MODULES_MAX)
        .map(|(name, circle)| {
            let names: Vec<String> = circle.iter().map(|module| module.join("::")).collect();
            format!(
                "crates/{name}: {} modules import each other in a circle, more than {CIRCLE_MODULES_MAX}: {}",
                names.len(),
                names.join(", ")
            )
        })
        .collect()
}

/// The crate and the module of a source file; none for tests and helpers of tests.
fn module_of(path: &str) -> Option<(String, Module)> {
    let (name, file) = path.strip_prefix("crates/")?.split_once("/src/")?;
    let mut module: Module = file
        .strip_suffix(".rs")?
        .split('/')
        .map(str::to_owned)
        .collect();
    let is_test =
        |part: &String| matches!(&**part, "tests" | "testing") || part.ends_with("_tests");
    if module.iter().any(is_test) {
        return None;
    }
    if matches!(&**module.last()?, "mod" | "lib" | "main") {
        module.pop();
    }
    Some((name.to_owned(), module))
}

impl Source {
    fn parse(text: &str) -> Self {
        let code = code_of(text, true);
        let code = code
            .split("#[cfg(test)]\nmod tests {")
            .next()
            .unwrap_or_default();
        let mut source = Self::default();
        for line in code.lines() {
            let words: Vec<&str> = line.split_whitespace().collect();
            if let [.., "mod", name] = words[..]
                && let Some(name) = name.strip_suffix(';')
            {
                source.children.insert(name.to_owned());
            }
        }
        source.read_uses(code);
        source
    }

    /// Reads `use` declarations, then paths in expressions and types.
    fn read_uses(&mut self, code: &str) {
        let mut others = String::new();
        let mut rest = code;
        while let Some(at) = find_word(rest, "use") {
            let (before, after) = rest.split_at(at);
            let (tree, behind) = after[3..].split_once(';').unwrap_or((&after[3..], ""));
            let line = before.rsplit('\n').next().unwrap_or_default();
            for path in expanded(tree) {
                if let (true, Some(name)) = (line.trim_start().starts_with("pub"), path.last()) {
                    self.exports.insert(name.clone(), path.clone());
                }
                self.uses.push(path);
            }
            others.push_str(before);
            rest = behind;
        }
        others.push_str(rest);
        let is_path = |c: char| c.is_alphanumeric() || matches!(c, '_' | ':');
        for word in others
            .split(|c| !is_path(c))
            .filter(|word| word.contains("::"))
        {
            let path = word
                .split("::")
                .filter(|part| !part.is_empty() && !part.contains(':'));
            self.uses.push(path.map(str::to_owned).collect());
        }
    }
}

/// Where a word stands by itself.
fn find_word(text: &str, word: &str) -> Option<usize> {
    let is_part = |c: char| c.is_alphanumeric() || c == '_';
    text.match_indices(word).map(|(at, _)| at).find(|at| {
        let before = text[..*at].chars().next_back();
        let after = text[at + word.len()..].chars().next();
        !before.is_some_and(is_part) && after.is_some_and(char::is_whitespace)
    })
}

/// The paths of a `use` tree.
fn expanded(tree: &str) -> Vec<Vec<String>> {
    let tree = tree.trim();
    if let Some(inner) = tree.strip_prefix('{') {
        let inner = inner.strip_suffix('}').unwrap_or(inner);
        let mut depth = 0;
        let parts = inner.split(|c| {
            depth += i32::from(c == '{') - i32::from(c == '}');
            c == ',' && depth == 0
        });
        return parts.flat_map(expanded).collect();
    }
    let tree = tree.split(" as ").next().unwrap_or_default();
    match tree.split_once("::") {
        Some((first, rest)) => expanded(rest)
            .into_iter()
            .map(|rest| [vec![first.trim().to_owned()], rest].concat())
            .collect(),
        None if tree.is_empty() => Vec::new(),
        None => vec![vec![tree.trim().to_owned()]],
    }
}

/// The modules that each module uses, without those above it.
fn graph(modules: &BTreeMap<Module, Source>) -> BTreeMap<&Module, BTreeSet<&Module>> {
    let used = |module: &Module, source: &Source| {
        let exported = |path: &&Vec<String>| !source.exports.values().any(|export| export == *path);
        let paths = source.uses.iter().filter(exported);
        let found = paths.filter_map(|path| resolved(modules, module, path, 0));
        found
            .filter_map(|found| modules.get_key_value(&found).map(|(key, _)| key))
            .filter(|found| !module.starts_with(found))
            .collect()
    };
    modules
        .iter()
        .map(|(module, source)| (module, used(module, source)))
        .collect()
}

/// The module in which a path that `from` writes ends.
fn resolved(
    modules: &BTreeMap<Module, Source>,
    from: &Module,
    path: &[String],
    depth: usize,
) -> Option<Module> {
    let mut at = from.clone();
    let mut rest = path;
    match &**path.first()? {
        "crate" => {
            at.clear();
            rest = &path[1..];
        }
        "self" => rest = &path[1..],
        "super" => {
            while let Some(("super", after)) =
                rest.split_first().map(|(word, after)| (&**word, after))
            {
                at.pop()?;
                rest = after;
            }
        }
        child if modules.get(from)?.children.contains(child) => {}
        _ => return None,
    }
    while let Some((name, after)) = rest.split_first() {
        let below = [&at[..], std::slice::from_ref(name)].concat();
        if modules.contains_key(&below) {
            at = below;
            rest = after;
            continue;
        }
        // Re-exports of re-exports are few; a circle of them compiles for no name.
        if let Some(export) = modules.get(&at).and_then(|source| source.exports.get(name))
            && depth < 8
        {
            let whole = [&export[..], after].concat();
            return resolved(modules, &at, &whole, depth + 1).or(Some(at));
        }
        break;
    }
    Some(at)
}

/// Sets of modules each of which reaches all others of its set.
fn circles<'a>(graph: &BTreeMap<&'a Module, BTreeSet<&'a Module>>) -> Vec<BTreeSet<&'a Module>> {
    let reached: BTreeMap<&Module, BTreeSet<&Module>> = graph
        .keys()
        .map(|start| {
            let mut seen = BTreeSet::new();
            let mut next: Vec<&Module> = graph[start].iter().copied().collect();
            while let Some(module) = next.pop() {
                if seen.insert(module) {
                    next.extend(graph.get(module).into_iter().flatten());
                }
            }
            (*start, seen)
        })
        .collect();
    let mut found: Vec<BTreeSet<&Module>> = Vec::new();
    for (module, reaches) in &reached {
        if found.iter().any(|circle| circle.contains(module)) {
            continue;
        }
        let back = reaches
            .iter()
            .filter(|other| reached[**other].contains(module));
        let circle: BTreeSet<&Module> = back.copied().collect();
        if circle.len() > 1 {
            found.push(circle);
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(files: &[(&str, &str)]) -> Vec<Vec<String>> {
        let modules: BTreeMap<Module, Source> = files
            .iter()
            .map(|(path, text)| {
                let (_, module) = module_of(path).expect("a source file");
                (module, Source::parse(text))
            })
            .collect();
        circles(&graph(&modules))
            .into_iter()
            .map(|circle| circle.into_iter().map(|module| module.join("::")).collect())
            .collect()
    }

    #[test]
    fn a_circle_is_found_in_every_way_of_writing_it() {
        for back in [
            "use crate::a::A;",
            "use crate::{b::B, a::{self, A}};",
            "use super::a::A as Other;",
            "fn f() -> crate::a::A { loop {} }",
            "use super::Renamed;",
        ] {
            let root = "mod a;\nmod b;\nmod c;\npub(crate) use a::{A, Renamed};\n";
            let files = [
                ("crates/x/src/lib.rs", root),
                ("crates/x/src/a.rs", "use crate::b::B;\n"),
                ("crates/x/src/b.rs", "use super::c;\n"),
                ("crates/x/src/c.rs", back),
            ];
            assert_eq!(found(&files), [["a", "b", "c"]], "{back}");
        }
    }

    #[test]
    fn uses_of_modules_above_tests_comments_and_strings_do_not_count() {
        for back in [
            "use super::Shared;",
            "// use crate::a::A;\n",
            "const TEXT: &str = \"crate::a::A\";",
            "#[cfg(test)]\nmod tests {\n    use crate::a::A;\n}\n",
        ] {
            let files = [
                ("crates/x/src/lib.rs", "mod a;\npub struct Shared;\n"),
                ("crates/x/src/a.rs", "mod b;\nuse self::b::B;\n"),
                ("crates/x/src/a/b.rs", back),
            ];
            assert!(found(&files).is_empty(), "{back}");
        }
    }
}
