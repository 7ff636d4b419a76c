"""The core's XLA handlers for CUDA, in call frames as XLA makes them: results, order on the call's stream, errors."""

import ctypes
import itertools
import os
import threading

import pytest
import torch
import xla_frames
from devices import (
    IS_REAL,
    IS_ROCM,
    Stream,
    communicators,
    count,
    current_stream,
    number_of_gpus,
    on_gpu,
    stream,
    wait_for_communicators,
)
from xla_frames import Call, Memory, Place, XlaError

import horovod.torch as hvd
from horovod import _core

hvd.init()
SIZE, RANK = hvd.size(), hvd.rank()
DEVICE = hvd.local_rank() % number_of_gpus()
KINDS = ["allreduce", "broadcast", "allgather", "alltoall", "reducescatter"]
IN_PLACE = ["allreduce", "broadcast"]
several = pytest.mark.skipif(SIZE == 1, reason="needs two ranks")
pytestmark = pytest.mark.skipif(IS_ROCM, reason="compiled programs are refused on AMD's GPUs")
watched = pytest.mark.skipif(IS_REAL, reason="the double holds streams back and counts calls")
# Tensors that go through host memory are complete before they are sent.
launched = pytest.mark.skipif(
    os.environ.get("HOROVOD_GPU_OPERATIONS") == "HOST", reason="the host waits for its copies"
)
OPERATORS = {hvd.Sum: "sum", hvd.Average: "average", hvd.Min: "min", hvd.Max: "max"}


def values(rank, shape=(6, 2), dtype=torch.float32):
    numbers = torch.arange(int(torch.tensor(shape).prod()) if shape else 1) % 7 + rank + 1
    return numbers.reshape(shape).to(dtype)


def rows(shape, kind):
    """Rows of a result."""
    if kind in IN_PLACE or kind == "alltoall":
        return shape
    return (shape[0] * SIZE if kind == "allgather" else shape[0] // SIZE, *shape[1:])


def expected(kind, shape, dtype=torch.float32):
    """A rank's result for `values`: a sum for reductions, the last rank's value for a broadcast."""
    everyones = [values(rank, shape, dtype) for rank in range(SIZE)]
    if kind == "allgather":
        return torch.cat(everyones)
    if kind == "broadcast":
        return everyones[-1]
    if kind == "alltoall":
        return torch.cat([tensor.chunk(SIZE)[RANK] for tensor in everyones])
    total = sum(tensor.double() for tensor in everyones).to(dtype)
    return total if kind == "allreduce" else total.chunk(SIZE)[RANK]


def call(kind, operands, results, *, on=None, ordinal=DEVICE, run_id=0, place=None, **attributes):
    """A call of a handler on the current stream; `place` is the call's place in a program, if it has one already."""
    attributes = {"reduce_op": hvd.Sum, "root": SIZE - 1} | attributes
    address = (on or current_stream(ordinal)).cuda_stream
    (place or Call(**attributes)).run(
        f"horovod_xla_cuda_{kind}",
        [Memory.of(tensor) for tensor in operands],
        [Memory.of(tensor) for tensor in results],
        Place(ordinal, address, run_id),
    )


def empty(shape, dtype=torch.float32):
    return on_gpu(torch.full(shape, 77).to(dtype), DEVICE)


def reduced(tensor, **attributes):
    result = empty(tuple(tensor.shape), tensor.dtype)
    call("allreduce", [tensor], [result], **attributes)
    return result.cpu()


def still_works(name):
    got = reduced(on_gpu(torch.ones(2), DEVICE), name=f"{name}.after")
    assert got.tolist() == [SIZE, SIZE]


# -- results


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int32, torch.int16, torch.uint8]
)
@pytest.mark.parametrize("kind", KINDS)
def test_results(kind, dtype):
    shape = (2 * SIZE, 3)
    own = on_gpu(values(RANK, shape, dtype), DEVICE)
    result = empty(rows(shape, kind), dtype)
    call(kind, [own], [result], name=f"result.{kind}.{dtype}")
    assert torch.equal(result.cpu(), expected(kind, shape, dtype))
    assert torch.equal(own.cpu(), values(RANK, shape, dtype)), "an operand was changed"


