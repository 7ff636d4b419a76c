//! Row-major copies of tensors that the ranks have in different orders in memory.

use horovod_kernels::Reordering;
use horovod_protocol::{MemoryOrder, Shape};

use crate::buffer::Buffer;
use crate::tensor::Tensor;

/// A tensor of this rank that is worked on as a row-major copy.
pub(super) struct Reordered {
    copy: Buffer,
    shape: Shape,
    /// Of the tensor itself.
    strides: Vec<i64>,
    row_major: Vec<i64>,
    element_bytes: usize,
}

impl Reordered {
    /// A copy of a tensor in memory of its size; `None` if its strides do not fit a number.
    ///
    /// # Safety
    /// The tensor's input is readable, as its submitter has promised until the operation has ended.
    pub(super) unsafe fn of(tensor: &Tensor, copy: Buffer) -> Option<Self> {
        let shape = tensor.meta.shape.clone();
        let this = Self {
            copy,
            strides: tensor.meta.order.strides(&shape)?,
            row_major: MemoryOrder::ROW_MAJOR.strides(&shape)?,
            shape,
            element_bytes: tensor.meta.dtype.size(),
        };
        // SAFETY: the tensor is dense in its order, and the copy has its size.
        unsafe {
            this.reordering(&this.strides, &this.row_major)
                .copy(tensor.input, this.copy.as_mut_ptr());
        }
        Some(this)
    }

    /// Where the operation reads and writes.
    pub(super) fn memory(&self) -> *mut u8 {
        self.copy.as_mut_ptr()
    }

    /// Puts the result where the submitter wants it.
    ///
    /// # Safety
    /// `output` is writable for the tensor's size.
    pub(super) unsafe fn write_to(&self, output: *mut u8) {
        // SAFETY: as in `of`, the other way round.
        unsafe {
            self.reordering(&self.row_major, &self.strides)
                .copy(self.copy.as_mut_ptr(), output);
        }
    }

    fn reordering<'a>(&'a self, from: &'a [i64], to: &'a [i64]) -> Reordering<'a> {
        Reordering {
            shape: &self.shape,
            from,
            to,
            element_bytes: self.element_bytes,
        }
    }
}
