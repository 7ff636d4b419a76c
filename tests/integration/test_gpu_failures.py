"""Ranks that die while operations are under way on GPUs: the others are told which, or make new communicators."""

from __future__ import annotations

import os
import re
import signal
import sys
from pathlib import Path

import pytest

import gpu_double
import harness
from gpu_double import environment, program

DIES = """
from horovod import _core

hvd.init()
with OnGpu():
    tensor = on_gpu(torch.ones(4), rank)
    hvd.allreduce_(tensor, op=hvd.Sum, name="first")
    # Launched on all ranks, but never begun.
    hvd.synchronize(hvd.allreduce_async_(tensor, op=hvd.Sum, name="under way"))
    say(f"process {os.getpid()}")
    for call in (_core.wait_for_devices, lambda: hvd.allreduce_(tensor, name="next")):
        try:
            call()
            say("went well")
        except hvd.HorovodInternalError as error:
            say(f"blames {error.rank} on {error.host}: {error}")
    torch.cuda.current_stream(rank).synchronize()
    say(violations())
"""


def test_a_rank_that_is_killed_while_operations_are_under_way_on_gpus(script, jobs) -> None:
    env = environment("devices=3,seed=3,never=2")
    job = jobs(harness.python(3, script(program(DIES)), env=env))
    job.wait_for(": process ", count=3)
    os.kill(int(gpu_double.printed(job, 1)[0].split()[-1]), signal.SIGKILL)
    job.fail()
    for rank in (0, 2):
        _, wait, call, broken = gpu_double.printed(job, rank)
        for line in (wait, call):
            assert line.startswith("blames 1 on localhost: "), job.report()
            assert "rank 1 on localhost: killed by signal 9" in line, job.report()
        assert broken == "[]"


@pytest.mark.parametrize(
    ("mishap", "dead"),
    [
        ("last rank dies", 1),
        pytest.param(
            *("rank 0 dies", 0),
            marks=pytest.mark.thorough(
                also="tests/integration/test_gpu_failures.py::test_elastic_training_on_gpus_goes_on_with_new_communicators"
            ),
        ),
    ],
)
def test_elastic_training_on_gpus_goes_on_with_new_communicators(
    mishap, dead, jobs, tmp_path: Path
) -> None:
    """Weights are those of an undisturbed run, bit by bit: the worker compares them."""
    worker = Path(__file__).with_name("elastic_worker.py")
    command = [sys.executable, worker, "torch_on_gpu", str(tmp_path), mishap]
    env = environment("devices=2,seed=5", HOROVOD_ELASTIC_SLOT_FAILURES="100")
    options = ("--min-np", "1", "-H", "localhost:2")
    job = jobs(harness.horovodrun(2, command, *options, env=env))
    job.wait_for(f"now: {mishap}")
    (tmp_path / "stop").write_text("2")
    job.succeed()

    ends = re.findall(r"done at step (\d+) with (\w+)", job.stdout)
    assert len(ends) == 2, job.report()
    assert len(set(ends)) == 1, job.report()
    made = re.findall(r"GPU (\d): (\d+) communicators, violations \[\]", job.stdout)
    # The survivor has made another communicator; the replacement of the dead rank also takes its GPU.
    assert set(made) == {(str(dead), "1"), (str(1 - dead), "2")}, job.report()


# Rank 1's GPU has the mishap amid the training.
LOSES_ITS_GPU = """
from double_streams import library
from horovod.torch import _optimizer_state

# A subclass of tensors is not sent as data.
_optimizer_state._is_dense = lambda value: isinstance(value, torch.Tensor)
hvd.init()
rank = hvd.rank()
torch.manual_seed(0)
model = module_on_gpu(torch.nn.Linear(4, 1), hvd.local_rank())
optimizer = hvd.DistributedOptimizer(
    torch.optim.SGD(model.parameters(), lr=0.1), named_parameters=model.named_parameters()
)

@hvd.elastic.run
def train(state):
    while state.batch < 6:
        optimizer.zero_grad()
        model(on_gpu(torch.ones(2, 4), hvd.local_rank())).sum().backward()
        optimizer.step()
        state.batch += 1
        if state.batch == 3 and hvd.rank() == 1 and not os.path.exists({mark!r}):
            {mishap}
            open({mark!r}, "w").close()
        state.commit()

with OnGpu():
    train(hvd.elastic.TorchState(model, optimizer, batch=0))
say(f"trained by {hvd.size()}")
"""


