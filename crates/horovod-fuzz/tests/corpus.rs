//! The inputs that the fuzzer kept, and those that once found something, on every machine.

#![allow(
    clippy::unwrap_used,
    reason = "a test wants to fail at once, with the place"
)]

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use horovod_fuzz::{TARGETS, run};

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
