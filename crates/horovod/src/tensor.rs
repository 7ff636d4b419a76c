//! How a framework's tensor looks to the engine: where its bytes are, when they are ready, who keeps them alive.

use std::ops::{Deref, DerefMut};

use horovod_protocol::TensorMeta;

/// Says when the bytes of a tensor may be read, e.g. a CUDA event recorded on the caller's stream.
/// Host tensors have none. Only the engine's own thread waits for it, never one that called the engine.
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

/// What one submission works on. Nearly always one tensor, which needs no list then.
pub enum Tensors {
    /// One.
    One(Tensor),
    /// A group, or none.
    Many(Vec<Tensor>),
}

impl Deref for Tensors {
    type Target = [Tensor];

    fn deref(&self) -> &[Tensor] {
        match self {
            Self::One(tensor) => std::slice::from_ref(tensor),
            Self::Many(tensors) => tensors,
        }
    }
}

impl DerefMut for Tensors {
    fn deref_mut(&mut self) -> &mut [Tensor] {
        match self {
            Self::One(tensor) => std::slice::from_mut(tensor),
            Self::Many(tensors) => tensors,
        }
    }
}

impl Default for Tensors {
    fn default() -> Self {
        Self::Many(Vec::new())
    }
}

impl From<Tensor> for Tensors {
    fn from(tensor: Tensor) -> Self {
        Self::One(tensor)
    }
}

impl From<Vec<Tensor>> for Tensors {
    fn from(mut tensors: Vec<Tensor>) -> Self {
        match tensors.pop() {
            Some(tensor) if tensors.is_empty() => Self::One(tensor),
            last => {
                tensors.extend(last);
                Self::Many(tensors)
            }
        }
    }
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
