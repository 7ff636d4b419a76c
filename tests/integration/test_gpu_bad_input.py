"""GPUs, drivers, NCCL and memory that cannot be used, and forks: clear errors on every rank, and no hang."""

from __future__ import annotations

import pytest

import gpu_double
import harness
from gpu_double import environment, program

ONES = """
hvd.init()
with OnGpu():
    mine = on_gpu(torch.ones(4), hvd.rank())
    tell(lambda: hvd.allreduce(mine, op=hvd.Sum, name="first"))
"""


def run(jobs, script, body: str, env: dict[str, str], before: str = "") -> tuple[list[str], str]:
    """What ranks 0 and 1 say, and the standard error of the job, which has to end well."""
    path = script(program(body, before))
    job = jobs(harness.python(2, path, env=env, limit_s=120.0)).succeed()
    said = [gpu_double.said(job, rank) for rank in range(2)]
    assert all(len(of) == 1 for of in said), job.report()
    return [of[0] for of in said], job.stderr


# -- the driver

NO_DRIVERS = {
    "too old": ("driver_version=11080", "libcuda.so.1 is version CUDA 11.8", "newer NVIDIA driver"),
    "no device": ("no_device", "CUDA_ERROR_NO_DEVICE", "CUDA_VISIBLE_DEVICES"),
    "stub": ("stub", "stub of a toolkit", "LD_LIBRARY_PATH"),
    "mismatch": ("init=803", "cuInit failed", "of different versions"),
}


@pytest.mark.parametrize("operations", ["NCCL", "HOST", None], ids=str)
@pytest.mark.parametrize("case", NO_DRIVERS)
def test_a_driver_that_cannot_be_used(case, operations, jobs, script) -> None:
    settings, *texts = NO_DRIVERS[case]
    said, _ = run(jobs, script, ONES, environment(f"devices=2,{settings}", operations))
    for of in said:
        assert of.startswith("HorovodInternalError: "), of
        assert all(text in of for text in texts), of


def test_a_driver_that_is_not_found(jobs, script) -> None:
    hide = 'os.environ["HOROVOD_CUDA_LIBRARY"] = "/nowhere/libcuda.so.1"\n'
    said, _ = run(jobs, script, hide + ONES, environment())
    for of in said:
        assert "libcuda.so.1 could not be loaded; tried /nowhere/libcuda.so.1: " in of, of
        assert "Install NVIDIA's driver" in of, of


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
    [said] = gpu_double.said(job, 0)
    assert said.startswith("HorovodInternalError: "), job.report()
    assert "rank 1" in said, job.report()


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
hvd.init()
with OnGpu():
    mine = on_gpu(torch.ones(4), 0 if os.environ["GPU_DOUBLE"].startswith("devices=1,") else rank)
    def both():
        hvd.allreduce(mine, op=hvd.Sum, name="first")
        total = hvd.allreduce(mine, op=hvd.Sum, name="second")
        return total.cpu().tolist(), count("ncclAllReduce"), violations()
    tell(both)
"""


def early(text: str) -> str:
    """Before anything is loaded that reads it, for settings of the double; after that for those of the product."""
    return text if "GPU_DOUBLE" in text else ""


def late(text: str) -> str:
    return "" if "GPU_DOUBLE" in text else text + "\n"


@pytest.mark.parametrize("case", OBSTACLES)
def test_nccl_that_was_demanded_and_cannot_be_used(case, jobs, script) -> None:
    before, double, texts = OBSTACLES[case]
    said, _ = run(jobs, script, late(before) + TWICE, environment(double), early(before))
    for of in said:
        assert "HOROVOD_GPU_OPERATIONS=NCCL, but NCCL cannot be used" in of, of
        assert all(text in of for text in texts), of


@pytest.mark.parametrize("case", OBSTACLES)
def test_nccl_that_cannot_be_used_is_warned_of_once(case, jobs, script) -> None:
    before, double, texts = OBSTACLES[case]
    env = environment(double, None)
    said, stderr = run(jobs, script, late(before) + TWICE, env, early(before))
    assert said == [str(([2.0] * 4, 0, []))] * 2
    [warning] = [line for line in stderr.splitlines() if "go through host memory" in line]
    assert all(text in warning for text in texts), warning


def test_two_ranks_on_one_gpu_that_ask_for_it(jobs, script) -> None:
    env = environment(BOTH_ON_ONE, NCCL_MULTI_RANK_GPU_ENABLE="1")
    said, stderr = run(jobs, script, TWICE, env)
    assert said == [str(([2.0] * 4, 2, []))] * 2
    assert "host memory" not in stderr


# -- memory

OUT_OF_MEMORY = {
    # What small tensors are brought together in.
    "device": ("fail=cuMemAllocAsync:1+:2", "NCCL", "cuMemAllocAsync"),
    "pinned": ("fail=cuMemHostAlloc:1+:2", "HOST", "cuMemHostAlloc"),
}

SMALL = """
hvd.init()
with OnGpu():
    mine = [on_gpu(torch.ones(4), rank), on_gpu(torch.ones(3), rank)]
    tell(lambda: hvd.grouped_allreduce(mine, op=hvd.Sum, name="first"))
"""


@pytest.mark.parametrize("case", OUT_OF_MEMORY)
def test_memory_that_one_rank_does_not_have(case, jobs, script) -> None:
    settings, operations, call = OUT_OF_MEMORY[case]
    before = f'if rank == 1: os.environ["GPU_DOUBLE"] += ",{settings}"'
    env = environment("devices=2", operations)
    said, _ = run(jobs, script, SMALL, env, before)
    for of in said:
        assert of.startswith("HorovodInternalError: "), of
        assert f"{call} failed with CUDA_ERROR_OUT_OF_MEMORY" in of, of
    assert "rank 1" in said[0]


@pytest.mark.parametrize("operations", ["NCCL", "HOST"])
@pytest.mark.parametrize("call", ["allgather", "alltoall"])
def test_memory_for_a_result_that_one_rank_does_not_have(call, operations, jobs, script) -> None:
    """PyTorch's own error is told, to all ranks."""
    body = f"""
hvd.init()
with OnGpu():
    mine = on_gpu(torch.ones(4, 2), rank)
    hvd.{call}(mine)
    if rank == 1:
        def new_empty(*_):
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.")
        torch.Tensor.new_empty = new_empty
    # Rank 0 has launched it, so it hears of the end by its next call.
    tell(lambda: (hvd.{call}(mine, name="result"), hvd.barrier()))
"""
    said, _ = run(jobs, script, body, environment("devices=2", operations))
    for of in said:
        assert of.startswith("HorovodInternalError: "), of
        assert "CUDA out of memory. Tried to allocate 20.00 GiB." in of, of
    assert "rank 1" in said[0]


# -- forks

FORK = """
hvd.init()
with OnGpu():
    mine = on_gpu(torch.ones(4), rank)
    hvd.allreduce_(mine, op=hvd.Sum, name="first")
    child = os.fork()
    if child == 0:
        tell(lambda: {call})
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert status == 0
    total = hvd.allreduce(mine, op=hvd.Sum, name="of the parent")
    assert total.cpu().tolist() == [4.0] * 4, total
    assert violations() == []
"""


@pytest.mark.parametrize(
    "call",
    [
        'hvd.allreduce_(mine, op=hvd.Sum, name="of the child")',
        'hvd.allgather(mine, name="of the child")',
    ],
)
def test_a_forked_child_that_uses_the_gpu(call, jobs, script) -> None:
    said, _ = run(jobs, script, FORK.format(call=call), environment("devices=2"))
    for of in said:
        assert "fork" in of, of
        assert "spawn" in of, of
