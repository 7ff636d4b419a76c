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
/// - [`Error::Differ`](crate::Error::Differ) on all ranks if two have different parameters or pass another `root`;
/// - [`Error::OfRank`](crate::Error::OfRank) on all ranks if one has two parameters of one name, or one of another type, or
///   cannot copy one to the host;
/// - [`Error::Horovod`](crate::Error::Horovod) for those of [`Communicator`], also if there is no rank `root`;
/// - [`Error::Candle`](crate::Error::Candle) if this rank cannot copy a received parameter to its device.
///
/// After an error the parameters of the ranks may be different.
pub fn broadcast_parameters(
    hvd: &Communicator,
    parameters: &(impl Parameters + ?Sized),
    root: usize,
) -> Result<()> {
    let parameters = Sorted::of(parameters);
    let lines = parameters.as_ref().map(Sorted::lines);
    let lines = Lines::new(lines.unwrap_or_default());
    let own = parameters.and_then(|parameters| {
        parameters.check_types()?;
        let mut used = UsedMemory::default();
        let places = parameters.iter().map(|(_, var)| used.place(var));
        let places = places.collect::<candle_core::Result<Vec<_>>>()?;
        Ok((parameters, places))
    });
    let root_line = format!("root\t{root}");
    let (parameters, places) = agree(hvd, &lines, Some(&root_line), own)?;
    let names = parameters.iter().map(|(name, _)| name);
    let pending: Vec<(&str, TensorMemory)> = names.zip(places).collect();
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
