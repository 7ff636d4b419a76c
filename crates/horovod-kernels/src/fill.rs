//! The neutral element of each operation: what a rank contributes that has nothing to say.

use horovod_protocol::DType;

use crate::spec::Combine;

/// The bytes of the neutral element, in the first `dtype.size()` places.
fn identity(dtype: DType, combine: Combine) -> [u8; 8] {
    macro_rules! of {
        ($t:ty, $low:expr, $high:expr) => {
            match combine {
                Combine::Sum => (0 as $t).to_ne_bytes().to_vec(),
                Combine::Product => (1 as $t).to_ne_bytes().to_vec(),
                Combine::Min => ($high as $t).to_ne_bytes().to_vec(),
                Combine::Max => ($low as $t).to_ne_bytes().to_vec(),
            }
        };
    }
    macro_rules! half {
        ($t:ty) => {
            match combine {
                Combine::Sum => <$t>::ZERO,
                Combine::Product => <$t>::ONE,
                Combine::Min => <$t>::INFINITY,
                Combine::Max => <$t>::NEG_INFINITY,
            }
            .to_ne_bytes()
            .to_vec()
        };
    }
    let bytes = match dtype {
        DType::U8 => of!(u8, u8::MIN, u8::MAX),
        DType::I8 => of!(i8, i8::MIN, i8::MAX),
        DType::U16 => of!(u16, u16::MIN, u16::MAX),
        DType::I16 => of!(i16, i16::MIN, i16::MAX),
        DType::U32 => of!(u32, u32::MIN, u32::MAX),
        DType::I32 => of!(i32, i32::MIN, i32::MAX),
        DType::U64 => of!(u64, u64::MIN, u64::MAX),
        DType::I64 => of!(i64, i64::MIN, i64::MAX),
        DType::F32 => of!(f32, f32::NEG_INFINITY, f32::INFINITY),
        DType::F64 => of!(f64, f64::NEG_INFINITY, f64::INFINITY),
        DType::F16 => half!(half::f16),
        DType::BF16 => half!(half::bf16),
        DType::Bool => of!(u8, 0, 1),
    };
    let mut out = [0; 8];
    out[..bytes.len()].copy_from_slice(&bytes);
    out
}

/// Fills `elems` elements with the neutral element of `combine` (0, 1, or the extreme of the type).
///
/// # Safety
/// `dst` is writable for `elems` elements of `dtype`; any alignment.
pub unsafe fn fill_identity(dtype: DType, combine: Combine, dst: *mut u8, elems: usize) {
    let (size, value) = (dtype.size(), identity(dtype, combine));
    if value[..size].iter().all(|byte| *byte == value[0]) {
        // SAFETY: the caller's promise.
        unsafe { dst.write_bytes(value[0], elems * size) };
        return;
    }
    for i in 0..elems {
        // SAFETY: i < elems; `value` holds `size` bytes.
        unsafe {
            dst.add(i * size)
                .copy_from_nonoverlapping(value.as_ptr(), size)
        };
    }
}
