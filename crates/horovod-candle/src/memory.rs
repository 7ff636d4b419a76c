//! The memory of tensors: the elements of many at once as slices, without a copy and without unsafe code.
//!
//! candle gives mutable memory to an in-place operation of one tensor only. So the operation on the first tensor runs
//! that on the second, and so on, and the innermost has the slices of all of them. It holds all their locks.

use std::cell::Cell;
use std::collections::HashSet;

use candle_core::{CpuStorage, DType, Device, InplaceOp1, Layout, Storage, Tensor, bail};
use half::{bf16, f16};

/// Tensors whose locks are held at once; more than that run as several operations. Each takes a part of the stack of the
/// calling thread: together less than 512 KiB in a build without optimisation, of the 2 MiB that a thread has.
pub(crate) const LOCKS_MAX: usize = 128;

/// A type of elements that both candle and the engine know.
pub(crate) trait CandleElement: horovod::Reduce {
    /// The elements of a storage of this type.
    fn elements(storage: &mut CpuStorage) -> Option<&mut Vec<Self>>;
}

macro_rules! elements {
    ($($type:ty => $variant:ident),+ $(,)?) => {
        /// The types of candle that can be sent.
        pub(crate) const TYPES: [DType; [$(DType::$variant),+].len()] = [$(DType::$variant),+];

        $(impl CandleElement for $type {
            fn elements(storage: &mut CpuStorage) -> Option<&mut Vec<Self>> {
                match storage {
                    CpuStorage::$variant(elements) => Some(elements),
                    _ => None,
                }
            }
        })+

        /// The address of a storage, which is the same for all views of it.
        fn address(storage: &CpuStorage) -> Option<usize> {
            match storage {
                $(CpuStorage::$variant(elements) => Some(elements.as_ptr() as usize),)+
                _ => None,
            }
        }

        /// Runs an operation on tensors of this type, which are dense, on the host, and do not share memory.
        pub(crate) fn run<O: Operation>(
            dtype: DType,
            tensors: &[Tensor],
            operation: &O,
        ) -> crate::Result<()> {
            match dtype {
                $(DType::$variant => run_typed::<$type, O>(tensors, operation),)+
                other => bail_of(other),
            }
        }
    };
}

elements! {
    f64 => F64, f32 => F32, f16 => F16, bf16 => BF16,
    u8 => U8, u32 => U32, i16 => I16, i32 => I32, i64 => I64,
}

fn bail_of(dtype: DType) -> crate::Result<()> {
    let unknown = candle_core::Error::UnsupportedDTypeForOp(dtype, "horovod");
    Err(unknown.bt().into())
}

/// An operation between ranks on the slices of some tensors.
pub(crate) trait Operation {
    /// Runs it and waits for its end.
    fn run<T: CandleElement>(&self, slices: Vec<&mut [T]>) -> horovod::Result<()>;
}

fn run_typed<T: CandleElement, O: Operation>(
    tensors: &[Tensor],
    operation: &O,
) -> crate::Result<()> {
    let ended = Cell::new(Ok(()));
    let slices = Vec::with_capacity(tensors.len());
    descend(tensors, slices, &|slices: Vec<&mut [T]>| {
        ended.set(operation.run(slices));
    })?;
    Ok(ended.into_inner()?)
}

/// One tensor whose lock is held, and those that follow.
struct Level<'slices, 'rest, T> {
    rest: &'rest [Tensor],
    slices: Cell<Vec<&'slices mut [T]>>,
    body: &'rest Body<'rest, T>,
}

type Body<'a, T> = dyn for<'slices> Fn(Vec<&'slices mut [T]>) + 'a;

fn descend<T: CandleElement>(
    tensors: &[Tensor],
    slices: Vec<&mut [T]>,
    body: &Body<'_, T>,
) -> candle_core::Result<()> {
    let Some((first, rest)) = tensors.split_first() else {
        body(slices);
        return Ok(());
    };
    let slices = Cell::new(slices);
    first.inplace_op1(&Level { rest, slices, body })
}

impl<T: CandleElement> InplaceOp1 for Level<'_, '_, T> {
    fn name(&self) -> &'static str {
        "horovod"
    }

    fn cpu_fwd(&self, storage: &mut CpuStorage, layout: &Layout) -> candle_core::Result<()> {
        let mut slices: Vec<&mut [T]> = self.slices.take();
        let Some((begin, end)) = layout.contiguous_offsets() else {
            bail!("horovod: a tensor that is not dense")
        };
        let Some(elements) = T::elements(storage) else {
            bail!("horovod: a tensor of another type than the first")
        };
        slices.push(&mut elements[begin..end]);
        descend(self.rest, slices, self.body)
    }
}

/// The memory of one tensor in an operation.
pub(crate) enum TensorMemory {
    /// Its own.
    Own(Tensor),
    /// A copy on the host, of a tensor that is strided, shares its memory with an earlier one, or is on a device.
    Copy(Tensor),
}

impl TensorMemory {
    pub(crate) fn tensor(&self) -> &Tensor {
        match self {
            Self::Own(tensor) | Self::Copy(tensor) => tensor,
        }
    }
}

/// Addresses of the storages that earlier tensors of these operations use.
#[derive(Default)]
pub(crate) struct UsedMemory(HashSet<usize>);

impl UsedMemory {
    pub(crate) fn place(&mut self, tensor: &Tensor) -> candle_core::Result<TensorMemory> {
        if !tensor.device().is_cpu() {
            let copy = tensor.detach().to_device(&Device::Cpu)?.contiguous()?;
            return Ok(TensorMemory::Copy(copy));
        }
        let is_own = {
            let (storage, layout) = tensor.storage_and_layout();
            match &*storage {
                Storage::Cpu(storage) => {
                    let is_new = address(storage).is_some_and(|address| self.0.insert(address));
                    is_new && layout.is_contiguous()
                }
                _ => false,
            }
        };
        Ok(match is_own {
            true => TensorMemory::Own(tensor.clone()),
            false => TensorMemory::Copy(tensor.detach().force_contiguous()?),
        })
    }
}
