//! Operations on vectors that are owned until their end, as futures.
#![forbid(unsafe_code)]

use std::future::Future;
use std::pin::Pin;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker};

use horovod_engine::{Op, OpResult, in_callback};

use crate::communicator::{Communicator, Received, received};
use crate::element::{Element, Reduce};
use crate::error::{Error, Result};
use crate::memory::{self, SlicePlace};
use crate::operation::{self, Call, Shape};
use crate::reduction::Reduction;

/// The result of an operation that has begun: a future, which any executor can drive.
///
/// The operation runs whether or not this is polled. Dropping it does not end the operation, for the other ranks take
/// part in it: the memory is freed at its end. Its waker is called on a thread on which all operations of this process
/// end: it must not wait. A call of this crate that would wait there returns [`Error::InCallback`].
#[must_use = "the result is lost with this; the other ranks still need the operation"]
pub struct Pending<R> {
    awaited: Arc<Awaited<R>>,
}

struct Awaited<R> {
    state: Mutex<PendingState<R>>,
    ended: Condvar,
}

enum PendingState<R> {
    Waiting(Option<Waker>),
    Ended(Result<R>),
    Taken,
}

impl<R> Awaited<R> {
    fn lock(&self) -> MutexGuard<'_, PendingState<R>> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Stores the result, unless there is one.
    fn end(&self, result: Result<R>) {
        let mut state = self.lock();
        if !matches!(*state, PendingState::Waiting(_)) {
            return;
        }
        let before = std::mem::replace(&mut *state, PendingState::Ended(result));
        drop(state);
        self.ended.notify_all();
        // Foreign code, without our lock.
        if let PendingState::Waiting(Some(waker)) = before {
            waker.wake();
        }
    }
}

/// Ends the wait also if the engine drops it without a call.
struct Ending<R>(Arc<Awaited<R>>);

impl<R> Drop for Ending<R> {
    fn drop(&mut self) {
        self.0.end(Err(Error::Closed));
    }
}

impl<R> std::fmt::Debug for Pending<R> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Pending")
            .field("is_ended", &self.is_ended())
            .finish()
    }
}

impl<R> Pending<R> {
    fn new() -> Self {
        let state = Mutex::new(PendingState::Waiting(None));
        let ended = Condvar::new();
        let awaited = Arc::new(Awaited { state, ended });
        Self { awaited }
    }

    fn failed(error: Error) -> Self {
        let pending = Self::new();
        pending.awaited.end(Err(error));
        pending
    }

    /// Whether the result is there; it does not wait.
    pub fn is_ended(&self) -> bool {
        !matches!(*self.awaited.lock(), PendingState::Waiting(_))
    }

    /// Waits for the result on this thread, without an executor.
    ///
    /// # Errors
    /// Those of the operation; [`Error::InCallback`] in a waker.
    pub fn wait(self) -> Result<R> {
        let mut state = self.awaited.lock();
        loop {
            match std::mem::replace(&mut *state, PendingState::Taken) {
                PendingState::Ended(result) => return result,
                PendingState::Taken => return Err(taken()),
                waiting @ PendingState::Waiting(_) => *state = waiting,
            }
            if in_callback() {
                return Err(Error::InCallback);
            }
            state = self
                .awaited
                .ended
                .wait(state)
                .unwrap_or_else(PoisonError::into_inner);
        }
    }
}

fn taken() -> Error {
    Error::invalid(
        "this future was polled again after it had given its result; poll it only until then",
    )
}

impl<R> Future for Pending<R> {
    type Output = Result<R>;

    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        // Foreign code of wakers runs without our lock.
        let waker = context.waker().clone();
        let mut state = self.awaited.lock();
        match std::mem::replace(&mut *state, PendingState::Taken) {
            PendingState::Ended(result) => Poll::Ready(result),
            PendingState::Taken => Poll::Ready(Err(taken())),
            PendingState::Waiting(before) => {
                *state = PendingState::Waiting(Some(waker));
                drop(state);
                drop(before);
                Poll::Pending
            }
        }
    }
}

