//! Completion of submissions: results and errors by handle, threads that wait for them, and functions called with them.

use std::any::Any;
use std::cell::Cell;
use std::collections::VecDeque;
use std::collections::hash_map::Entry;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use horovod_protocol::{Completion, Shape};

use super::by_number::ByNumber;
use super::soft::WaitedFor;
use crate::buffer::Buffer;
use crate::error::Error;

/// Names one submission of this process; counts from 1, also over re-initialisations, so that a handle that is
/// kept too long is unknown and never another operation's.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Handle(pub u64);

/// What a successful operation gives back.
#[derive(Debug)]
pub struct OpResult {
    /// One per tensor: memory and shape where the engine allocated the output; empty where it allocated none.
    pub outputs: Vec<Option<(Buffer, Shape)>>,
    /// Alltoall: rows received from each member.
    pub received_splits: Option<Vec<u64>>,
    /// What ended, for join and process-set changes.
    pub completion: Completion,
}

impl OpResult {
    pub(crate) fn plain(completion: Completion) -> Self {
        Self {
            outputs: Vec::new(),
            received_splits: None,
            completion,
        }
    }
}

static NEXT: AtomicU64 = AtomicU64::new(1);

/// What the caller wants back from whoever waits for the operation; the engine never looks at it.
pub type Kept = Arc<dyn Any + Send + Sync>;

/// What is called with the result of an operation.
pub type Callback = Box<dyn FnOnce(Result<OpResult, Error>) + Send>;

/// Who hears of the end of an operation.
pub(crate) enum End {
    /// Whoever waits for the handle, who gets back what was kept.
    Waited(Option<Kept>),
    /// A function, called by the callback thread.
    Called(Callback),
}

thread_local! {
    static CALLED: Cell<bool> = const { Cell::new(false) };
}

/// Whether this thread is amid a call of [`Handles::run_callbacks`].
pub(crate) fn in_callback() -> bool {
    CALLED.get()
}

#[derive(Debug)]
enum Progress {
    Pending,
    /// As pending, but who waits for it softly shall leave.
    LetGo(WaitedFor),
    Done(Result<OpResult, Error>),
}

/// Its end may run foreign code, also when it is dropped: never under our lock.
struct Slot {
    progress: Progress,
    end: End,
}

#[derive(Default)]
pub(crate) struct Table {
    slots: ByNumber<Slot>,
    waiters: usize,
    /// Calls that are due, in this order.
    calls: VecDeque<Call>,
    /// Operations that have not ended and end with a call.
    awaited_callbacks: usize,
    /// No operation will be accepted any more.
    closed: bool,
}

/// Foreign code that is to run when no lock is held.
pub(crate) type Call = Box<dyn FnOnce() + Send>;

/// All handles of one engine.
#[derive(Default)]
pub(crate) struct Handles {
    table: Mutex<Table>,
    /// Something has ended, or the seat is free.
    changed: Condvar,
    /// There is something to call now or later, or never will be.
    calling: Condvar,
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
    pub(crate) fn insert(&self, handle: Handle, end: End) {
        let mut table = self.lock();
        if matches!(end, End::Called(_)) {
            table.awaited_callbacks += 1;
            self.calling.notify_all();
        }
        let progress = Progress::Pending;
        table.slots.insert(handle.0, Slot { progress, end });
    }

    /// Never call the function of this one: its memory may still be in use.
    pub(crate) fn forget_callback(&self, handle: Handle) {
        let mut table = self.lock();
        if let Entry::Occupied(slot) = table.slots.entry(handle.0)
            && matches!(slot.get().end, End::Called(_))
        {
            std::mem::forget(slot.remove());
            table.awaited_callbacks -= 1;
            self.calling.notify_all();
        }
    }

    /// Forget a handle that nobody will ask for.
    pub(crate) fn cancel(&self, handle: Handle) {
        let mut table = self.lock();
        let slot = table.slots.remove(&handle.0);
        if let Some(Slot {
            end: End::Called(_),
            ..
        }) = &slot
        {
            table.awaited_callbacks -= 1;
            self.calling.notify_all();
        }
        drop(table);
        drop(slot);
    }

    /// Have this called.
    pub(crate) fn call(&self, call: Call) {
        let mut table = self.lock();
        table.calls.push_back(call);
        self.calling.notify_all();
        if table.waiters > 0 {
            self.changed.notify_all();
        }
    }

    /// Whether calls are due.
    pub(crate) fn has_callbacks(&self) -> bool {
        !self.lock().calls.is_empty()
    }

    /// No operation will be accepted any more: when the last call is made there will be no other.
    pub(crate) fn close(&self) {
        self.lock().closed = true;
        self.calling.notify_all();
        self.changed.notify_all();
    }

