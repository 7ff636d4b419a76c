//! A slice that ends with the closure ends before the scope has waited.
use horovod::ReduceOp::Sum;

fn main() -> horovod::Result<()> {
    let hvd = horovod::init()?;
    hvd.scope(|s| {
        let mut values = [1.0f32];
        s.allreduce_in_place(&mut values, Sum);
    })
}
