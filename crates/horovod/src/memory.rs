//! The memory of slices that the engine reads and writes: the only file with unsafe code.
//!
//! The engine uses the addresses of a tensor until its operation has ended. Three ways keep this memory in place:
//! a call that does not return before that end ([`run`]), a scope that does not return before it ([`scoped`]), and a
//! vector that the engine's tensor owns ([`start_owned`]).

use std::marker::PhantomData;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use horovod_engine::{
    Buffer, DType, Engine, Handle, Leaving, OpResult, Output, Submission, Tensor, TensorMeta,
    Tensors, Waited,
};

use crate::element::Element;
use crate::error::{Error, Result};
use crate::operation::{Call, Shape};

/// Aborts the process if it is dropped: a panic must not pass a frame whose borrows the engine still uses. Only a
/// fault of the engine itself could raise one there.
struct NoUnwind;

impl NoUnwind {
    fn end(self) {
        std::mem::forget(self);
    }
}

impl Drop for NoUnwind {
    fn drop(&mut self) {
        std::process::abort();
    }
}

/// A slice that is reduced or received in place.
///
/// # Safety
/// `slice` stays borrowed until the operation of the tensor has ended.
unsafe fn in_place<T: Element>(slice: &mut [T], shape: Shape) -> Tensor {
    let meta = TensorMeta::new(T::DTYPE, shape.of(slice.len()));
    let at = slice.as_mut_ptr().cast::<u8>();
    // SAFETY: the slice has the bytes of `meta`, for `Sealed` pairs each type with its code; by the contract of this
    // function nobody else uses them meanwhile.
    unsafe { Tensor::new(meta, at, Output::At(at)) }
}

/// A slice that is only read; the engine allocates the result.
///
/// # Safety
/// `slice` stays borrowed until the operation of the tensor has ended.
unsafe fn read_only<T: Element>(slice: &[T], shape: Shape) -> Tensor {
    let meta = TensorMeta::new(T::DTYPE, shape.of(slice.len()));
    // SAFETY: as of `in_place`; without an output address nothing is written here.
    unsafe { Tensor::new(meta, slice.as_ptr().cast::<u8>(), Output::Allocate) }
}

/// Makes valid values of what other ranks have sent: a `bool` of another language may have any byte.
fn mend<T: Element>(slice: &mut [T]) {
    if T::DTYPE == DType::Bool {
        let bytes = slice.as_mut_ptr().cast::<u8>();
        // SAFETY: these are the bytes of the slice, which is borrowed.
        let bytes = unsafe { std::slice::from_raw_parts_mut(bytes, slice.len()) };
        normalise(bytes);
    }
}

fn normalise(bytes: &mut [u8]) {
    for byte in bytes {
        *byte = u8::from(*byte != 0);
    }
}

/// The elements of a result that the engine has allocated.
fn copied<T: Element>(buffer: &Buffer) -> Vec<T> {
    let len = buffer.len() / size_of::<T>();
    let mut values: Vec<T> = Vec::with_capacity(len);
    let to = values.as_mut_ptr().cast::<u8>();
    // SAFETY: both have this many bytes; the engine has written all of the result, and does not use it any more. The
    // bytes are made valid values, see `mend`, before they count as such.
    unsafe {
        std::ptr::copy_nonoverlapping(buffer.as_mut_ptr().cast_const(), to, len * size_of::<T>());
        if T::DTYPE == DType::Bool {
            normalise(std::slice::from_raw_parts_mut(to, len));
        }
        values.set_len(len);
    }
    values
}

/// The elements of the first output that the engine has allocated.
pub(crate) fn first_output<T: Element>(result: OpResult) -> Vec<T> {
    match result.outputs.into_iter().flatten().next() {
        Some((buffer, _)) => copied(&buffer),
        None => Vec::new(),
    }
}

/// Waits for the end of a submitted operation.
fn wait_for(engine: &Engine, handle: Handle) -> Result<OpResult> {
    loop {
        match engine.wait(handle, Duration::MAX) {
            Waited::Pending => {}
            Waited::Ended { result, .. } => {
                return result.map_err(|error| Error::on(engine, error));
            }
            Waited::Unknown => return Err(Error::internal("an operation vanished")),
        }
    }
}

