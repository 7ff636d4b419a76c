//! Our own kernels: element-wise work that NCCL does not do, in PTX that the driver compiles; for AMD's GPUs in C++.
//!
//! Their results are those of `horovod-kernels`, bit for bit (but for the bits of a NaN that an operation makes).

#[cfg(test)]
mod hip_tests;
#[cfg(test)]
mod interpreter;
#[cfg(test)]
mod tests;

use std::ffi::{CStr, c_void};
use std::ptr::null_mut;

use horovod_protocol::DType;

use crate::device::Device;
use crate::device::stream::Stream;
use crate::driver::Handle;
use crate::error::GpuError;
use crate::hiprtc;
use crate::load::Stack;

/// The text that the driver compiles, with the NUL that ends it.
const PTX: &str = concat!(
    include_str!("kernels.ptx"),
    include_str!("kernels/floats.ptx"),
    include_str!("kernels/halves.ptx"),
    include_str!("kernels/integers.ptx"),
    include_str!("kernels/memory.ptx"),
    "\0"
);
/// The same for AMD's GPUs.
const HIP: &CStr =
    match CStr::from_bytes_with_nul(concat!(include_str!("kernels.hip"), "\0").as_bytes()) {
        Ok(text) => text,
        Err(_) => panic!("a NUL within the text"),
    };
/// Threads of a block, of every kernel.
const BLOCK: u32 = 512;
/// Blocks of a launch at most, for each multiprocessor.
const BLOCKS_PER_MULTIPROCESSOR: u32 = 8;
/// Bytes that one thread moves at once where addresses allow it.
const VECTOR: u64 = 16;
/// Copies of one launch: their table is a parameter, and parameters are at most 4 KiB.
const BATCH: usize = 160;

/// Entry points, in the order of [`Entry`].
const ENTRIES: [&CStr; Entry::COUNT] = [
    c"hvd_scale_f16",
    c"hvd_scale_bf16",
    c"hvd_scale_f32",
    c"hvd_scale_f64",
    c"hvd_fill_b8",
    c"hvd_fill_b16",
    c"hvd_fill_b32",
    c"hvd_fill_b64",
    c"hvd_copy_batch",
    c"hvd_widen_i16",
    c"hvd_widen_u16",
    c"hvd_narrow_16",
];

#[derive(Clone, Copy)]
enum Entry {
    ScaleF16,
    ScaleBf16,
    ScaleF32,
    ScaleF64,
    Fill8,
    Fill16,
    Fill32,
    Fill64,
    CopyBatch,
    WidenI16,
    WidenU16,
    Narrow16,
}

impl Entry {
    const COUNT: usize = Self::Narrow16 as usize + 1;
}

/// The kernels, loaded on one device.
pub struct Kernels {
    device: &'static Device,
    functions: [Handle; Entry::COUNT],
}

// SAFETY: functions of a module are names that any thread may launch.
unsafe impl Send for Kernels {}
// SAFETY: as above.
unsafe impl Sync for Kernels {}

/// One copy of a batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeviceCopy {
    /// Where to.
    pub dst: u64,
    /// Where from; the ranges do not overlap.
    pub src: u64,
    /// How much.
    pub bytes: u64,
}

/// Operands of a kernel that converts each element by itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Elements {
    /// Their type; of the 16-bit side where a kernel changes the width.
    pub dtype: DType,
    /// How many.
    pub count: usize,
    /// Where to.
    pub dst: u64,
    /// Where from.
    pub src: u64,
}

impl Elements {
    /// The results replace the operands at `at`.
    pub fn in_place(dtype: DType, count: usize, at: u64) -> Self {
        Self {
            dtype,
            count,
            dst: at,
            src: at,
        }
    }
}

/// The parameter of `hvd_copy_batch`.
#[repr(C)]
struct CopyTable {
    dst: [u64; BATCH],
    src: [u64; BATCH],
    bytes: [u64; BATCH],
    count: u64,
}

