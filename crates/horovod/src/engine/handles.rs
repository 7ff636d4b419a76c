//! Completion of submissions: results and errors by handle, threads that wait for them, and callbacks.

use std::any::Any;
use std::cell::Cell;
use std::collections::VecDeque;
use std::collections::hash_map::Entry;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use horovod_protocol::{Completion, Shape};

use super::accelerator::LaunchEnd;
use super::by_number::ByNumber;
use super::soft::WaitedFor;
use crate::buffer::Buffer;
use crate::error::Error;

/// Names one submission of this process; counts from 1, also over re-initialisations, so that a handle that is
/// kept too long is unknown and never another operation's.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Handle(pub u64);

/// Result of a successful operation.
#[derive(Debug)]
pub struct OpResult {
    /// One per tensor: memory and shape where the engine allocated the output; empty where it allocated none.
    pub outputs: Vec<Option<(Buffer, Shape)>>,
    /// Alltoall: rows received from each member.
    pub received_splits: Option<Vec<u64>>,
    /// Completion of a join or of a change of process sets.
    pub completion: Completion,
    /// On a device: the operation was launched, and its results are there once this has passed.
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

/// Object that the caller gets back from the wait for the operation; opaque to the engine.
pub type Kept = Arc<dyn Any + Send + Sync>;

/// Function that is called with the result of an operation.
pub type Callback = Box<dyn FnOnce(Result<OpResult, Error>) + Send>;

/// Receiver of the end of an operation.
pub(crate) enum Delivery {
    /// The waiter of the handle, who gets back the kept object.
    ToWaiter(Option<Kept>),
    /// A callback, run by the callback thread.
    ToCallback(Callback),
}

thread_local! {
    static IN_CALLBACK: Cell<bool> = const { Cell::new(false) };
}

/// Whether this thread is amid a callback: it must not wait, for perhaps no other is called meanwhile.
pub fn in_callback() -> bool {
    IN_CALLBACK.get()
}

/// Calls `callback` on this thread. A callback never waits for its own submissions. So calls do not nest ever deeper,
/// however long a chain is of operations whose ends submit the next.
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
    /// As pending, but who waits for it softly shall leave.
    LetGo(WaitedFor),
    Done(Result<OpResult, Error>),
}

/// Its end may run foreign code, also when it is dropped: never under our lock.
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
    /// No operation will be accepted any more.
    closed: bool,
}

/// Foreign code that is to run when no lock is held.
pub(crate) type DueCallback = Box<dyn FnOnce() + Send>;

/// All handles of one engine.
#[derive(Default)]
pub(crate) struct Handles {
    table: Mutex<Table>,
    /// Something has ended, or the driver lock is free.
    changed: Condvar,
    /// A callback is due or awaited, or none ever will be.
    callbacks_changed: Condvar,
}

impl Handles {
    pub(crate) fn lock(&self) -> MutexGuard<'_, Table> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A handle of its own, unknown until it is inserted.
    pub(crate) fn number() -> Handle {
        Handle(NEXT.fetch_add(1, Ordering::Relaxed))
    }

    /// From here on it is pending.
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

    /// Never call the function of this one: its memory may still be in use.
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

    /// Have a pending operation, for which nobody waits, end with a callback; gives it back with the end of one that
    /// has ended already.
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

    /// Forget a handle that nobody will ask for.
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

    /// Have this run by the callback thread.
    pub(crate) fn enqueue_callback(&self, callback: DueCallback) {
        let mut table = self.lock();
        table.due_callbacks.push_back(callback);
        self.callbacks_changed.notify_all();
        if table.waiters > 0 {
            self.changed.notify_all();
        }
    }

    /// Whether callbacks are due.
    pub(crate) fn has_callbacks(&self) -> bool {
        !self.lock().due_callbacks.is_empty()
    }

    /// No operation will be accepted any more: after the last callback there will be no other.
    pub(crate) fn close(&self) {
        self.lock().closed = true;
        self.callbacks_changed.notify_all();
        self.changed.notify_all();
    }

    /// Run the callbacks that are due, and wait until an operation is pending that ends with one. `None`: there will be
    /// no other. Only for the callback thread.
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

