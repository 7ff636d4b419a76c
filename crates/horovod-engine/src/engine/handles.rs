//! Completion of submissions: results and errors by handle, threads that wait for them, and callbacks.

use std::any::Any;
use std::cell::Cell;
use std::collections::VecDeque;
use std::collections::hash_map::Entry;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use horovod_protocol::{Completion, Rank, Shape};

use super::by_number::ByNumber;
use super::placement::LaunchEnd;
use crate::buffer::Buffer;
use crate::error::Error;

/// Identifies one submission of this process. Handles count from 1, also over re-initialisations, so a stale handle is
/// unknown and never identifies another operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Handle(pub u64);

/// Result of a successful operation.
#[derive(Debug)]
pub struct OpResult {
    /// One element per tensor: memory and shape where the engine allocated the output, otherwise empty.
    pub outputs: Vec<Option<(Buffer, Shape)>>,
    /// Alltoall: rows received from each member.
    pub received_splits: Option<Vec<u64>>,
    /// Completion of a join or of a change of process sets.
    pub completion: Completion,
    /// On a device: the operation was launched, and its results are valid once this end has passed.
    pub end: Option<Arc<dyn LaunchEnd>>,
}

impl OpResult {
    /// A result with nothing but its completion.
    pub fn plain(completion: Completion) -> Self {
        Self {
            outputs: Vec::new(),
            received_splits: None,
            completion,
            end: None,
        }
    }
}

static NEXT: AtomicU64 = AtomicU64::new(1);

/// Object that the wait for an operation returns to the caller; opaque to the engine.
pub type Kept = Arc<dyn Any + Send + Sync>;

/// Function that is called with the result of an operation.
pub type Callback = Box<dyn FnOnce(Result<OpResult, Error>) + Send>;

/// Receiver of the end of an operation.
pub(crate) enum Delivery {
    /// The waiter of the handle, which receives the kept object.
    ToWaiter(Option<Kept>),
    /// A callback, run by the callback thread.
    ToCallback(Callback),
}

thread_local! {
    static IN_CALLBACK: Cell<bool> = const { Cell::new(false) };
}

/// Returns whether this thread runs a callback. Such a thread must not wait, because perhaps no other callback runs
/// meanwhile.
pub fn in_callback() -> bool {
    IN_CALLBACK.get()
}

/// Calls `callback` on this thread. A callback never waits for its own submissions. Calls therefore do not nest deeper
/// in a chain of operations whose ends submit the next.
pub(crate) fn call_here(callback: impl FnOnce()) {
    let outer = IN_CALLBACK.replace(true);
    if catch_unwind(AssertUnwindSafe(callback)).is_err() {
        tracing::error!("a function that was called with a result panicked");
    }
    IN_CALLBACK.set(outer);
}

#[derive(Debug)]
enum Progress {
    Pending,
    /// As pending, but a thread that waits softly must leave.
    LetGo(WaitedFor),
    Done(Result<OpResult, Error>),
}

/// Entry of a handle. Its delivery may run foreign code, also when it is dropped: never under our lock.
struct HandleEntry {
    progress: Progress,
    end: Delivery,
}

#[derive(Default)]
pub(crate) struct Table {
    entries: ByNumber<HandleEntry>,
    waiters: usize,
    /// Callbacks that are due, in this order.
    due_callbacks: VecDeque<DueCallback>,
    /// Operations that have not ended and end with a callback.
    awaited_callbacks: usize,
    /// A callback has been called and has not returned.
    is_calling: bool,
    /// No operation is accepted any more.
    closed: bool,
}

/// Foreign code that is to run when no lock is held.
pub(crate) type DueCallback = Box<dyn FnOnce() + Send>;

/// All handles of one engine.
#[derive(Default)]
pub(crate) struct Handles {
    table: Mutex<Table>,
    /// An operation has ended, or the driver lock is free.
    changed: Condvar,
    /// A callback is due or awaited, or none ever will be.
    callbacks_changed: Condvar,
}

