"""Handles, names of unnamed operations, init and shutdown, topology, barrier and join."""

import ctypes
import importlib.util
import itertools
import os
import random
import signal
import threading
from collections import Counter

import pytest
import torch
from ops_support import still_works

import horovod.torch as hvd
from horovod.common.exceptions import HorovodNotInitializedError
from horovod.torch import mpi_ops


def test_handles_are_growing_integers():
    handles = [hvd.allreduce_async(torch.ones(1)) for _ in range(3)]
    assert all(type(handle) is int for handle in handles)
    assert handles[0] >= 1
    assert handles == sorted(set(handles))
    for handle in handles:
        hvd.synchronize(handle)


def test_a_handle_gives_its_result_once():
    handle = hvd.allreduce_async(torch.ones(2), op=hvd.Sum)
    assert hvd.synchronize(handle).eq(hvd.size()).all()
    assert hvd.synchronize(handle) is None
    with pytest.raises(ValueError, match="was not created or has been cleared"):
        hvd.poll(handle)


def test_poll_says_when_the_result_is_there():
    several = hvd.size() > 1
    if hvd.rank() == 0:
        handle = hvd.allreduce_async(torch.ones(2), name="polled")
        if several:
            assert hvd.poll(handle) is False
        hvd.barrier()
    else:
        hvd.barrier()
        handle = hvd.allreduce_async(torch.ones(2), name="polled")
    hvd.barrier()
    # All ranks have enqueued it, but that is all a barrier says: a later operation runs after it.
    hvd.allreduce(torch.ones(1))
    assert hvd.poll(handle) is True
    assert hvd.synchronize(handle).eq(1).all()


def test_unknown_handles():
    with pytest.raises(ValueError, match="Handle 987654321 was not created or has been cleared"):
        hvd.poll(987654321)
    assert hvd.synchronize(987654321) is None
    for nonsense in ("nonsense", torch.ones(2), None):
        with pytest.raises(TypeError):
            hvd.poll(nonsense)
    with pytest.raises(TypeError, match=r"handle .* has returned, not 'nonsense'"):
        hvd.synchronize("nonsense")
    with pytest.raises(TypeError, match=r"handle .* has returned, not a tensor"):
        hvd.synchronize(hvd.allreduce(torch.ones(2)))
    with pytest.raises(TypeError, match="handle"):
        hvd.synchronize(None)


def test_an_interrupted_wait_can_be_resumed():
    if hvd.size() == 1:
        pytest.skip("needs several ranks")
    if hvd.rank() == 0:
        handle = hvd.allreduce_async(torch.ones(2), name="interrupted", op=hvd.Sum)
        before = signal.signal(signal.SIGINT, signal.default_int_handler)
        begun = threading.Event()

        def interrupt():
            begun.wait()
            signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)

        thread = threading.Thread(target=interrupt)
        thread.start()
        try:
            with pytest.raises(KeyboardInterrupt):
                begun.set()
                hvd.synchronize(handle)  # the others have not begun: it cannot end by itself
        finally:
            thread.join()
            signal.signal(signal.SIGINT, before)
        hvd.barrier()
    else:
        hvd.barrier()
        handle = hvd.allreduce_async(torch.ones(2), name="interrupted", op=hvd.Sum)
    assert hvd.synchronize(handle).eq(hvd.size()).all()


def test_memory_of_dropped_tensors_stays_until_the_result_is_there():
    handles = []
    for i in range(50):
        handles.append(hvd.allreduce_async(torch.full((10_000,), float(i)), op=hvd.Sum))
    for i, handle in enumerate(handles):
        assert hvd.synchronize(handle).eq(i * hvd.size()).all()


def test_empty_names_are_no_names():
    first = hvd.allreduce_async(torch.ones(1), name="", op=hvd.Sum)
    second = hvd.allreduce_async(torch.ones(1), name="", op=hvd.Sum)
    third = hvd.allreduce_async(torch.ones(1), op=hvd.Sum)
    for handle in (first, second, third):
        assert hvd.synchronize(handle).item() == hvd.size()


