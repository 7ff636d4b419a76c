//! Custom operations of TensorFlow over its C API, in a library that `tf.load_op_library` loads.
//!
//! Nothing is linked: TensorFlow's functions and those of the core (`python/horovod/include/horovod.h`) are looked up in
//! what the process has already loaded. Operations are registered while the library is being loaded, for that is when
//! TensorFlow collects them.
