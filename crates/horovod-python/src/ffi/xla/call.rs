//! A call as XLA describes it, read: attributes, operands, results.

use std::ffi::c_int;
use std::mem::size_of;
use std::slice;

use horovod_engine::{DType, Error, Output, Shape, Tensor, TensorMeta};

use super::abi::{
    self, Attrs, BUFFER, Buffer, ByteSpan, CallFrame, SCALAR, STRING, Scalar, Values, sized,
};

/// XLA's codes of element types.
const S32: c_int = 4;
const S64: c_int = 5;
const F64: c_int = 12;
/// Holds nothing: it makes a call come after another one.
const TOKEN: c_int = 17;
/// Pairs of floats and doubles.
const C64: c_int = 15;
const C128: c_int = 18;

/// Attributes of a call. Absent attributes have their defaults, unknown ones are refused.
#[derive(Debug, PartialEq)]
pub(super) struct Attributes<'a> {
    pub(super) name: &'a str,
    pub(super) reduce_op: u8,
    pub(super) prescale: f64,
    pub(super) postscale: f64,
    pub(super) process_set: u32,
    pub(super) root: u32,
    /// Whether nothing orders the call among those of its program; absent where a name is at one place only.
    pub(super) is_unordered: Option<bool>,
    /// Whether the last argument before those of `after` is no operand, but the number of the call of the function that the
    /// call is in.
    pub(super) has_call_site: bool,
    /// How many of the last arguments are there only so that the call comes after what makes them.
    pub(super) after: u32,
}

impl<'a> Attributes<'a> {
    /// # Safety
    /// The frame is XLA's, and lives for `'a`.
    pub(super) unsafe fn of(frame: &'a CallFrame) -> Result<Self, Error> {
        let mut all = Self {
            name: "",
            reduce_op: 1,
            prescale: 1.0,
            postscale: 1.0,
            process_set: 0,
            root: 0,
            is_unordered: None,
            has_call_site: false,
            after: 0,
        };
        let Attrs {
            head,
            size,
            types,
            names,
            values,
        } = &frame.attrs;
        check_layout::<Attrs>("attributes", head.struct_size)?;
        // SAFETY: lists of this length, as XLA's interface says.
        let (types, names, values) = unsafe {
            (
                list(*types, *size),
                list(*names, *size),
                list(*values, *size),
            )
        };
        for ((kind, name), value) in types.iter().zip(names).zip(values) {
            // SAFETY: each name is a span; each value is what its type says.
            let (name, value) = unsafe { (text(*name)?, Value::of(*kind, value.cast())?) };
            match (name, value) {
                ("name", Value::Text(name)) => all.name = name,
                ("reduce_op", Value::Int(code)) => all.reduce_op = number(name, code)?,
                ("prescale", Value::Float(factor)) => all.prescale = factor,
                ("postscale", Value::Float(factor)) => all.postscale = factor,
                ("process_set", Value::Int(set)) => all.process_set = number(name, set)?,
                ("root", Value::Int(rank)) => all.root = number(name, rank)?,
                ("is_unordered", Value::Int(is)) => all.is_unordered = Some(is != 0),
                ("has_call_site", Value::Int(has)) => all.has_call_site = has != 0,
                ("after", Value::Int(count)) => all.after = number(name, count)?,
                (_, value) => {
                    return Err(invalid(format!(
                        "an XLA call has the attribute {name:?} with {value:?}; known are name (a string), reduce_op, \
                         process_set, root, is_unordered, has_call_site, after (32-bit integers), prescale and postscale \
                         (64-bit floats)"
                    )));
                }
            }
        }
        if all.name.is_empty() {
            return Err(invalid(
                "an XLA call has no attribute `name`, by which the ranks find each other's operands",
            ));
        }
        Ok(all)
    }
}

#[derive(Debug)]
enum Value<'a> {
    Text(&'a str),
    Int(i32),
    Float(f64),
}

impl<'a> Value<'a> {
    /// # Safety
    /// `value` is of the kind that its code says, and lives for `'a`.
    unsafe fn of(kind: c_int, value: *const Scalar) -> Result<Self, Error> {
        if kind == STRING {
            // SAFETY: as the caller promises.
            return Ok(Self::Text(unsafe { text(value.cast())? }));
        }
        if kind == SCALAR && !value.is_null() {
            // SAFETY: as the caller promises; a scalar's value is as long as its type.
            unsafe {
                let Scalar { dtype, value } = &*value;
                match *dtype {
                    S32 => return Ok(Self::Int(value.cast::<i32>().read_unaligned())),
                    F64 => return Ok(Self::Float(value.cast::<f64>().read_unaligned())),
                    _ => {}
                }
            }
        }
        Err(invalid(format!(
            "an XLA call has an attribute of kind {kind} that is no string, 32-bit integer or 64-bit float"
        )))
    }
}

