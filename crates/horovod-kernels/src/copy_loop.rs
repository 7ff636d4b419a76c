//! The loop of a copy out of a slot and into it, the same for every instruction set.

/// [`crate::copy_out_and_in`] through registers of type `V`, so that no store waits for the load beside it.
///
/// # Safety
/// As [`crate::copy_out_and_in`]; `V` is plain bits.
#[inline(always)]
pub(crate) unsafe fn out_and_in<V: Copy>(
    out: *mut u8,
    slot: *mut u8,
    next: *const u8,
    bytes: usize,
) {
    const UNROLLED: usize = 4;
    let round = UNROLLED * size_of::<V>();
    let whole = bytes - bytes % round;
    let mut at = 0;
    while at < whole {
        // SAFETY: at + round <= bytes.
        unsafe {
            let (out, slot) = (out.add(at).cast::<V>(), slot.add(at).cast::<V>());
            let next = next.add(at).cast::<V>();
            let mut old = [slot.read_unaligned(); UNROLLED];
            for (i, value) in old.iter_mut().enumerate().skip(1) {
                *value = slot.add(i).read_unaligned();
            }
            let mut new = [next.read_unaligned(); UNROLLED];
            for (i, value) in new.iter_mut().enumerate().skip(1) {
                *value = next.add(i).read_unaligned();
            }
            for (i, value) in old.iter().enumerate() {
                out.add(i).write_unaligned(*value);
            }
            for (i, value) in new.iter().enumerate() {
                slot.add(i).write_unaligned(*value);
            }
        }
        at += round;
    }
    // SAFETY: the rest of all three.
    unsafe {
        let (slot, rest) = (slot.add(whole), bytes - whole);
        out.add(whole).copy_from_nonoverlapping(slot, rest);
        slot.copy_from_nonoverlapping(next.add(whole), rest);
    }
}