    /// Operations that have not ended.
    pub(crate) fn pending(&self) -> usize {
        let table = self.lock();
        table.entries.values().filter(|e| !e.is_done()).count()
    }

    /// Callbacks that are due, or have not returned.
    pub(crate) fn callbacks(&self) -> usize {
        let table = self.lock();
        table.due_callbacks.len() + usize::from(table.is_calling)
    }

    /// Operations that have not ended and end with a callback, ascending.
    pub(crate) fn called_back(&self) -> Vec<Handle> {
        let table = self.lock();
        let entries = table.entries.iter();
        let called = entries.filter(|(_, e)| matches!(e.end, Delivery::ToCallback(_)));
        let mut all: Vec<u64> = called.map(|(n, _)| *n).collect();
        drop(table);
        all.sort_unstable();
        all.into_iter().map(Handle).collect()
    }

    /// Handles that nobody has waited for to the end, ascending.
    pub(crate) fn all(&self) -> Vec<u64> {
        let table = self.lock();
        let waited = table.entries.iter();
        let waited = waited.filter(|(_, entry)| matches!(entry.end, Delivery::ToWaiter(_)));
        let mut all: Vec<u64> = waited.map(|(n, _)| *n).collect();
        drop(table);
        all.sort_unstable();
        all
    }

    /// Store the results of operations that ended together and wake whoever waits.
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

    /// End everything that is still pending with this error, but what is `in_use`: there the tensors still are.
    pub(crate) fn fail_pending(&self, error: &Error, in_use: impl Fn(Handle) -> bool) {
        let mut t = self.lock();
        let pending = t.entries.iter().filter(|(_, entry)| !entry.is_done());
        let pending: Vec<_> = pending.map(|(n, _)| Handle(*n)).collect();
        for handle in pending.into_iter().filter(|handle| !in_use(*handle)) {
            t.end(handle, Err(error.clone()));
        }
        self.changed.notify_all();
    }

    /// Whether the operation has ended, also on its device; `None` for a handle that was never made or is cleared.
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

    /// Whether a thread that waits for this has reason to go on waiting.
    pub(crate) fn is_awaited(&self, handle: Handle) -> bool {
        let t = self.lock();
        let entry = t.entries.get(&handle.0);
        entry.is_some_and(|entry| matches!(entry.progress, Progress::Pending))
    }

    /// Have the thread that waits for this softly leave.
    pub(crate) fn let_go(&self, handle: Handle, cause: WaitedFor) {
        let mut t = self.lock();
        if let Some(entry) = t.entries.get_mut(&handle.0)
            && matches!(entry.progress, Progress::Pending)
        {
            entry.progress = Progress::LetGo(cause);
            self.changed.notify_all();
        }
    }

    /// Let others do until a completion, a free driver lock, or the deadline; `false` if that has passed.
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

    /// The driver lock is free: one of those who wait may take it.
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

    /// The end of an operation, which clears its handle; `None` while it has not ended and is to be waited for.
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

    /// Whether an operation has not ended.
    pub(crate) fn is_pending(&self, handle: Handle) -> bool {
        let entry = self.entries.get(&handle.0);
        entry.is_some_and(|entry| !entry.is_done())
    }

    /// Undo a [`Self::take`].
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

    /// Why who waits for this softly shall leave, if so.
    pub(crate) fn let_go(&self, handle: Handle) -> Option<&WaitedFor> {
        match &self.entries.get(&handle.0)?.progress {
            Progress::LetGo(cause) => Some(cause),
            _ => None,
        }
    }

    /// Nobody waits for this softly any more: it is as pending as any.
    pub(crate) fn keep(&mut self, handle: Handle) {
        if let Some(entry) = self.entries.get_mut(&handle.0)
            && matches!(entry.progress, Progress::LetGo(_))
        {
            entry.progress = Progress::Pending;
        }
    }
}

/// Outcome of one bounded wait.
#[derive(Debug)]
pub enum Waited {
    /// The handle was never made or is cleared.
    Unknown,
    /// The time is over, the operation is not.
    Pending,
    /// The operation has ended; the handle is cleared.
    Ended {
        /// How.
        result: Result<OpResult, Error>,
        /// The object kept until now.
        kept: Option<Kept>,
    },
}

#[cfg(test)]
mod tests;
