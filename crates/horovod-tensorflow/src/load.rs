//! Initialisation while the library is being loaded: look-ups, then registration.

use std::panic::catch_unwind;

use crate::core_functions::CoreFunctions;
use crate::loaded_objects::Library;
use crate::tf::functions::Functions;
use crate::{found, registration};

/// TensorFlow's library, which `import tensorflow` has loaded.
const TENSORFLOW: &str = "libtensorflow_framework.so.2";

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
    found::set(tf, core);
    Ok(())
}