impl Handles {
    pub(crate) fn lock(&self) -> MutexGuard<'_, Table> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns a new handle, which is unknown until it is inserted.
    pub(crate) fn number() -> Handle {
        Handle(NEXT.fetch_add(1, Ordering::Relaxed))
    }

    /// Inserts a handle, whose operation is pending from here on.
    pub(crate) fn insert(&self, handle: Handle, end: Delivery) {
        let mut table = self.lock();
        if matches!(end, Delivery::ToCallback(_)) {
            table.awaited_callbacks += 1;
            self.callbacks_changed.notify_all();
        }
        let progress = Progress::Pending;
        table
            .entries
            .insert(handle.0, HandleEntry { progress, end });
    }

    /// Leaks the callback of this operation without a call: its memory may still be in use.
    pub(crate) fn forget_callback(&self, handle: Handle) {
        let mut table = self.lock();
        if let Entry::Occupied(entry) = table.entries.entry(handle.0)
            && matches!(entry.get().end, Delivery::ToCallback(_))
        {
            std::mem::forget(entry.remove());
            table.awaited_callbacks -= 1;
            self.callbacks_changed.notify_all();
        }
    }

    /// Makes a pending operation, for which no thread waits, end with a callback. If the operation has ended already,
    /// returns its end and the callback.
    pub(crate) fn redirect(
        &self,
        handle: Handle,
        callback: Callback,
    ) -> Option<(Waited, Callback)> {
        let mut table = self.lock();
        if let Some(end) = table.take(handle) {
            return Some((end, callback));
        }
        if let Entry::Occupied(mut entry) = table.entries.entry(handle.0) {
            entry.get_mut().end = Delivery::ToCallback(callback);
            table.awaited_callbacks += 1;
            self.callbacks_changed.notify_all();
        }
        None
    }

    /// Removes a handle whose result no thread will request.
    pub(crate) fn cancel(&self, handle: Handle) {
        let mut table = self.lock();
        let entry = table.entries.remove(&handle.0);
        if let Some(HandleEntry {
            end: Delivery::ToCallback(_),
            ..
        }) = &entry
        {
            table.awaited_callbacks -= 1;
            self.callbacks_changed.notify_all();
        }
        drop(table);
        drop(entry);
    }

    /// Queues a callback for the callback thread.
    pub(crate) fn enqueue_callback(&self, callback: DueCallback) {
        let mut table = self.lock();
        table.due_callbacks.push_back(callback);
        self.callbacks_changed.notify_all();
        if table.waiters > 0 {
            self.changed.notify_all();
        }
    }

    /// Returns whether callbacks are due.
    pub(crate) fn has_callbacks(&self) -> bool {
        !self.lock().due_callbacks.is_empty()
    }

    /// Notes that no operation is accepted any more, so that the callback thread ends after the last callback.
    pub(crate) fn close(&self) {
        self.lock().closed = true;
        self.callbacks_changed.notify_all();
        self.changed.notify_all();
    }