impl Kernels {
    pub(crate) fn load(device: &'static Device) -> Result<Self, GpuError> {
        device.entered_relaxed(|| {
            let driver = device.driver();
            let compiled;
            let image = match driver.stack() {
                Stack::Cuda => PTX.as_bytes(),
                Stack::Rocm => {
                    compiled = hiprtc::compile(HIP, &[])?;
                    &compiled[..]
                }
            };
            let mut module = null_mut();
            // SAFETY: text that ends with NUL, or a compiler's code; and a place for one handle.
            let code =
                unsafe { (driver.table.module_load_data)(&raw mut module, image.as_ptr().cast()) };
            driver.checked("cuModuleLoadData", code)?;
            let mut functions = [null_mut(); Entry::COUNT];
            for (function, name) in functions.iter_mut().zip(ENTRIES) {
                // SAFETY: a module, a C string and a place for one handle.
                let code =
                    unsafe { (driver.table.module_get_function)(function, module, name.as_ptr()) };
                driver.checked("cuModuleGetFunction", code)?;
            }
            Ok(Self { device, functions })
        })
    }

    /// Multiplies `count` elements of a float type by a factor: as f32 for halves and f32, as f64 for f64. `dst` may be
    /// `src`. A factor of 1 only copies.
    ///
    /// # Safety
    /// Both ranges are memory of this device, aligned to the type, and nobody else uses them in a way that this
    /// stream's order does not cover.
    pub unsafe fn scale(
        &self,
        stream: &Stream,
        elements: Elements,
        factor: f64,
    ) -> Result<(), GpuError> {
        let Elements {
            dtype,
            count,
            dst,
            src,
        } = elements;
        let entry = match dtype {
            DType::F16 => Entry::ScaleF16,
            DType::BF16 => Entry::ScaleBf16,
            DType::F32 => Entry::ScaleF32,
            DType::F64 => Entry::ScaleF64,
            _ => return Err(unsupported("scale", "floats", dtype)),
        };
        let bytes = count * dtype.size();
        if factor == 1.0 {
            if dst == src {
                return Ok(());
            }
            // SAFETY: the caller's promise.
            return unsafe { self.device.copy_within(dst, src, bytes, stream) };
        }
        let (mut dst, mut src, mut elements, mut factor) = (dst, src, count as u64, factor);
        // SAFETY: the parameters of hvd_scale_*, and the caller's promise.
        unsafe {
            self.launch(
                stream,
                entry,
                (blocks(bytes as u64, self.most_blocks()), 1),
                &mut [
                    (&raw mut dst).cast(),
                    (&raw mut src).cast(),
                    (&raw mut elements).cast(),
                    (&raw mut factor).cast(),
                ],
            )
        }
    }

    /// Writes a pattern of 1, 2, 4 or 8 bytes `count` times.
    ///
    /// # Safety
    /// As [`Self::scale`]; `dst` is aligned to the pattern's length.
    pub unsafe fn fill(
        &self,
        stream: &Stream,
        dst: u64,
        count: usize,
        pattern: &[u8],
    ) -> Result<(), GpuError> {
        let entry = match pattern.len() {
            1 => Entry::Fill8,
            2 => Entry::Fill16,
            4 => Entry::Fill32,
            8 => Entry::Fill64,
            other => {
                return Err(GpuError::Invalid(format!(
                    "a pattern to fill memory with has 1, 2, 4 or 8 bytes, not {other}"
                )));
            }
        };
        let mut value = [0; 8];
        value[..pattern.len()].copy_from_slice(pattern);
        let (mut dst, mut elements, mut value) = (dst, count as u64, u64::from_le_bytes(value));
        let bytes = elements * pattern.len() as u64;
        // SAFETY: the parameters of hvd_fill_*, and the caller's promise.
        unsafe {
            self.launch(
                stream,
                entry,
                (blocks(bytes, self.most_blocks()), 1),
                &mut [
                    (&raw mut dst).cast(),
                    (&raw mut elements).cast(),
                    (&raw mut value).cast(),
                ],
            )
        }
    }

