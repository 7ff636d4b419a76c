//! NEON: the generic loops, with halves converted by `fcvtl` and `fcvtn`.

use std::arch::asm;

use crate::half::{Convert, Portable};

pub(crate) struct Neon;

impl Convert for Neon {
    // Assembly, because the half-precision vector types are not in stable Rust for every version
    // this project supports.
    #[inline(always)]
    unsafe fn f16_to_f32(src: *const u16, dst: *mut f32, n: usize) {
        let whole = n - n % 8;
        for i in (0..whole).step_by(8) {
            // SAFETY: reads 8 halves at src + i and writes 8 floats at dst + i; i + 8 <= n.
            unsafe {
                asm!(
                    "ldr {h:q}, [{src}]",
                    "fcvtl {low:v}.4s, {h:v}.4h",
                    "fcvtl2 {high:v}.4s, {h:v}.8h",
                    "stp {low:q}, {high:q}, [{dst}]",
                    src = in(reg) src.add(i), dst = in(reg) dst.add(i),
                    h = out(vreg) _, low = out(vreg) _, high = out(vreg) _,
                    options(nostack, preserves_flags)
                );
            }
        }
        // SAFETY: the rest of both blocks.
        unsafe { Portable::f16_to_f32(src.add(whole), dst.add(whole), n - whole) };
    }

    #[inline(always)]
    unsafe fn f32_to_f16(src: *const f32, dst: *mut u16, n: usize) {
        let whole = n - n % 8;
        for i in (0..whole).step_by(8) {
            // SAFETY: reads 8 floats at src + i and writes 8 halves at dst + i; i + 8 <= n.
            unsafe {
                asm!(
                    "ldp {low:q}, {high:q}, [{src}]",
                    "fcvtn {h:v}.4h, {low:v}.4s",
                    "fcvtn2 {h:v}.8h, {high:v}.4s",
                    "str {h:q}, [{dst}]",
                    src = in(reg) src.add(i), dst = in(reg) dst.add(i),
                    h = out(vreg) _, low = out(vreg) _, high = out(vreg) _,
                    options(nostack, preserves_flags)
                );
            }
        }
        // SAFETY: the rest of both blocks.
        unsafe { Portable::f32_to_f16(src.add(whole), dst.add(whole), n - whole) };
    }
}
