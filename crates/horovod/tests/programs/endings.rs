//! Ranks that end in every way. The last rank does what the first argument says; the others reduce until an error.
#![allow(
    clippy::print_stdout,
    clippy::panic,
    reason = "what the test reads, and what it is about"
)]

use std::io::Write;

use horovod::Error;
use horovod::ReduceOp::Sum;

fn main() -> horovod::Result<()> {
    let ending = std::env::args().nth(1).unwrap_or_default();
    let hvd = horovod::init()?;
    if let Err(second) = horovod::init().map(drop) {
        assert_eq!(second, Error::AlreadyInitialized);
    }
    let mut values = vec![1.0f32; 1000];
    hvd.allreduce_in_place(&mut values, Sum)?;
    if hvd.rank() + 1 < hvd.size() {
        loop {
            if let Err(error) = hvd.allreduce_in_place(&mut values, Sum) {
                tell(&format!("rank {} caught: {error}\n", hvd.rank()));
                return Err(error);
            }
        }
    }
    match ending.as_str() {
        "panic" => panic!("the data of step 7 are missing"),
        "panic in scope" => hvd.scope(|s| {
            s.named("of the last rank")
                .allreduce_in_place(&mut values, Sum);
            panic!("the data of step 8 are missing")
        }),
        "error" => Err(Error::Invalid {
            mistake: "there are no data at /data".into(),
        }),
        "exit" => std::process::exit(7),
        "exit 0" => std::process::exit(0),
        "forget" => {
            std::mem::forget(hvd);
            Ok(())
        }
        "leave" => {
            let (after, mut value) = (hvd.clone(), [1.0f32]);
            drop(hvd);
            assert_eq!(
                after.allreduce_in_place(&mut value, Sum),
                Err(Error::Closed)
            );
            Ok(())
        }
        other => panic!("no such ending: {other}"),
    }
}

/// One write, so that the lines of ranks stay whole.
fn tell(line: &str) {
    let _ = std::io::stdout().write_all(line.as_bytes());
}