@pytest.mark.parametrize("kind", IN_PLACE)
def test_in_place(kind):
    """As for donated arguments, and wherever XLA needs an operand no more."""
    tensor = on_gpu(values(RANK), DEVICE)
    call(kind, [tensor], [tensor], name=f"place.{kind}")
    assert torch.equal(tensor.cpu(), expected(kind, (6, 2)))


@pytest.mark.parametrize("op", OPERATORS, ids=OPERATORS.get)
def test_operators_and_factors(op):
    everyones = torch.stack([values(rank) for rank in range(SIZE)])
    want = {
        hvd.Sum: everyones.sum(0),
        hvd.Average: everyones.mean(0),
        hvd.Min: everyones.amin(0),
        hvd.Max: everyones.amax(0),
    }[op]
    own = on_gpu(values(RANK), DEVICE)
    assert torch.allclose(reduced(own, name=f"op.{op}", reduce_op=op), want)
    if op == hvd.Sum:
        got = reduced(own, name="factors", prescale=0.5, postscale=6.0)
        assert torch.allclose(got, want * 3)


def test_complex_numbers():
    own = torch.complex(values(RANK), -values(RANK))
    got = reduced(on_gpu(own, DEVICE), name="complex")
    total = expected("allreduce", (6, 2))
    assert torch.equal(got, torch.complex(total, -total))


@pytest.mark.parametrize("kind", ["allreduce", "broadcast", "allgather", "reducescatter"])
def test_groups(kind):
    shapes = [((SIZE, 3), torch.float32), ((2 * SIZE,), torch.int32), ((SIZE, 1), torch.float32)]
    own = [on_gpu(values(RANK, *pair), DEVICE) for pair in shapes]
    results = [empty(rows(shape, kind), dtype) for shape, dtype in shapes]
    call(kind, own, results, name=f"group.{kind}")
    for result, (shape, dtype) in zip(results, shapes, strict=True):
        assert torch.equal(result.cpu(), expected(kind, shape, dtype))


