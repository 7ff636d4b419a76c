//! A scope cannot begin operations after it was left.
use horovod::ReduceOp::Sum;

fn main() -> horovod::Result<()> {
    let hvd = horovod::init()?;
    let mut values = [1.0f32];
    let mut kept = None;
    hvd.scope(|s| kept = Some(s.named("late")))?;
    kept.unwrap().allreduce_in_place(&mut values, Sum);
    Ok(())
}
