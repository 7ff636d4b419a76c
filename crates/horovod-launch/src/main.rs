//! `horovodrun`: see the library of this crate.

use std::process::ExitCode;

fn main() -> ExitCode {
    let words: Vec<_> = std::env::args_os().skip(1).collect();
    ExitCode::from(horovod_launch::run(&words))
}
