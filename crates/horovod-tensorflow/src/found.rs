//! The functions of TensorFlow and of the core that were found while this library was loaded.

use std::sync::OnceLock;

use crate::core_functions::CoreFunctions;
use crate::tf::functions::Functions;

struct Found {
    tf: Functions,
    core: CoreFunctions,
}

static FOUND: OnceLock<Found> = OnceLock::new();

/// Keeps the functions; the first call counts.
pub(crate) fn set(tf: Functions, core: CoreFunctions) {
    let _ = FOUND.set(Found { tf, core });
}

fn found() -> &'static Found {
    FOUND
        .get()
        .expect("TensorFlow calls only what was registered, which is after the look-up")
}

/// TensorFlow's functions.
pub(crate) fn tf() -> &'static Functions {
    &found().tf
}

/// The core's functions.
pub(crate) fn core() -> &'static CoreFunctions {
    &found().core
}