fn submission<'a>(call: &'a Call<'_>, tensors: Tensors) -> Submission<'a> {
    Submission::new(call.kind, call.name, call.op.clone(), call.set, tensors)
        .with_splits(call.splits.clone())
}

/// Runs one operation and waits for its end, while the frame of the caller borrows the memory of `tensors`.
fn run(engine: &Engine, call: &Call<'_>, tensors: Tensors) -> Result<OpResult> {
    let no_unwind = NoUnwind;
    let submitted = engine.submit_and_wait_for(submission(call, tensors), Duration::MAX);
    let result = match submitted {
        Ok((_, Waited::Ended { result, .. })) => result.map_err(|error| Error::on(engine, error)),
        Ok((handle, Waited::Pending | Waited::Unknown)) => wait_for(engine, handle),
        Err(refused) => Err(Error::on(engine, refused)),
    };
    no_unwind.end();
    result
}

/// Runs an operation in place on one slice.
pub(crate) fn run_in_place<T: Element>(
    engine: &Engine,
    call: &Call<'_>,
    slice: &mut [T],
) -> Result<()> {
    // SAFETY: `run` returns after the end of the operation, and this frame borrows the slice.
    let tensor = unsafe { in_place(slice, call.shape) };
    let result = run(engine, call, tensor.into());
    mend(slice);
    result.map(drop)
}

/// Runs one operation in place on several slices.
pub(crate) fn run_group_in_place<T: Element>(
    engine: &Engine,
    call: &Call<'_>,
    slices: &mut [&mut [T]],
) -> Result<()> {
    // SAFETY: as in `run_in_place`.
    let tensors = slices
        .iter_mut()
        .map(|slice| unsafe { in_place(slice, call.shape) });
    let tensors: Vec<_> = tensors.collect();
    let result = run(engine, call, tensors.into());
    slices.iter_mut().for_each(|slice| mend(slice));
    result.map(drop)
}

/// Runs an operation whose result the engine allocates.
pub(crate) fn run_allocating<T: Element>(
    engine: &Engine,
    call: &Call<'_>,
    slice: &[T],
) -> Result<OpResult> {
    // SAFETY: as in `run_in_place`.
    let tensor = unsafe { read_only(slice, call.shape) };
    run(engine, call, tensor.into())
}

/// Operations on memory borrowed for `'scope`, which have begun and perhaps not ended. Only [`scoped`] makes one.
pub(crate) struct InFlight<'scope, 'env: 'scope> {
    engine: &'env Engine,
    begun: Mutex<Vec<Begun>>,
    error: Mutex<Option<Error>>,
    /// Neither lifetime may shrink: a slice must be borrowed until all operations have ended.
    scope: PhantomData<&'scope mut &'scope ()>,
    env: PhantomData<&'env mut &'env ()>,
}

struct Begun {
    handle: Handle,
    /// The slices of the operation if they are `bool`, to be made valid values at its end.
    received: Vec<Received>,
}

/// The place of a `bool` slice.
struct Received {
    at: *mut u8,
    len: usize,
}

// SAFETY: the slice is borrowed until its operation has ended, and one thread uses the place after that.
unsafe impl Send for Received {}

impl<'scope> InFlight<'scope, '_> {
    /// Begins an operation in place.
    pub(crate) fn begin<T: Element>(
        &self,
        call: &Call<'_>,
        slices: impl Iterator<Item = &'scope mut [T]>,
    ) {
        let mut received = Vec::new();
        let tensors = slices.map(|slice| {
            let len = slice.len();
            // SAFETY: the slice is borrowed for `'scope`, in which `scoped` waits for the operation.
            let tensor = unsafe { in_place(slice, call.shape) };
            if T::DTYPE == DType::Bool {
                // From the tensor, as a second borrow of the slice would end the first.
                let at = tensor.input().cast_mut();
                received.push(Received { at, len });
            }
            tensor
        });
        let tensors: Vec<_> = tensors.collect();
        // Locked before the submission: nothing may go wrong between it and the note of its handle.
        let mut begun = self.begun.lock().unwrap_or_else(PoisonError::into_inner);
        let no_unwind = NoUnwind;
        match self.engine.submit(submission(call, tensors.into())) {
            Ok(handle) => begun.push(Begun { handle, received }),
            Err(refused) => self.note(Error::on(self.engine, refused)),
        }
        no_unwind.end();
    }

    /// Notes the error of an operation, unless there was one before.
    pub(crate) fn note(&self, error: Error) {
        let noted = self.error.lock();
        noted
            .unwrap_or_else(PoisonError::into_inner)
            .get_or_insert(error);
    }

    /// Waits for all operations; the first error that was noted, or else the first in the order of the operations.
    fn finish(&self) -> Result<()> {
        let begun = std::mem::take(&mut *self.begun.lock().unwrap_or_else(PoisonError::into_inner));
        for Begun { handle, received } in begun {
            if let Err(error) = wait_for(self.engine, handle) {
                self.note(error);
            }
            for Received { at, len } in received {
                // SAFETY: the slice is borrowed, and its operation has ended.
                normalise(unsafe { std::slice::from_raw_parts_mut(at, len) });
            }
        }
        let noted = self.error.lock();
        let error = noted.unwrap_or_else(PoisonError::into_inner).take();
        error.map_or(Ok(()), Err)
    }
}

