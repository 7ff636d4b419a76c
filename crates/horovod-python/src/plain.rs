//! Operations in place on tensors that the core reads by itself: one crossing into Rust, and nothing asked in Python.

use std::sync::Arc;

use horovod_engine::gpu::Ready;
use horovod_engine::{Engine, Op, Output, Submission, Tensor, Tensors};
use pyo3::exceptions::PyRuntimeError;
use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::{PyList, PyTuple, PyType};

use crate::dlpack::{Read, Reader};
use crate::errors::operation_error;
use crate::exit::stay_if_leaving;
use crate::gpu::record;
use crate::runtime::registered;
use crate::submit::{ALLREDUCE, BROADCAST, Kept, has_meaning, op_from, submit, submit_and_wait};

/// Error text for a tensor whose memory is not where the operation wrote.
pub(crate) const MOVED: &str = "The tensor got other memory while an operation on it was in flight (tensor.data = ..., \
    tensor.set_(), tensor.resize_(), resize_() or share_memory_() of its storage), so the result is not in it. \
    Leave a tensor as it is until synchronize() has returned, or pass a clone() of it.";

/// The code of the operator, and the factors before and after.
type ReductionArgs = (u8, f64, f64);

/// A tensor that the operation works on in place.
pub(crate) struct InPlace {
    pub(crate) tensor: Py<PyAny>,
    /// Holds the memory: a script can give the tensor other memory while the operation is in flight.
    #[expect(dead_code, reason = "dropped with the rest, which is its purpose")]
    storage: Py<PyAny>,
    /// Finds out where the tensor's memory is.
    pub(crate) reader: Reader,
    /// Where the result was written, if it has elements.
    written: Option<usize>,
}

impl InPlace {
    /// That the result is where the tensor's memory is.
    pub(crate) fn check(&self, py: Python<'_>) -> PyResult<()> {
        if let Some(at) = self.written
            && let Some(now) = self.reader.address(self.tensor.bind(py))
            && now.addr() != at
        {
            return Err(PyRuntimeError::new_err(MOVED));
        }
        Ok(())
    }
}

/// A tensor that the core has read by itself, to work on in place.
struct Plain {
    tensor: Tensor,
    kept: horovod_engine::Kept,
    gpu: Option<(Reader, i32)>,
}

impl Plain {
    /// The tensor with its event, and what is kept for it.
    #[inline(always)] // as a call it moves the tensor twice
    fn placed(
        self,
        py: Python<'_>,
        named: (&str, Option<&str>),
        recorded: &mut Recorded,
    ) -> PyResult<(Tensor, horovod_engine::Kept)> {
        let Self { tensor, kept, gpu } = self;
        let tensor = match gpu {
            None => tensor,
            Some(gpu) => match recorded.event(py, named, gpu)? {
                None => tensor,
                // SAFETY: the framework's own description says that the memory is that GPU's.
                Some(ready) => unsafe { tensor.on_gpu(ready) },
            },
        };
        Ok((tensor, kept))
    }
}

/// When the operands of one call are ready: one event for all that are on the same GPU.
#[derive(Default)]
struct Recorded(Option<(i32, Arc<Ready>)>);

impl Recorded {
    /// The event of an operand on this GPU; `None` where the framework has no streams.
    fn event(
        &mut self,
        py: Python<'_>,
        named: (&str, Option<&str>),
        (reader, ordinal): (Reader, i32),
    ) -> PyResult<Option<Arc<Ready>>> {
        let Some(streams) = reader.streams() else {
            return Ok(None);
        };
        if let Some((recorded, ready)) = &self.0
            && *recorded == ordinal
        {
            return Ok(Some(ready.clone()));
        }
        let ready = record(py, named, ordinal, streams.current(py, ordinal)?)?;
        self.0 = Some((ordinal, ready.clone()));
        Ok(Some(ready))
    }
}

/// Types of one framework whose tensors the core can read by itself.
#[pyclass(frozen, module = "horovod._core")]
pub(crate) struct PlainTensors {
    readers: Vec<(Py<PyType>, Reader)>,
    lazy: Py<PyAny>,
    storage: Py<PyAny>,
}

#[pymethods]
impl PlainTensors {
    /// `types` exactly, no subclasses; `lazy(tensor)` says of one with at most one element whether its memory does not
    /// hold the value as it is. `storage(tensor)` is what keeps a tensor's memory alive when the tensor itself is given
    /// other memory.
    #[new]
    fn new(types: Vec<Bound<'_, PyType>>, lazy: Py<PyAny>, storage: Py<PyAny>) -> PyResult<Self> {
        let mut readers = Vec::new();
        for class in types {
            if let Some(reader) = Reader::of(&class)? {
                readers.push((class.unbind(), reader));
            }
        }
        Ok(Self {
            readers,
            lazy,
            storage,
        })
    }

