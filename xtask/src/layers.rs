//! The layers of the house: dependencies point down only, and the protocol knows almost nobody.

use std::collections::BTreeSet;
use std::path::Path;
use std::process::Command;

/// Crates from the ground up; one may use those of lower numbers only.
const LAYERS: &[(&str, u32)] = &[
    ("horovod-protocol", 0),
    ("horovod-settings", 0),
    ("horovod-kernels", 1),
    ("horovod-scheduler", 1),
    ("horovod-pmi", 1),
    ("horovod-gpu", 1),
    ("horovod-transport", 1),
    ("horovod-autotune", 2),
    ("horovod-collectives", 2),
    ("horovod-diagnosis", 2),
    ("horovod-doctor", 2),
    ("horovod-metrics", 2),
    ("horovod-timeline", 2),
    ("horovod-engine", 3),
    ("horovod", 4),
    ("horovod-burn", 5),
    ("horovod-candle", 5),
    ("horovod-launch", 4),
    ("horovod-python", 5),
    // It meets the core through C functions only, so it may use none of the others.
    ("horovod-tensorflow", 0),
];
/// For development only: nobody depends on them.
const DEVELOPMENT: &[&str] = &["horovod-fuzz", "horovod-gpu-double", "horovod-sim", "xtask"];

/// All that the protocol may be compiled with: error enums, and what that macro needs.
const PROTOCOL_MAY_USE: &[&str] = &[
    "horovod-protocol",
    "proc-macro2",
    "quote",
    "syn",
    "thiserror",
    "thiserror-impl",
    "unicode-ident",
];

/// Bindings that would link a framework, MPI or CUDA: those are looked up at run time.
const NEVER: &[&str] = &[
    "cudarc",
    "mpi",
    "mpi-sys",
    "rsmpi",
    "tch",
    "tensorflow",
    "torch-sys",
];

/// Complaints about arrows that point up.
pub(crate) fn check(root: &Path) -> Vec<String> {
    let mut complaints = Vec::new();
    let Ok(folders) = std::fs::read_dir(root.join("crates")) else {
        return vec!["crates: cannot be read".to_owned()];
    };
    let mut names: Vec<String> = folders
        .flatten()
        .filter(|entry| entry.path().join("Cargo.toml").exists())
        .filter_map(|entry| entry.file_name().into_string().ok())
        .collect();
    names.sort();
    for name in &names {
        let manifest = root.join("crates").join(name).join("Cargo.toml");
        let text = std::fs::read_to_string(manifest).unwrap_or_default();
        complaints.extend(check_manifest(name, &dependencies(&text)));
    }
    complaints.extend(check_protocol(root));
    let lock = std::fs::read_to_string(root.join("Cargo.lock")).unwrap_or_default();
    for name in NEVER {
        if lock
            .lines()
            .any(|line| line == format!("name = \"{name}\""))
        {
            complaints.push(format!(
                "Cargo.lock: {name} links what must be found at run time"
            ));
        }
    }
    complaints
}

fn level(name: &str) -> Option<u32> {
    LAYERS
        .iter()
        .find(|(known, _)| *known == name)
        .map(|(_, level)| *level)
}

fn check_manifest(name: &str, dependencies: &BTreeSet<String>) -> Vec<String> {
    let mut complaints = Vec::new();
    let own = level(name);
    if own.is_none() && !DEVELOPMENT.contains(&name) {
        complaints.push(format!("crates/{name}: has no place in the layers"));
    }
    for dependency in dependencies {
        if DEVELOPMENT.contains(&dependency.as_str()) {
            complaints.push(format!(
                "crates/{name}: depends on {dependency}, which is for development"
            ));
        }
        if let (Some(own), Some(theirs)) = (own, level(dependency))
            && theirs >= own
        {
            complaints.push(format!(
                "crates/{name}: depends on {dependency}, an arrow up"
            ));
        }
    }
    complaints
}

/// Names in `[dependencies]` and its kin, development ones left out.
fn dependencies(manifest: &str) -> BTreeSet<String> {
    let mut found = BTreeSet::new();
    let mut is_inside = false;
    for line in manifest.lines() {
        if let Some(section) = line.strip_prefix('[') {
            let section = section.trim_end_matches(']');
            is_inside = section.ends_with("dependencies") && !section.ends_with("dev-dependencies");
        } else if is_inside {
            let name = line.split(['.', '=', ' ']).next().unwrap_or_default();
            if !name.is_empty() && !name.starts_with('#') {
                found.insert(name.trim_matches('"').to_owned());
            }
        }
    }
    found
}

fn check_protocol(root: &Path) -> Vec<String> {
    let arguments = [
        "tree",
        "--locked",
        "-p",
        "horovod-protocol",
        "-e",
        "normal,build",
        "--prefix",
        "none",
        "--format",
        "{p}",
    ];
    let output = Command::new(env!("CARGO"))
        .args(arguments)
        .current_dir(root)
        .output();
    let text = match output {
        Ok(output) if output.status.success() => output.stdout,
        Ok(output) => {
            return vec![format!(
                "cargo tree: {}",
                String::from_utf8_lossy(&output.stderr)
            )];
        }
        Err(error) => return vec![format!("cargo tree: {error}")],
    };
    String::from_utf8_lossy(&text)
        .lines()
        .filter_map(|line| line.split(' ').next())
        .filter(|name| !name.is_empty() && !PROTOCOL_MAY_USE.contains(name))
        .map(|name| format!("crates/horovod-protocol: must not use {name}"))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::{check_manifest, dependencies};

    #[test]
    fn arrows_up_and_across_are_found() {
        let manifest = "[dependencies]\nhorovod-engine.workspace = true\n[dev-dependencies]\nhorovod-sim = 1\n";
        let found = dependencies(manifest);
        assert_eq!(found.len(), 1);
        assert_eq!(check_manifest("horovod-transport", &found).len(), 1);
        assert_eq!(check_manifest("horovod-python", &found).len(), 0);
    }

    #[test]
    fn a_crate_without_a_layer_is_found() {
        assert_eq!(check_manifest("horovod-new", &dependencies("")).len(), 1);
    }
}
