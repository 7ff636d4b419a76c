//! Completion of submissions: results and errors by handle, and the threads that wait for them.

use std::collections::hash_map::Entry;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use horovod_protocol::{Completion, Shape};

use super::by_number::ByNumber;
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

#[derive(Debug)]
enum Slot {
    Pending,
    Done(Result<OpResult, Error>),
}

#[derive(Debug, Default)]
pub(crate) struct Table {
    slots: ByNumber<Slot>,
    waiters: usize,
}

/// All handles of one engine.
#[derive(Debug, Default)]
pub(crate) struct Handles {
    table: Mutex<Table>,
    /// Something has ended, or the seat is free.
    changed: Condvar,
}

impl Handles {
    pub(crate) fn lock(&self) -> MutexGuard<'_, Table> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A new pending handle.
    pub(crate) fn create(&self) -> Handle {
        let n = NEXT.fetch_add(1, Ordering::Relaxed);
        self.lock().slots.insert(n, Slot::Pending);
        Handle(n)
    }

    /// Forget a handle whose submission was refused.
    pub(crate) fn cancel(&self, handle: Handle) {
        self.lock().slots.remove(&handle.0);
    }

    /// Store the results of operations that ended together and wake whoever waits.
    pub(crate) fn complete(
        &self,
        results: impl IntoIterator<Item = (Handle, Result<OpResult, Error>)>,
    ) {
        let mut t = self.lock();
        for (handle, result) in results {
            if let Some(slot) = t.slots.get_mut(&handle.0) {
                *slot = Slot::Done(result);
            }
        }
        if t.waiters > 0 {
            self.changed.notify_all();
        }
    }

    /// End everything that is still pending with this error.
    pub(crate) fn fail_pending(&self, error: &Error) {
        let mut t = self.lock();
        for slot in t.slots.values_mut() {
            if matches!(slot, Slot::Pending) {
                *slot = Slot::Done(Err(error.clone()));
            }
        }
        self.changed.notify_all();
    }

    /// Whether the operation has ended; `None` for a handle that was never made or is cleared.
    pub(crate) fn poll(&self, handle: Handle) -> Option<bool> {
        self.lock()
            .slots
            .get(&handle.0)
            .map(|s| matches!(s, Slot::Done(_)))
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

impl Table {
    /// The end of an operation, which clears its handle; `None` while it has not ended.
    pub(crate) fn take(&mut self, handle: Handle) -> Option<Waited> {
        match self.slots.entry(handle.0) {
            Entry::Vacant(_) => Some(Waited::Unknown),
            Entry::Occupied(slot) if matches!(slot.get(), Slot::Pending) => None,
            Entry::Occupied(slot) => match slot.remove() {
                Slot::Done(result) => Some(Waited::Ended(result)),
                Slot::Pending => None,
            },
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
    Ended(Result<OpResult, Error>),
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn a_handle_is_pending_then_done_then_cleared() {
        let h = Handles::default();
        let a = h.create();
        assert!(a >= Handle(1));
        assert_eq!(h.poll(a), Some(false));
        assert!(h.lock().take(a).is_none());
        h.complete([(a, Ok(OpResult::plain(Completion::Done)))]);
        assert_eq!(h.poll(a), Some(true));
        assert!(matches!(h.lock().take(a), Some(Waited::Ended(Ok(_)))));
        assert_eq!(h.poll(a), None);
        assert!(matches!(h.lock().take(a), Some(Waited::Unknown)));
    }

    #[test]
    fn a_handle_of_an_ended_engine_is_unknown_to_the_next() {
        let old = Handles::default().create();
        let h = Handles::default();
        h.create();
        assert_eq!(h.poll(old), None);
    }

    #[test]
    fn pending_handles_end_with_the_error_and_finished_ones_keep_their_result() {
        let h = Handles::default();
        let (a, b) = (h.create(), h.create());
        h.complete([(a, Ok(OpResult::plain(Completion::Done)))]);
        h.fail_pending(&Error::Internal("gone".into()));
        assert!(matches!(h.lock().take(a), Some(Waited::Ended(Ok(_)))));
        assert!(matches!(
            h.lock().take(b),
            Some(Waited::Ended(Err(Error::Internal(_))))
        ));
    }

    #[test]
    fn a_waiting_thread_is_woken_by_the_completion() {
        let h = std::sync::Arc::new(Handles::default());
        let a = h.create();
        let other = std::thread::spawn({
            let h = h.clone();
            move || {
                let deadline = Instant::now() + Duration::from_secs(60);
                loop {
                    let mut table = h.lock();
                    if let Some(end) = table.take(a) {
                        return matches!(end, Waited::Ended(Ok(_)));
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
