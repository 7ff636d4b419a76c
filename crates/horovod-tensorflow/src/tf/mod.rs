//! TensorFlow's C API: its functions, found at run time, and safe types over what they work on.

pub(crate) mod construction;
pub(crate) mod context;
pub(crate) mod functions;
pub(crate) mod shape_context;
pub(crate) mod status;
pub(crate) mod tensor;
