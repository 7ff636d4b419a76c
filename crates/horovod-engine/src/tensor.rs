//! A framework's tensor as the engine sees it: where its bytes are, when they are ready, who keeps them alive.

use std::ops::{Deref, DerefMut};
use std::sync::Arc;

use horovod_protocol::{Device, TensorMeta};

use crate::engine::placement::Placement;

/// Says when the bytes of a tensor in host memory may be read.
/// Host tensors that are ready when they are submitted have none.
pub trait ReadyEvent: Send {
    /// Whether the bytes are ready; the text says why they never will be. It is asked again and again, by whichever
    /// thread makes progress, with a lock of the engine held: it must not block, and must not call the engine.
    fn is_ready(&self) -> Result<bool, String>;
}

/// Where the result goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Output {
    /// Into memory of the caller; may be the input's own (in place).
    At(*mut u8),
    /// Into memory that is allocated when the size is known.
    Allocate,
    /// Into so many bytes of memory of the caller's if all members bring equally many rows, or get them, and they need
    /// just that; else as [`Self::Allocate`], which on a device, where nobody allocates, is memory that is freed with
    /// the result: wait for its end before. For allgather, alltoall and reducescatter.
    Even {
        /// First byte.
        at: *mut u8,
        /// Length.
        bytes: usize,
    },
    /// Into so many bytes of memory of the caller's, which are just what this rank gets: anything else is an error. For
    /// reducescatter, of which each rank knows that ([`Engine::scattered_rows`]).
    ///
    /// [`Engine::scattered_rows`]: crate::Engine::scattered_rows
    Exactly {
        /// First byte.
        at: *mut u8,
        /// Length.
        bytes: usize,
    },
}

/// One tensor of a submission: an address with a type, a shape and an owner.
pub struct Tensor {
    /// Element type and shape on this rank.
    pub(crate) meta: TensorMeta,
    /// First input byte; dense, in the order that `meta` says.
    pub(crate) input: *const u8,
    pub(crate) output: Output,
    pub(crate) device: Device,
    /// The facts that its device must know.
    pub(crate) placement: Option<Placement>,
    /// When the input may be read; `None`: now.
    pub(crate) ready: Option<Box<dyn ReadyEvent>>,
    /// Dropped when the operation has ended.
    pub(crate) owner: Option<Arc<dyn Send + Sync>>,
}

/// Tensors of one submission. Nearly always one tensor, which needs no list then.
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

// SAFETY: what the pointers lead to is the engine's alone between submission and completion, as `Tensor::new` demands.
unsafe impl Send for Tensor {}

impl Tensor {
    /// A dense tensor in host memory, in the order that `meta` says, whose bytes begin at `input`; its output is in the
    /// same order. Null pointers are for tensors without elements.
    ///
    /// # Safety
    /// Until the operation it is submitted to has ended (or the submission is refused), `input` is readable for the
    /// bytes of `meta` and nobody writes there; an output address is writable for as many bytes and nobody else reads
    /// or writes there. It is either `input` itself or does not overlap it, and overlaps no other tensor of the
    /// submission. An owner that ends that promise when it is dropped can be given with [`Self::kept_by`].
    #[inline]
    pub unsafe fn new(meta: TensorMeta, input: *const u8, output: Output) -> Self {
        Self {
            meta,
            input,
            output,
            device: Device::Cpu,
            placement: None,
            ready: None,
            owner: None,
        }
    }

    /// With an owner, dropped when the operation has ended and nothing uses the memory any more.
    #[must_use]
    #[inline]
    pub fn kept_by(mut self, owner: Arc<dyn Send + Sync>) -> Self {
        self.owner = Some(owner);
        self
    }

    /// With an event before which the input is not to be read.
    #[must_use]
    pub fn ready_after(mut self, event: Option<Box<dyn ReadyEvent>>) -> Self {
        self.ready = event;
        self
    }

    /// In the memory of a device of this kind.
    ///
    /// # Safety
    /// The requirements of [`Self::new`] for the addresses hold on that device.
    #[must_use]
    pub unsafe fn on(mut self, device: Device) -> Self {
        self.device = device;
        self
    }

    /// With facts that its device must know; tensors of one call may share them.
    #[must_use]
    #[inline]
    pub fn placed(mut self, placement: Placement) -> Self {
        self.placement = Some(placement);
        self
    }

    /// The facts that its device must know.
    pub fn placement(&self) -> Option<&Placement> {
        self.placement.as_ref()
    }

    /// First input byte.
    pub fn input(&self) -> *const u8 {
        self.input
    }

    /// Where the result goes.
    pub fn output(&self) -> Output {
        self.output
    }

    /// Element type and shape.
    pub fn meta(&self) -> &TensorMeta {
        &self.meta
    }

    /// Whether it has the memory that its elements need.
    pub fn has_memory(&self) -> bool {
        let has_output = match self.output {
            Output::At(at) | Output::Even { at, .. } => !at.is_null(),
            Output::Exactly { at, bytes } => !at.is_null() || bytes == 0,
            Output::Allocate => true,
        };
        (has_output && !self.input.is_null()) || self.bytes() == Some(0)
    }

    /// The addresses of its input; `None` if it has no bytes.
    pub fn span(&self) -> Option<std::ops::Range<usize>> {
        let start = self.input.addr();
        let bytes = self.bytes().filter(|bytes| *bytes > 0)?;
        Some(start..start.saturating_add(bytes))
    }

    pub(crate) fn output_ptr(&self) -> Option<*mut u8> {
        match self.output {
            Output::At(p) => Some(p),
            Output::Allocate | Output::Even { .. } | Output::Exactly { .. } => None,
        }
    }

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