@pytest.mark.parametrize("shape", [(0,), (0, 3), (2 * SIZE, 0)], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_what_has_no_elements_has_no_address(kind, shape):
    own, result = torch.empty(shape), torch.empty(rows(shape, kind))
    call(kind, [own], [result], name=f"nothing.{kind}.{shape}")
    # In a group with others, too.
    if kind != "alltoall":
        other = on_gpu(values(RANK, (SIZE,)), DEVICE)
        got = empty(rows((SIZE,), kind))
        call(kind, [own, other], [result, got], name=f"nothing and more.{kind}.{shape}")
        assert torch.equal(got.cpu(), expected(kind, (SIZE,)))


def test_a_scalar():
    assert reduced(on_gpu(torch.tensor(RANK + 1.0), DEVICE), name="scalar") == sum(
        range(1, SIZE + 1)
    )


@several
def test_a_process_set():
    reduced(on_gpu(torch.ones(1), DEVICE), name="before")
    before = communicators()
    others = hvd.add_process_set(list(range(1, SIZE)))
    if RANK > 0:
        attributes = {"name": "of a set", "process_set": others.process_set_id}
        got = reduced(on_gpu(torch.tensor([float(RANK)]), DEVICE), **attributes)
        assert got == sum(range(1, SIZE))
    hvd.barrier()
    hvd.remove_process_set(others)
    wait_for_communicators(before)


# -- order


def write(on, tensor, content):
    """Put a kernel on a stream that writes a tensor; the host does not wait for it."""
    data = ctypes.create_string_buffer(content.numpy().tobytes())
    code = library.double_stream_write(on.cuda_stream, tensor.data_ptr(), data, content.nbytes)
    assert code == 0


def read(on, tensor):
    """Put a kernel on a stream that reads a tensor; where its values will be, which are -1 before."""
    host = torch.full(tuple(tensor.shape), -1.0)
    code = library.double_stream_read(
        on.cuda_stream, host.data_ptr(), tensor.data_ptr(), host.nbytes
    )
    assert code == 0
    return host


if not IS_REAL:
    from double_streams import library

    library.double_stream_gate.restype = ctypes.c_uint64
    library.double_stream_gate.argtypes = (ctypes.c_void_p,)
    library.double_gate_open.argtypes = (ctypes.c_uint64,)

HOST_WAITS = ["cuStreamSynchronize", "cuEventSynchronize"]


@watched
@launched
@pytest.mark.parametrize("kind", KINDS)
def test_a_call_is_ordered_on_its_stream_and_the_host_does_not_wait(kind):
    """All is handed over while streams are held back: what writes the operand, the operation, what reads the result.

    The double reports accesses that nothing orders, after each test.
    """
    side, shape = Stream(DEVICE), (2 * SIZE, 3)
    operand, result = empty(shape), empty(rows(shape, kind))
    # One-time initialisation may wait.
    call(kind, [operand], [result], on=side, name=f"first.{kind}")
    waits = [count(function) for function in HOST_WAITS]

    gate = library.double_stream_gate(side.cuda_stream)
    write(side, operand, values(RANK, shape))
    call(kind, [operand], [result], on=side, name=f"held back.{kind}")
    host = read(side, result)

    assert [count(function) for function in HOST_WAITS] == waits
    assert torch.equal(host, torch.full_like(host, -1)), "the stream was not held back"
    hvd.barrier()  # every rank has come through its call
    library.double_gate_open(gate)
    side.synchronize()
    assert torch.equal(host, expected(kind, shape))


@watched
@launched
def test_many_calls_follow_each_other_on_the_device_alone():
    side, tensor, steps = Stream(DEVICE), empty((4,)), 30
    place = Call(name="step", reduce_op=hvd.Average)
    call("allreduce", [tensor], [tensor], on=side, place=place)
    recorded = count("cuEventRecord")

    gate = library.double_stream_gate(side.cuda_stream)
    write(side, tensor, values(RANK, (4,)))
    for run in range(steps):
        call("allreduce", [tensor], [tensor], on=side, place=place, run_id=run)
    host = read(side, tensor)

    # Of the call's stream at the begin, and the operation's end.
    assert count("cuEventRecord") == recorded + 2 * steps
    hvd.barrier()
    library.double_gate_open(gate)
    side.synchronize()
    assert torch.allclose(host, expected("allreduce", (4,)) / SIZE)


def test_streams_of_two_programs():
    first, second = Stream(DEVICE), Stream(DEVICE)
    results = []
    for run, side in enumerate([first, second, first, second]):
        with stream(side):
            results.append(reduced(on_gpu(values(RANK), DEVICE), name=f"program.{run}"))
    assert all(torch.equal(result, expected("allreduce", (6, 2))) for result in results)


# -- what XLA asks of a handler, and what it is told


@pytest.mark.parametrize("kind", KINDS)
def test_handlers_are_not_recorded_into_graphs(kind):
    version, traits = xla_frames.metadata_of(f"horovod_xla_cuda_{kind}")
    assert version == xla_frames.VERSION
    assert traits == 0, "bit 0 lets XLA capture the call into a CUDA graph"


def test_only_the_execution_of_a_program_communicates():
    for stage in range(xla_frames.EXECUTE):
        Call(name="early").run(
            "horovod_xla_cuda_allreduce", [], [], Place("none", "none"), stage=stage
        )


def refused(*args, match, code, **options):
    with pytest.raises(XlaError, match=match) as error:
        call(*args, **options)
    assert error.value.code == code
    return str(error.value)


INVALID, FAILED_PRECONDITION = 3, 9


@watched
def test_a_stream_that_is_captured_is_refused_and_the_capture_goes_on():
    side, tensor = Stream(DEVICE), empty((2,))
    with side.captured():
        words = refused(
            "allreduce",
            [tensor],
            [tensor],
            on=side,
            name="captured",
            match="^RuntimeError: The current stream is being captured into a CUDA graph",
            code=FAILED_PRECONDITION,
        )
    assert "HorovodInternalError" not in words
    still_works("captured")


@pytest.mark.skipif(number_of_gpus() < 4, reason="needs four GPUs")
def test_a_second_gpu_of_the_process_is_refused():
    still_works("first GPU")
    tensor = on_gpu(torch.ones(2), 3)
    match = f"^ValueError: .*on GPU 3.*from GPU {DEVICE}"
    refused(
        "allreduce", [tensor], [tensor], ordinal=3, name="second GPU", match=match, code=INVALID
    )
    still_works("second GPU")


@pytest.mark.skipif(number_of_gpus() < 2, reason="needs two GPUs")
def test_the_stream_decides_which_gpu_it_is():
    """XLA's numbers are of its own devices, which may be fewer than CUDA's, or several on one GPU."""
    tensor, side = on_gpu(values(RANK), DEVICE), Stream(DEVICE)
    result = empty((6, 2))
    other = (DEVICE + 1) % number_of_gpus()
    call("allreduce", [tensor], [result], on=side, ordinal=other, name="numbers of XLA's")
    side.synchronize()
    assert torch.equal(result.cpu(), expected("allreduce", (6, 2)))


def test_without_a_place_the_words_of_xla_are_told():
    tensor = empty((2,))
    for place, words in (
        (Place(DEVICE, "no stream today"), "no stream today"),
        (Place("what GPU?", 0), "what GPU\\?"),
    ):
        with pytest.raises(XlaError, match=f"its GPU and its stream.*\\({words}\\)") as error:
            Call(name="no place").run(
                "horovod_xla_cuda_allreduce", [Memory.of(tensor)], [Memory.of(tensor)], place
            )
        assert error.value.code == INVALID
        assert not xla_frames.XLA.errors, "XLA's error was not destroyed"
    still_works("no place")


def test_an_older_xla_is_refused():
    table = xla_frames.XLA.older("XLA_FFI_DeviceOrdinal_Get", 1)
    memory = Memory.of(empty((2,)))
    with pytest.raises(XlaError, match=r"of version 0\.1, does not have it.*newer version of XLA"):
        Call(name="old").run(
            "horovod_xla_cuda_allreduce", [memory], [memory], Place(DEVICE, 0), table=table
        )
    still_works("old")


@pytest.mark.parametrize(
    ("attributes", "match"),
    [
        ({"name": "x", "colour": 1}, 'attribute "colour"'),
        ({}, "no attribute `name`"),
        (
            {"name": "x", "has_call_site": 1},
            "number of a call site in an XLA call is no 64-bit integer",
        ),
        ({"name": "x", "after": 2}, "0 operands and 1 results"),
        ({"name": "x", "reduce_op": 77}, "Reduction op type 77"),
        (
            {"name": "x", "reduce_op": hvd.Adasum},
            "Adasum in programs.*outside of the compiled program",
        ),
    ],
)
def test_attributes_that_are_not_understood(attributes, match):
    tensor = empty((2,))
    memory = Memory.of(tensor)
    with pytest.raises(XlaError, match=match) as error:
        place = Place(DEVICE, current_stream(DEVICE).cuda_stream)
        Call(**attributes).run("horovod_xla_cuda_allreduce", [memory], [memory], place)
    assert error.value.code == INVALID
    still_works("attributes")


def test_one_name_at_two_places_of_a_run():
    tensor = empty((2,))
    first, second = (Call(name="twice", is_unordered=1) for _ in range(2))
    call("allreduce", [tensor], [tensor], place=first, run_id=5)
    with pytest.raises(XlaError, match="several places of one compiled program"):
        call("allreduce", [tensor], [tensor], place=second, run_id=5)
    call("allreduce", [tensor], [tensor], place=second, run_id=6)


def test_calls_at_several_sites_are_paired_by_numbers_in_the_gpus_memory():
    """As functions of TensorFlow have them. The ranks begin the two calls in another order."""
    results = {}

    def at_site(site):
        side = Stream(DEVICE)
        with stream(side):
            number = on_gpu(torch.tensor(site), DEVICE)
            own, result = on_gpu(values(RANK) * site, DEVICE), empty((6, 2))
            operands = [Memory.of(own), Memory.of(number)]
            place = Place(DEVICE, side.cuda_stream)
            Call(name="in a function", reduce_op=hvd.Sum, has_call_site=1).run(
                "horovod_xla_cuda_allreduce", operands, [Memory.of(result)], place
            )
            results[site] = result.cpu()

    threads = [threading.Thread(target=at_site, args=(site,)) for site in (1, 1000)]
    for thread in threads if RANK % 2 else reversed(threads):
        thread.start()
    for thread in threads:
        thread.join()
    total = expected("allreduce", (6, 2))
    assert torch.equal(results[1], total)
    assert torch.equal(results[1000], total * 1000)


def test_arguments_that_only_bring_order():
    """As a program's second call has one, a result of the first; beside the number of a call site, too."""
    own, result = on_gpu(values(RANK), DEVICE), empty((6, 2))
    others = [on_gpu(torch.tensor(7), DEVICE), empty((3,)), empty((0,))]
    place = Place(DEVICE, current_stream(DEVICE).cuda_stream)
    operands = [Memory.of(tensor) for tensor in (own, *others)]
    Call(name="later", reduce_op=hvd.Sum, has_call_site=1, after=2).run(
        "horovod_xla_cuda_allreduce", operands, [Memory.of(result)], place
    )
    assert torch.equal(result.cpu(), expected("allreduce", (6, 2)))
    assert others[1].cpu().tolist() == [77, 77, 77]


@several
def test_shapes_that_differ():
    tensor = empty((RANK + 1,))
    match = "^HorovodInternalError: .*Mismatched"
    refused("allreduce", [tensor], [tensor], name="shapes", match=match, code=FAILED_PRECONDITION)
    still_works("shapes")


@several
@pytest.mark.parametrize("kind", ["allgather", "alltoall", "reducescatter"])
def test_unequal_rows_are_an_error_on_every_rank(kind):
    """Compiled programs have room for equal parts only. The job goes on."""
    if kind == "reducescatter":
        # One row more than the ranks can share evenly: all of them bring it.
        shape, room = (SIZE + 1, 2), (1, 2)
    else:
        # With three ranks the second brings just what the average is.
        shape = (SIZE * (RANK + 1), 2)
        room = rows(shape, kind)
    tensor, result = on_gpu(values(RANK, shape), DEVICE), empty(room)
    match = "^ValueError: .*the ranks bring unequal numbers of rows"
    refused(kind, [tensor], [result], name=f"uneven.{kind}", match=match, code=INVALID)
    still_works(f"uneven.{kind}")


def call_on_host(tensor, name):
    memory, place = Memory.of(tensor), Place("no GPU", "no stream")
    # Without futures a handler waits for the end.
    table = xla_frames.XLA.older("XLA_FFI_Future_Create", 0)
    Call(name=name, reduce_op=hvd.Sum).run(
        "horovod_xla_allreduce", [memory], [memory], place, table=table
    )


@several
def test_a_program_on_the_cpu_against_one_on_a_gpu():
    with pytest.raises(XlaError, match=r"Mismatched ALLREDUCE CPU/GPU.*rank 0 and rank 1"):
        if RANK == 0:
            call_on_host(torch.ones(2), "where")
        else:
            reduced(empty((2,)), name="where")
    still_works("where")


def test_programs_on_the_cpu_and_on_a_gpu_take_turns():
    for n, where in enumerate(itertools.islice(itertools.cycle(["cpu", "gpu"]), 6)):
        name, own = f"turn.{n}", values(RANK)
        if where == "gpu":
            got = reduced(on_gpu(own, DEVICE), name=name)
        else:
            call_on_host(own, name)
            got = own
        assert torch.equal(got, expected("allreduce", (6, 2)))


def test_the_core_knows_where_nccl_may_be_without_a_look():
    assert _core.prepare_gpus() is None
