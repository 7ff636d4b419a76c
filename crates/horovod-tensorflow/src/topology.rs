//! Operations that give sizes and ranks as they are when they run: elastic jobs change them under a graph.

use crate::dtypes::INT32;
use crate::found::core;
use crate::operations::Query;
use crate::tf::context::Context;
use crate::tf::status::{Code, Failure};

/// Same text as for the queries of the other frameworks.
const NOT_INITIALIZED: &str = "Horovod has not been initialized; use hvd.init().";
/// `HOROVOD_PROCESS_SET_ERROR_UNKNOWN_SET` of Python's basics.
const UNKNOWN_SET: i32 = -3;

/// Sets the only output.
pub(crate) fn answer(query: Query, process_set: u32, context: Context) -> Result<(), Failure> {
    let core = core();
    if core.size() < 0 {
        return Err(Failure::new(Code::FailedPrecondition, NOT_INITIALIZED));
    }
    let number = match query {
        Query::Size => match core.process_set_size(process_set) {
            size if size >= 0 => size,
            _ => {
                let text = "Size: Process set provided does not exist, or has not been registered.";
                return Err(Failure::new(Code::InvalidArgument, text));
            }
        },
        Query::LocalSize => core.local_size(),
        Query::Rank => core.rank(),
        Query::LocalRank => core.local_rank(),
        Query::ProcessSetIncluded if core.process_set_size(process_set) < 0 => UNKNOWN_SET,
        Query::ProcessSetIncluded => i32::from(core.process_set_rank(process_set) >= 0),
    };
    write_numbers(context, 0, &[], &[number])
}

/// Sets an output of 32-bit integers.
pub(crate) fn write_numbers(
    context: Context,
    index: usize,
    dims: &[i64],
    numbers: &[i32],
) -> Result<(), Failure> {
    let output = context.allocate_output(index, INT32, dims)?;
    // SAFETY: the output has as many elements of this type as `dims` says, which is the list's length.
    unsafe { std::ptr::copy_nonoverlapping(numbers.as_ptr(), output.data().cast(), numbers.len()) };
    Ok(())
}
