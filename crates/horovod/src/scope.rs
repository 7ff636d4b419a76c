//! Several operations on borrowed slices, which have all ended when the scope is left: as `std::thread::scope`.
#![forbid(unsafe_code)]

use horovod_engine::Op;

use crate::communicator::Communicator;
use crate::element::{Element, Reduce};
use crate::error::Result;
use crate::memory::{self, InFlight};
use crate::operation::{self, Shape};
use crate::reduction::Reduction;

/// Begins operations on slices that outlive it: see [`Communicator::scope`].
///
/// A method begins its operation and returns. Its errors, also of its arguments, are the result of the scope.
pub struct Scope<'scope, 'env: 'scope> {
    communicator: Communicator,
    in_flight: &'scope InFlight<'scope, 'env>,
}

impl<'scope> Scope<'scope, '_> {
    /// A view whose operations have this name: see [`Communicator::named`].
    #[must_use]
    pub fn named(&self, name: &str) -> Self {
        Self {
            communicator: self.communicator.named(name),
            in_flight: self.in_flight,
        }
    }

    /// Begins [`Communicator::allreduce_in_place`].
    pub fn allreduce_in_place<T: Reduce>(&self, values: &'scope mut [T], op: impl Into<Reduction>) {
        let op = operation::allreduce(&op.into());
        self.begin("allreduce", op, [values].into_iter());
    }

    /// Begins [`Communicator::grouped_allreduce_in_place`].
    pub fn grouped_allreduce_in_place<T: Reduce>(
        &self,
        values: impl IntoIterator<Item = &'scope mut [T]>,
        op: impl Into<Reduction>,
    ) {
        let mut values = values.into_iter().peekable();
        if values.peek().is_none() {
            return;
        }
        self.begin(
            "grouped_allreduce",
            operation::allreduce(&op.into()),
            values,
        );
    }

    /// Begins [`Communicator::broadcast_in_place`].
    pub fn broadcast_in_place<T: Element>(&self, values: &'scope mut [T], root: usize) {
        let op = self.communicator.broadcast_from(root);
        self.begin("broadcast", op, [values].into_iter());
    }

    fn begin<T: Element>(
        &self,
        kind: &'static str,
        op: Result<Op>,
        values: impl Iterator<Item = &'scope mut [T]>,
    ) {
        match op {
            Ok(op) => {
                let call = self.communicator.call(kind, op, Shape::Flat);
                self.in_flight.begin(&call, values);
            }
            Err(error) => self.in_flight.note(error),
        }
    }
}

/// Runs the closure of [`Communicator::scope`].
pub(crate) fn run<'env, R>(
    communicator: &'env Communicator,
    body: impl for<'scope> FnOnce(&Scope<'scope, 'env>) -> R,
) -> Result<R> {
    memory::scoped(&communicator.engine, |in_flight| {
        body(&Scope {
            communicator: communicator.clone(),
            in_flight,
        })
    })
}

impl std::fmt::Debug for Scope<'_, '_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Scope")
            .field("communicator", &self.communicator)
            .finish_non_exhaustive()
    }
}
