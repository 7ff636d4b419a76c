//! Custom operations of TensorFlow over its C API, in a library that `tf.load_op_library` loads.
//!
//! Nothing is linked: TensorFlow's functions and those of the core (`python/horovod/include/horovod.h`) are looked up in
//! what the process has already loaded. Operations are registered while the library is being loaded, for that is when
//! TensorFlow collects them. The library exports nothing.
//!
//! One operation's way: `kernel` reads the attributes, `collective` submits the tensors to the core and returns, the core
//! calls `pending` back, which sets the outputs and calls TensorFlow's moved `done` callback. An operation that runs alone
//! (`wait_history`) mostly ends so before `collective` returns.

#[cfg(target_os = "linux")]
mod collective;
#[cfg(target_os = "linux")]
mod core_functions;
#[cfg(target_os = "linux")]
mod done;
mod dtypes;
#[cfg(target_os = "linux")]
mod found;
mod kernel;
#[cfg(target_os = "linux")]
mod load;
#[cfg(target_os = "linux")]
mod loaded_objects;
mod names;
mod operations;
#[cfg(target_os = "linux")]
mod pending;
#[cfg(target_os = "linux")]
mod registration;
#[cfg(target_os = "linux")]
mod shapes;
#[cfg(target_os = "linux")]
mod tf;
#[cfg(target_os = "linux")]
mod topology;
#[cfg(target_os = "linux")]
mod wait_history;
