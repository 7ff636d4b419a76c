"""GPUs, drivers, NCCL and memory that cannot be used, and forks: clear errors on every rank, and no hang."""

from __future__ import annotations

import pytest

import gpu_double
import harness
from gpu_double import environment, program

# `told` has each rank say what becomes of a call, in a job of its own for each of the given settings.
AGAIN = """
def told(call, *settings):
    for operations in settings:
        os.environ.pop("HOROVOD_GPU_OPERATIONS", None)
        if operations:
            os.environ["HOROVOD_GPU_OPERATIONS"] = operations
        hvd.init()
        with OnGpu():
            tell(call)
        hvd.shutdown()
"""


def run(
    jobs, script, body: str, env: dict[str, str], before: str = ""
) -> tuple[tuple[list[str], list[str]], str]:
    """The output of ranks 0 and 1, one text a call, and the standard error of the job, which has to end well."""
    path = script(program(AGAIN + body, before))
    job = jobs(harness.python(2, path, env=env, forked=True)).succeed()
    first, second = (gpu_double.printed(job, rank) for rank in range(2))
    assert len(first) == len(second), job.report()
    return (first, second), job.stderr


# -- the driver

ALL = ["NCCL", "HOST", None]
ONES = f"""
mine = on_gpu(torch.ones(4), rank)
told(lambda: hvd.allreduce(mine, op=hvd.Sum, name="first"), *{ALL})
"""
NO_DRIVERS = {
    "too old": ("driver_version=11080", "libcuda.so.1 is version CUDA 11.8", "newer NVIDIA driver"),
    "no device": ("no_device", "CUDA_ERROR_NO_DEVICE", "CUDA_VISIBLE_DEVICES"),
    "stub": ("stub", "stub of a toolkit", "LD_LIBRARY_PATH"),
    "mismatch": ("init=803", "cuInit failed", "of different versions"),
}
# Others of the same table are in the first tier.
OTHER_DRIVERS = pytest.mark.thorough(
    also="tests/integration/test_gpu_bad_input.py::test_a_driver_that_cannot_be_used"
)
OTHER_LIBRARIES = pytest.mark.thorough(
    also="tests/integration/test_gpu_bad_input.py::test_nccl_that_cannot_be_used"
)


@pytest.mark.parametrize(
    "case",
    [
        "too old",
        "no device",
        pytest.param("stub", marks=OTHER_DRIVERS),
        pytest.param("mismatch", marks=OTHER_DRIVERS),
    ],
)
def test_a_driver_that_cannot_be_used(case, jobs, script) -> None:
    settings, *texts = NO_DRIVERS[case]
    printed, _ = run(jobs, script, ONES, environment(f"devices=2,{settings}"))
    for of in printed:
        assert len(of) == len(ALL)
        for line in of:
            assert line.startswith("HorovodInternalError: "), line
            assert all(text in line for text in texts), line


def test_a_driver_that_is_not_found(jobs, script) -> None:
    hide = 'os.environ["HOROVOD_CUDA_LIBRARY"] = "/nowhere/libcuda.so.1"\n'
    printed, _ = run(jobs, script, hide + ONES, environment())
    everything = [*printed[0], *printed[1]]
    assert len(everything) == 2 * len(ALL)
    for line in everything:
        assert "libcuda.so.1 could not be loaded; tried /nowhere/libcuda.so.1: " in line, line
        assert "Install NVIDIA's driver" in line, line


def test_a_driver_that_one_rank_does_not_find(jobs, script) -> None:
    """Its error ends that rank, if nobody catches it, and names it to the others."""
    hide = 'if rank == 1: os.environ["HOROVOD_CUDA_LIBRARY"] = "/nowhere/libcuda.so.1"\n'
    body = """
hvd.init()
with OnGpu():
    mine = on_gpu(torch.ones(4), rank)
    if rank == 0:
        tell(lambda: hvd.allreduce(mine, name="first"))
        os._exit(0)
    hvd.allreduce(mine, name="first")
"""
    job = jobs(harness.python(2, script(program(hide + body)), env=environment()))
    assert job.fail() == 1
    assert "HorovodInternalError: libcuda.so.1 could not be loaded" in job.stderr, job.report()
    [printed] = gpu_double.printed(job, 0)
    assert printed.startswith("HorovodInternalError: "), job.report()
    assert "rank 1" in printed, job.report()


