//! How a framework's tensor looks to the engine: where its bytes are, when they are ready, who keeps them alive.

use horovod_protocol::TensorMeta;

/// Says when the bytes of a tensor may be read, e.g. a CUDA event recorded on the caller's stream.
/// Host tensors have none.
pub trait ReadyEvent: Send {
    /// Block until the bytes are ready; the text says why they never will be.
    fn wait(&self) -> Result<(), String>;
}

/// Where the result goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Output {
    /// Into memory of the caller; may be the input's own (in place).
    At(*mut u8),
    /// Into memory that is allocated when the size is known.
    Allocate,
}

/// One tensor of a submission.
pub struct Tensor {
    /// Element type and shape on this rank.
    pub meta: TensorMeta,
    /// First input byte; dense, row-major.
    pub input: *const u8,
    /// Where the result goes.
    pub output: Output,
    /// When the input may be read; `None`: now.
    pub ready: Option<Box<dyn ReadyEvent>>,
    /// Dropped when the operation has ended: keeps the memory alive until then.
    pub owner: Option<Box<dyn Send>>,
}

// SAFETY: the pointers refer to memory that `owner` keeps alive; the engine is the only one to use them
// between submission and completion, as the public contract of the submit functions demands.
unsafe impl Send for Tensor {}

impl Tensor {
    /// Bytes of the tensor; `None` if the shape overflows.
    pub fn bytes(&self) -> Option<usize> {
        let elems = usize::try_from(self.meta.elems()?).ok()?;
        elems.checked_mul(self.meta.dtype.size())
    }

    /// Bytes of one row of dimension 0.
    pub fn row_bytes(&self) -> Option<usize> {
        let row = self
            .meta
            .shape
            .iter()
            .skip(1)
            .try_fold(1u64, |n, d| n.checked_mul(*d))?;
        usize::try_from(row)
            .ok()?
            .checked_mul(self.meta.dtype.size())
    }

    /// Rows of dimension 0; 1 for a 0-d tensor.
    pub fn rows(&self) -> u64 {
        self.meta.shape.first().copied().unwrap_or(1)
    }
}
