//! Registration of operations and kernels with TensorFlow.

use std::ffi::{CStr, CString, c_char, c_int};

use crate::found::tf;
use crate::kernel;
use crate::loaded_objects::Library;
use crate::operations::{ALL, Computes, Operation};
use crate::shapes;
use crate::tf::functions::{ShapeFn, TfOpBuilder, TfShapeContext, TfStatus};
use crate::tf::status::{Failure, Status};

const DEVICE: &CStr = c"CPU";

/// Registers everything.
///
/// # Errors
/// TensorFlow refuses something.
pub(crate) fn register_all() -> Result<(), String> {
    for (operation, functions) in ALL.iter().zip(kernel::FUNCTIONS) {
        register_operation(operation)
            .and_then(|()| register_kernel(operation, functions))
            .map_err(|failure| {
                format!("it refuses the operation {}: {failure:?}", operation.name)
            })?;
    }
    Ok(())
}

fn register_operation(operation: &Operation) -> Result<(), Failure> {
    let name = c_text(operation.name);
    // SAFETY: C strings; TensorFlow copies them. The builder is used until it is registered, which takes it.
    unsafe {
        let builder = (tf().new_op_builder)(name.as_ptr());
        for attribute in operation.attributes {
            (tf().op_add_attr)(builder, c_text(attribute).as_ptr());
        }
        for input in operation.inputs {
            (tf().op_add_input)(builder, c_text(input).as_ptr());
        }
        for output in operation.outputs {
            (tf().op_add_output)(builder, c_text(output).as_ptr());
        }
        // TensorFlow does not look at the argument: an operation is stateful if this was called.
        if operation.stateful {
            (tf().op_set_stateful)(builder, true);
        }
        (tf().op_set_shape_function)(builder, shapes::function(operation));
        let status = Status::new();
        (tf().register_op)(builder, status.as_ptr());
        status.check()
    }
}

fn register_kernel(
    operation: &Operation,
    functions: kernel::KernelFunctions,
) -> Result<(), Failure> {
    let name = c_text(operation.name);
    let status = Status::new();
    // SAFETY: C strings, and functions that live as long as this library, which is never unloaded; registering takes
    // the builder.
    unsafe {
        let builder = match operation.computes {
            Computes::Collective(_) => (tf().new_async_kernel_builder)(
                name.as_ptr(),
                DEVICE.as_ptr(),
                functions.create,
                kernel::compute_collective,
                kernel::delete,
            ),
            Computes::Query(_) => (tf().new_kernel_builder)(
                name.as_ptr(),
                DEVICE.as_ptr(),
                functions.create,
                kernel::compute_query,
                kernel::delete,
            ),
        };
        (tf().register_kernel)(name.as_ptr(), builder, status.as_ptr());
    }
    status.check()
}

fn c_text(text: &str) -> CString {
    CString::new(text).unwrap_or_default()
}

/// Says what is missing by an operation `HorovodLoadProblem`, whose attribute `text` has it as its default value:
/// Python reads it there. Where TensorFlow lacks even that, on the standard error stream.
pub(crate) fn register_problem(library: Library, problem: &str) {
    if register_problem_op(library, problem).is_none() {
        #[expect(clippy::print_stderr, reason = "there is no other way to tell")]
        {
            eprintln!("horovod.tensorflow: {problem}");
        }
    }
}

fn register_problem_op(library: Library, problem: &str) -> Option<()> {
    macro_rules! function {
        ($name:literal, $type:ty) => {
            // SAFETY: TensorFlow's headers declare it with this type.
            unsafe { library.function::<$type>($name)? }
        };
    }
    type AddFn = unsafe extern "C" fn(*mut TfOpBuilder, *const c_char);
    let new_builder = function!(
        c"TF_NewOpDefinitionBuilder",
        unsafe extern "C" fn(*const c_char) -> *mut TfOpBuilder
    );
    let add_attribute = function!(c"TF_OpDefinitionBuilderAddAttr", AddFn);
    let set_shapes = function!(
        c"TF_OpDefinitionBuilderSetShapeInferenceFunction",
        unsafe extern "C" fn(*mut TfOpBuilder, ShapeFn)
    );
    let register = function!(
        c"TF_RegisterOpDefinition",
        unsafe extern "C" fn(*mut TfOpBuilder, *mut TfStatus)
    );
    let new_status = function!(c"TF_NewStatus", unsafe extern "C" fn() -> *mut TfStatus);
    let code = function!(
        c"TF_GetCode",
        unsafe extern "C" fn(*const TfStatus) -> c_int
    );
    let attribute = format!("text: string = '{}'", plain(problem));
    // SAFETY: C strings; the builder is used until registering takes it, and the status is kept.
    let failed = unsafe {
        let builder = new_builder(c"HorovodLoadProblem".as_ptr());
        add_attribute(builder, c_text(&attribute).as_ptr());
        set_shapes(builder, no_shapes);
        let status = new_status();
        register(builder, status);
        code(status)
    };
    (failed == 0).then_some(())
}

/// Without what ends a text in TensorFlow's grammar of attributes.
fn plain(text: &str) -> String {
    let replaced = |c: char| match c {
        '\'' | '\\' | '"' => '`',
        c if c.is_control() => ' ',
        c => c,
    };
    text.chars().map(replaced).collect()
}

unsafe extern "C" fn no_shapes(_: *mut TfShapeContext, _: *mut TfStatus) {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_problem_fits_into_an_attribute() {
        assert_eq!(plain("it's a\n\"\\\" path"), "it`s a ``` path");
    }
}