/// Runs `body`, which begins operations on slices that are borrowed for `'scope`, and waits for all of them, also if
/// `body` panics: then this process leaves the job before, so that no wait is without end.
///
/// The closure must do for any `'scope`, so a slice that it borrows for `'scope` is borrowed until this returns.
pub(crate) fn scoped<'env, R>(
    engine: &'env Engine,
    body: impl for<'scope> FnOnce(&'scope InFlight<'scope, 'env>) -> R,
) -> Result<R> {
    let in_flight = InFlight {
        engine,
        begun: Mutex::default(),
        error: Mutex::default(),
        scope: PhantomData,
        env: PhantomData,
    };
    let returned = catch_unwind(AssertUnwindSafe(|| body(&in_flight)));
    let no_unwind = NoUnwind;
    let has_begun = in_flight.begun.lock().is_ok_and(|begun| !begun.is_empty());
    if returned.is_err() && has_begun {
        engine.shutdown_because(Leaving::Failed);
    }
    let finished = in_flight.finish();
    no_unwind.end();
    match returned {
        Ok(returned) => finished.map(|()| returned),
        Err(panic) => resume_unwind(panic),
    }
}

/// A vector that an operation reads or writes until its end. Only then it is taken out.
pub(crate) struct Owned<T>(Mutex<Vec<T>>);

impl<T: Element> Owned<T> {
    /// Takes the vector.
    ///
    /// # Safety
    /// The operation has ended.
    unsafe fn take(&self) -> Vec<T> {
        let mut values =
            std::mem::take(&mut *self.0.lock().unwrap_or_else(PoisonError::into_inner));
        mend(&mut values);
        values
    }
}

/// Where the result of an operation on a vector goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum SlicePlace {
    /// Into the vector itself.
    InPlace,
    /// Into memory of the engine.
    Allocated,
}

/// Begins an operation on a vector and returns. `done` is called with its end, once, on the callback thread, with the
/// vector; not if this returns an error.
pub(crate) fn start_owned<T: Element>(
    engine: &Engine,
    call: &Call<'_>,
    mut values: Vec<T>,
    place: SlicePlace,
    done: impl FnOnce(Result<(OpResult, Vec<T>)>) + Send + 'static,
) -> Result<()> {
    let tensor = match place {
        // SAFETY: the tensor owns the vector, see below; it is not touched before the end of the operation.
        SlicePlace::InPlace => unsafe { in_place(&mut values, call.shape) },
        // SAFETY: as above.
        SlicePlace::Allocated => unsafe { read_only(&values, call.shape) },
    };
    // The elements stay where they are when the vector itself moves.
    let owned = Arc::new(Owned(Mutex::new(values)));
    let tensor = tensor.kept_by(owned.clone());
    let own = Some(engine.topology().rank.index());
    let ended = move |result: std::result::Result<OpResult, horovod_engine::Error>| {
        // SAFETY: the engine calls this with the end of the operation.
        let values = unsafe { owned.take() };
        done(
            result
                .map(|result| (result, values))
                .map_err(|error| Error::of(own, error)),
        );
    };
    let submission = submission(call, tensor.into()).calling(Box::new(ended));
    let submitted = engine.submit(submission);
    submitted
        .map(drop)
        .map_err(|error| Error::on(engine, error))
}
