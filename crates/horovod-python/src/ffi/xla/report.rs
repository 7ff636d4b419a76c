//! The report of parameters as a custom call: a compiled program gives its parameters to each step, and only the first step
//! of a generation reads them.

use std::slice;

use horovod_engine::{Error, ProcessSetId, Replica};

use super::abi::{self, Buffer, CallFrame};
use super::answer;
use super::call::{Attributes, buffers, invalid, meta_of};

/// Reports its operands to rank 0, once in a generation. The one result, a number that is 0, makes operations come after
/// the call. The attribute `name` begins with four lines: the digest of the parameters' names, the bytes up to which
/// parameters are read whole, the bytes of a block of larger ones, and the advice. A line for each parameter's name
/// follows.
///
/// # Safety
/// Called by XLA on the host, with a frame of its own that lives until the answer.
#[unsafe(no_mangle)]
unsafe extern "C" fn horovod_xla_report(frame: *mut CallFrame) -> *mut abi::Error {
    // SAFETY: as the caller promises; the frame is XLA's.
    unsafe { answer(frame, |frame, _| report(frame)) }
}

/// # Safety
/// The frame is XLA's, of a call on the host.
unsafe fn report(frame: &CallFrame) -> Result<(), Error> {
    // SAFETY: XLA's frame.
    let (attributes, results) = unsafe { (Attributes::of(frame)?, buffers(&frame.rets)?) };
    let [result] = results[..] else {
        return Err(invalid("a report has one result"));
    };
    // SAFETY: XLA's buffer.
    let result_bytes = unsafe { bytes_of(result)? };
    // SAFETY: the memory of a result, of so many bytes.
    unsafe { result.data.cast::<u8>().write_bytes(0, result_bytes) };
    let mut lines = attributes.name.split('\n');
    let mut next = || lines.next().unwrap_or_default();
    let [key, whole_max, block] = [next(), next(), next()].map(str::parse::<u64>);
    let (Ok(key), Ok(whole_max), Ok(block)) = (key, whole_max, block) else {
        return Err(invalid("a report begins with three numbers"));
    };
    let set = ProcessSetId(attributes.process_set);
    // Without a job there is nobody to differ from, as in `checks_replicas`.
    let Ok(engine) = horovod_engine::engine() else {
        return Ok(());
    };
    if engine.has_reported(set, key) || !engine.checks_replicas(set) {
        return Ok(());
    }
    let advice = next().to_owned();
    let names: Vec<String> = lines.map(str::to_owned).collect();
    // SAFETY: XLA's frame.
    let operands = unsafe { buffers(&frame.args)? };
    let sizes = operands.iter().map(|operand| {
        // SAFETY: XLA's buffer.
        unsafe { bytes_of(operand) }
    });
    let sizes = sizes.collect::<Result<Vec<_>, _>>()?;
    let is_whole = sizes.iter().sum::<usize>() as u64 <= whole_max;
    let block = usize::try_from(block).unwrap_or(usize::MAX);
    let sums = operands.iter().zip(sizes).map(|(operand, bytes)| {
        let bytes = if operand.data.is_null() { 0 } else { bytes };
        let block = if is_whole { bytes } else { block };
        // SAFETY: XLA's buffers are dense, and nobody writes to an operand during the call.
        unsafe { checksum(operand.data.cast_const().cast(), bytes, block) }
    });
    engine.report_first_replica(set, key, || Replica {
        key,
        names,
        sums: sums.collect(),
        advice,
    });
    Ok(())
}

/// Of all bytes, or of the first and the last block, as Python's adapters have it.
///
/// # Safety
/// `memory` is readable for `bytes`, or there are none.
unsafe fn checksum(memory: *const u8, bytes: usize, block: usize) -> u64 {
    if bytes <= block.saturating_mul(2) {
        // SAFETY: as the caller promises.
        return unsafe { horovod_kernels::checksum(memory, bytes) };
    }
    // SAFETY: both blocks are within the memory.
    let ends = unsafe {
        let last = memory.add(bytes - block);
        [
            slice::from_raw_parts(memory, block),
            slice::from_raw_parts(last, block),
        ]
        .concat()
    };
    // SAFETY: a slice is readable.
    unsafe { horovod_kernels::checksum(ends.as_ptr(), ends.len()) }
}

/// # Safety
/// The buffer is XLA's.
unsafe fn bytes_of(buffer: &Buffer) -> Result<usize, Error> {
    // SAFETY: as the caller promises.
    let meta = unsafe { meta_of(buffer)? };
    let elements = meta.elems().and_then(|n| usize::try_from(n).ok());
    let bytes = elements.and_then(|n| n.checked_mul(meta.dtype.size()));
    bytes.ok_or_else(|| invalid("a parameter is too large for this machine"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn of_large_parameters_the_ends_count() {
        let sum = |bytes: &[u8], block| {
            // SAFETY: a slice is readable.
            unsafe { checksum(bytes.as_ptr(), bytes.len(), block) }
        };
        let mut bytes = [7u8; 64];
        let (whole, ends) = (sum(&bytes, 32), sum(&bytes, 8));
        bytes[30] = 8;
        assert_eq!(sum(&bytes, 8), ends);
        assert_ne!(sum(&bytes, 32), whole);
        for at in [0, 7, 56, 63] {
            let mut bytes = [7u8; 64];
            bytes[at] = 8;
            assert_ne!(sum(&bytes, 8), ends, "{at}");
        }
    }
}
