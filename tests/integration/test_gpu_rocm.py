"""AMD's GPUs, by the double under the names of AMD's libraries: what NVIDIA's do, and jobs that have both."""

from __future__ import annotations

import re
import shutil
import sys
from pathlib import Path

import pytest

import gpu_double
import harness

FOLDER = Path(gpu_double.FOLDER)
# Of the tests over NVIDIA's. The first ones call every function of AMD's libraries that is called at all: the others'
# faults are those of NVIDIA's GPUs.
OPERATIONS = "test_gpu_operations.py"
EVERY_FUNCTION = (OPERATIONS, "test_gpu_steps.py", "test_gpu_timeline.py")
OTHERS = (
    "test_gpu_training.py",
    "test_gpu_errors.py",
    "test_gpu_layouts.py",
    "test_gpu_sparse.py",
    "test_gpu_dropped.py",
)
# The same functions copy between host and GPU on both kinds of GPU.
STAGED = pytest.mark.thorough(
    also="tests/integration/test_gpu_rocm.py::test_hosts_of_both_kinds_go_through_host_memory"
)
AS_NVIDIAS = pytest.mark.thorough(also="tests/test_parallel.py::test_on_every_rank")


@pytest.fixture
def rocm(tmp_path: Path) -> str:
    """A folder as `HOROVOD_ROCM_HOME`."""
    lib = tmp_path / "rocm" / "lib"
    lib.mkdir(parents=True)
    # A file of its own, whose name tells the version.
    library = Path(shutil.copy(gpu_double.LIBRARY, lib / "libamdhip64.so.7.2.70200"))
    for name in ("libamdhip64.so.7", "librccl.so.1", "libhiprtc.so.7"):
        (lib / name).symlink_to(library)
    return str(lib.parent)


def environment(home: str, double: str = "devices=4,seed=5", **others: str) -> dict[str, str]:
    """Variables of ranks that find AMD's libraries, and nothing of NVIDIA's."""
    return {
        "HVD_TEST_GPU": "rocm",
        "HOROVOD_ROCM_HOME": home,
        "HOROVOD_DYNAMIC_PROCESS_SETS": "1",
        "HOROVOD_CHECK_REPLICAS": "off",
        "GPU_DOUBLE": double,
        **others,
    }


@pytest.mark.parametrize(
    ("operations", "names"),
    [
        pytest.param("NCCL", EVERY_FUNCTION, id="NCCL"),
        pytest.param("NCCL", OTHERS, marks=AS_NVIDIAS, id="NCCL, the others"),
        pytest.param("HOST", (OPERATIONS,), marks=STAGED, id="HOST"),
    ],
)
def test_the_same_tests_as_on_gpus_of_nvidia(operations, names, rocm, jobs) -> None:
    words = ["-m", "pytest", "-x", "-q", "--tb=short", "-p", "no:cacheprovider"]
    files = [str(FOLDER / name) for name in names]
    command = [sys.executable, *words, "--rootdir", str(harness.ROOT), *files]
    env = environment(rocm, HOROVOD_GPU_OPERATIONS=operations)
    jobs(harness.horovodrun(2, command, env=env, cwd=harness.ROOT, forked=True)).succeed()


SUMS = """
hvd.init()
with OnGpu():
    mine = on_gpu(torch.full((4,), rank + 1.0), rank)
    tell(lambda: hvd.allreduce(mine, op=hvd.Average, name="first"))
    tell(lambda: hvd.allreduce(mine, op=hvd.Sum, name="second"))
say([hvd.cuda_built(), hvd.rocm_built(), hvd.nccl_built()])
say(violations())
"""
# Before anything is loaded: rank 0 is one of NVIDIA's.
MIXED = f"""
if rank == 0:
    del os.environ["HVD_TEST_GPU"], os.environ["HOROVOD_ROCM_HOME"]
    os.environ["HOROVOD_CUDA_LIBRARY"] = {gpu_double.LIBRARY!r}
    os.environ["HOROVOD_NCCL_LIBRARY"] = {gpu_double.LIBRARY!r}
"""


def run(jobs, script, env: dict[str, str], before: str = "", body: str = SUMS):
    path = script(gpu_double.program(body, before))
    job = jobs(harness.python(2, path, env=env, forked=True))
    job.succeed()
    return [gpu_double.printed(job, rank) for rank in range(2)], job.stderr


SUMMED = ["[1.5, 1.5, 1.5, 1.5]", "[3.0, 3.0, 3.0, 3.0]"]


def test_hosts_of_both_kinds_go_through_host_memory(rocm, jobs, script) -> None:
    (first, second), errors = run(jobs, script, environment(rocm), MIXED)
    assert first == [*SUMMED, "[True, False, 23007]", "[]"]
    assert second == [*SUMMED, "[False, True, 23007]", "[]"]
    pattern = r"through host memory.*rank 0 .*GPU of CUDA, rank 1 .*one of ROCm"
    assert re.search(pattern, " ".join(errors.split())), errors


def test_hosts_of_both_kinds_where_nccl_is_demanded(rocm, jobs, script) -> None:
    env = environment(rocm, HOROVOD_GPU_OPERATIONS="NCCL")
    printed, _ = run(jobs, script, env, MIXED)
    for line in printed[0][:2] + printed[1][:2]:
        assert line.startswith("ValueError: HOROVOD_GPU_OPERATIONS=NCCL, but NCCL cannot"), line
        assert "one of ROCm" in line


def test_a_compiler_that_fails_on_one_rank_is_known_on_all(rocm, jobs, script) -> None:
    fails = 'if rank == 1: os.environ["GPU_DOUBLE"] += ",fail=hiprtcCompileProgram:1+:6"\n'
    printed, errors = run(jobs, script, environment(rocm), fails)
    assert [of[:2] for of in printed] == [SUMMED, SUMMED]
    pattern = r"through host memory.*rank 1 .*hiprtcCompileProgram failed with"
    assert re.search(pattern, " ".join(errors.split())), errors


def test_a_gpu_that_is_not_there(rocm, jobs, script) -> None:
    printed, _ = run(jobs, script, environment(rocm, "no_device"))
    for line in printed[0][:2] + printed[1][:2]:
        assert line.startswith("HorovodInternalError: "), line
        assert "hipInit failed with hipErrorNoDevice" in line
        assert "HIP_VISIBLE_DEVICES" in line


def test_where_cuda_is_nothing_of_amds_is_opened(rocm, jobs, script) -> None:
    body = """
say([hvd.rocm_built(), hvd.cuda_built(), hvd.nccl_built() > 0])
say("libamdhip64" in open("/proc/self/maps").read())
"""
    env = gpu_double.environment(HOROVOD_ROCM_HOME=rocm)
    printed, _ = run(jobs, script, env, body=body)
    assert printed == [["[False, True, True]", "False"]] * 2


def test_what_was_found_is_told(rocm, jobs) -> None:
    env = environment(rocm)
    for words, expected in (
        (["--check-build", "--verbose"], f"here it is 7.2 in {rocm}/lib/libamdhip64.so.7"),
        (["--check-build"], "[X] NCCL"),
        (["--doctor", "-np", "1"], "ROCm 7.2, NCCL 2.30.7"),
    ):
        job = jobs(harness.Job([harness.HOROVODRUN, *words], env=env)).succeed()
        assert expected in " ".join(job.stdout.split()), job.report()