def test_topology_is_consistent():
    rank, size = hvd.rank(), hvd.size()
    assert 0 <= rank < size
    assert 0 <= hvd.local_rank() < hvd.local_size() <= size
    assert 0 <= hvd.cross_rank() < hvd.cross_size() <= size
    assert rank == int(os.environ.get("HOROVOD_RANK", 0))
    assert size == int(os.environ.get("HOROVOD_SIZE", 1))
    everyone = hvd.allgather_object((rank, size, hvd.local_rank(), hvd.cross_rank()))
    assert [entry[0] for entry in everyone] == list(range(size))
    assert {entry[1] for entry in everyone} == {size}
    assert len({entry[2:] for entry in everyone}) == size
    assert isinstance(mpi_ops.is_homogeneous(), bool)
    assert hvd.global_process_set.ranks == list(range(size))
    assert hvd.global_process_set.process_set_id == 0


def test_init_again_changes_nothing():
    hvd.init()
    hvd.init()
    assert hvd.is_initialized()
    still_works()


def test_a_job_can_be_left_and_started_again():
    for _ in range(3):
        rank, size = hvd.rank(), hvd.size()
        hvd.allreduce(torch.ones(3), name="before")
        hvd.barrier()
        hvd.shutdown()
        assert not hvd.is_initialized()
        for call in (
            hvd.rank,
            hvd.barrier,
            hvd.join,
            lambda: hvd.allreduce(torch.ones(3)),
            lambda: hvd.allreduce_(torch.ones(3)),
            lambda: hvd.broadcast(torch.ones(3), 0),
            lambda: hvd.allgather(torch.ones(3)),
            lambda: hvd.broadcast_object("x", 0),
            lambda: hvd.allgather_object("x"),
            lambda: hvd.broadcast_parameters({"x": torch.ones(1)}, 0),
            lambda: hvd.start_timeline("never written"),
        ):
            with pytest.raises(
                HorovodNotInitializedError, match=r"has not been initialized; use hvd.init"
            ) as error:
                call()
            # Classes that scripts and libraries catch: the first around queries, the second around operations.
            assert isinstance(error.value, ValueError)
            assert isinstance(error.value, hvd.HorovodInternalError)
        hvd.shutdown()
        hvd.init()
        assert (hvd.rank(), hvd.size()) == (rank, size)
        still_works()


def test_shutdown_of_one_rank_fails_what_the_others_wait_for():
    if hvd.size() == 1:
        pytest.skip("needs several ranks")
    hvd.barrier()
    if hvd.rank() == 0:
        hvd.shutdown()
    else:
        with pytest.raises(
            hvd.HorovodInternalError, match=r"shut down: rank 0 called hvd.shutdown\(\)"
        ):
            hvd.allreduce(torch.ones(3), name="never comes")
        assert hvd.is_initialized()
        with pytest.raises(hvd.HorovodInternalError):
            hvd.allreduce(torch.ones(3))
        hvd.shutdown()
    hvd.init()
    still_works()


def test_handles_of_an_earlier_job_are_forgotten():
    consumed, one, two = (hvd.allreduce_async(torch.ones(2)) for _ in range(3))
    hvd.synchronize(consumed)
    hvd.barrier()
    hvd.shutdown()
    for ask in (hvd.poll, hvd.synchronize):
        with pytest.raises(HorovodNotInitializedError, match=r"shutdown\(\) was called before"):
            ask(one)
    hvd.init()
    with pytest.raises(HorovodNotInitializedError, match=r"shutdown\(\) was called before"):
        hvd.synchronize(two)
    assert hvd.synchronize(consumed) is None
    handle = two
    with pytest.raises(ValueError, match="was not created or has been cleared"):
        hvd.poll(handle)


