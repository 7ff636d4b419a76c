"""Adasum of tensors on GPUs of several hosts in whole jobs; what scripts are told that scale the learning rate by it.

All ranks are on this machine; that they call their hosts by different names makes them ranks of several hosts. The GPUs
are the double's.
"""

from __future__ import annotations

import pytest

import gpu_double
import harness

ENV = gpu_double.environment("devices=4,seed=5", None, HOROVOD_DYNAMIC_PROCESS_SETS="1")
# Its first argument says the host of each rank.
START = f"""
import os, sys
rank, hosts = int(os.environ["HOROVOD_RANK"]), sys.argv[1]
host = hosts[rank]
placement = {{
    "LOCAL_RANK": hosts[:rank].count(host), "LOCAL_SIZE": hosts.count(host),
    "CROSS_RANK": sorted(set(hosts)).index(host), "CROSS_SIZE": len(set(hosts)),
}}
os.environ.update({{f"HOROVOD_{{name}}": str(value) for name, value in placement.items()}})
os.environ["HOROVOD_HOSTNAME"] = f"host-{{host}}"
if "without-nccl" in sys.argv[2:] and rank == len(hosts) - 1:
    os.environ["HOROVOD_NCCL_LIBRARY"] = "/nowhere/libnccl.so.2"
sys.path.insert(0, {gpu_double.FOLDER!r})
import conftest  # the core's reader takes tensors of the double
import numpy as np
import torch
import horovod.torch as hvd
from devices import OnGpu, module_on_gpu, on_gpu

hvd.init()
assert hvd.local_size() == hosts.count(host)
# All GPUs are this machine's.
device = rank
"""
REFERENCE = """
def pair(a, b):
    factor = lambda v: 1 - a @ b / (2 * v @ v)
    return factor(a) * a + factor(b) * b

def adasum(vectors):
    # Those beyond a power of two join before.
    vectors, power = list(vectors), 1 << (len(vectors).bit_length() - 1)
    for extra in range(power, len(vectors)):
        vectors[extra - power] = pair(vectors[extra - power], vectors[extra])
    vectors = vectors[:power]
    while len(vectors) > 1:
        vectors = [pair(vectors[i], vectors[i + 1]) for i in range(0, len(vectors), 2)]
    return vectors[0]

def on_hosts(ranks, combine):
    groups = {}
    for one in ranks:
        groups.setdefault(hosts[one], []).append(one)
    return [combine([values(one) for one in group]) for group in groups.values()]

def values(rank):
    return np.random.default_rng(rank).normal(size=10)

mean, total, every = (lambda vs: np.mean(vs, 0)), (lambda vs: np.sum(vs, 0)), range(len(hosts))
"""


def _run(jobs, script, hosts: str, text: str, *words: str, **env: str) -> harness.Job:
    path = script(START + REFERENCE + text)
    return jobs(harness.python(len(hosts), path, hosts, *words, env={**ENV, **env}, forked=True))


OPERATIONS = """
with OnGpu():
    assert hvd.nccl_built() > 0
    want = adasum(on_hosts(every, mean))
    tensor = on_gpu(torch.tensor(values(rank)), device)
    np.testing.assert_allclose(hvd.allreduce(tensor, op=hvd.Adasum).cpu().numpy(), want)
    tensors = [tensor.clone(), tensor.clone()]
    hvd.grouped_allreduce_(tensors, op=hvd.Adasum)
    for result in tensors:
        np.testing.assert_allclose(result.cpu().numpy(), want)
    # Of the members of a set on each host.
    chosen = hvd.add_process_set(range(len(hosts) - 1)) if len(hosts) > 2 else hvd.global_process_set
    if chosen.included():
        got = hvd.allreduce(tensor, op=hvd.Adasum, process_set=chosen)
        np.testing.assert_allclose(got.cpu().numpy(), adasum(on_hosts(chosen.ranks, mean)))
# Tensors in host memory are what they were: all ranks combine.
got = hvd.allreduce(torch.tensor(values(rank)), op=hvd.Adasum)
np.testing.assert_allclose(got.numpy(), adasum([values(one) for one in every]))
print("right", flush=True)
"""


LESS = pytest.mark.thorough(
    also="tests/integration/test_gpu_adasum.py::test_the_averages_of_the_hosts_combine"
)


@pytest.mark.parametrize("hosts", ["00", pytest.param("01", marks=LESS), "001", "0101"])
def test_the_averages_of_the_hosts_combine(hosts, script, jobs) -> None:
    job = _run(jobs, script, hosts, OPERATIONS)
    job.succeed()
    assert job.stdout.count("right") == len(hosts), job.report()
    # Between hosts NCCL's links are plain, which is said once.
    plain = [line for line in job.stderr.splitlines() if "without authentication" in line]
    assert len(plain) == (len(set(hosts)) > 1), job.report()


TRAINING = """
with OnGpu():
    model = module_on_gpu(torch.nn.Linear(10, 1, bias=False).double(), device)
    # As scripts written for the original choose it.
    scale = hvd.local_size() if hvd.nccl_built() else 1
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5 * scale)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    start = model.weight.detach().cpu().numpy()[0]
    optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters(), op=hvd.Adasum)
    model(on_gpu(torch.tensor(values(rank)), device)).sum().backward()
    optimizer.step()
    moved = start - model.weight.detach().cpu().numpy()[0]
vectors = on_hosts(every, total) if sys.argv[2] == "AUTO" else [values(one) for one in every]
np.testing.assert_allclose(moved, 0.5 * adasum(vectors))
print("right", flush=True)
"""


@pytest.mark.parametrize("operations", ["AUTO", "HOST"])
# On one host the operation is that of the test above.
@pytest.mark.parametrize("hosts", [pytest.param("00", marks=LESS), "0011"])
def test_a_script_that_scales_by_local_size_where_nccl_is_built(
    hosts, operations, script, jobs
) -> None:
    job = _run(jobs, script, hosts, TRAINING, operations, HOROVOD_GPU_OPERATIONS=operations)
    job.succeed()
    assert job.stdout.count("right") == len(hosts), job.report()


MIXED = """
with OnGpu():
    tensor = on_gpu(torch.tensor(values(rank)), device)
    try:
        hvd.allreduce(tensor, op=hvd.Adasum, name="mixed")
    except ValueError as error:
        print(f"refused: {error}", flush=True)
    got = hvd.allreduce(tensor, op=hvd.Sum, name="sum").cpu().numpy()
    np.testing.assert_allclose(got, total([values(one) for one in every]))
print("nccl", bool(hvd.nccl_built()), flush=True)
"""


def test_ranks_that_are_told_different_things_are_refused(script, jobs) -> None:
    job = _run(jobs, script, "01", MIXED, "without-nccl")
    job.succeed()
    text = "it is found on rank 0 (host host-0), and not on rank 1 (host host-1)"
    refused = [line for line in job.stdout.splitlines() if "refused: " in line]
    assert len(refused) == 2, job.report()
    assert all(text in line and "HOROVOD_GPU_OPERATIONS=HOST" in line for line in refused)
    assert sorted(line.split()[-1] for line in job.stdout.splitlines() if "nccl " in line) == [
        "False",
        "True",
    ]