    /// Copies any number of ranges, none of which overlaps another that is written.
    ///
    /// # Safety
    /// As [`Self::scale`], for every range, without any alignment.
    pub unsafe fn copy_batch(
        &self,
        stream: &Stream,
        copies: &[DeviceCopy],
    ) -> Result<(), GpuError> {
        let copies: Vec<&DeviceCopy> = copies.iter().filter(|copy| copy.bytes > 0).collect();
        for batch in copies.chunks(BATCH) {
            let mut table = CopyTable {
                dst: [0; BATCH],
                src: [0; BATCH],
                bytes: [0; BATCH],
                count: batch.len() as u64,
            };
            for (i, copy) in batch.iter().enumerate() {
                table.dst[i] = copy.dst;
                table.src[i] = copy.src;
                table.bytes[i] = copy.bytes;
            }
            let largest = batch.iter().map(|copy| copy.bytes).max().unwrap_or(0);
            let rows = batch.len() as u32;
            let most = (self.most_blocks() / rows).max(1);
            // SAFETY: the parameter of hvd_copy_batch, and the caller's promise.
            unsafe {
                self.launch(
                    stream,
                    Entry::CopyBatch,
                    (blocks(largest, most), rows),
                    &mut [(&raw mut table).cast()],
                )?;
            }
        }
        Ok(())
    }

    /// Turns 16-bit integers, of the given type, into 32-bit ones of the same value.
    ///
    /// # Safety
    /// As [`Self::scale`]; the ranges do not overlap.
    pub unsafe fn widen(&self, stream: &Stream, elements: Elements) -> Result<(), GpuError> {
        let entry = match elements.dtype {
            DType::I16 => Entry::WidenI16,
            DType::U16 => Entry::WidenU16,
            dtype => return Err(unsupported("widen", "int16 and uint16", dtype)),
        };
        // SAFETY: the caller's promise.
        unsafe { self.convert(stream, entry, elements) }
    }

    /// Keeps the lower 16 bits, of the given type, of 32-bit integers.
    ///
    /// # Safety
    /// As [`Self::widen`].
    pub unsafe fn narrow(&self, stream: &Stream, elements: Elements) -> Result<(), GpuError> {
        if !matches!(elements.dtype, DType::I16 | DType::U16) {
            return Err(unsupported("narrow", "int16 and uint16", elements.dtype));
        }
        // SAFETY: the caller's promise.
        unsafe { self.convert(stream, Entry::Narrow16, elements) }
    }

    /// # Safety
    /// As [`Self::widen`].
    unsafe fn convert(
        &self,
        stream: &Stream,
        entry: Entry,
        elements: Elements,
    ) -> Result<(), GpuError> {
        let (mut dst, mut src) = (elements.dst, elements.src);
        let mut elements = elements.count as u64;
        // SAFETY: the parameters of hvd_widen_* and hvd_narrow_16, and the caller's promise.
        unsafe {
            self.launch(
                stream,
                entry,
                (blocks(elements * 4, self.most_blocks()), 1),
                &mut [
                    (&raw mut dst).cast(),
                    (&raw mut src).cast(),
                    (&raw mut elements).cast(),
                ],
            )
        }
    }

    fn most_blocks(&self) -> u32 {
        let multiprocessors = u32::try_from(self.device.multiprocessors()).unwrap_or(1);
        multiprocessors.max(1) * BLOCKS_PER_MULTIPROCESSOR
    }

    /// # Safety
    /// The parameters are those of the entry, and what they name is memory as the caller of the kernel promises.
    unsafe fn launch(
        &self,
        stream: &Stream,
        entry: Entry,
        (columns, rows): (u32, u32),
        parameters: &mut [*mut c_void],
    ) -> Result<(), GpuError> {
        if columns == 0 {
            return Ok(());
        }
        let driver = self.device.driver();
        self.device.entered(|| {
            // SAFETY: the caller's promise; the driver copies the parameters during the call.
            let code = unsafe {
                (driver.table.launch_kernel)(
                    self.functions[entry as usize],
                    columns,
                    rows,
                    1,
                    BLOCK,
                    1,
                    1,
                    0,
                    stream.raw().0,
                    parameters.as_mut_ptr(),
                    null_mut(),
                )
            };
            driver.checked("cuLaunchKernel", code)
        })
    }
}

impl std::fmt::Debug for Kernels {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Kernels")
            .field("device", &self.device)
            .finish_non_exhaustive()
    }
}

/// Blocks for so many bytes: each thread strides over the grid, so fewer than would cover them are enough.
fn blocks(bytes: u64, most: u32) -> u32 {
    let wanted = bytes.div_ceil(u64::from(BLOCK) * VECTOR);
    wanted.min(u64::from(most)) as u32
}

fn unsupported(kernel: &str, types: &str, dtype: DType) -> GpuError {
    GpuError::Invalid(format!(
        "the kernel `{kernel}` is for {types}, not {}",
        dtype.name()
    ))
}