def test_init_refuses_what_is_no_list_of_ranks():
    hvd.barrier()
    hvd.shutdown()
    for wrong, message in (
        (3.5, "has not been built with MPI support"),
        ("0,1", "has not been built with MPI support"),
        ([0.0, 1.0], "Invalid type of argument comm"),
    ):
        with pytest.raises(ValueError, match=message):
            hvd.init(comm=wrong)
        assert not hvd.is_initialized()
    with pytest.raises(ValueError, match='list of ProcessSet or "dynamic"'):
        hvd.init(process_sets="static")
    with pytest.raises(ValueError, match='list of ProcessSet or "dynamic"'):
        hvd.init(process_sets=[[0]])
    hvd.init(list(range(int(os.environ.get("HOROVOD_SIZE", 1)))))
    assert hvd.rank() == int(os.environ.get("HOROVOD_RANK", 0))
    still_works()


def test_a_job_of_some_of_the_ranks_is_refused():
    if hvd.size() == 1:
        pytest.skip("needs several ranks")
    hvd.barrier()
    hvd.shutdown()
    for ranks in ([0], [1, 0], [0, 1, 77]):
        with pytest.raises(ValueError, match="use process sets for subsets"):
            hvd.init(comm=ranks)
        assert not hvd.is_initialized()
    hvd.init()
    still_works()


def nccl_code():
    major, minor, patch = torch.cuda.nccl.version()
    return major * 10000 + minor * 100 + patch


def has_library(name):
    try:
        ctypes.CDLL(name)
    except OSError:
        return False
    return True


def test_what_is_built_in():
    assert hvd.gloo_built()
    assert hvd.gloo_enabled() is True
    # Both are found at run time: NCCL is in the wheels that PyTorch for CUDA requires, the driver only where a GPU is.
    if torch.version.cuda is not None:
        assert hvd.nccl_built() == nccl_code()
    assert hvd.cuda_built() is has_library("libcuda.so.1")
    # With PyTorch for ROCm: test_gpu_rocm.py.
    assert hvd.rocm_built() is False
    assert hvd.mpi_built() is (importlib.util.find_spec("mpi4py") is not None)
    for query in (hvd.mpi_enabled, hvd.ddl_built, hvd.ccl_built):
        assert query() is False
    # Under launchers that start MPI: tests/integration/test_mpi.py, test_mpi_launchers.py.
    assert hvd.mpi_threads_supported() is False
    hvd.barrier()
    hvd.shutdown()
    assert hvd.gloo_enabled() is True  # scripts choose their path by it before `init`
    hvd.init()


def test_a_barrier_waits_for_everybody():
    flag = torch.zeros(1)
    handle = None
    if hvd.rank() == 0:
        handle = hvd.broadcast_async(torch.ones(1), 0, name="before the barrier")
    hvd.barrier()
    if hvd.rank() != 0:
        flag = hvd.broadcast(flag, 0, name="before the barrier")
    else:
        flag = hvd.synchronize(handle)
    assert flag.item() == 1
    for _ in range(50):
        hvd.barrier()


# -- join


def test_join_names_the_rank_that_came_last():
    last = hvd.size() - 1
    if hvd.rank() == last:
        # The others have joined when a reduction of one rank alone goes through.
        while hvd.allreduce(torch.ones(1), name="alone", op=hvd.Sum).item() != 1:
            pass
    assert hvd.join() == last
    still_works()


def test_who_joins_because_others_have_is_the_last():
    """A chain in a new order each round: each but the first joins when it has seen that the one before has."""
    hvd.barrier()
    hvd.shutdown()
    size = int(os.environ.get("HOROVOD_SIZE", "1"))
    pairs = {pair: hvd.ProcessSet(pair) for pair in itertools.combinations(range(size), 2)}
    if size == 2:
        pairs[0, 1] = hvd.global_process_set
        hvd.init()
    else:
        hvd.init(process_sets=list(pairs.values()))
    rounds = int(os.environ.get("HVD_TEST_JOIN_ROUNDS", "60"))
    dice = random.Random(1)
    for number in range(rounds):
        chain = dice.sample(range(hvd.size()), hvd.size())
        at = chain.index(hvd.rank())
        if at > 0:
            before = pairs[tuple(sorted((hvd.rank(), chain[at - 1])))]
            with pytest.raises(hvd.HorovodInternalError, match="not supported with Join"):
                hvd.allgather(torch.ones(1), name=f"before.{number}", process_set=before)
        assert hvd.join() == chain[-1], f"round {number}: {chain}"
    hvd.barrier()
    hvd.shutdown()
    hvd.init()
    still_works()


