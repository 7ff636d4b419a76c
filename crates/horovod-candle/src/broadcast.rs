//! The broadcast of parameters, so that all ranks begin alike.

use horovod::Communicator;
use horovod::framework::Lines;

use crate::error::Result;
use crate::memory::{self, CandleElement, LOCKS_MAX, Operation, TensorMemory, UsedMemory};
use crate::parameters::{Parameters, Sorted, agree};

/// Copies the parameters of the rank `root` to all other ranks, into the same variables.
///
/// Call it on all ranks after the model is made or loaded, before the first step. Parameters pair by name; all ranks
/// must have the same names, types and shapes. Types are `f64`, `f32`, `f16`, `bf16`, `u8`, `u32`, `i16`, `i32`
/// and `i64`.
///
/// An optimizer that has made steps before, such as `AdamW`, has private moments, which cannot be sent: make
/// the optimizers of all ranks anew, after this call.
///
/// # Errors
/// - [`Error::Differ`](crate::Error::Differ) on all ranks if two have different parameters;
/// - [`Error::Invalid`](crate::Error::Invalid) for two parameters of one name, or one of another type;
/// - [`Error::Horovod`](crate::Error::Horovod) for those of [`Communicator`], also if there is no rank `root`.
///
/// After an error the parameters of the ranks may be different.
pub fn broadcast_parameters(
    hvd: &Communicator,
    parameters: &(impl Parameters + ?Sized),
    root: usize,
) -> Result<()> {
    let parameters = Sorted::of(parameters)?;
    agree(hvd, &Lines::new(parameters.lines()), None)?;
    parameters.check_types()?;
    let mut places = UsedMemory::default();
    let mut pending: Vec<(&str, TensorMemory)> = Vec::new();
    for (name, var) in parameters.iter() {
        pending.push((name, places.place(var)?));
    }
    for dtype in memory::TYPES {
        let of_type: Vec<_> = pending
            .iter()
            .filter(|(_, place)| place.tensor().dtype() == dtype && place.tensor().elem_count() > 0)
            .collect();
        for chunk in of_type.chunks(LOCKS_MAX) {
            let names = chunk.iter().map(|(name, _)| *name).collect();
            let tensors: Vec<_> = chunk
                .iter()
                .map(|(_, place)| place.tensor().clone())
                .collect();
            memory::run(dtype, &tensors, &Broadcast { hvd, names, root })?;
        }
    }
    for ((_, var), (_, place)) in parameters.iter().zip(&pending) {
        if let TensorMemory::Copy(copy) = place {
            var.set(&copy.to_device(var.device())?)?;
        }
    }
    Ok(())
}

struct Broadcast<'a> {
    hvd: &'a Communicator,
    names: Vec<&'a str>,
    root: usize,
}

impl Operation for Broadcast<'_> {
    fn run<T: CandleElement>(&self, slices: Vec<&mut [T]>) -> horovod::Result<()> {
        self.hvd.scope(|scope| {
            for (name, slice) in self.names.iter().zip(slices) {
                let named = scope.named(&format!("candle.parameter.{name}"));
                named.broadcast_in_place(slice, self.root);
            }
        })
    }
}