/// Operations on vectors. Each begins at once; [`Pending`] gives its result.
impl Communicator {
    /// As [`allreduce`](Self::allreduce), in the memory of the vector, as a future.
    ///
    /// ```
    /// # fn main() -> horovod::Result<()> {
    /// use horovod::ReduceOp::Sum;
    ///
    /// let hvd = horovod::init()?;
    /// let one = hvd.allreduce_async(vec![1.0f32; 4], Sum);
    /// let two = hvd.allreduce_async(vec![2.0f32; 4], Sum);
    /// // In an async function: let sum = one.await?;
    /// assert_eq!(two.wait()?, vec![2.0 * hvd.size() as f32; 4]);
    /// assert_eq!(one.wait()?, vec![hvd.size() as f32; 4]);
    /// # Ok(()) }
    /// ```
    pub fn allreduce_async<T: Reduce>(
        &self,
        values: Vec<T>,
        op: impl Into<Reduction>,
    ) -> Pending<Vec<T>> {
        let op = operation::allreduce(&op.into());
        let call = op.map(|op| self.call("allreduce", op, Shape::Flat));
        self.start(call, values, SlicePlace::InPlace, |_, values| values)
    }

    /// As [`broadcast`](Self::broadcast), in the memory of the vector, as a future.
    pub fn broadcast_async<T: Element>(&self, values: Vec<T>, root: usize) -> Pending<Vec<T>> {
        let op = self.broadcast_from(root);
        let call = op.map(|op| self.call("broadcast", op, Shape::Flat));
        self.start(call, values, SlicePlace::InPlace, |_, values| values)
    }

    /// As [`allgather`](Self::allgather), as a future.
    pub fn allgather_async<T: Element>(&self, values: Vec<T>, row: usize) -> Pending<Vec<T>> {
        let shape = Shape::rows(row, values.len());
        let call = shape.map(|shape| self.call("allgather", Op::Allgather, shape));
        self.start(call, values, SlicePlace::Allocated, |result, _| {
            memory::first_output(result)
        })
    }

    /// As [`alltoall`](Self::alltoall), as a future.
    pub fn alltoall_async<T: Element>(
        &self,
        values: Vec<T>,
        row: usize,
        rows: Option<&[usize]>,
    ) -> Pending<Received<T>> {
        let call = self.alltoall_call(values.len(), row, rows);
        self.start(call, values, SlicePlace::Allocated, |result, _| {
            received(result)
        })
    }

    /// As [`reduce_scatter`](Self::reduce_scatter), as a future.
    pub fn reduce_scatter_async<T: Reduce>(
        &self,
        values: Vec<T>,
        row: usize,
        op: impl Into<Reduction>,
    ) -> Pending<Vec<T>> {
        let call = self.reduce_scatter_call(values.len(), row, &op.into());
        self.start(call, values, SlicePlace::Allocated, |result, _| {
            memory::first_output(result)
        })
    }

    fn start<T: Element, R: Send + 'static>(
        &self,
        call: Result<Call<'_>>,
        values: Vec<T>,
        place: SlicePlace,
        finish: impl FnOnce(OpResult, Vec<T>) -> R + Send + 'static,
    ) -> Pending<R> {
        let call = match call {
            Ok(call) => call,
            Err(error) => return Pending::failed(error),
        };
        let pending = Pending::new();
        let ending = Ending(pending.awaited.clone());
        let done = move |ended: Result<(OpResult, Vec<T>)>| {
            ending
                .0
                .end(ended.map(|(result, values)| finish(result, values)));
        };
        match memory::start_owned(&self.engine, &call, values, place, done) {
            Ok(()) => pending,
            Err(error) => Pending::failed(error),
        }
    }
}