@pytest.mark.parametrize("op", ["Sum", "Average", "Min", "Max", "Product"])
def test_ranks_that_joined_contribute_what_changes_nothing(op):
    # Rank r has r + 1 batches; in the last one only the last rank is left, with the value 6.
    for batch in range(hvd.rank() + 1):
        active = hvd.size() - batch
        value = torch.tensor([6.0, -6.0])
        got = hvd.allreduce(value, name=f"{op}.{batch}", op=getattr(hvd, op))
        expected = {
            "Sum": value * active,
            "Average": value * active / hvd.size(),  # each sample keeps its weight
            "Product": value**active,
        }.get(op, value)
        torch.testing.assert_close(got, expected)
    assert hvd.join() == hvd.size() - 1
    still_works()


@pytest.mark.parametrize(
    "dtype", [torch.uint8, torch.int64, torch.bool, torch.bfloat16, torch.float64]
)
def test_the_identity_fits_the_dtype(dtype):
    value = torch.tensor([1], dtype=dtype)
    if hvd.rank() == 0:
        for name in ("Sum", "Min", "Max", "Product"):
            got = hvd.allreduce(value, name=f"identity.{name}", op=getattr(hvd, name))
            assert got.item() == 1
    hvd.join()
    still_works()


def test_groups_go_on_while_ranks_have_joined():
    if hvd.rank() == 0:
        results = hvd.grouped_allreduce(
            [torch.ones(2), torch.full((3,), 2.0)], name="rank 0 only", op=hvd.Sum
        )
        assert results[0].eq(1).all()
        assert results[1].eq(2).all()
    assert hvd.join() in range(hvd.size())


def test_what_needs_data_of_all_ranks_fails_while_some_have_joined():
    if hvd.size() == 1:
        pytest.skip("needs several ranks")
    if hvd.rank() == 0:
        for what, call in (
            ("Allgather", lambda: hvd.allgather(torch.ones(2), name="joined")),
            ("Broadcast", lambda: hvd.broadcast(torch.ones(2), 0, name="joined")),
            ("Alltoall", lambda: hvd.alltoall(torch.ones(hvd.size()), name="joined")),
            ("Reducescatter", lambda: hvd.reducescatter(torch.ones(2), name="joined")),
        ):
            with pytest.raises(
                hvd.HorovodInternalError, match=f"{what} is not supported with Join"
            ):
                call()
    hvd.join()
    still_works()


def test_join_accepts_a_device():
    assert hvd.join(-1) in range(hvd.size())
    assert hvd.join(device=0) in range(hvd.size())


def test_a_profile_names_operations():
    """Operations that an operation calls are not named again."""
    parameter = torch.nn.Parameter(torch.ones(3))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([parameter], lr=0.1))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        hvd.allreduce_(torch.ones(3))
        hvd.allreduce(torch.ones(3))
        hvd.allgather(torch.ones(3))
        hvd.synchronize(hvd.broadcast_async_(torch.ones(3), 0))
        parameter.sum().backward()
        optimizer.step()
    names = Counter(e.name for e in profile.events() if e.name.startswith("horovod."))
    gradients = {} if hvd.size() == 1 else {"horovod.allreduce_together_": 1}
    assert names == {
        "horovod.allreduce_": 1,
        "horovod.allreduce": 1,
        "horovod.allgather": 1,
        "horovod.broadcast_async_": 1,
        "horovod.synchronize": 1 + len(gradients),
        **gradients,
    }
    hvd.allreduce_(torch.ones(3))