/// An operand, and the result that belongs to it.
#[derive(Debug)]
pub(super) struct CallOperand {
    pub(super) meta: TensorMeta,
    input: *const u8,
    pub(super) output: *mut u8,
    pub(super) output_shape: Shape,
    output_bytes: usize,
}

impl CallOperand {
    /// Those of a call: as many results as operands, of the same types; and the number of the call site, if it has one,
    /// which `read` gets from where it is.
    ///
    /// # Safety
    /// The frame is XLA's.
    pub(super) unsafe fn all(
        frame: &CallFrame,
        attributes: &Attributes<'_>,
        read: impl FnOnce(*const i64) -> Result<i64, Error>,
    ) -> Result<(Vec<Self>, i64), Error> {
        // SAFETY: as the caller promises.
        let (mut args, rets) = unsafe { (buffers(&frame.args)?, buffers(&frame.rets)?) };
        args.truncate(args.len().saturating_sub(attributes.after as usize));
        let last = if attributes.has_call_site {
            args.pop()
        } else {
            None
        };
        let call_site = last.map_or(Ok(0), |last| read(number_in(last)?))?;
        if args.len() != rets.len() || args.is_empty() {
            return Err(invalid(format!(
                "an XLA call has {} operands and {} results; there must be at least one, and a result for each",
                args.len(),
                rets.len()
            )));
        }
        let pairs = args.into_iter().zip(rets);
        // SAFETY: as the caller promises.
        let operands = pairs
            .map(|(arg, ret)| unsafe { Self::of(arg, ret) })
            .collect::<Result<_, _>>()?;
        Ok((operands, call_site))
    }

    unsafe fn of(arg: &Buffer, ret: &Buffer) -> Result<Self, Error> {
        // SAFETY: XLA's buffers have dimensions of their rank.
        let (meta, result) = unsafe { (meta_of(arg)?, meta_of(ret)?) };
        if meta.dtype != result.dtype {
            return Err(invalid(format!(
                "an XLA call has an operand of type {:?} and for it a result of type {:?}",
                meta.dtype, result.dtype
            )));
        }
        let bytes = result.elems().and_then(|n| usize::try_from(n).ok());
        let bytes = bytes.and_then(|n| n.checked_mul(meta.dtype.size()));
        Ok(Self {
            meta,
            input: arg.data.cast_const().cast(),
            output: ret.data.cast(),
            output_shape: result.shape,
            output_bytes: bytes.ok_or_else(|| invalid("a result is too large for this machine"))?,
        })
    }

    /// For an operation whose results are as large as its operands.
    ///
    /// # Safety
    /// The buffers are left alone until the operation has ended.
    pub(super) unsafe fn same_shape(&self) -> Result<Tensor, Error> {
        if self.meta.shape != self.output_shape {
            return Err(invalid(format!(
                "an XLA call has an operand of shape {:?} and for it a result of shape {:?}; they must be equal",
                self.meta.shape, self.output_shape
            )));
        }
        // SAFETY: as the caller promises, and the shapes are equal.
        unsafe { self.tensor(Output::At(self.output)) }
    }

    /// For an operation that brings or gives every member equally many rows.
    ///
    /// # Safety
    /// The buffers are left alone until the operation has ended.
    pub(super) unsafe fn even_rows(&self) -> Result<Tensor, Error> {
        let output = Output::Even {
            at: self.output,
            bytes: self.output_bytes,
        };
        // SAFETY: as the caller promises, and so many bytes are there.
        unsafe { self.tensor(output) }
    }

    unsafe fn tensor(&self, output: Output) -> Result<Tensor, Error> {
        // SAFETY: XLA's buffers are dense and row-major, and left alone as the caller promises.
        let tensor = unsafe { Tensor::new(self.meta.clone(), self.input, output) };
        if tensor.has_memory() {
            return Ok(tensor);
        }
        // XLA has no memory where there are no elements, which may be so for one of the two.
        if self.output_bytes == 0 || tensor.bytes() == Some(0) {
            let nothing = std::ptr::without_provenance_mut::<u8>(size_of::<u64>());
            let input = if self.input.is_null() {
                nothing
            } else {
                self.input.cast_mut()
            };
            let somewhere = |at: *mut u8| if at.is_null() { nothing } else { at };
            let output = match output {
                Output::At(at) => Output::At(somewhere(at)),
                Output::Even { at, bytes } => Output::Even {
                    at: somewhere(at),
                    bytes,
                },
                Output::Allocate | Output::Exactly { .. } => output,
            };
            // SAFETY: as above; what has no bytes is not touched.
            let tensor = unsafe { Tensor::new(self.meta.clone(), input, output) };
            if tensor.has_memory() {
                return Ok(tensor);
            }
        }
        Err(invalid(format!(
            "an operand of shape {:?} has no memory",
            self.meta.shape
        )))
    }
}

