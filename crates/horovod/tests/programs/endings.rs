//! Ranks that end in every way. The last rank does what the first argument says; the others reduce until an error.
//! With `well` all ranks use the calls of the guard, and leave and join the job twice.
#![allow(clippy::panic, reason = "what the test is about")]

mod mishap;

use horovod::Error;
use horovod::ReduceOp::Sum;

fn main() -> horovod::Result<()> {
    let ending = std::env::args().nth(1).unwrap_or_default();
    if ending == "well" {
        use_the_guard()?;
        return use_the_guard();
    }
    let hvd = horovod::init()?;
    if let Err(second) = horovod::init().map(drop) {
        assert_eq!(second, Error::AlreadyInitialized);
    }
    let mut values = vec![1.0f32; 1000];
    hvd.allreduce_in_place(&mut values, Sum)?;
    if hvd.rank() + 1 < hvd.size() {
        loop {
            if let Err(error) = hvd.allreduce_in_place(&mut values, Sum) {
                mishap::tell(&format!("rank {} caught: {error}\n", hvd.rank()));
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

/// On one host: joins the job, calls what needs the guard, and leaves.
fn use_the_guard() -> horovod::Result<()> {
    let hvd = horovod::init()?;
    let (rank, size) = (hvd.rank(), hvd.size());
    assert_eq!((hvd.local_rank(), hvd.local_size()), (rank, size));
    assert_eq!((hvd.cross_rank(), hvd.cross_size()), (0, 1));
    if size > 1 {
        let first = hvd.process_set(&[0])?;
        assert_eq!(first.communicator().is_some(), rank == 0);
        first.remove()?;
    }
    // Rank 0 has one batch more than the others, which take part in it with zeros.
    for _batch in 0..=usize::from(rank == 0) {
        let sum = hvd.named("gradient").allreduce(&[1.0f32], Sum)?;
        assert!(sum == [1.0] || sum == [size as f32], "{sum:?}");
    }
    let last = hvd.join()?;
    assert!(last < size);
    hvd.barrier()?;
    mishap::tell(&format!("rank {rank} is well\n"));
    Ok(())
}
