//! Shape inference: the shapes of inputs as far as they are known, and those of outputs.

use std::ffi::c_int;

use super::functions::{TfShapeContext, TfShapeHandle};
use super::status::{Failure, Status};
use crate::found::tf;

/// `TF_ShapeInferenceContext`, during the call of a shape function.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ShapeContext(*mut TfShapeContext);

/// A shape, perhaps unknown in part.
#[derive(Debug)]
pub(crate) struct Shape(*mut TfShapeHandle);

impl Shape {
    fn new() -> Self {
        // SAFETY: TensorFlow's own constructor.
        Self(unsafe { (tf().new_shape)() })
    }
}

impl Drop for Shape {
    fn drop(&mut self) {
        // SAFETY: ours, and deleted once.
        unsafe { (tf().delete_shape)(self.0) }
    }
}

impl ShapeContext {
    /// Of the call of a shape function.
    ///
    /// # Safety
    /// `context` is what TensorFlow has passed, and the call outlasts this.
    pub(crate) unsafe fn new(context: *mut TfShapeContext) -> Self {
        Self(context)
    }

    /// How many inputs there are.
    pub(crate) fn input_count(self) -> usize {
        // SAFETY: valid, as `new` was promised; so below.
        let count = unsafe { (tf().shape_num_inputs)(self.0) };
        usize::try_from(count).unwrap_or(0)
    }

    /// The shape of an input.
    pub(crate) fn input(self, index: usize) -> Result<Shape, Failure> {
        let (status, shape) = (Status::new(), Shape::new());
        // SAFETY: as above.
        unsafe { (tf().shape_get_input)(self.0, as_int(index), shape.0, status.as_ptr()) };
        status.check().map(|()| shape)
    }

    /// Says what is known of an output's shape.
    pub(crate) fn set_output(self, index: usize, shape: &Shape) -> Result<(), Failure> {
        let status = Status::new();
        // SAFETY: as above.
        unsafe { (tf().shape_set_output)(self.0, as_int(index), shape.0, status.as_ptr()) };
        status.check()
    }

    /// How many dimensions; `None` if that is unknown.
    pub(crate) fn rank(self, shape: &Shape) -> Option<i64> {
        // SAFETY: as above.
        let known = unsafe { (tf().shape_rank_known)(self.0, shape.0) } != 0;
        // SAFETY: as above.
        known.then(|| unsafe { (tf().shape_rank)(self.0, shape.0) })
    }

    /// The size of a dimension of a shape that has it; `None` if it is unknown.
    pub(crate) fn dim(self, shape: &Shape, index: i64) -> Option<i64> {
        // SAFETY: TensorFlow's own constructor.
        let dimension = unsafe { (tf().new_dimension)() };
        // SAFETY: as above.
        unsafe { (tf().shape_dim)(self.0, shape.0, index, dimension) };
        // SAFETY: written by the call before.
        let known = unsafe { (tf().dimension_known)(dimension) } != 0;
        // SAFETY: as before.
        let value = known.then(|| unsafe { (tf().dimension_value)(dimension) });
        // SAFETY: made above, deleted once.
        unsafe { (tf().delete_dimension)(dimension) };
        value
    }

    /// That of one number.
    pub(crate) fn scalar(self) -> Shape {
        // SAFETY: as above; the handle is ours.
        Shape(unsafe { (tf().shape_scalar)(self.0) })
    }

    /// One dimension of unknown size: there is no other way to ask for one.
    pub(crate) fn unknown_vector(self) -> Shape {
        // SAFETY: as above; TensorFlow reads the largest number as -1, its sign of what is unknown.
        Shape(unsafe { (tf().shape_vector)(self.0, usize::MAX) })
    }

    /// The same shape with an unknown first dimension; the number of dimensions is `rank`, at least 1.
    pub(crate) fn with_unknown_rows(self, shape: &Shape, rank: i64) -> Result<Shape, Failure> {
        let status = Status::new();
        let (rows, rest, result) = (self.unknown_vector(), Shape::new(), Shape::new());
        // SAFETY: as above.
        unsafe { (tf().shape_subshape)(self.0, shape.0, 1, rank, rest.0, status.as_ptr()) };
        status.check()?;
        // SAFETY: as above.
        unsafe {
            (tf().shape_concatenate)(self.0, rows.0, rest.0, result.0, status.as_ptr());
        }
        status.check().map(|()| result)
    }
}

fn as_int(number: usize) -> c_int {
    c_int::try_from(number).unwrap_or(c_int::MAX)
}