    /// Runs the callbacks that are due, and waits until an operation is pending that ends with one. Returns `None` when
    /// there will be no other. Only for the callback thread.
    pub(crate) fn run_callbacks(&self) -> Option<MutexGuard<'_, Table>> {
        let mut table = self.lock();
        loop {
            if let Some(callback) = table.due_callbacks.pop_front() {
                table.is_calling = true;
                drop(table);
                call_here(callback);
                table = self.lock();
                table.is_calling = false;
            } else if table.awaited_callbacks > 0 {
                return Some(table);
            } else if table.closed {
                return None;
            } else {
                let woken = self.callbacks_changed.wait(table);
                table = woken.unwrap_or_else(PoisonError::into_inner);
            }
        }
    }

    /// Returns the number of operations that have not ended.
    pub(crate) fn pending(&self) -> usize {
        let table = self.lock();
        table.entries.values().filter(|e| !e.is_done()).count()
    }

    /// Returns the number of callbacks that are due or have not returned.
    pub(crate) fn callbacks(&self) -> usize {
        let table = self.lock();
        table.due_callbacks.len() + usize::from(table.is_calling)
    }

    /// Returns the operations that have not ended and end with a callback, ascending.
    pub(crate) fn called_back(&self) -> Vec<Handle> {
        let table = self.lock();
        let entries = table.entries.iter();
        let called = entries.filter(|(_, e)| matches!(e.end, Delivery::ToCallback(_)));
        let mut all: Vec<u64> = called.map(|(n, _)| *n).collect();
        drop(table);
        all.sort_unstable();
        all.into_iter().map(Handle).collect()
    }

    /// Returns the handles of operations without a callback whose results no thread has taken, ascending.
    pub(crate) fn all(&self) -> Vec<u64> {
        let table = self.lock();
        let waited = table.entries.iter();
        let waited = waited.filter(|(_, entry)| matches!(entry.end, Delivery::ToWaiter(_)));
        let mut all: Vec<u64> = waited.map(|(n, _)| *n).collect();
        drop(table);
        all.sort_unstable();
        all
    }

    /// Stores the results of operations that ended together and wakes the waiting threads.
    pub(crate) fn complete(
        &self,
        results: impl IntoIterator<Item = (Handle, Result<OpResult, Error>)>,
    ) {
        let mut t = self.lock();
        for (handle, result) in results {
            t.end(handle, result);
        }
        if t.waiters > 0 {
            self.changed.notify_all();
        }
    }

    /// Ends every pending operation with this error, except those `in_use`, whose tensors are not released yet.
    pub(crate) fn fail_pending(&self, error: &Error, in_use: impl Fn(Handle) -> bool) {
        let mut t = self.lock();
        let pending = t.entries.iter().filter(|(_, entry)| !entry.is_done());
        let pending: Vec<_> = pending.map(|(n, _)| Handle(*n)).collect();
        for handle in pending.into_iter().filter(|handle| !in_use(*handle)) {
            t.end(handle, Err(error.clone()));
        }
        self.changed.notify_all();
    }

    /// Returns whether the operation has ended, also on its device; `None` for a handle that was never made or is
    /// cleared.
    pub(crate) fn poll(&self, handle: Handle) -> Option<bool> {
        let table = self.lock();
        let entry = table.entries.get(&handle.0)?;
        let Progress::Done(result) = &entry.progress else {
            return Some(false);
        };
        let end = result.as_ref().ok().and_then(|result| result.end.clone());
        drop(table);
        // A failure on the device counts as an end: the waiter then gets the error.
        Some(end.is_none_or(|end| end.has_passed().unwrap_or(true)))
    }

    /// Returns whether a thread that waits for this operation must continue to wait.
    pub(crate) fn is_awaited(&self, handle: Handle) -> bool {
        let t = self.lock();
        let entry = t.entries.get(&handle.0);
        entry.is_some_and(|entry| matches!(entry.progress, Progress::Pending))
    }

    /// Makes the thread that waits softly for this operation leave.
    pub(crate) fn let_go(&self, handle: Handle, cause: WaitedFor) {
        let mut t = self.lock();
        if let Some(entry) = t.entries.get_mut(&handle.0)
            && matches!(entry.progress, Progress::Pending)
        {
            entry.progress = Progress::LetGo(cause);
            self.changed.notify_all();
        }
    }

    /// Sleeps until a completion, a free driver lock, or the deadline. Returns `false` if the deadline had passed
    /// before.
    pub(crate) fn sleep(&self, mut table: MutexGuard<'_, Table>, deadline: Instant) -> bool {
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return false;
        }
        table.waiters += 1;
        let woken = self.changed.wait_timeout(table, left);
        let (mut table, _) = woken.unwrap_or_else(PoisonError::into_inner);
        table.waiters -= 1;
        true
    }

    /// Wakes waiting threads because the driver lock is free: one of them may take it.
    pub(crate) fn driver_is_free(&self) {
        if self.lock().waiters > 0 {
            self.changed.notify_all();
        }
    }
}