/// Of arguments or results; tokens are left out.
///
/// # Safety
/// The list is XLA's.
pub(super) unsafe fn buffers(values: &Values) -> Result<Vec<&Buffer>, Error> {
    check_layout::<Values>("values", values.head.struct_size)?;
    // SAFETY: lists of this length, as XLA's interface says.
    let (types, buffers) = unsafe {
        (
            list(values.types, values.size),
            list(values.values, values.size),
        )
    };
    let buffer = |(kind, buffer): (&c_int, &*const std::ffi::c_void)| {
        if *kind != BUFFER {
            return Err(invalid(format!(
                "an XLA call has an operand of kind {kind}, which is no buffer"
            )));
        }
        // SAFETY: of a buffer's kind.
        unsafe { sized(buffer.cast::<Buffer>(), size_of::<Buffer>()) }
            .map_err(|size| unknown_layout("a buffer", size, size_of::<Buffer>()))
    };
    let all = types.iter().zip(buffers).map(buffer);
    all.filter(|buffer| !matches!(buffer, Ok(Buffer { dtype: TOKEN, .. })))
        .collect()
}

/// Where the value of a scalar of 64 bits is.
fn number_in(buffer: &Buffer) -> Result<*const i64, Error> {
    if buffer.dtype != S64 || buffer.rank != 0 || buffer.data.is_null() {
        return Err(invalid(
            "the number of a call site in an XLA call is no 64-bit integer",
        ));
    }
    Ok(buffer.data.cast_const().cast())
}

/// Complex numbers are pairs in a dimension of their own.
///
/// # Safety
/// The buffer is XLA's.
pub(super) unsafe fn meta_of(buffer: &Buffer) -> Result<TensorMeta, Error> {
    // SAFETY: as many dimensions as its rank says.
    let dims = unsafe { list(buffer.dims, buffer.rank) };
    let mut shape = Vec::with_capacity(dims.len() + 1);
    for dim in dims {
        shape.push(u64::try_from(*dim).map_err(|_| invalid(format!("a dimension of {dim}")))?);
    }
    let dtype = match buffer.dtype {
        1 => DType::Bool,
        2 => DType::I8,
        3 => DType::I16,
        S32 => DType::I32,
        S64 => DType::I64,
        6 => DType::U8,
        7 => DType::U16,
        8 => DType::U32,
        9 => DType::U64,
        10 => DType::F16,
        11 | C64 => DType::F32,
        F64 | C128 => DType::F64,
        16 => DType::BF16,
        other => {
            return Err(invalid(format!(
                "XLA's element type {other} is none that Horovod can send; convert it, for example to float32 or uint8"
            )));
        }
    };
    if matches!(buffer.dtype, C64 | C128) {
        shape.push(2);
    }
    Ok(TensorMeta::new(dtype, shape))
}

/// Structures that lie inside others must be just as long as here.
fn check_layout<T>(what: &str, size: usize) -> Result<(), Error> {
    if size == size_of::<T>() {
        return Ok(());
    }
    Err(unknown_layout(what, size, size_of::<T>()))
}

fn unknown_layout(what: &str, size: usize, known: usize) -> Error {
    Error::Internal(format!(
        "this version of XLA describes {what} in {size} bytes, where {known} are known: it is too new, or too old, for \
         this version of Horovod"
    ))
}

unsafe fn text<'a>(span: *const ByteSpan) -> Result<&'a str, Error> {
    if span.is_null() {
        return Err(invalid("an XLA call has an attribute without a value"));
    }
    // SAFETY: a span of XLA's, which lives as long as the call.
    let bytes = unsafe {
        let abi::ByteSpan { at, len } = &*span;
        list(at.cast::<u8>(), i64::try_from(*len).unwrap_or(0))
    };
    std::str::from_utf8(bytes).map_err(|_| invalid("an attribute of an XLA call is not UTF-8"))
}

unsafe fn list<'a, T>(first: *const T, length: i64) -> &'a [T] {
    match usize::try_from(length) {
        // SAFETY: as long as its count, as the caller promises.
        Ok(length) if length > 0 && !first.is_null() => unsafe {
            slice::from_raw_parts(first, length)
        },
        _ => &[],
    }
}

fn number<T: TryFrom<i32>>(name: &str, value: i32) -> Result<T, Error> {
    T::try_from(value)
        .map_err(|_| invalid(format!("the attribute {name} of an XLA call is {value}")))
}

pub(super) fn invalid(text: impl Into<String>) -> Error {
    Error::Invalid(text.into())
}
