//! Initialisation while the library is being loaded: look-ups, then registration; and the functions that were found.

use std::panic::catch_unwind;
use std::sync::OnceLock;

use crate::core_functions::CoreFunctions;
use crate::loaded_objects::Library;
use crate::registration;
use crate::tf::functions::Functions;

/// TensorFlow's library, which `import tensorflow` has loaded.
const TENSORFLOW: &str = "libtensorflow_framework.so.2";

struct Found {
    tf: Functions,
    core: CoreFunctions,
}

static FOUND: OnceLock<Found> = OnceLock::new();

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

/// Run by the loader: TensorFlow collects what is registered while it loads a library.
#[used]
#[unsafe(link_section = ".init_array")]
static CONSTRUCTOR: extern "C" fn() = on_load;

extern "C" fn on_load() {
    // A panic's text has been printed; Python will see that the operations are missing.
    let _ = catch_unwind(|| {
        // Without it there is nobody to register with, nor to tell.
        let Some(library) = Library::loaded(TENSORFLOW) else {
            return;
        };
        if let Err(problem) = resolve(library).and_then(|()| registration::register_all()) {
            registration::register_problem(library, &problem);
        }
    });
}

fn resolve(library: Library) -> Result<(), String> {
    let tf = Functions::resolve(library).map_err(|missing| {
        let names: Vec<_> = missing.iter().map(|name| name.to_string_lossy()).collect();
        format!("it lacks {}", names.join(", "))
    })?;
    let core = CoreFunctions::resolve()?;
    // Loaded once: the loader calls a constructor once.
    let _ = FOUND.set(Found { tf, core });
    Ok(())
}