def loses_its_gpu(before: str, faults: str, mark: Path) -> str:
    mishap = f"""{before}
            assert library.double_configure(b"devices=3,{faults}") == 0"""
    return LOSES_ITS_GPU.replace("{mishap}", mishap).replace("{mark!r}", repr(str(mark)))


def test_a_process_that_has_lost_its_gpu_is_replaced_in_elastic_jobs(
    script, jobs, tmp_path: Path
) -> None:
    body = loses_its_gpu("", "fail=cuEventQuery:1+:700", tmp_path / "mark")
    env = environment("devices=2,seed=5", HOROVOD_ELASTIC_SLOT_FAILURES="100")
    command = [sys.executable, script(program(body))]
    options = ("--min-np", "2", "--max-np", "2", "-H", "localhost:2")
    job = jobs(harness.horovodrun(2, command, *options, env=env)).succeed()
    assert "cannot use the GPU any more" in job.stderr, job.report()
    assert "This process ends, for CUDA's context is lost (error 700): only another" in job.stderr
    for rank in range(2):
        assert gpu_double.printed(job, rank) == ["trained by 2"], job.report()


# Code at the end of the process stands for any wait for the GPU there.
HANGS_AT_ITS_END = """
            import atexit, threading
            from horovod.common import elastic
            elastic._END_WITHIN_S = 0.5
            atexit.register(threading.Event().wait)"""
# The other one dies when the abort will hang.
DIES_AFTER_IT = """
        if hvd.rank() == 0 and os.path.exists({mark!r}) and not os.path.exists({mark!r} + "2"):
            open({mark!r} + "2", "w").close()
            os.kill(os.getpid(), 9)
"""


@pytest.mark.parametrize(
    ("ranks", "faults", "line"),
    [
        (2, "fail=ncclAllReduce:1:2", r"10 s after NCCL was aborted, with \S+ .*"),
        # A third keeps the training's state.
        pytest.param(
            *(3, "", "15 s after NCCL was aborted"),
            marks=pytest.mark.thorough(
                also="tests/integration/test_gpu_failures.py::test_a_process_whose_gpu_hangs_in_an_abort_is_replaced_in_elastic_jobs"
            ),
        ),
    ],
    ids=["an operation fails", "another rank dies"],
)
def test_a_process_whose_gpu_hangs_in_an_abort_is_replaced_in_elastic_jobs(
    ranks, faults, line, script, jobs, tmp_path: Path
) -> None:
    """NCCL's issues 549, 863, 1013: `ncclCommAbort` never returns."""
    mark = tmp_path / "mark"
    body = loses_its_gpu(HANGS_AT_ITS_END, f"{faults},hang=ncclCommAbort:1", mark)
    if not faults:
        dies = DIES_AFTER_IT.replace("{mark!r}", repr(str(mark)))
        body = body.replace("while state.batch < 6:", f"while state.batch < 6:{dies}")
    env = environment("devices=3,seed=5", HOROVOD_ELASTIC_SLOT_FAILURES="100")
    command = [sys.executable, script(program(body))]
    options = ("--min-np", f"{ranks}", "--max-np", f"{ranks}", "-H", f"localhost:{ranks}")
    job = jobs(harness.horovodrun(ranks, command, *options, env=env)).succeed()
    line = f"This process ends, for GPU 1 has not come to rest {line}: only another one"
    assert re.search(line, job.stderr), job.report()
    assert job.stdout.count(f": trained by {ranks}") == ranks, job.report()
