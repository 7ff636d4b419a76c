//! Blocks of halves to `f32` and back: portable code, and the trait instruction sets improve on.

/// Conversion of blocks between halves and `f32`; rounding is to nearest, ties to even.
pub(crate) trait Convert {
    /// # Safety
    /// `src` is readable and `dst` writable for `n` elements; they do not overlap; the CPU has what
    /// the implementation was compiled for.
    #[inline(always)]
    unsafe fn f16_to_f32(src: *const u16, dst: *mut f32, n: usize) {
        for i in 0..n {
            // SAFETY: i < n, both pointers are good for n elements.
            unsafe { dst.add(i).write(f16_to_f32(src.add(i).read_unaligned())) };
        }
    }

    /// # Safety
    /// As [`Convert::f16_to_f32`].
    #[inline(always)]
    unsafe fn f32_to_f16(src: *const f32, dst: *mut u16, n: usize) {
        for i in 0..n {
            // SAFETY: i < n, both pointers are good for n elements.
            unsafe { dst.add(i).write_unaligned(f32_to_f16(src.add(i).read())) };
        }
    }

    /// # Safety
    /// As [`Convert::f16_to_f32`].
    #[inline(always)]
    unsafe fn bf16_to_f32(src: *const u16, dst: *mut f32, n: usize) {
        for i in 0..n {
            // SAFETY: i < n, both pointers are good for n elements.
            unsafe { dst.add(i).write(bf16_to_f32(src.add(i).read_unaligned())) };
        }
    }

    /// # Safety
    /// As [`Convert::f16_to_f32`].
    // Shifts and adds, which vectorise. The AVX-512 instruction for it flushes subnormals to zero,
    // so it would not give the bits that the other paths give.
    #[inline(always)]
    unsafe fn f32_to_bf16(src: *const f32, dst: *mut u16, n: usize) {
        for i in 0..n {
            // SAFETY: i < n, both pointers are good for n elements.
            unsafe { dst.add(i).write_unaligned(f32_to_bf16(src.add(i).read())) };
        }
    }
}

/// Compiled for whatever the target has at least.
pub(crate) struct Portable;
impl Convert for Portable {}

#[inline(always)]
pub(crate) fn bf16_to_f32(bits: u16) -> f32 {
    f32::from_bits(u32::from(bits) << 16)
}

#[inline(always)]
pub(crate) fn f32_to_bf16(value: f32) -> u16 {
    let bits = value.to_bits();
    // Adding half a unit (and one bit less when the kept part is even) rounds to nearest even;
    // the carry into the exponent is what rounding up to a power of two or to infinity needs.
    let rounded = bits.wrapping_add(0x7fff + ((bits >> 16) & 1)) >> 16;
    let quiet_nan = (bits >> 16) | 0x0040;
    (if value.is_nan() { quiet_nan } else { rounded }) as u16
}

/// Branch-free, so that loops over it vectorise.
#[inline(always)]
pub(crate) fn f16_to_f32(bits: u16) -> f32 {
    let sign = u32::from(bits & 0x8000) << 16;
    let magnitude = u32::from(bits & 0x7fff) << 13;
    // Re-bias the exponent by multiplying with 2^112; also normalises subnormals exactly.
    let scaled = (f32::from_bits(magnitude) * f32::from_bits(0x7780_0000)).to_bits();
    // Infinity and NaN keep their mantissa under an all-ones exponent; NaN becomes quiet.
    let nan = u32::from(bits & 0x7fff > 0x7c00) << 22;
    let special = magnitude | 0x7f80_0000 | nan;
    let out = if bits & 0x7fff >= 0x7c00 {
        special
    } else {
        scaled
    };
    f32::from_bits(out | sign)
}

/// Branch-free, so that loops over it vectorise.
#[inline(always)]
pub(crate) fn f32_to_f16(value: f32) -> u16 {
    let bits = value.to_bits();
    let sign = (bits >> 16) & 0x8000;
    let magnitude = bits & 0x7fff_ffff;
    // Normal results: re-bias, then round to nearest even on the 13 bits dropped.
    let rebiased = magnitude.wrapping_sub(112 << 23);
    let normal = rebiased.wrapping_add(0xfff + ((magnitude >> 13) & 1)) >> 13;
    // Subnormal results: adding 0.5 lets the FPU align and round; the mantissa's low bits remain.
    let subnormal = (f32::from_bits(magnitude) + 0.5)
        .to_bits()
        .wrapping_sub(0.5f32.to_bits());
    let nan = 0x7e00 | ((magnitude >> 13) & 0x3ff);
    let finite = if magnitude < (113 << 23) {
        subnormal
    } else {
        normal
    };
    // From 65520 on everything rounds to infinity.
    let bounded = if magnitude >= 0x477f_f000 {
        0x7c00
    } else {
        finite
    };
    let out = if magnitude > 0x7f80_0000 {
        nan
    } else {
        bounded
    };
    (out | sign) as u16
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_half_widens_as_the_half_crate_does() {
        for bits in 0..=u16::MAX {
            let (ours, theirs) = (f16_to_f32(bits), half::f16::from_bits(bits).to_f32());
            assert_eq!(ours.is_nan(), theirs.is_nan(), "{bits:#06x}");
            assert!(
                ours.is_nan() || ours.to_bits() == theirs.to_bits(),
                "{bits:#06x}"
            );
            let (ours, theirs) = (bf16_to_f32(bits), half::bf16::from_bits(bits).to_f32());
            assert!(ours.to_bits() == theirs.to_bits() || ours.is_nan() && theirs.is_nan());
        }
    }

    fn check_narrow(bits: u32) {
        let value = f32::from_bits(bits);
        let (ours, theirs) = (f32_to_f16(value), half::f16::from_f32(value));
        if value.is_nan() {
            assert!(half::f16::from_bits(ours).is_nan(), "{bits:#010x}");
            assert!(
                half::bf16::from_bits(f32_to_bf16(value)).is_nan(),
                "{bits:#010x}"
            );
            return;
        }
        assert_eq!(ours, theirs.to_bits(), "{bits:#010x}");
        assert_eq!(
            f32_to_bf16(value),
            half::bf16::from_f32(value).to_bits(),
            "{bits:#010x}"
        );
    }

    #[test]
    fn narrowing_rounds_as_the_half_crate_does() {
        // Every half's neighbourhood, midpoints between halves, and a stride over all f32.
        for half_bits in 0..=u16::MAX {
            for middle in [
                f16_to_f32(half_bits).to_bits(),
                bf16_to_f32(half_bits).to_bits(),
            ] {
                for offset in [0, 1, 0xfff, 0x1000, 0x1001, 0x7fff, 0x8000, 0x8001] {
                    check_narrow(middle.wrapping_add(offset));
                    check_narrow(middle.wrapping_sub(offset));
                }
            }
        }
        for bits in (0..=u32::MAX).step_by(10_007) {
            check_narrow(bits);
        }
    }
}
