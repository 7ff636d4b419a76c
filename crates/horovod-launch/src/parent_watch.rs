//! The parent-death watch: ends the job when the process that started this launcher has ended, however it did.
//!
//! `horovod.run` keeps one end of a pipe; the other is inherited here. Its end of file is as good as SIGTERM.

use std::fs::File;
use std::io::Read;

use crate::environment;

/// Watches the pipe, if there is one.
pub(crate) fn watch() {
    let Some(fd) = environment::parent_watch() else {
        return;
    };
    let Ok(mut pipe) = File::open(format!("/dev/fd/{fd}")) else {
        return;
    };
    // A thread of its own: whatever the launcher waits for, it hears signals.
    let _ = std::thread::Builder::new()
        .name("parent-watch".into())
        .spawn(move || {
            // Nothing is ever written to it.
            while matches!(pipe.read(&mut [0; 16]), Ok(n) if n > 0) {}
            let _ = rustix::process::kill_process(
                rustix::process::getpid(),
                rustix::process::Signal::TERM,
            );
        });
}
