//! Types of elements.
#![forbid(unsafe_code)]

use std::fmt;

use horovod_engine as engine;

mod sealed {
    use horovod_engine::DType;

    /// Gives the code of the type on the wire; nobody else can implement it, so each code fits its type.
    pub trait Sealed {
        const DTYPE: DType;
    }
}

pub(crate) use sealed::Sealed;

/// A type of which slices can be sent: integers of 8 to 64 bits, `f32`, `f64` and `bool`; with the feature `half` also
/// `half::f16` and `half::bf16`.
///
/// All ranks must pass the same type to one operation. Python's ranks of the same job may take part: `f32` is their
/// `float32`.
pub trait Element:
    Sealed + Copy + Default + PartialEq + fmt::Debug + Send + Sync + 'static
{
}

/// A type whose values can be reduced: every [`Element`].
///
/// `bool` can be reduced by `Sum` (or), `Product` (and), `Min` and `Max`, but not by `Average`; `Adasum` is for floats.
/// An operation that a type does not have ends with [`Error::Invalid`](crate::Error::Invalid), before anything is sent.
pub trait Reduce: Element {}

macro_rules! elements {
    ($($type:ty => $code:ident),+ $(,)?) => {$(
        impl Sealed for $type {
            const DTYPE: engine::DType = engine::DType::$code;
        }
        impl Element for $type {}
        impl Reduce for $type {}
    )+};
}

elements! {
    u8 => U8, i8 => I8, u16 => U16, i16 => I16, u32 => U32, i32 => I32, u64 => U64, i64 => I64,
    f32 => F32, f64 => F64, bool => Bool,
}
#[cfg(feature = "half")]
elements! { half::f16 => F16, half::bf16 => BF16 }
