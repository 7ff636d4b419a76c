//! Collectives and transfers.
#![expect(
    clippy::missing_safety_doc,
    reason = "the contracts are NCCL's: pointers are valid for what the call reads or writes"
)]

use std::ffi::{c_int, c_void};

use super::calls::nccl;
use super::communicator::CommunicatorPhase;
use super::group::{Group, Queued};
use super::part::{Function, Part};
use super::reduction::{FIRST_MADE, dtype_of};
use super::{IN_PROGRESS, INVALID_ARGUMENT, INVALID_USAGE};
use crate::call::{Call, CallOutcome};
use crate::handles::Handle;
use crate::thread;

/// Arguments of any collective.
struct Arguments {
    function: Function,
    send: *const c_void,
    receive: *const c_void,
    count: usize,
    dtype: c_int,
    operator: c_int,
    root: c_int,
    communicator: Handle,
    stream: Handle,
}

const NO_OPERATOR: c_int = -1;
const NO_ROOT: c_int = -1;

fn collective(since: i32, arguments: &Arguments) -> c_int {
    let Arguments {
        count,
        dtype,
        operator,
        root,
        ..
    } = arguments;
    let shown = format_args!(
        "{:?} {:?} {count} {dtype} {operator} {root} {:?} {:?}",
        arguments.send, arguments.receive, arguments.communicator, arguments.stream
    );
    let name = arguments.function.name();
    let code = nccl(name, since, shown, |call| enqueue(call, arguments));
    note_in_group(code)
}

/// An error of a call within a group is the group's too.
pub(crate) fn note_in_group(code: c_int) -> c_int {
    thread::with(|thread| {
        if thread.group.depth > 0 && !matches!(code, 0 | IN_PROGRESS) {
            thread.group.error.get_or_insert(code);
        }
    });
    code
}

fn enqueue(call: &mut Call, arguments: &Arguments) -> CallOutcome {
    let id = call.own_communicator(arguments.communicator)?;
    let name = call.name;
    let Some(communicator) = call.communicators.get(&id) else {
        return Err(INVALID_ARGUMENT);
    };
    let (device, size) = (communicator.device, communicator.size);
    if communicator.phase != CommunicatorPhase::Ready {
        call.violation("after finalize", &format!("{name} of communicator {id}"));
        return Err(INVALID_USAGE);
    }
    let dtype = dtype_of(arguments.dtype).ok_or(INVALID_ARGUMENT)?;
    let mut scalar = None;
    if arguments.function.reduces() {
        if arguments.operator >= FIRST_MADE {
            let made = communicator.operators.get(&arguments.operator);
            let (of, value) = made.ok_or(INVALID_ARGUMENT)?;
            if *of != arguments.dtype {
                return Err(INVALID_ARGUMENT);
            }
            scalar = Some(value.clone());
        } else if arguments.operator < 0 {
            return Err(INVALID_ARGUMENT);
        }
    }
    if arguments.function.has_root() && !(0..size).contains(&arguments.root) {
        return Err(INVALID_ARGUMENT);
    }
    let bytes = arguments.count.checked_mul(dtype.size());
    let bytes = bytes.and_then(|bytes| bytes.checked_mul(size as usize));
    bytes.ok_or(INVALID_ARGUMENT)?;
    let stream = call
        .stream_of(arguments.stream, device, name)
        .map_err(|_| INVALID_ARGUMENT)?;
    let current = call.current_device();
    if current.is_some_and(|current| current != device) {
        let text = format!("{name} of a communicator of device {device} with another's context");
        call.violation("device", &text);
    }
    let queued = Queued {
        communicator: id,
        part: Part {
            function: arguments.function,
            send: arguments.send as u64,
            receive: arguments.receive as u64,
            count: arguments.count as u64,
            dtype: arguments.dtype,
            operator: arguments.operator,
            root: arguments.root,
            sequence: 0,
            scalar,
            is_stuck: false,
            raises: None,
        },
        stream,
    };
    let alone = thread::with(|thread| {
        if thread.group.depth > 0 {
            thread.group.queued.push(queued);
            return None;
        }
        Some(queued)
    });
    match alone {
        // A call by itself is a group of one.
        Some(queued) => call.end_group(Group {
            queued: vec![queued],
            ..Group::default()
        }),
        None => Ok(()),
    }
}

