//! Names that stand at several places of one compiled program, found while it runs.
//!
//! A function that is traced once and used at several places (a `jit` inside a `jit`, two scans of one function) gives
//! all of them one name. Where nothing orders the places XLA may run them in another order on each rank, and then
//! operands of one would meet those of another without a word.

use std::collections::HashMap;
use std::sync::{LazyLock, Mutex, PoisonError};

/// More names are not remembered: all are forgotten then, and found again when they are next used twice.
const NAMES_MAX: usize = 1 << 16;

/// A run of a program, and a place in it.
#[derive(Clone, Copy)]
pub(super) struct Use {
    pub(super) run_id: i64,
    /// The address of the call's attributes, which XLA has once for each place.
    pub(super) place: usize,
    /// Whether XLA may run it before or after any other one.
    pub(super) is_unordered: bool,
}

/// Where each name was used last.
static USES: LazyLock<Mutex<HashMap<String, Use>>> = LazyLock::new(Mutex::default);

/// Whether the same run has used the name at another place, and another rank's may do it in another order.
pub(super) fn may_be_mixed_up(name: &str, now: Use) -> bool {
    let mut uses = USES.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(last) = uses.get_mut(name) {
        let is_elsewhere = last.run_id == now.run_id && last.place != now.place;
        let is_unordered = last.is_unordered || now.is_unordered;
        *last = now;
        return is_elsewhere && is_unordered;
    }
    if uses.len() >= NAMES_MAX {
        uses.clear();
    }
    uses.insert(name.to_owned(), now);
    false
}
