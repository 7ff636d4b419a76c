//! The runtime and the Rust API: init, engine, handles, settings.
