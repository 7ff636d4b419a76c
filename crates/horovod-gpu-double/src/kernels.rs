//! The product's kernels by their names, carried out with the code that is their oracle.

use std::ffi::c_void;

use horovod_protocol::DType;

use crate::memory::Access;
use crate::stream::StreamWork;

/// Most copies of one batch.
pub(crate) const BATCH_MAX: usize = 160;

/// The one parameter of `hvd_copy_batch`.
#[repr(C)]
#[derive(Clone, Copy)]
struct Batch {
    to: [u64; BATCH_MAX],
    from: [u64; BATCH_MAX],
    bytes: [u64; BATCH_MAX],
    count: u64,
}

/// A kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kernel {
    /// `dst[i] = src[i] * factor`.
    Scale(DType),
    /// `dst[i] = pattern`, of so many bytes.
    Fill(u64),
    CopyBatch,
    /// 16 bits to 32, with a sign or without.
    Widen {
        is_signed: bool,
    },
    /// The lower 16 of 32 bits.
    Narrow,
}

impl Kernel {
    pub(crate) fn named(name: &str) -> Option<Self> {
        Some(match name {
            "hvd_scale_f16" => Self::Scale(DType::F16),
            "hvd_scale_bf16" => Self::Scale(DType::BF16),
            "hvd_scale_f32" => Self::Scale(DType::F32),
            "hvd_scale_f64" => Self::Scale(DType::F64),
            "hvd_fill_b8" => Self::Fill(1),
            "hvd_fill_b16" => Self::Fill(2),
            "hvd_fill_b32" => Self::Fill(4),
            "hvd_fill_b64" => Self::Fill(8),
            "hvd_copy_batch" => Self::CopyBatch,
            "hvd_widen_i16" => Self::Widen { is_signed: true },
            "hvd_widen_u16" => Self::Widen { is_signed: false },
            "hvd_narrow_16" => Self::Narrow,
            _ => return None,
        })
    }

    /// The parameters that it declares.
    pub(crate) fn parameters(self) -> &'static [&'static str] {
        match self {
            Self::Scale(_) => &["u64", "u64", "u64", "f64"],
            Self::CopyBatch => &["b8[3848]"],
            Self::Fill(_) | Self::Widen { .. } | Self::Narrow => &["u64", "u64", "u64"],
        }
    }

    /// Bytes that its addresses are multiples of.
    fn alignments(self) -> [u64; 2] {
        match self {
            Self::Scale(dtype) => [dtype.size() as u64; 2],
            Self::Fill(size) => [size; 2],
            Self::CopyBatch => [1; 2],
            Self::Widen { .. } => [4, 2],
            Self::Narrow => [2, 4],
        }
    }

    /// Whether what it writes first and reads second lies as its accesses need it.
    pub(crate) fn is_aligned(self, accesses: &[Access]) -> bool {
        let mut pairs = accesses.iter().zip(self.alignments());
        self == Self::CopyBatch || pairs.all(|(a, alignment)| a.address % alignment == 0)
    }

    /// Ranges that it uses, and what it does with them. `rows` is the grid's second dimension.
    ///
    /// # Safety
    /// `parameters` points to the addresses of as many values as [`Kernel::parameters`] declares.
    pub(crate) unsafe fn launch(
        self,
        parameters: *const *const c_void,
        rows: usize,
    ) -> Option<(Vec<Access>, StreamWork)> {
        // SAFETY: the caller's promise, for the kernels that have so many.
        let word = |i: usize| unsafe { (*parameters.add(i)).cast::<u64>().read_unaligned() };
        let ranges = |to: u64, size_to: u64, from: u64, size_from: u64, count: u64| {
            let (to_bytes, from_bytes) =
                (count.checked_mul(size_to)?, count.checked_mul(size_from)?);
            // In place is fine; what overlaps otherwise is a race among the kernel's threads.
            let part = usize::from(to != from);
            Some(vec![
                Access::write(to, to_bytes),
                Access::read(from, from_bytes).of_part(part),
            ])
        };
        match self {
            Self::Scale(dtype) => {
                let (to, from, count, factor) =
                    (word(0), word(1), word(2), f64::from_bits(word(3)));
                let size = dtype.size() as u64;
                let accesses = ranges(to, size, from, size, count)?;
                let work = StreamWork::Local(Box::new(move || {
                    let (from, to) = (from as *const u8, to as *mut u8);
                    // SAFETY: the ranges were checked, are live, and are equal or do not overlap, or that is a
                    // violation already.
                    unsafe { horovod_kernels::scale(dtype, factor, from, to, count as usize) };
                }));
                Some((accesses, work))
            }
            Self::Fill(size) => {
                let (to, count, pattern) = (word(0), word(1), word(2).to_le_bytes());
                let bytes = count.checked_mul(size)?;
                let work = StreamWork::Local(Box::new(move || {
                    for i in 0..count {
                        let at = (to + i * size) as *mut u8;
                        // SAFETY: the range was checked and is live.
                        unsafe { at.copy_from_nonoverlapping(pattern.as_ptr(), size as usize) };
                    }
                }));
                Some((vec![Access::write(to, bytes)], work))
            }
            Self::CopyBatch => {
                // SAFETY: the caller's promise.
                let batch = unsafe { (*parameters).cast::<Batch>().read_unaligned() };
                let count = usize::try_from(batch.count)
                    .ok()
                    .filter(|n| *n <= BATCH_MAX)?;
                // Row `y` of the grid does copy `y`.
                let copies: Vec<_> = (0..count.min(rows))
                    .map(|i| (batch.to[i], batch.from[i], batch.bytes[i] as usize))
                    .collect();
                let accesses = crate::driver::memory::batch_accesses(&copies);
                Some((accesses, crate::driver::memory::batch_work(copies)))
            }
            Self::Widen { is_signed } => {
                let (to, from, count) = (word(0), word(1), word(2));
                let accesses = ranges(to, 4, from, 2, count)?;
                let work = each(count, move |i| {
                    // SAFETY: both ranges were checked and are live.
                    unsafe {
                        let value = (from as *const i16).add(i).read_unaligned();
                        let wide = if is_signed {
                            i32::from(value)
                        } else {
                            i32::from(value as u16)
                        };
                        (to as *mut i32).add(i).write_unaligned(wide);
                    }
                });
                Some((accesses, work))
            }
            Self::Narrow => {
                let (to, from, count) = (word(0), word(1), word(2));
                let accesses = ranges(to, 2, from, 4, count)?;
                let work = each(count, move |i| {
                    // SAFETY: both ranges were checked and are live.
                    unsafe {
                        let value = (from as *const i32).add(i).read_unaligned();
                        (to as *mut i16).add(i).write_unaligned(value as i16);
                    }
                });
                Some((accesses, work))
            }
        }
    }
}

fn each(count: u64, body: impl Fn(usize) + Send + 'static) -> StreamWork {
    StreamWork::Local(Box::new(move || (0..count as usize).for_each(body)))
}
