//! Two operations cannot write one slice at the same time.
use horovod::ReduceOp::Sum;

fn main() -> horovod::Result<()> {
    let hvd = horovod::init()?;
    let mut values = [1.0f32];
    hvd.scope(|s| {
        s.allreduce_in_place(&mut values, Sum);
        s.allreduce_in_place(&mut values, Sum);
    })
}