    /// Queue an allreduce of one tensor in place and return its handle. `None`: not such a tensor; nothing was queued.
    #[expect(
        clippy::too_many_arguments,
        reason = "called for each gradient: a tuple would be made for each"
    )]
    fn allreduce(
        &self,
        tensor: &Bound<'_, PyAny>,
        name: Option<&str>,
        op: u8,
        prescale: f64,
        postscale: f64,
        process_set: Option<u32>,
    ) -> PyResult<Option<u64>> {
        let op = op_from((ALLREDUCE, op, prescale, postscale, -1))?;
        self.begin(tensor, ("allreduce", name), op, process_set, submit)
    }

    /// The same of a broadcast.
    fn broadcast(
        &self,
        tensor: &Bound<'_, PyAny>,
        root: i64,
        name: Option<&str>,
        process_set: Option<u32>,
    ) -> PyResult<Option<u64>> {
        let op = op_from((BROADCAST, 0, 1.0, 1.0, root))?;
        self.begin(tensor, ("broadcast", name), op, process_set, submit)
    }

    /// As `allreduce` and then `wait`, in one crossing.
    #[expect(
        clippy::too_many_arguments,
        reason = "called for each gradient: a tuple would be made for each"
    )]
    fn allreduce_and_wait(
        &self,
        tensor: &Bound<'_, PyAny>,
        name: Option<&str>,
        op: u8,
        prescale: f64,
        postscale: f64,
        process_set: Option<u32>,
    ) -> PyResult<Option<Py<PyAny>>> {
        let op = op_from((ALLREDUCE, op, prescale, postscale, -1))?;
        self.begin(
            tensor,
            ("allreduce", name),
            op,
            process_set,
            submit_and_wait,
        )
    }

    /// As `broadcast` and then `wait`, in one crossing.
    fn broadcast_and_wait(
        &self,
        tensor: &Bound<'_, PyAny>,
        root: i64,
        name: Option<&str>,
        process_set: Option<u32>,
    ) -> PyResult<Option<Py<PyAny>>> {
        let op = op_from((BROADCAST, 0, 1.0, 1.0, root))?;
        self.begin(
            tensor,
            ("broadcast", name),
            op,
            process_set,
            submit_and_wait,
        )
    }

    /// Queue allreduces in place that begin together, one per tensor and name, and return their handles. There are
    /// fewer where one is no such tensor, or was refused: neither that one nor any after it was queued.
    fn allreduce_together(
        &self,
        tensors: &Bound<'_, PyList>,
        prefix: &str,
        names: &Bound<'_, PyList>,
        reduction: ReductionArgs,
        process_set: Option<u32>,
    ) -> PyResult<Vec<u64>> {
        let py = tensors.py();
        stay_if_leaving(py);
        let (op, prescale, postscale) = reduction;
        let op = op_from((ALLREDUCE, op, prescale, postscale, -1))?;
        let set = registered(process_set)?;
        let engine = horovod_engine::engine().map_err(|e| operation_error(py, e))?;
        let mut handles = Vec::with_capacity(tensors.len());
        let mut recorded = Recorded::default();
        engine.submit_together(|queue| {
            for (tensor, name) in tensors.iter().zip(names.iter()) {
                // Submitting this tensor alone reports the error.
                let (Ok(Some(plain)), Ok(name)) = (self.read(&tensor, &op), name.extract::<&str>())
                else {
                    break;
                };
                let Ok((tensor, kept)) = plain.placed(py, (prefix, Some(name)), &mut recorded)
                else {
                    break;
                };
                let tensor = Tensors::One(tensor);
                let submission = Submission::new(prefix, Some(name), op.clone(), set, tensor);
                let Ok(handle) = queue(submission.keeping(Some(kept))) else {
                    break;
                };
                handles.push(handle.0);
            }
        });
        Ok(handles)
    }

    /// Queue one grouped allreduce of tensors in place and return its handle. `None`: one of them is no such tensor, two
    /// share memory, or there are none; nothing was queued.
    fn grouped_allreduce(
        &self,
        tensors: &Bound<'_, PyTuple>,
        prefix: &str,
        name: Option<&str>,
        reduction: ReductionArgs,
        process_set: Option<u32>,
    ) -> PyResult<Option<u64>> {
        let py = tensors.py();
        stay_if_leaving(py);
        let (op, prescale, postscale) = reduction;
        let op = op_from((ALLREDUCE, op, prescale, postscale, -1))?;
        let mut members = Vec::with_capacity(tensors.len());
        let mut parts = Vec::with_capacity(tensors.len());
        let mut plains = Vec::with_capacity(tensors.len());
        for tensor in tensors {
            let Some(plain) = self.read(&tensor, &op)? else {
                return Ok(None);
            };
            plains.push(plain);
        }
        let ordinal = |plain: &Plain| plain.gpu.map(|(_, ordinal)| ordinal);
        let places = plains.windows(2);
        let is_one_place = places.into_iter().all(|p| ordinal(&p[0]) == ordinal(&p[1]));
        if plains.is_empty() || !is_one_place || overlap(plains.iter().map(|p| &p.tensor)) {
            return Ok(None);
        }
        let mut recorded = Recorded::default();
        for plain in plains {
            let (tensor, part) = plain.placed(py, (prefix, name), &mut recorded)?;
            members.push(tensor);
            parts.push(part);
        }
        let engine = horovod_engine::engine().map_err(|e| operation_error(py, e))?;
        let set = registered(process_set)?;
        let kept = Arc::new(Kept::GroupInPlace(tensors.clone().unbind(), parts));
        let submission = Submission::new(prefix, name, op, set, Tensors::Many(members));
        submit(py, &engine, submission.keeping(Some(kept))).map(Some)
    }
}

