//! Development commands: `cargo xtask tidy` checks what no compiler sees, `cargo xtask docs` writes generated pages.

mod circles;
mod files;
mod layers;
mod map;
mod names;
mod prose;
mod settings;

use std::path::{Path, PathBuf};
use std::process::ExitCode;

fn main() -> ExitCode {
    let command = std::env::args().nth(1).unwrap_or_default();
    let root = root();
    match command.as_str() {
        "tidy" => tidy(&root),
        "docs" => settings::write(&root),
        _ => {
            print("usage: cargo run -p xtask -- tidy | docs");
            ExitCode::from(2)
        }
    }
}

/// Runs every check and prints all complaints, each with its file.
fn tidy(root: &Path) -> ExitCode {
    let tracked = match files::tracked(root) {
        Ok(tracked) => tracked,
        Err(why) => {
            print(&why);
            return ExitCode::FAILURE;
        }
    };
    let mut complaints = Vec::new();
    complaints.extend(files::check(root, &tracked));
    complaints.extend(names::check(root, &tracked));
    complaints.extend(prose::check(root, &tracked));
    complaints.extend(circles::check(root, &tracked));
    complaints.extend(map::check(root));
    complaints.extend(layers::check(root));
    complaints.extend(settings::check(root));
    for complaint in &complaints {
        print(complaint);
    }
    let limits = files::limits(root, &tracked);
    print(&format!(
        "tidy: {} files, {} named limits, {} complaints",
        tracked.len(),
        limits.len(),
        complaints.len()
    ));
    if complaints.is_empty() {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    }
}

fn root() -> PathBuf {
    let here = Path::new(env!("CARGO_MANIFEST_DIR"));
    here.parent().unwrap_or(here).to_path_buf()
}

#[expect(
    clippy::print_stdout,
    reason = "the output is what this program is for"
)]
fn print(text: &str) {
    println!("{text}");
}
