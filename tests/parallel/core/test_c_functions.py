"""The C functions of the core, called by a library that is compiled here, and by Python's own callbacks."""

import ctypes
import subprocess
import threading
from pathlib import Path

import numpy as np
import pytest

import horovod
import horovod.numpy as hvd
from horovod import _core

hvd.init()
SIZE, RANK = hvd.size(), hvd.rank()
HEADER = Path(horovod.__file__).parent / "include"
LIMIT_S = 120


@pytest.fixture(scope="module")
def adapter(tmp_path_factory):
    path = tmp_path_factory.mktemp("adapter") / "adapter.so"
    source = Path(__file__).with_name("adapter.c")
    words = ["cc", "-shared", "-fPIC", "-pthread", "-Wall", "-Wextra", "-Werror", "-D_GNU_SOURCE"]
    # A `%lu` of the host's width is wanted, no more.
    words += [f"-I{HEADER}", str(source), "-o", str(path), "-ldl"]
    subprocess.run(words, check=True, timeout=LIMIT_S)
    library = ctypes.CDLL(str(path))
    library.adapter_error.restype = ctypes.c_char_p
    library.adapter_sums.argtypes = [ctypes.c_int, ctypes.c_uint64, ctypes.c_int]
    assert library.adapter_open(_core.__file__.encode()) == 0, library.adapter_error()
    return library


def ends_well(adapter, end):
    assert end == 0, adapter.adapter_error().decode()


@pytest.mark.parametrize("may_wait", [0, 1])
@pytest.mark.parametrize(
    ("count", "elements"), [(1, 1), (100, 1), (100, 1000), (3, 300_000), (2, 0)]
)
def test_sums_that_are_all_in_flight(adapter, count, elements, may_wait):
    for _ in range(3):
        ends_well(adapter, adapter.adapter_sums(count, elements, may_wait))


def test_each_end_submits_the_next(adapter):
    ends_well(adapter, adapter.adapter_chain(200))


@pytest.mark.parametrize("allocates", [0, 1])
def test_outputs_whose_size_is_known_late(adapter, allocates):
    for _ in range(3):
        ends_well(adapter, adapter.adapter_gather(allocates))
        ends_well(adapter, adapter.adapter_exchange(allocates))


def test_structures_of_other_versions(adapter):
    ends_well(adapter, adapter.adapter_later())
    ends_well(adapter, adapter.adapter_earlier())


def test_barrier_and_join(adapter):
    ends_well(adapter, adapter.adapter_join())


def test_what_has_no_meaning_is_refused_and_never_called(adapter):
    ends_well(adapter, adapter.adapter_refused())


def test_a_mismatch_reaches_every_call(adapter):
    text = ctypes.create_string_buffer(512)
    ends_well(adapter, adapter.adapter_mismatch(text, ctypes.c_size_t(512)))
    if SIZE > 1:
        assert b"Mismatched ALLREDUCE" in text.value or b"shape" in text.value


def test_other_threads_wait_meanwhile(adapter):
    """A thread that waits for its own operation makes progress as well; both come to their end."""
    ended = []

    def sums():
        ended.append([adapter.adapter_sums(50, 100, 0) for _ in range(20)])

    thread = threading.Thread(target=sums)
    thread.start()
    for i in range(100):
        got = hvd.allreduce(np.full(10, RANK + i), op=hvd.Sum, name=f"python.{i}")
        assert got[0] == sum(rank + i for rank in range(SIZE))
    thread.join(LIMIT_S)
    assert ended == [[0] * 20]


def test_a_callback_may_take_the_interpreter_lock_and_panics_nowhere(adapter):
    done_type = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p)
    core = ctypes.CDLL(_core.__file__)

    class Tensor(ctypes.Structure):
        _fields_ = (
            ("struct_size", ctypes.c_uint32),
            ("dtype", ctypes.c_uint8),
            ("device", ctypes.c_uint8),
            ("input", ctypes.c_void_p),
            ("output", ctypes.c_void_p),
            ("dims", ctypes.POINTER(ctypes.c_uint64)),
            ("ndim", ctypes.c_size_t),
        )

    class Operation(ctypes.Structure):
        _fields_ = (
            ("struct_size", ctypes.c_uint32),
            ("kind", ctypes.c_uint8),
            ("reduce_op", ctypes.c_uint8),
            ("process_set", ctypes.c_uint32),
            ("root", ctypes.c_uint32),
            ("prefix", ctypes.c_char_p),
            ("name", ctypes.c_char_p),
            ("prescale", ctypes.c_double),
            ("postscale", ctypes.c_double),
            ("tensors", ctypes.POINTER(Tensor)),
            ("tensor_count", ctypes.c_size_t),
            ("splits", ctypes.c_void_p),
            ("split_count", ctypes.c_size_t),
            ("done", done_type),
            ("allocate", ctypes.c_void_p),
            ("context", ctypes.c_void_p),
        )

    values = np.full(8, float(RANK + 1))
    dims = ctypes.c_uint64(8)
    at = values.ctypes.data
    tensor = Tensor(ctypes.sizeof(Tensor), 8, 0, at, at, ctypes.pointer(dims), 1)
    called = threading.Event()
    seen = []

    @done_type
    def done(context, result):
        seen.append((context, core.horovod_result_status(ctypes.c_void_p(result))))
        called.set()

    name, prefix = b"ctypes", b"allreduce"
    operation = Operation(
        ctypes.sizeof(Operation), 0, 1, 0, 0, prefix, name, 1.0, 0.5,
        ctypes.pointer(tensor), 1, None, 0, done, None, 42,
    )  # fmt: skip
    error = ctypes.create_string_buffer(200)
    assert core.horovod_enqueue(ctypes.byref(operation), error, ctypes.c_size_t(200)) == 0, (
        error.value
    )
    assert called.wait(LIMIT_S)
    assert seen == [(42, 0)]
    assert values[0] == sum(range(1, SIZE + 1)) / 2


def test_queries():
    core = ctypes.CDLL(_core.__file__)
    assert core.horovod_abi_version() == 1
    assert (core.horovod_rank(), core.horovod_size()) == (RANK, SIZE)
    assert (core.horovod_local_rank(), core.horovod_local_size()) == (
        hvd.local_rank(),
        hvd.local_size(),
    )
    assert (core.horovod_process_set_rank(0), core.horovod_process_set_size(0)) == (RANK, SIZE)
    assert (core.horovod_process_set_rank(77), core.horovod_process_set_size(77)) == (-1, -1)


def test_after_the_job_nothing_is_accepted_and_nothing_crashes(adapter):
    hvd.shutdown()
    try:
        core = ctypes.CDLL(_core.__file__)
        assert core.horovod_size() == -1
        assert adapter.adapter_chain(1) != 0
        assert b"not been initialized" in adapter.adapter_error()
    finally:
        hvd.init()
    ends_well(adapter, adapter.adapter_sums(5, 5, 0))