# -- NCCL

ANY_LIBRARY = "libgcc_s.so.1"
BOTH_ON_ONE = "devices=1,seed=3"

# Of each: what happens before, settings of the double, and what the reason says.
OBSTACLES = {
    "missing": (
        'if rank == 1: os.environ["HOROVOD_NCCL_LIBRARY"] = "/nowhere/libnccl.so.2"',
        "",
        ["rank 1 (host ", "libnccl.so.2 could not be loaded; tried /nowhere/libnccl.so.2"],
    ),
    "lacks symbols": (
        f'os.environ["HOROVOD_NCCL_LIBRARY"] = "{ANY_LIBRARY}"',
        "",
        ["rank 0 (host ", "ncclGetVersion", ANY_LIBRARY],
    ),
    "lacks symbols on one rank": (
        f'if rank == 1: os.environ["HOROVOD_NCCL_LIBRARY"] = "{ANY_LIBRARY}"',
        "",
        ["rank 1 (host ", "ncclGetVersion", ANY_LIBRARY],
    ),
    "too old": ("", "devices=2,nccl_version=21700", ["is version 2.17.0", "at least 2.18"]),
    "versions differ": (
        'if rank == 1: os.environ["GPU_DOUBLE"] = "devices=2,nccl_version=22703"',
        "devices=2,nccl_version=23007",
        ["rank 0 (host ", "has NCCL 2.30.7", "rank 1 (host ", "has NCCL 2.27.3", "same version"],
    ),
    "one GPU": (
        "",
        BOTH_ON_ONE,
        ["rank 0 and rank 1 are on the same GPU", "set_device", "NCCL_MULTI_RANK_GPU_ENABLE=1"],
    ),
}

TWICE = """
mine = on_gpu(torch.ones(4), 0 if os.environ["GPU_DOUBLE"].startswith("devices=1,") else rank)
def both():
    hvd.allreduce(mine, op=hvd.Sum, name="first")
    total = hvd.allreduce(mine, op=hvd.Sum, name="second")
    return total.cpu().tolist(), count("ncclAllReduce"), violations()
told(both, *{operations})
"""


def early(text: str) -> str:
    """Before anything is loaded that reads it, for settings of the double; after that for those of the product."""
    return text if "GPU_DOUBLE" in text else ""


def late(text: str) -> str:
    return "" if "GPU_DOUBLE" in text else text + "\n"


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, marks=OTHER_LIBRARIES) if case == "lacks symbols on one rank" else case
        for case in OBSTACLES
    ],
)
def test_nccl_that_cannot_be_used(case, jobs, script) -> None:
    """Where it was demanded that is an error, else one warning."""
    before, double, texts = OBSTACLES[case]
    body = late(before) + TWICE.format(operations=["NCCL", None])
    printed, stderr = run(jobs, script, body, environment(double), early(before))
    for demanded, staged in printed:
        assert "HOROVOD_GPU_OPERATIONS=NCCL, but NCCL cannot be used" in demanded, demanded
        assert all(text in demanded for text in texts), demanded
        assert staged == str(([2.0] * 4, 0, []))
    [warning] = [line for line in stderr.splitlines() if "go through host memory" in line]
    assert all(text in warning for text in texts), warning


def test_mpi_is_host_memory_and_says_so_once(jobs, script) -> None:
    body = TWICE.format(operations=["MPI"])
    printed, stderr = run(jobs, script, body, environment("devices=2,seed=3"))
    assert printed == ([str(([2.0] * 4, 0, []))],) * 2
    [line] = [line for line in stderr.splitlines() if "go through host memory" in line]
    assert "HOROVOD_GPU_OPERATIONS=MPI: there is no MPI here" in line