    /// Make the calls that are due, and wait until an operation is pending that ends with one. `None`: there will be
    /// no other. Only for the callback thread.
    pub(crate) fn run_callbacks(&self) -> Option<MutexGuard<'_, Table>> {
        let mut table = self.lock();
        loop {
            if let Some(call) = table.calls.pop_front() {
                drop(table);
                CALLED.set(true);
                if catch_unwind(AssertUnwindSafe(call)).is_err() {
                    tracing::error!("a function that was called with a result panicked");
                }
                CALLED.set(false);
                table = self.lock();
            } else if table.awaited_callbacks > 0 {
                return Some(table);
            } else if table.closed {
                return None;
            } else {
                let woken = self.calling.wait(table);
                table = woken.unwrap_or_else(PoisonError::into_inner);
            }
        }
    }

    /// Handles that nobody has waited for to the end, ascending.
    pub(crate) fn all(&self) -> Vec<u64> {
        let table = self.lock();
        let waited = table.slots.iter();
        let waited = waited.filter(|(_, slot)| matches!(slot.end, End::Waited(_)));
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
        let pending = t.slots.iter().filter(|(_, slot)| !slot.is_done());
        let pending: Vec<_> = pending.map(|(n, _)| Handle(*n)).collect();
        for handle in pending.into_iter().filter(|handle| !in_use(*handle)) {
            t.end(handle, Err(error.clone()));
        }
        self.changed.notify_all();
    }

    /// Whether the operation has ended; `None` for a handle that was never made or is cleared.
    pub(crate) fn poll(&self, handle: Handle) -> Option<bool> {
        self.lock().slots.get(&handle.0).map(Slot::is_done)
    }

    /// Whether a thread that waits for this has reason to go on waiting.
    pub(crate) fn is_awaited(&self, handle: Handle) -> bool {
        let t = self.lock();
        let slot = t.slots.get(&handle.0);
        slot.is_some_and(|slot| matches!(slot.progress, Progress::Pending))
    }

    /// Have the thread that waits for this softly leave.
    pub(crate) fn let_go(&self, handle: Handle, cause: WaitedFor) {
        let mut t = self.lock();
        if let Some(slot) = t.slots.get_mut(&handle.0)
            && matches!(slot.progress, Progress::Pending)
        {
            slot.progress = Progress::LetGo(cause);
            self.changed.notify_all();
        }
    }

    /// Let others do until a completion, a free seat, or the deadline; `false` if that has passed.
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

    /// Nobody drives any more: one of those who wait may.
    pub(crate) fn seat_is_free(&self) {
        if self.lock().waiters > 0 {
            self.changed.notify_all();
        }
    }
}

impl Slot {
    fn is_done(&self) -> bool {
        matches!(self.progress, Progress::Done(_))
    }
}

impl Table {
    fn end(&mut self, handle: Handle, result: Result<OpResult, Error>) {
        let Entry::Occupied(mut slot) = self.slots.entry(handle.0) else {
            return;
        };
        if matches!(slot.get().end, End::Called(_)) {
            if let End::Called(callback) = slot.remove().end {
                self.awaited_callbacks -= 1;
                self.calls.push_back(Box::new(move || callback(result)));
            }
            return;
        }
        slot.get_mut().progress = Progress::Done(result);
    }

    /// The end of an operation, which clears its handle; `None` while it has not ended and is to be waited for.
    pub(crate) fn take(&mut self, handle: Handle) -> Option<Waited> {
        let Entry::Occupied(slot) = self.slots.entry(handle.0) else {
            return Some(Waited::Unknown);
        };
        match slot.get().progress {
            Progress::Pending => return None,
            Progress::LetGo(_) => return Some(Waited::Pending),
            Progress::Done(_) => {}
        }
        match slot.remove() {
            Slot {
                progress: Progress::Done(result),
                end: End::Waited(kept),
            } => Some(Waited::Ended { result, kept }),
            _ => None,
        }
    }

    /// Whether an operation has not ended.
    pub(crate) fn is_pending(&self, handle: Handle) -> bool {
        let slot = self.slots.get(&handle.0);
        slot.is_some_and(|slot| !slot.is_done())
    }

    /// Undo a [`Self::take`].
    pub(crate) fn put_back(
        &mut self,
        handle: Handle,
        result: Result<OpResult, Error>,
        kept: Option<Kept>,
    ) {
        let progress = Progress::Done(result);
        let end = End::Waited(kept);
        self.slots.insert(handle.0, Slot { progress, end });
    }

    /// Why who waits for this softly shall leave, if so.
    pub(crate) fn let_go(&self, handle: Handle) -> Option<&WaitedFor> {
        match &self.slots.get(&handle.0)?.progress {
            Progress::LetGo(cause) => Some(cause),
            _ => None,
        }
    }

