//! The functions of TensorFlow's C API that are needed, and their look-up.

use std::ffi::{CStr, c_char, c_int, c_void};

use crate::loaded_objects::Library;

/// Things that only TensorFlow knows more of.
macro_rules! opaque {
    ($($(#[$doc:meta])* $name:ident;)*) => {
        $($(#[$doc])* #[repr(C)] #[derive(Debug)] pub(crate) struct $name { _private: [u8; 0] })*
    };
}

opaque! {
    /// `TF_Status`.
    TfStatus;
    /// `TF_Tensor`.
    TfTensor;
    /// `TF_OpDefinitionBuilder`.
    TfOpBuilder;
    /// `TF_KernelBuilder`.
    TfKernelBuilder;
    /// `TF_OpKernelConstruction`.
    TfConstruction;
    /// `TF_OpKernelContext`.
    TfContext;
    /// `TF_ShapeInferenceContext`.
    TfShapeContext;
    /// `TF_ShapeHandle`.
    TfShapeHandle;
    /// `TF_DimensionHandle`.
    TfDimensionHandle;
}

/// `TF_StringView`.
#[repr(C)]
pub(crate) struct TfStringView {
    pub(crate) data: *const c_char,
    pub(crate) len: usize,
}

pub(crate) type CreateFn = unsafe extern "C" fn(*mut TfConstruction) -> *mut c_void;
pub(crate) type ComputeFn = unsafe extern "C" fn(*mut c_void, *mut TfContext);
pub(crate) type ComputeAsyncFn = unsafe extern "C" fn(*mut c_void, *mut TfContext, *mut c_void);
pub(crate) type DeleteFn = unsafe extern "C" fn(*mut c_void);
pub(crate) type ShapeFn = unsafe extern "C" fn(*mut TfShapeContext, *mut TfStatus);

macro_rules! functions {
    ($($field:ident = $symbol:literal : fn($($argument:ty),*) $(-> $result:ty)?;)*) => {
        /// The looked-up functions.
        pub(crate) struct Functions {
            $(pub(crate) $field: unsafe extern "C" fn($($argument),*) $(-> $result)?,)*
        }

        impl Functions {
            /// Looks all of them up.
            ///
            /// # Errors
            /// The names of those that this TensorFlow lacks.
            pub(crate) fn resolve(library: Library) -> Result<Self, Vec<&'static CStr>> {
                let all: &[&'static CStr] = &[$($symbol),*];
                let missing = || -> Vec<&'static CStr> {
                    all.iter().copied().filter(|name| library.symbol(name).is_none()).collect()
                };
                Ok(Self {
                    // SAFETY: TensorFlow's headers declare it with the field's type.
                    $($field: unsafe { library.function($symbol) }.ok_or_else(missing)?,)*
                })
            }
        }
    };
}

functions! {
    new_status = c"TF_NewStatus": fn() -> *mut TfStatus;
    delete_status = c"TF_DeleteStatus": fn(*mut TfStatus);
    set_status = c"TF_SetStatus": fn(*mut TfStatus, c_int, *const c_char);
    get_code = c"TF_GetCode": fn(*const TfStatus) -> c_int;
    message = c"TF_Message": fn(*const TfStatus) -> *const c_char;

    delete_tensor = c"TF_DeleteTensor": fn(*mut TfTensor);
    tensor_type = c"TF_TensorType": fn(*const TfTensor) -> c_int;
    num_dims = c"TF_NumDims": fn(*const TfTensor) -> c_int;
    dim = c"TF_Dim": fn(*const TfTensor, c_int) -> i64;
    tensor_data = c"TF_TensorData": fn(*const TfTensor) -> *mut c_void;

    new_op_builder = c"TF_NewOpDefinitionBuilder": fn(*const c_char) -> *mut TfOpBuilder;
    register_op = c"TF_RegisterOpDefinition": fn(*mut TfOpBuilder, *mut TfStatus);
    op_add_attr = c"TF_OpDefinitionBuilderAddAttr": fn(*mut TfOpBuilder, *const c_char);
    op_add_input = c"TF_OpDefinitionBuilderAddInput": fn(*mut TfOpBuilder, *const c_char);
    op_add_output = c"TF_OpDefinitionBuilderAddOutput": fn(*mut TfOpBuilder, *const c_char);
    op_set_stateful = c"TF_OpDefinitionBuilderSetIsStateful": fn(*mut TfOpBuilder, bool);
    op_set_shape_function = c"TF_OpDefinitionBuilderSetShapeInferenceFunction": fn(*mut TfOpBuilder, ShapeFn);

    shape_num_inputs = c"TF_ShapeInferenceContextNumInputs": fn(*mut TfShapeContext) -> i64;
    shape_get_input = c"TF_ShapeInferenceContextGetInput":
        fn(*mut TfShapeContext, c_int, *mut TfShapeHandle, *mut TfStatus);
    shape_set_output = c"TF_ShapeInferenceContextSetOutput":
        fn(*mut TfShapeContext, c_int, *mut TfShapeHandle, *mut TfStatus);
    shape_scalar = c"TF_ShapeInferenceContextScalar": fn(*mut TfShapeContext) -> *mut TfShapeHandle;
    shape_vector = c"TF_ShapeInferenceContextVectorFromSize": fn(*mut TfShapeContext, usize) -> *mut TfShapeHandle;
    shape_rank = c"TF_ShapeInferenceContextRank": fn(*mut TfShapeContext, *mut TfShapeHandle) -> i64;
    shape_rank_known = c"TF_ShapeInferenceContextRankKnown": fn(*mut TfShapeContext, *mut TfShapeHandle) -> c_int;
    shape_dim = c"TF_ShapeInferenceContextDim":
        fn(*mut TfShapeContext, *mut TfShapeHandle, i64, *mut TfDimensionHandle);
    shape_subshape = c"TF_ShapeInferenceContextSubshape":
        fn(*mut TfShapeContext, *mut TfShapeHandle, i64, i64, *mut TfShapeHandle, *mut TfStatus);
    shape_concatenate = c"TF_ShapeInferenceContextConcatenateShapes":
        fn(*mut TfShapeContext, *mut TfShapeHandle, *mut TfShapeHandle, *mut TfShapeHandle, *mut TfStatus);
    new_shape = c"TF_NewShapeHandle": fn() -> *mut TfShapeHandle;
    delete_shape = c"TF_DeleteShapeHandle": fn(*mut TfShapeHandle);
    new_dimension = c"TF_NewDimensionHandle": fn() -> *mut TfDimensionHandle;
    delete_dimension = c"TF_DeleteDimensionHandle": fn(*mut TfDimensionHandle);
    dimension_value = c"TF_DimensionHandleValue": fn(*mut TfDimensionHandle) -> i64;
    dimension_known = c"TF_DimensionHandleValueKnown": fn(*mut TfDimensionHandle) -> c_int;

    new_kernel_builder = c"TF_NewKernelBuilder":
        fn(*const c_char, *const c_char, CreateFn, ComputeFn, DeleteFn) -> *mut TfKernelBuilder;
    new_async_kernel_builder = c"TF_NewAsyncKernelBuilder":
        fn(*const c_char, *const c_char, CreateFn, ComputeAsyncFn, DeleteFn) -> *mut TfKernelBuilder;
    register_kernel = c"TF_RegisterKernelBuilder": fn(*const c_char, *mut TfKernelBuilder, *mut TfStatus);
    construction_name = c"TF_OpKernelConstruction_GetName": fn(*mut TfConstruction) -> TfStringView;
    construction_int = c"TF_OpKernelConstruction_GetAttrInt64":
        fn(*mut TfConstruction, *const c_char, *mut i64, *mut TfStatus);
    construction_float = c"TF_OpKernelConstruction_GetAttrFloat":
        fn(*mut TfConstruction, *const c_char, *mut f32, *mut TfStatus);
    construction_bool = c"TF_OpKernelConstruction_GetAttrBool":
        fn(*mut TfConstruction, *const c_char, *mut u8, *mut TfStatus);
    construction_failure = c"TF_OpKernelConstruction_Failure": fn(*mut TfConstruction, *mut TfStatus);

    num_inputs = c"TF_NumInputs": fn(*mut TfContext) -> c_int;
    get_input = c"TF_GetInput": fn(*mut TfContext, c_int, *mut *mut TfTensor, *mut TfStatus);
    set_output = c"TF_SetOutput": fn(*mut TfContext, c_int, *const TfTensor, *mut TfStatus);
    allocate_output = c"TF_AllocateOutput":
        fn(*mut TfContext, c_int, c_int, *const i64, c_int, usize, *mut TfStatus) -> *mut TfTensor;
    forward_or_allocate = c"TF_ForwardInputOrAllocateOutput":
        fn(*mut TfContext, *const c_int, c_int, c_int, *const i64, c_int, *mut c_int, *mut TfStatus) -> *mut TfTensor;
    context_failure = c"TF_OpKernelContext_Failure": fn(*mut TfContext, *mut TfStatus);
    run_done = c"TF_RunAsyncOpKernelDoneCallback": fn(*mut c_void);
}
