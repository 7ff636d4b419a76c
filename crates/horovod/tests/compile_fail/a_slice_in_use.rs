//! A slice that an operation writes can be read only after the scope.
use horovod::ReduceOp::Sum;

fn main() -> horovod::Result<()> {
    let hvd = horovod::init()?;
    let mut values = [1.0f32];
    hvd.scope(|s| {
        s.allreduce_in_place(&mut values, Sum);
        assert_eq!(values[0], 1.0);
    })
}