    /// Nobody waits for this softly any more: it is as pending as any.
    pub(crate) fn keep(&mut self, handle: Handle) {
        if let Some(slot) = self.slots.get_mut(&handle.0)
            && matches!(slot.progress, Progress::LetGo(_))
        {
            slot.progress = Progress::Pending;
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
        /// What was to be kept until now.
        kept: Option<Kept>,
    },
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    impl Handles {
        pub(in crate::engine) fn create(&self, end: End) -> Handle {
            let handle = Self::number();
            self.insert(handle, end);
            handle
        }
    }

    #[test]
    fn a_handle_is_pending_then_done_then_cleared() {
        let h = Handles::default();
        let a = h.create(End::Waited(None));
        assert!(a >= Handle(1));
        assert_eq!(h.poll(a), Some(false));
        assert!(h.lock().take(a).is_none());
        h.complete([(a, Ok(OpResult::plain(Completion::Done)))]);
        assert_eq!(h.poll(a), Some(true));
        assert!(matches!(
            h.lock().take(a),
            Some(Waited::Ended { result: Ok(_), .. })
        ));
        assert_eq!(h.poll(a), None);
        assert!(matches!(h.lock().take(a), Some(Waited::Unknown)));
    }

    #[test]
    fn what_is_let_go_of_is_left_once_and_stays_pending() {
        let h = Handles::default();
        let a = h.create(End::Waited(None));
        let cause = WaitedFor {
            rank: horovod_protocol::Rank(1),
            name: "metric".into(),
        };
        assert!(h.is_awaited(a));
        h.let_go(a, cause.clone());
        assert!(!h.is_awaited(a) && h.lock().is_pending(a));
        assert_eq!(h.poll(a), Some(false));
        assert!(matches!(h.lock().take(a), Some(Waited::Pending)));
        assert_eq!(h.lock().let_go(a), Some(&cause));
        h.lock().keep(a);
        assert!(h.is_awaited(a) && h.lock().take(a).is_none());
        h.let_go(a, cause.clone());
        h.complete([(a, Ok(OpResult::plain(Completion::Done)))]);
        let Some(Waited::Ended { result, kept }) = h.lock().take(a) else {
            panic!("it has ended");
        };
        h.lock().put_back(a, result, kept);
        h.let_go(a, cause);
        h.lock().keep(a);
        assert!(matches!(
            h.lock().take(a),
            Some(Waited::Ended { result: Ok(_), .. })
        ));
    }

    #[test]
    fn a_handle_of_an_ended_engine_is_unknown_to_the_next() {
        let old = Handles::default().create(End::Waited(None));
        let h = Handles::default();
        h.create(End::Waited(None));
        assert_eq!(h.poll(old), None);
    }

    #[test]
    fn pending_handles_end_with_the_error_and_finished_ones_keep_their_result() {
        let h = Handles::default();
        let (a, b) = (h.create(End::Waited(None)), h.create(End::Waited(None)));
        h.complete([(a, Ok(OpResult::plain(Completion::Done)))]);
        h.fail_pending(&Error::Closed, |_| false);
        assert!(matches!(
            h.lock().take(a),
            Some(Waited::Ended { result: Ok(_), .. })
        ));
        assert!(matches!(
            h.lock().take(b),
            Some(Waited::Ended {
                result: Err(Error::Closed),
                ..
            })
        ));
    }

    #[test]
    fn a_function_is_called_once_with_the_end_whatever_it_is_and_its_panic_ends_nothing() {
        let h = Arc::new(Handles::default());
        let called = Arc::new(Mutex::new(Vec::new()));
        let callback = |name: &'static str| {
            let (called, table) = (called.clone(), h.clone());
            let callback: Callback = Box::new(move |result| {
                assert!(table.table.try_lock().is_ok(), "a lock is held");
                called.lock().unwrap().push((name, result.is_ok()));
                assert_ne!(name, "panics", "as some function may");
            });
            h.create(End::Called(callback))
        };
        let done = || Ok(OpResult::plain(Completion::Done));
        let first = callback("panics");
        h.complete([(first, done())]);
        assert!(h.has_callbacks() && called.lock().unwrap().is_empty());
        assert_eq!(h.poll(first), None, "nobody can ask for its result");
        let (kept, failed) = (callback("kept"), callback("failed"));
        h.cancel(callback("given up"));
        h.forget_callback(callback("still in use"));
        let gone = Error::Internal("gone".into());
        h.fail_pending(&gone, |handle| handle == kept);
        assert!(h.run_callbacks().is_some(), "one is still pending");
        h.complete([(kept, done()), (failed, done()), (first, done())]);
        h.close();
        assert!(h.run_callbacks().is_none());
        let called = called.lock().unwrap();
        let expected = [("panics", true), ("failed", false), ("kept", true)];
        assert_eq!(*called, expected);
    }

    #[test]
    fn a_waiting_thread_is_woken_by_the_completion() {
        let h = std::sync::Arc::new(Handles::default());
        let a = h.create(End::Waited(None));
        let other = std::thread::spawn({
            let h = h.clone();
            move || {
                let deadline = Instant::now() + Duration::from_secs(60);
                loop {
                    let mut table = h.lock();
                    if let Some(end) = table.take(a) {
                        return matches!(end, Waited::Ended { result: Ok(_), .. });
                    }
                    if !h.sleep(table, deadline) {
                        return false;
                    }
                }
            }
        });
        h.complete([(a, Ok(OpResult::plain(Completion::Done)))]);
        assert!(other.join().unwrap());
    }
}
