//! Names that stand at several places of one compiled program, found while it runs.
//!
//! A function that is traced once and used at several places (a `jit` inside a `jit`, two scans of one function) gives
//! all of them one name. XLA may run the places in another order on each rank, and then operands of one would meet
//! those of another without a word.

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
}

/// Where each name was used last.
static USES: LazyLock<Mutex<HashMap<String, Use>>> = LazyLock::new(Mutex::default);

/// Whether the same run has used the name at another place.
pub(super) fn is_elsewhere(name: &str, now: Use) -> bool {
    let mut uses = USES.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(last) = uses.get_mut(name) {
        let elsewhere = last.run_id == now.run_id && last.place != now.place;
        *last = now;
        return elsewhere;
    }
    if uses.len() >= NAMES_MAX {
        uses.clear();
    }
    uses.insert(name.to_owned(), now);
    false
}