/// Calls a function of one argument. `call1` makes a tuple of it where only the limited API is to be had, which takes
/// longer than such a function itself.
fn call_with<'py>(
    function: &Py<PyAny>,
    argument: &Bound<'py, PyAny>,
) -> PyResult<Bound<'py, PyAny>> {
    let end = std::ptr::null_mut::<ffi::PyObject>();
    // SAFETY: both are objects, the list of arguments ends with a null pointer, and the interpreter lock is held, as
    // `Bound` proves. The result is a new reference, or null with the exception set.
    unsafe {
        let result = ffi::PyObject_CallFunctionObjArgs(function.as_ptr(), argument.as_ptr(), end);
        Bound::from_owned_ptr_or_err(argument.py(), result)
    }
}

/// Whether some byte belongs to two of these.
pub(crate) fn overlap<'a>(tensors: impl IntoIterator<Item = &'a Tensor>) -> bool {
    let mut spans: Vec<_> = tensors.into_iter().filter_map(Tensor::span).collect();
    spans.sort_unstable_by_key(|span| span.start);
    spans.windows(2).any(|pair| pair[1].start < pair[0].end)
}

impl PlainTensors {
    /// Begins the operation with `submit`; `None` if the core cannot read the tensor.
    #[inline(always)] // as a call it moves the submission twice
    fn begin<T>(
        &self,
        tensor: &Bound<'_, PyAny>,
        named: (&str, Option<&str>),
        op: Op,
        process_set: Option<u32>,
        submit: impl FnOnce(Python<'_>, &Engine, Submission<'_>) -> PyResult<T>,
    ) -> PyResult<Option<T>> {
        let py = tensor.py();
        stay_if_leaving(py);
        let Some(plain) = self.read(tensor, &op)? else {
            return Ok(None);
        };
        let engine = horovod_engine::engine().map_err(|e| operation_error(py, e))?;
        let set = registered(process_set)?;
        let (tensor, kept) = plain.placed(py, named, &mut Recorded::default())?;
        let submission = Submission::new(named.0, named.1, op, set, Tensors::One(tensor));
        submit(py, &engine, submission.keeping(Some(kept))).map(Some)
    }

    fn reader(&self, tensor: &Bound<'_, PyAny>) -> Option<Reader> {
        let class = tensor.get_type_ptr();
        let mut readers = self.readers.iter();
        readers
            .find(|r| r.0.as_ptr().cast() == class)
            .map(|(_, reader)| *reader)
    }

    /// The tensor as the engine sees it, to work on in place; `None` if it is not one that the core can read, or not
    /// one for this operation.
    fn read(&self, tensor: &Bound<'_, PyAny>, op: &Op) -> PyResult<Option<Plain>> {
        let Some(reader) = self.reader(tensor) else {
            return Ok(None);
        };
        let Some(Read { memory, meta, gpu }) = reader.read(tensor) else {
            return Ok(None);
        };
        let meaningful = match op {
            Op::Allreduce { op, .. } => has_meaning(*op, meta.dtype),
            Op::Broadcast { .. } => true,
            _ => false,
        };
        // To ask costs as much as all else here. Lazy is the imaginary half of what was conjugated, of which the
        // elements lie apart, but for a single one.
        let may_be_lazy = meta.elems().is_none_or(|n| n <= 1);
        if !meaningful || (may_be_lazy && call_with(&self.lazy, tensor)?.is_truthy()?) {
            return Ok(None);
        }
        // Not the tensor: a script can give it other memory while the operation is in flight.
        let Ok(storage) = call_with(&self.storage, tensor) else {
            return Ok(None);
        };
        let is_empty = meta.shape.contains(&0);
        let kept = Arc::new(Kept::InPlace(InPlace {
            tensor: tensor.clone().unbind(),
            storage: storage.unbind(),
            reader,
            written: (!is_empty).then(|| memory.addr()),
        }));
        // SAFETY: what is kept holds the memory, and hvd's users leave a tensor alone until its handle has ended.
        let tensor = unsafe { Tensor::new(meta, memory, Output::At(memory)) };
        Ok(Some(Plain {
            tensor: tensor.kept_by(kept.clone()),
            kept,
            gpu: gpu.map(|ordinal| (reader, ordinal)),
        }))
    }
}
