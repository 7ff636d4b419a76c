"""The tests of tests/parallel/gpu on the GPUs of this machine, through its own CUDA and NCCL."""

import sys
from pathlib import Path

import pytest
import torch

import harness
from horovod import _core

FOLDER = Path(__file__).resolve().parents[1] / "parallel" / "gpu"
LIMIT_S = 600.0

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="PyTorch finds no GPU"),
]


@pytest.mark.parametrize("operations", ["NCCL", "HOST"])
@pytest.mark.parametrize("np", [1, 2])
def test_on_real_gpus(np, operations, jobs) -> None:
    variables = {
        "HVD_TEST_GPU": "real",
        "HOROVOD_GPU_OPERATIONS": operations,
        # As in the environments of these tests over the double.
        "HOROVOD_DYNAMIC_PROCESS_SETS": "1",
        "HOROVOD_CHECK_REPLICAS": "off",
        # NCCL's warnings are in the report of a test that fails.
        "NCCL_DEBUG": "WARN",
        # JAX leaves memory for PyTorch, NCCL and the other rank.
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
    }
    if np > torch.cuda.device_count():
        # Two ranks on one GPU: NCCL allows it to those who ask, and wants few resources for each then.
        if operations == "NCCL" and torch.cuda.nccl.version() < _core.NCCL_SHARES_GPUS_SINCE:
            pytest.skip("this NCCL refuses two ranks on one GPU")
        variables |= {"NCCL_MULTI_RANK_GPU_ENABLE": "1", "NCCL_MAX_CTAS": "4"}
    words = ["-m", "pytest", "-q", "--tb=short", "-p", "no:cacheprovider"]
    if np > 1:
        words.append("-x")  # the others wait for a rank that has left a test
    command = [sys.executable, *words, "--rootdir", str(harness.ROOT), str(FOLDER)]
    job = jobs(harness.horovodrun(np, command, limit_s=LIMIT_S, env=variables, cwd=harness.ROOT))
    job.succeed()


def test_sparse_gradients(script, jobs) -> None:
    path = script(
        """
import torch, horovod.torch as hvd
hvd.init()
torch.cuda.set_device(hvd.local_rank() % torch.cuda.device_count())
positions = torch.tensor([[hvd.rank(), hvd.rank() + 1], [0, 1]])
mine = torch.sparse_coo_tensor(positions, torch.ones(2), (hvd.size() + 1, 2)).cuda()
total = hvd.sparse_allreduce_async(mine, "sparse", hvd.Sum)()
assert total.is_cuda
assert total.to_dense().sum().item() == 2 * hvd.size()
"""
    )
    jobs(harness.python(1, path)).succeed()


def test_the_benchmark(jobs) -> None:
    command = [sys.executable, "-m", "horovod.bench", "--device", "cuda", "-e", "1M", "-d", "all"]
    job = jobs(harness.horovodrun(1, command)).succeed()
    assert "# all right" in job.stdout