/// `ncclAllReduce`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclAllReduce(
    send: *const c_void,
    receive: *mut c_void,
    count: usize,
    dtype: c_int,
    operator: c_int,
    communicator: Handle,
    stream: Handle,
) -> c_int {
    let function = Function::AllReduce;
    collective(
        0,
        &Arguments {
            function,
            send,
            receive,
            count,
            dtype,
            operator,
            root: NO_ROOT,
            communicator,
            stream,
        },
    )
}

/// `ncclReduce`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclReduce(
    send: *const c_void,
    receive: *mut c_void,
    count: usize,
    dtype: c_int,
    operator: c_int,
    root: c_int,
    communicator: Handle,
    stream: Handle,
) -> c_int {
    let function = Function::Reduce;
    collective(
        0,
        &Arguments {
            function,
            send,
            receive,
            count,
            dtype,
            operator,
            root,
            communicator,
            stream,
        },
    )
}

/// `ncclReduceScatter`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclReduceScatter(
    send: *const c_void,
    receive: *mut c_void,
    count: usize,
    dtype: c_int,
    operator: c_int,
    communicator: Handle,
    stream: Handle,
) -> c_int {
    let function = Function::ReduceScatter;
    collective(
        0,
        &Arguments {
            function,
            send,
            receive,
            count,
            dtype,
            operator,
            root: NO_ROOT,
            communicator,
            stream,
        },
    )
}

/// `ncclAllGather`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclAllGather(
    send: *const c_void,
    receive: *mut c_void,
    count: usize,
    dtype: c_int,
    communicator: Handle,
    stream: Handle,
) -> c_int {
    let (function, operator) = (Function::AllGather, NO_OPERATOR);
    collective(
        0,
        &Arguments {
            function,
            send,
            receive,
            count,
            dtype,
            operator,
            root: NO_ROOT,
            communicator,
            stream,
        },
    )
}

/// `ncclBroadcast`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclBroadcast(
    send: *const c_void,
    receive: *mut c_void,
    count: usize,
    dtype: c_int,
    root: c_int,
    communicator: Handle,
    stream: Handle,
) -> c_int {
    let (function, operator) = (Function::Broadcast, NO_OPERATOR);
    collective(
        0,
        &Arguments {
            function,
            send,
            receive,
            count,
            dtype,
            operator,
            root,
            communicator,
            stream,
        },
    )
}

/// `ncclAlltoAll`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclAlltoAll(
    send: *const c_void,
    receive: *mut c_void,
    count: usize,
    dtype: c_int,
    communicator: Handle,
    stream: Handle,
) -> c_int {
    let (function, operator) = (Function::AlltoAll, NO_OPERATOR);
    collective(
        22800,
        &Arguments {
            function,
            send,
            receive,
            count,
            dtype,
            operator,
            root: NO_ROOT,
            communicator,
            stream,
        },
    )
}

/// `ncclSend`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclSend(
    send: *const c_void,
    count: usize,
    dtype: c_int,
    peer: c_int,
    communicator: Handle,
    stream: Handle,
) -> c_int {
    let (function, operator, receive) = (Function::Send, NO_OPERATOR, std::ptr::null());
    collective(
        0,
        &Arguments {
            function,
            send,
            receive,
            count,
            dtype,
            operator,
            root: peer,
            communicator,
            stream,
        },
    )
}

/// `ncclRecv`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclRecv(
    receive: *mut c_void,
    count: usize,
    dtype: c_int,
    peer: c_int,
    communicator: Handle,
    stream: Handle,
) -> c_int {
    let (function, operator, send) = (Function::Recv, NO_OPERATOR, std::ptr::null());
    collective(
        0,
        &Arguments {
            function,
            send,
            receive,
            count,
            dtype,
            operator,
            root: peer,
            communicator,
            stream,
        },
    )
}
