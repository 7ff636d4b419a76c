//! The launch of one piece of work: kernels before, one group of NCCL's calls, kernels after.

use horovod_protocol::DType;

use super::ExecutorState;
use super::communicators::{Unfinished, settle};
use super::plan::{LaunchPlan, in_nccl, is_widened};
use super::work::{AllReduce, AllReduceInput, Call, GpuWork, ReduceScatter};
use crate::device::Device;
use crate::device::kernels::{DeviceCopy, Elements, Kernels};
use crate::device::stream::Stream;
use crate::error::GpuError;
use crate::nccl::{Communicator, NcclOp, NcclType};

/// Context of a launch.
pub(super) struct Launcher<'a> {
    pub(super) device: &'static Device,
    pub(super) stream: &'a Stream,
    /// `None`: this member is the only one.
    pub(super) communicator: Option<&'a Communicator>,
    /// Of [`LaunchPlan::bytes`] bytes.
    pub(super) scratch: u64,
    pub(super) shared: &'a ExecutorState,
    pub(super) rank: usize,
}

/// A reduction as NCCL is asked for it.
struct Reduce {
    send: u64,
    recv: u64,
    count: usize,
    dtype: NcclType,
    op: NcclOp,
}

impl Launcher<'_> {
    /// # Safety
    /// As [`super::Executor::submit`]; the plan is the work's.
    pub(super) unsafe fn launch(
        &self,
        work: &GpuWork,
        plan: &LaunchPlan,
    ) -> Result<(), Unfinished> {
        let Some(communicator) = self.communicator else {
            for call in &work.calls {
                // SAFETY: the caller's promise.
                unsafe { self.alone(call)? };
            }
            return Ok(());
        };
        // SAFETY: the caller's promise.
        let reduces = unsafe { self.before(work, plan)? };
        let any = !reduces.is_empty() || work.calls.iter().any(moves_bytes);
        if any {
            let nccl = crate::load::nccl()?;
            // SAFETY: this thread ends the group below, whatever happens in between.
            unsafe { nccl.group_start()? };
            // SAFETY: the caller's promise; `before` has made the operands.
            let called = unsafe { self.call_all(communicator, work, plan, &reduces) };
            // SAFETY: begun above.
            let ended = unsafe { nccl.group_end() };
            called?;
            let _ = ended?;
            settle(communicator, self.shared, None)?;
        }
        // SAFETY: the caller's promise.
        unsafe { self.after(work, plan)? };
        Ok(())
    }

    fn kernels(&self) -> Result<&'static Kernels, GpuError> {
        self.device.kernels()
    }

    fn at(&self, offset: usize) -> u64 {
        self.scratch + offset as u64
    }

    /// Bring operands to where NCCL finds them.
    ///
    /// # Safety
    /// As [`Self::launch`].
    unsafe fn before(&self, work: &GpuWork, plan: &LaunchPlan) -> Result<Vec<Reduce>, GpuError> {
        let mut reduces = Vec::new();
        for pack in &plan.packs {
            let members = || {
                pack.members
                    .iter()
                    .map(|(i, at)| (&work.calls[*i], self.at(*at)))
            };
            let copies: Vec<_> = members()
                .filter_map(|(call, at)| match call {
                    Call::AllReduce(reduce) => match reduce.input {
                        AllReduceInput::At(src) => Some(DeviceCopy {
                            dst: at,
                            src,
                            bytes: reduce.bytes() as u64,
                        }),
                        AllReduceInput::Identity(_) => None,
                    },
                    _ => None,
                })
                .collect();
            let count = pack.bytes / pack.dtype.size();
            let begin = self.at(pack.begin);
            // SAFETY: the caller's promise, and scratch memory that is this work's alone in the stream's order.
            unsafe {
                self.kernels()?.copy_batch(self.stream, &copies)?;
                self.scale(
                    Elements::in_place(pack.dtype, count, begin),
                    pack.reduction.pre,
                )?;
                for (call, at) in members() {
                    if let Call::AllReduce(reduce) = call {
                        self.fill(reduce, at)?;
                    }
                }
            }
            let (dtype, op) = in_nccl(pack.dtype, pack.reduction.op);
            reduces.push(Reduce {
                send: begin,
                recv: begin,
                count,
                dtype,
                op,
            });
        }
        for (i, call) in work.calls.iter().enumerate() {
            let scratch = plan.scratch[i].map(|offset| self.at(offset));
            match call {
                Call::AllReduce(reduce) if reduce.count > 0 && !plan.is_packed[i] => {
                    // SAFETY: the caller's promise.
                    reduces.push(unsafe { self.operand(reduce, scratch)? });
                }
                Call::ReduceScatter(scatter) => {
                    // SAFETY: the caller's promise.
                    unsafe { self.scatter_operand(scatter, scratch)? };
                }
                _ => {}
            }
        }
        Ok(reduces)
    }

    /// # Safety
    /// As [`Self::launch`].
    unsafe fn operand(&self, reduce: &AllReduce, scratch: Option<u64>) -> Result<Reduce, GpuError> {
        let (dtype, op) = in_nccl(reduce.dtype, reduce.reduction.op);
        let made = |send, recv| Reduce {
            send,
            recv,
            count: reduce.count,
            dtype,
            op,
        };
        // SAFETY: the caller's promise.
        unsafe {
            match (reduce.input, scratch) {
                (AllReduceInput::At(input), Some(wide)) => {
                    let kernels = self.kernels()?;
                    let elements = Elements {
                        dtype: reduce.dtype,
                        count: reduce.count,
                        dst: wide,
                        src: input,
                    };
                    kernels.widen(self.stream, elements)?;
                    Ok(made(wide, wide))
                }
                (AllReduceInput::At(input), None) if reduce.reduction.pre != 1.0 => {
                    let elements = Elements {
                        dtype: reduce.dtype,
                        count: reduce.count,
                        dst: reduce.output,
                        src: input,
                    };
                    self.scale(elements, reduce.reduction.pre)?;
                    Ok(made(reduce.output, reduce.output))
                }
                (AllReduceInput::At(input), None) => Ok(made(input, reduce.output)),
                (AllReduceInput::Identity(_), Some(at)) => {
                    self.fill(reduce, at)?;
                    Ok(made(at, at))
                }
                (AllReduceInput::Identity(_), None) => Err(GpuError::Invalid(
                    "a member without a tensor has no memory to stand for it".into(),
                )),
            }
        }
    }

    /// # Safety
    /// As [`Self::launch`].
    unsafe fn scatter_operand(
        &self,
        scatter: &ReduceScatter,
        scratch: Option<u64>,
    ) -> Result<(), GpuError> {
        let (Some(scratch), count) = (scratch, scatter.counts.iter().sum()) else {
            return Ok(());
        };
        let elements = Elements {
            dtype: scatter.dtype,
            count,
            dst: scratch,
            src: scatter.input,
        };
        // SAFETY: the caller's promise.
        unsafe {
            if is_widened(scatter.dtype) {
                return self.kernels()?.widen(self.stream, elements);
            }
            self.scale(elements, scatter.reduction.pre)
        }
    }

    /// Write what stands for the tensor of a member that has none.
    ///
    /// # Safety
    /// As [`Self::launch`].
    unsafe fn fill(&self, reduce: &AllReduce, at: u64) -> Result<(), GpuError> {
        let AllReduceInput::Identity(value) = reduce.input else {
            return Ok(());
        };
        let wide;
        let pattern = match reduce.dtype {
            DType::I16 => {
                wide = i32::from(i16::from_le_bytes([value[0], value[1]])).to_le_bytes();
                &wide[..]
            }
            DType::U16 => {
                wide = i32::from(u16::from_le_bytes([value[0], value[1]])).to_le_bytes();
                &wide[..]
            }
            dtype => &value[..dtype.size()],
        };
        // SAFETY: the caller's promise.
        unsafe { self.kernels()?.fill(self.stream, at, reduce.count, pattern) }
    }

    /// # Safety
    /// As [`Self::launch`].
    unsafe fn scale(&self, elements: Elements, factor: f64) -> Result<(), GpuError> {
        let Elements {
            dtype,
            count,
            dst,
            src,
        } = elements;
        if dst == src && factor == 1.0 || count == 0 {
            return Ok(());
        }
        if factor == 1.0 {
            let bytes = count * dtype.size();
            // SAFETY: the caller's promise.
            return unsafe { self.device.copy_within(dst, src, bytes, self.stream) };
        }
        // SAFETY: the caller's promise.
        unsafe { self.kernels()?.scale(self.stream, elements, factor) }
    }

    /// # Safety
    /// As [`Self::launch`].
    unsafe fn call_all(
        &self,
        communicator: &Communicator,
        work: &GpuWork,
        plan: &LaunchPlan,
        reduces: &[Reduce],
    ) -> Result<(), GpuError> {
        for reduce in reduces {
            let Reduce {
                send,
                recv,
                count,
                dtype,
                op,
            } = *reduce;
            // SAFETY: the caller's promise.
            let _ = unsafe { communicator.all_reduce(send, recv, count, dtype, op, self.stream)? };
        }
        for (i, call) in work.calls.iter().enumerate() {
            let scratch = plan.scratch[i].map(|offset| self.at(offset));
            // SAFETY: the caller's promise.
            unsafe { self.call(communicator, call, scratch)? };
        }
        Ok(())
    }

    /// # Safety
    /// As [`Self::launch`].
    unsafe fn call(
        &self,
        communicator: &Communicator,
        call: &Call,
        scratch: Option<u64>,
    ) -> Result<(), GpuError> {
        let (bytes_of_one, stream) = (NcclType::U8, self.stream);
        match call {
            Call::AllReduce(_) | Call::ToHost { .. } | Call::ToDevice { .. } => {}
            Call::Broadcast {
                input,
                output,
                bytes,
                root,
            } if *bytes > 0 => {
                // SAFETY: the caller's promise.
                let _ = unsafe {
                    communicator.broadcast(*input, *output, *bytes, bytes_of_one, *root, stream)?
                };
            }
            Call::Broadcast { .. } => {}
            Call::AllGather {
                input,
                output,
                bytes,
            } => {
                let first = bytes.first().copied().unwrap_or(0);
                if bytes.iter().all(|bytes| *bytes == first) {
                    if first > 0 {
                        // SAFETY: the caller's promise.
                        let _ = unsafe {
                            communicator.all_gather(*input, *output, first, bytes_of_one, stream)?
                        };
                    }
                    return Ok(());
                }
                for (root, at, bytes) in parts(bytes) {
                    let output = output + at as u64;
                    // SAFETY: the caller's promise.
                    let _ = unsafe {
                        communicator.broadcast(*input, output, bytes, bytes_of_one, root, stream)?
                    };
                }
            }
            Call::AllToAll {
                input,
                output,
                send,
                receive,
            } => {
                for (peer, at, bytes) in parts(send) {
                    let from = input + at as u64;
                    // SAFETY: the caller's promise.
                    let _ = unsafe { communicator.send(from, bytes, bytes_of_one, peer, stream)? };
                }
                for (peer, at, bytes) in parts(receive) {
                    let to = output + at as u64;
                    // SAFETY: the caller's promise.
                    let _ = unsafe { communicator.recv(to, bytes, bytes_of_one, peer, stream)? };
                }
            }
            // SAFETY: the caller's promise.
            Call::ReduceScatter(scatter) => unsafe {
                self.reduce_scatter(communicator, scatter, scratch)?;
            },
        }
        Ok(())
    }

    /// # Safety
    /// As [`Self::launch`].
    unsafe fn reduce_scatter(
        &self,
        communicator: &Communicator,
        scatter: &ReduceScatter,
        scratch: Option<u64>,
    ) -> Result<(), GpuError> {
        let (dtype, op) = in_nccl(scatter.dtype, scatter.reduction.op);
        let size = if is_widened(scatter.dtype) {
            4
        } else {
            scatter.dtype.size()
        };
        let send = scratch.unwrap_or(scatter.input);
        let recv = self.scattered(scatter, scratch);
        let counts = &scatter.counts;
        let first = counts.first().copied().unwrap_or(0);
        if counts.iter().all(|count| *count == first) {
            if first > 0 {
                // SAFETY: the caller's promise.
                let _ = unsafe {
                    communicator.reduce_scatter(send, recv, first, dtype, op, self.stream)?
                };
            }
            return Ok(());
        }
        for (root, at, count) in parts(counts) {
            let send = send + (at * size) as u64;
            // SAFETY: the caller's promise; only the root writes what it receives.
            let _ =
                unsafe { communicator.reduce(send, recv, count, dtype, op, root, self.stream)? };
        }
        Ok(())
    }

    /// Where this member's part of a reduce-scatter is received.
    fn scattered(&self, scatter: &ReduceScatter, scratch: Option<u64>) -> u64 {
        match scratch {
            Some(wide) if is_widened(scatter.dtype) => {
                wide + 4 * scatter.counts.iter().sum::<usize>() as u64
            }
            _ => scatter.output,
        }
    }

    /// Bring results to where they belong.
    ///
    /// # Safety
    /// As [`Self::launch`].
    unsafe fn after(&self, work: &GpuWork, plan: &LaunchPlan) -> Result<(), GpuError> {
        for pack in &plan.packs {
            let members = || {
                pack.members
                    .iter()
                    .map(|(i, at)| (&work.calls[*i], self.at(*at)))
            };
            let count = pack.bytes / pack.dtype.size();
            let begin = self.at(pack.begin);
            let copies: Vec<_> = members()
                .filter_map(|(call, at)| match call {
                    Call::AllReduce(reduce) if matches!(reduce.input, AllReduceInput::At(_)) => {
                        Some(DeviceCopy {
                            dst: reduce.output,
                            src: at,
                            bytes: reduce.bytes() as u64,
                        })
                    }
                    _ => None,
                })
                .collect();
            // SAFETY: the caller's promise.
            unsafe {
                self.scale(
                    Elements::in_place(pack.dtype, count, begin),
                    pack.reduction.post,
                )?;
                self.kernels()?.copy_batch(self.stream, &copies)?;
            }
        }
        for (i, call) in work.calls.iter().enumerate() {
            let scratch = plan.scratch[i].map(|offset| self.at(offset));
            match call {
                Call::AllReduce(reduce) if !plan.is_packed[i] => {
                    if matches!(reduce.input, AllReduceInput::Identity(_)) {
                        continue;
                    }
                    // SAFETY: the caller's promise.
                    unsafe {
                        let result = Elements::in_place(reduce.dtype, reduce.count, reduce.output);
                        if let Some(wide) = scratch {
                            let elements = Elements {
                                src: wide,
                                ..result
                            };
                            self.kernels()?.narrow(self.stream, elements)?;
                        }
                        self.scale(result, reduce.reduction.post)?;
                    }
                }
                Call::ReduceScatter(scatter) => {
                    let count = scatter.counts.get(self.rank).copied().unwrap_or(0);
                    let result = Elements::in_place(scatter.dtype, count, scatter.output);
                    // SAFETY: the caller's promise.
                    unsafe {
                        if is_widened(scatter.dtype) && count > 0 {
                            let src = self.scattered(scatter, scratch);
                            let elements = Elements { src, ..result };
                            self.kernels()?.narrow(self.stream, elements)?;
                        }
                        self.scale(result, scatter.reduction.post)?;
                    }
                }
                _ => {}
            }
        }
        Ok(())
    }

    /// The operation of a group of one, or between device and host.
    ///
    /// # Safety
    /// As [`Self::launch`].
    unsafe fn alone(&self, call: &Call) -> Result<(), GpuError> {
        // SAFETY: the caller's promise.
        unsafe {
            match call {
                Call::AllReduce(reduce) => match reduce.input {
                    AllReduceInput::At(input) => self.reduce_alone(
                        Elements {
                            dtype: reduce.dtype,
                            count: reduce.count,
                            dst: reduce.output,
                            src: input,
                        },
                        (reduce.reduction.pre, reduce.reduction.post),
                    ),
                    AllReduceInput::Identity(_) => Ok(()),
                },
                Call::ReduceScatter(scatter) => self.reduce_alone(
                    Elements {
                        dtype: scatter.dtype,
                        count: scatter.counts.iter().sum(),
                        dst: scatter.output,
                        src: scatter.input,
                    },
                    (scatter.reduction.pre, scatter.reduction.post),
                ),
                Call::Broadcast {
                    input,
                    output,
                    bytes,
                    ..
                } => self.copy(*input, *output, *bytes),
                Call::AllGather {
                    input,
                    output,
                    bytes,
                } => self.copy(*input, *output, bytes.iter().sum()),
                Call::AllToAll {
                    input,
                    output,
                    receive,
                    ..
                } => self.copy(*input, *output, receive.iter().sum()),
                Call::ToHost { from, to, bytes } if *bytes > 0 => {
                    self.device.copy_to_host(to.0, *from, *bytes, self.stream)
                }
                Call::ToDevice { from, to, bytes } if *bytes > 0 => {
                    self.device.copy_to_device(*to, from.0, *bytes, self.stream)
                }
                Call::ToHost { .. } | Call::ToDevice { .. } => Ok(()),
            }
        }
    }

    /// # Safety
    /// As [`Self::launch`].
    unsafe fn reduce_alone(
        &self,
        elements: Elements,
        (pre, post): (f64, f64),
    ) -> Result<(), GpuError> {
        // SAFETY: the caller's promise.
        unsafe {
            self.scale(elements, pre)?;
            let src = elements.dst;
            self.scale(Elements { src, ..elements }, post)
        }
    }

    /// # Safety
    /// As [`Self::launch`].
    unsafe fn copy(&self, input: u64, output: u64, bytes: usize) -> Result<(), GpuError> {
        if input == output || bytes == 0 {
            return Ok(());
        }
        // SAFETY: the caller's promise.
        unsafe { self.device.copy_within(output, input, bytes, self.stream) }
    }
}

/// Whether NCCL is needed for it beside the reductions.
fn moves_bytes(call: &Call) -> bool {
    match call {
        Call::AllReduce(_) | Call::ToHost { .. } | Call::ToDevice { .. } => false,
        Call::Broadcast { bytes, .. } => *bytes > 0,
        Call::AllGather { bytes, .. } => bytes.iter().any(|bytes| *bytes > 0),
        // Another member may have something for this one where it has nothing to send.
        Call::AllToAll { send, receive, .. } => send.iter().chain(receive).any(|bytes| *bytes > 0),
        Call::ReduceScatter(scatter) => scatter.counts.iter().any(|count| *count > 0),
    }
}

/// The parts that have a length: of which member, where each begins, its length.
fn parts(lengths: &[usize]) -> impl Iterator<Item = (i32, usize, usize)> {
    let mut at = 0;
    let parts = lengths.iter().zip(0..).map(move |(length, member)| {
        let begin = at;
        at += length;
        (member, begin, *length)
    });
    parts.filter(|(_, _, length)| *length > 0)
}
