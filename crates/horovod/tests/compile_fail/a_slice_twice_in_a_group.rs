//! One operation cannot write one slice twice.
use horovod::ReduceOp::Sum;

fn main() -> horovod::Result<()> {
    let hvd = horovod::init()?;
    let mut values = [1.0f32];
    hvd.grouped_allreduce_in_place(&mut [&mut values, &mut values], Sum)
}