impl HandleEntry {
    fn is_done(&self) -> bool {
        matches!(self.progress, Progress::Done(_))
    }
}

impl Table {
    fn end(&mut self, handle: Handle, result: Result<OpResult, Error>) {
        let Entry::Occupied(mut entry) = self.entries.entry(handle.0) else {
            return;
        };
        if matches!(entry.get().end, Delivery::ToCallback(_)) {
            if let Delivery::ToCallback(callback) = entry.remove().end {
                self.awaited_callbacks -= 1;
                self.due_callbacks
                    .push_back(Box::new(move || callback(result)));
            }
            return;
        }
        entry.get_mut().progress = Progress::Done(result);
    }

    /// Takes the end of an operation, which clears its handle. Returns `None` if the caller must continue to wait.
    pub(crate) fn take(&mut self, handle: Handle) -> Option<Waited> {
        let Entry::Occupied(entry) = self.entries.entry(handle.0) else {
            return Some(Waited::Unknown);
        };
        match entry.get().progress {
            Progress::Pending => return None,
            Progress::LetGo(_) => return Some(Waited::Pending),
            Progress::Done(_) => {}
        }
        match entry.remove() {
            HandleEntry {
                progress: Progress::Done(result),
                end: Delivery::ToWaiter(kept),
            } => Some(Waited::Ended { result, kept }),
            _ => None,
        }
    }

    /// Returns whether an operation is registered and has not ended.
    pub(crate) fn is_pending(&self, handle: Handle) -> bool {
        let entry = self.entries.get(&handle.0);
        entry.is_some_and(|entry| !entry.is_done())
    }

    /// Undoes a [`Self::take`].
    pub(crate) fn put_back(
        &mut self,
        handle: Handle,
        result: Result<OpResult, Error>,
        kept: Option<Kept>,
    ) {
        let progress = Progress::Done(result);
        let end = Delivery::ToWaiter(kept);
        self.entries.insert(handle.0, HandleEntry { progress, end });
    }

    /// Returns why a thread that waits softly for this operation must leave; `None` if it need not.
    pub(crate) fn let_go(&self, handle: Handle) -> Option<&WaitedFor> {
        match &self.entries.get(&handle.0)?.progress {
            Progress::LetGo(cause) => Some(cause),
            _ => None,
        }
    }

    /// Makes an operation plainly pending again, after the end of its soft wait.
    pub(crate) fn keep(&mut self, handle: Handle) {
        if let Some(entry) = self.entries.get_mut(&handle.0)
            && matches!(entry.progress, Progress::LetGo(_))
        {
            entry.progress = Progress::Pending;
        }
    }
}

/// How a thread waits for an operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Wait {
    Plain,
    /// The wait may end before its operation: [`super::Engine::wait_softly`].
    Soft,
    /// The wait also announces the operation that this thread has submitted.
    Announcing,
}

/// The operation for which other ranks wait, and because of which a soft wait ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WaitedFor {
    /// One of the ranks that wait.
    pub rank: Rank,
    /// Name of the operation, as in reports.
    pub name: Box<str>,
}

/// Outcome of one bounded wait.
#[derive(Debug)]
pub enum Waited {
    /// The handle was never made or is cleared.
    Unknown,
    /// The time is over, but the operation has not ended.
    Pending,
    /// The operation has ended; the handle is cleared.
    Ended {
        /// Result or error of the operation.
        result: Result<OpResult, Error>,
        /// The object that was kept until the end.
        kept: Option<Kept>,
    },
}

#[cfg(test)]
mod tests;
