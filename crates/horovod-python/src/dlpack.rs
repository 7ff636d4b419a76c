//! The reader of tensors through DLPack's C exchange table: device, address, shape and type in one call.
//!
//! Asking the tensor for each of its properties through Python costs more than everything else that `enqueue`
//! does. The table is DLPack's stable interface (since 1.3); frameworks without it are served by descriptions
//! that the adapter puts together.

use std::ffi::{CStr, c_int, c_void};

use horovod_engine::{DType, MemoryOrder, Shape, TensorMeta};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::PyCapsule;

use crate::gpu::{CurrentStream, StreamSource};

/// Name of the capsule and, as an attribute of the type, where it is found.
const CAPSULE: &CStr = c"dlpack_exchange_api";
const ATTRIBUTE: &str = "__dlpack_c_exchange_api__";
const MAJOR: u32 = 1;
const CPU: i32 = 1;
/// `kDLCUDA`.
pub(crate) const CUDA: i32 = 2;

#[repr(C)]
struct Header {
    major: u32,
    minor: u32,
    older: *const Header,
}

/// `DLPackExchangeAPI` of DLPack 1; only what is used here has its type.
#[repr(C)]
struct ExchangeApi {
    header: Header,
    allocate: *const c_void,
    managed_from_object: *const c_void,
    managed_to_object: *const c_void,
    tensor_from_object: Option<Describe>,
    current_work_stream: Option<CurrentStream>,
}

type Describe = unsafe extern "C" fn(*mut c_void, *mut RawTensor) -> c_int;

/// `DLTensor`.
#[repr(C)]
pub(crate) struct RawTensor {
    pub(crate) data: *mut c_void,
    device_type: i32,
    device_id: i32,
    ndim: i32,
    code: u8,
    bits: u8,
    lanes: u16,
    shape: *const i64,
    strides: *const i64,
    byte_offset: u64,
}

/// Describes tensors of one framework.
#[derive(Clone, Copy)]
pub(crate) struct Reader {
    describe: Describe,
    current_stream: Option<CurrentStream>,
}

/// A tensor as it was read.
pub(crate) struct Read {
    /// Where its elements begin.
    pub(crate) memory: *mut u8,
    pub(crate) meta: TensorMeta,
    /// The number of its GPU; `None`: host memory.
    pub(crate) gpu: Option<i32>,
}

impl Reader {
    /// The reader of a type; `None` where the framework has no such interface.
    pub(crate) fn of(class: &Bound<'_, PyAny>) -> PyResult<Option<Self>> {
        let Some(capsule) = class.getattr_opt(ATTRIBUTE)? else {
            return Ok(None);
        };
        let Ok(capsule) = capsule.cast_into::<PyCapsule>() else {
            return Err(PyValueError::new_err(format!(
                "{ATTRIBUTE} of {class} is not a capsule"
            )));
        };
        let mut header = capsule
            .pointer_checked(Some(CAPSULE))?
            .as_ptr()
            .cast::<Header>()
            .cast_const();
        while !header.is_null() {
            // SAFETY: the capsule's name says what it points to: a table, or the header of an older one,
            // both of which live as long as the process.
            let Header {
                major,
                minor,
                older,
            } = unsafe { header.read() };
            if major == MAJOR && minor >= 3 {
                // SAFETY: tables of this version have this layout, and their header comes first.
                let table = unsafe { &*header.cast::<ExchangeApi>() };
                let current_stream = table.current_work_stream;
                return Ok(table.tensor_from_object.map(|describe| Self {
                    describe,
                    current_stream,
                }));
            }
            header = older;
        }
        Ok(None)
    }

    /// Where the elements of a tensor begin now; `None` where that cannot be told.
    pub(crate) fn address(self, tensor: &Bound<'_, PyAny>) -> Option<*mut u8> {
        self.describe(tensor)?.memory()
    }

    /// Where the framework tells its current streams.
    pub(crate) fn streams(self) -> Option<StreamSource> {
        self.current_stream.map(StreamSource::Table)
    }

    fn describe(self, tensor: &Bound<'_, PyAny>) -> Option<RawTensor> {
        let mut raw = std::mem::MaybeUninit::<RawTensor>::uninit();
        // SAFETY: the table belongs to the tensor's type, as `of` demands of the caller; the interpreter lock
        // is held; there is room for the description.
        let status = unsafe { (self.describe)(tensor.as_ptr().cast(), raw.as_mut_ptr()) };
        if status != 0 {
            // No memory to describe. The caller's own checks say it in the framework's words.
            drop(PyErr::take(tensor.py()));
            return None;
        }
        // SAFETY: status 0 says that every field was filled in.
        Some(unsafe { raw.assume_init() })
    }

    /// Where the elements of a tensor are, and what they are. `None` unless it is dense memory, in any order of the
    /// host's or row by row of a GPU's, of a type that the core computes with.
    pub(crate) fn read(self, tensor: &Bound<'_, PyAny>) -> Option<Read> {
        let raw = self.describe(tensor)?;
        let gpu = match raw.device_type {
            CPU => None,
            CUDA if self.current_stream.is_some() => Some(raw.device_id),
            _ => return None,
        };
        if raw.lanes != 1 {
            return None;
        }
        let dtype = dtype(raw.code, raw.bits)?;
        let ndim = usize::try_from(raw.ndim).ok()?;
        let (shape, strides): (&[i64], &[i64]) = if ndim == 0 {
            (&[], &[])
        } else if raw.shape.is_null() || raw.strides.is_null() {
            // Older tables could leave strides out; what they mean then is for the slow way to find out.
            return None;
        } else {
            // SAFETY: with dimensions, both point to `ndim` numbers that the tensor keeps while we hold it.
            unsafe {
                (
                    std::slice::from_raw_parts(raw.shape, ndim),
                    std::slice::from_raw_parts(raw.strides, ndim),
                )
            }
        };
        let shape = shape
            .iter()
            .map(|&n| u64::try_from(n))
            .collect::<Result<Shape, _>>()
            .ok()?;
        let order = MemoryOrder::of(&shape, strides)?;
        if (raw.data.is_null() && !shape.contains(&0)) || (gpu.is_some() && !order.is_row_major()) {
            return None;
        }
        Some(Read {
            memory: raw.memory()?,
            meta: TensorMeta::new(dtype, shape).in_order(order),
            gpu,
        })
    }
}

impl RawTensor {
    /// Where the elements begin.
    fn memory(&self) -> Option<*mut u8> {
        let offset = usize::try_from(self.byte_offset).ok()?;
        Some(self.data.cast::<u8>().wrapping_add(offset))
    }
}

/// The core's type for DLPack's type code and width.
fn dtype(code: u8, bits: u8) -> Option<DType> {
    Some(match (code, bits) {
        (0, 8) => DType::I8,
        (0, 16) => DType::I16,
        (0, 32) => DType::I32,
        (0, 64) => DType::I64,
        (1, 8) => DType::U8,
        (1, 16) => DType::U16,
        (1, 32) => DType::U32,
        (1, 64) => DType::U64,
        (2, 16) => DType::F16,
        (2, 32) => DType::F32,
        (2, 64) => DType::F64,
        (4, 16) => DType::BF16,
        (6, 8) => DType::Bool,
        _ => return None,
    })
}
