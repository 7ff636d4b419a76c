//! The inputs that the fuzzer kept, and those that once found something, on every machine.

#![allow(
    clippy::unwrap_used,
    reason = "a test wants to fail at once, with the place"
)]

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use horovod_fuzz::{SEEDS, TARGETS, run, seeds};

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("corpus")
}

fn names(folder: &Path) -> BTreeSet<String> {
    let entries = std::fs::read_dir(folder).unwrap_or_else(|e| panic!("{}: {e}", folder.display()));
    entries
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect()
}

#[test]
fn nothing_in_the_corpus_breaks_a_promise() {
    for (name, _) in TARGETS {
        let folder = root().join(name);
        let inputs = names(&folder);
        assert!(!inputs.is_empty(), "{name}: no inputs");
        for input in inputs {
            println!("{name}/{input}");
            run(name, &std::fs::read(folder.join(input)).unwrap());
        }
    }
}

/// An old input is refused in its first byte, and reaches nothing behind that.
#[test]
fn the_corpus_has_a_valid_input_of_each_kind_of_message() {
    let mut wanted = BTreeSet::new();
    for (path, bytes) in seeds() {
        let kept = std::fs::read(root().join(&path)).ok();
        assert!(
            kept.as_ref() == Some(&bytes),
            "{path} is not what the messages are now; run: cargo run -p horovod-fuzz"
        );
        wanted.insert(path);
    }
    for (target, _) in SEEDS {
        let kept = names(&root().join(target)).into_iter();
        let kept = kept.map(|name| format!("{target}/{name}"));
        let stale = kept.filter(|path| path.contains("/seed_") && !wanted.contains(path));
        assert_eq!(stale.collect::<Vec<_>>(), Vec::<String>::new());
    }
}

#[test]
fn every_target_has_a_fuzzer_and_a_folder() {
    let targets: BTreeSet<String> = TARGETS.iter().map(|(name, _)| (*name).to_owned()).collect();
    assert_eq!(names(&root()), targets);
    let fuzzers = root().join("../../../fuzz/fuzz_targets");
    let files = names(&fuzzers);
    let files: BTreeSet<String> = files
        .iter()
        .filter_map(|file| file.strip_suffix(".rs"))
        .map(str::to_owned)
        .collect();
    assert_eq!(files, targets);
}

#[test]
fn short_inputs_break_no_promise() {
    for (name, target) in TARGETS {
        println!("{name}");
        target(&[]);
        for first in 0..=255 {
            target(&[first]);
            target(&[first; 40]);
        }
    }
}
