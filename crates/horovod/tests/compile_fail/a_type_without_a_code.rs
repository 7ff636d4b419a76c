//! Only types that all ranks know can be sent, and a program cannot add one.
use horovod::ReduceOp::Sum;

#[derive(Clone, Copy, Debug, Default, PartialEq)]
struct Reference(usize);

impl horovod::Element for Reference {}

fn main() -> horovod::Result<()> {
    let hvd = horovod::init()?;
    hvd.allreduce(&[Reference(1)], Sum)?;
    hvd.broadcast(&["text"], 0)?;
    Ok(())
}
