//! Alltoall: a block from every member to every member. Sizes first, then pairwise: in step `s` each
//! member sends to the one `s` after it while receiving from the one `s` before it.

use crate::context::Ctx;
use crate::error::CollectiveError;
use crate::exchange::{Transfer, exchange, exchange_bytes};
use crate::slices::{Segment, copy};

/// Sends `send_bytes[j]` bytes, consecutive in `input`, to each member `j`, and stores what the others
/// sent, in member order, where `alloc` says. `alloc` is called once, with the bytes that each member
/// sends here.
///
/// # Safety
/// `input` is readable for the sum of `send_bytes`; what `alloc` returns is writable for the sum of its
/// argument and does not overlap `input`; nobody else touches either until this returns.
pub unsafe fn alltoall(
    ctx: &mut Ctx<'_>,
    input: *const u8,
    send_bytes: &[usize],
    alloc: &mut dyn FnMut(&[usize]) -> Result<*mut u8, CollectiveError>,
) -> Result<(), CollectiveError> {
    let (n, me) = (ctx.members.len(), ctx.me);
    let mut recv_bytes = vec![0; n];
    recv_bytes[me] = send_bytes[me];
    for step in 1..n {
        let (to, from) = ((me + step) % n, (me + n - step) % n);
        let count = (send_bytes[to] as u64).to_le_bytes();
        let mut theirs = [0; 8];
        exchange_bytes(ctx, Some((to, &count)), Some((from, &mut theirs)))?;
        recv_bytes[from] = block_size(from, u64::from_le_bytes(theirs))?;
    }
    let total = recv_bytes
        .iter()
        .try_fold(0usize, |sum, bytes| sum.checked_add(*bytes));
    if total.is_none_or(|total| isize::try_from(total).is_err()) {
        return Err(CollectiveError::Allocation(
            "the sizes received overflow".into(),
        ));
    }
    let output = alloc(&recv_bytes)?;
    let start = |bytes: &[usize], member: usize| bytes[..member].iter().sum::<usize>();
    let mine = input.wrapping_add(start(send_bytes, me));
    // SAFETY: the caller's promise.
    unsafe {
        copy(
            mine,
            output.wrapping_add(start(&recv_bytes, me)),
            send_bytes[me],
        )
    };
    for step in 1..n {
        let (to, from) = ((me + step) % n, (me + n - step) % n);
        let block = |ptr: *mut u8, elems| Segment {
            input: ptr,
            output: ptr,
            elems,
        };
        let source = input.wrapping_add(start(send_bytes, to)).cast_mut();
        let target = output.wrapping_add(start(&recv_bytes, from));
        // The cursor that sends only reads.
        let out = ctx.scratch.vector(1, [block(source, send_bytes[to])]);
        let inn = ctx.scratch.vector(1, [block(target, recv_bytes[from])]);
        let send = Transfer {
            peer: to,
            bytes: &out,
            range: 0..out.len(),
        };
        let recv = Transfer {
            peer: from,
            bytes: &inn,
            range: 0..inn.len(),
        };
        exchange(ctx, Some(send), Some(recv))?;
        ctx.scratch.put_vector(out);
        ctx.scratch.put_vector(inn);
    }
    Ok(())
}

/// A peer's word for the size of a block, if it can be one.
fn block_size(member: usize, bytes: u64) -> Result<usize, CollectiveError> {
    isize::try_from(bytes)
        .map(isize::unsigned_abs)
        .map_err(|_| CollectiveError::BlockSize { member, bytes })
}