def test_two_ranks_on_one_gpu_that_ask_for_it(jobs, script) -> None:
    env = environment(BOTH_ON_ONE, NCCL_MULTI_RANK_GPU_ENABLE="1")
    printed, stderr = run(jobs, script, TWICE.format(operations=["NCCL"]), env)
    assert printed == ([str(([2.0] * 4, 2, []))],) * 2
    assert "host memory" not in stderr


# -- memory

# Memory for small tensors that are packed together, pinned memory, and memory of results whose size is known late: for
# the last one PyTorch's own error is raised.
OUT_OF_MEMORY = """
from double_streams import library

@contextmanager
def failing(call):
    if rank == 1:
        assert library.double_configure(f"devices=2,fail={call}:1+:2".encode()) == 0
    yield
    assert library.double_configure(b"devices=2") == 0

@contextmanager
def without_memory_of_pytorch():
    real = torch.Tensor.new_empty
    def new_empty(*_):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.")
    if rank == 1:
        torch.Tensor.new_empty = new_empty
    try:
        yield
    finally:
        torch.Tensor.new_empty = real

small = [on_gpu(torch.ones(4), rank), on_gpu(torch.ones(3), rank)]
def group():
    hvd.grouped_allreduce(small, op=hvd.Sum, name="group")
with failing("cuMemAllocAsync"):
    told(group, "NCCL")
with failing("cuMemHostAlloc"):
    told(group, "HOST")

mine = on_gpu(torch.ones(4, 2), rank)
for gather in (hvd.allgather, hvd.alltoall):
    def result():
        gather(mine)
        with without_memory_of_pytorch():
            # Rank 0 has launched it, so it hears of the end by its next call.
            gather(mine, name="result")
            hvd.barrier()
    told(result, "NCCL", "HOST")
"""
ON_GPU = (
    *("cuMemAllocAsync failed with CUDA_ERROR_OUT_OF_MEMORY", "65536 bytes are needed on GPU 1"),
    *("of whose 17179869184 bytes ", "HOROVOD_FUSION_THRESHOLD", "PYTORCH_CUDA_ALLOC_CONF"),
)
PINNED = (
    *("cuMemHostAlloc failed with CUDA_ERROR_OUT_OF_MEMORY", "4096 bytes of pinned host memory"),
    *("ulimit -l", "HOROVOD_FUSION_THRESHOLD"),
)
RESULT = ("a result of 64 bytes: ", "CUDA out of memory. Tried to allocate 20.00 GiB.")
RECEIVED = ("a result of 32 bytes: ", RESULT[1])


def test_memory_that_one_rank_does_not_have(jobs, script) -> None:
    """All ranks are told which, how much was wanted, and what to do."""
    body = "from contextlib import contextmanager\n" + OUT_OF_MEMORY
    printed, _ = run(jobs, script, body, environment("devices=2"))
    expected = [ON_GPU, PINNED, RESULT, RESULT, RECEIVED, RECEIVED]
    for of in printed:
        for line, texts in zip(of, expected, strict=True):
            assert line.startswith("HorovodInternalError: "), line
            assert "rank 1 on localhost" in line, line
            assert all(text in line for text in texts), line


# -- forks

FORK = """
hvd.init()
with OnGpu():
    mine = on_gpu(torch.ones(4), rank)
    hvd.allreduce_(mine, op=hvd.Sum, name="first")
    for call in (hvd.allreduce_, hvd.allgather):
        child = os.fork()
        if child == 0:
            tell(lambda: call(mine, name="of the child"))
            os._exit(0)
        _, status = os.waitpid(child, 0)
        assert status == 0
    total = hvd.allreduce(mine, op=hvd.Sum, name="of the parent")
    assert total.cpu().tolist() == [4.0] * 4, total
    assert violations() == []
"""


def test_a_forked_child_that_uses_the_gpu(jobs, script) -> None:
    printed, _ = run(jobs, script, FORK, environment("devices=2"))
    for of in printed:
        assert len(of) == 2
        for line in of:
            assert "fork" in line, line
            assert "spawn" in line, line
