//! The answers of a rank to rank 0's questions in the diagnosis of stalls.

use std::sync::Arc;
use std::sync::mpsc::{Receiver, sync_channel};

use horovod_diagnosis::{Brief, Key, Seen, Standing, ThreadStack, Unfinished, runnable_ms, stacks};
use horovod_protocol::{EntryId, ProcessSetId};

use super::EngineState;

/// Returns the answer to a question about a soft wait: the operations for which this rank's threads wait, and which of
/// `keys` are pending.
pub(super) fn brief(shared: &EngineState, keys: &[Key]) -> Brief {
    let first = shared.callers.observe(shared.now().0);
    // A wait that is about to end no longer counts, even if its thread has not noticed yet. Only this thread ends
    // waits, so a wait that lasts after this check is not ended meanwhile.
    let table = shared.handles.lock();
    let ends = first.handles.iter().any(|h| table.let_go(*h).is_some());
    drop(table);
    let waits = shared.callers.observe(shared.now().0);
    let state = shared.lock();
    let named = waits.handles.iter().filter_map(|handle| {
        let (set, name) = state.worker.name_of(EntryId(handle.0))?;
        let soft = waits.soft.contains(handle);
        Some(((set.0, name), if soft { handle.0 } else { 0 }))
    });
    let waits_for: Vec<_> = named.collect();
    let has = |(set, name): &Key| state.worker.is_pending(ProcessSetId(*set), name);
    Brief {
        // An operation on which the ranks have agreed, or that has ended, is not stuck. A framework's threads may
        // submit more.
        blocked: waits.all
            && !waits.has_guests
            && waits == first
            && !ends
            && waits_for.len() == waits.handles.len(),
        pending: keys.iter().map(has).collect(),
        waits_for,
    }
    .bounded()
}

/// Returns the answer to a question about a stall, without names and stacks, which are added later.
pub(super) fn standing(shared: &EngineState, executes: bool) -> Standing {
    let waits = shared.callers.observe(shared.now().0);
    let called = shared.handles.called_back();
    let callbacks = shared.handles.callbacks() as u64;
    let pending = shared.handles.pending();
    let state = shared.lock();
    let unfinished = pending.saturating_sub(state.worker.pending()) as u64;
    let handles = waits.handles.iter().chain(&called);
    let names = handles.filter_map(|handle| state.worker.name_of(EntryId(handle.0)));
    let waits_for: Vec<Key> = names.map(|(set, name)| (set.0, name)).collect();
    // An operation on which the ranks have agreed, or that has ended, is not stuck.
    let is_stuck = waits_for.len() == waits.handles.len() + called.len();
    let seen = Seen {
        all_wait: waits.all,
        has_guests: waits.has_guests,
        has_callbacks: !called.is_empty(),
    };
    Standing {
        pid: std::process::id(),
        submitted: shared.callers.submitted(),
        runnable_ms: runnable_ms(),
        executes,
        blocked: is_stuck && seen.blocked(),
        waits_if_idle: is_stuck && seen.waits_if_idle(),
        waits_for,
        in_hand: Unfinished {
            count: unfinished,
            callbacks,
            ..Unfinished::default()
        },
        device: shared.accelerators.standing(),
        ..Standing::default()
    }
}

/// Starts a thread that collects the stacks; returns `None` if no source of stacks is registered.
pub(super) fn search_stacks(
    shared: &Arc<EngineState>,
) -> std::io::Result<Option<Receiver<Vec<ThreadStack>>>> {
    let Some(stacks) = stacks() else {
        return Ok(None);
    };
    let (found, search) = sync_channel(1);
    let shared = shared.clone();
    std::thread::Builder::new()
        .name("horovod-stacks".into())
        .spawn(move || {
            // The receiver may have given up.
            let _ = found.send(stacks());
            shared.notifier.notify();
        })?;
    Ok(Some(search))
}
