"""`backward()` waits for all ranks, but not for those that wait for what comes after it: then it ends at once.

The scripts are such as the original carries out. Settings are the defaults: a circle that is not ended in time ends
the job with the report of a standstill.
"""

from __future__ import annotations

import os
import re
from collections import Counter

import pytest

import harness

WARNING = "backward() returned before the gradients of"

HEAD = """
import os, sys
import torch
import horovod.torch as hvd

hvd.init()
rank, size = hvd.rank(), hvd.size()

def weight():
    return torch.nn.Parameter(torch.zeros(4, dtype=torch.float64))

def optimizer(name, param, **kwargs):
    # A step adds what all ranks have subtracted from the gradient.
    plain = torch.optim.SGD([param], lr=1.0)
    return hvd.DistributedOptimizer(plain, named_parameters=[(name, param)], op=hvd.Sum, **kwargs)

def backward(param, of=1.0):
    # Minus the gradient: a digit for each rank.
    (param * (-of * 4**rank)).sum().backward()

def metric(name):
    return hvd.allreduce(torch.tensor([float(rank)]), name=name, op=hvd.Sum).item()

def tell(*params):
    values = [f"{value:g}" for param in params for value in param.detach().unique().tolist()]
    print(f"rank {rank} has {' '.join(values)}", flush=True)
"""

# By kind: the script, and what each parameter is in the end, where b(r) is what rank r adds in one backward pass.
SKIPPED = """
w = weight()
opt = optimizer("w", w)
for step in range(4):
    opt.zero_grad()
    if rank != size - 1 or step in (0, 3):
        backward(w)
    assert metric("metric") == sum(range(size))
    opt.step()
tell(w)
"""

OTHER_SIDE = """
w = weight()
opt = optimizer("w", w)
for step in range(3):
    opt.zero_grad()
    if rank == 0:
        metric("loss")
    backward(w)
    if rank != 0:
        metric("loss")
    opt.step()
tell(w)
"""

TWO_MODELS = """
a, b = weight(), weight()
opts = [optimizer("a", a), optimizer("b", b)]
for step in range(3):
    for opt in opts:
        opt.zero_grad()
    for param in (a, b) if rank == 0 else (b, a):
        backward(param, 1.0 if param is a else 3.0)
    for opt in opts:
        opt.step()
tell(a, b)
"""

UNEVEN = """
w = weight()
opt = optimizer("w", w, backward_passes_per_step=1 if rank == 0 else 2)
for step in range(3):
    opt.zero_grad()
    backward(w)
    metric("first")
    if rank != 0:
        backward(w)
    metric("second")
    opt.step()
tell(w)
"""


def b(*ranks: int) -> int:
    return sum(4**rank for rank in ranks)


KINDS = {
    "skipped": (SKIPPED, lambda n: [4 * b(*range(n)) - 2 * b(n - 1)]),
    "other side": (OTHER_SIDE, lambda n: [3 * b(*range(n))]),
    "two models": (TWO_MODELS, lambda n: [3 * b(*range(n)), 9 * b(*range(n))]),
    "uneven": (UNEVEN, lambda n: [3 * (2 * b(*range(n)) - b(0))]),
}


def warned(job: harness.Job) -> Counter[str]:
    """How often each rank has said that its gradients are not reduced."""
    lines = [line for line in job.stderr.splitlines() if WARNING in line]
    return Counter(re.search(r"\[(\d+)\]", line)[1] for line in lines)


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_scripts_of_the_original_go_on_and_are_told_once(script, jobs, kind, size) -> None:
    text, expected = KINDS[kind]
    # Python itself would say the same words of the same line once.
    env = {"PYTHONWARNINGS": "always"}
    job = jobs(harness.python(size, script(HEAD + text), env=env)).succeed()

    values = " ".join(f"{value:g}" for value in expected(size))
    for rank in range(size):
        assert f"rank {rank} has {values}" in job.stdout, job.report()
    assert "stood still" not in job.stderr, job.report()
    said = warned(job)
    if (
        kind == "two models"
    ):  # two optimizers each; which rank is to go on depends on who came first
        assert 1 <= max(said.values(), default=0) <= 2, job.report()
        return
    name, leave = {
        "skipped": ("metric", range(size - 1)),
        "other side": ("loss", range(1, size)),
        "uneven": ("first", range(1)),
    }[kind]
    assert said == {str(rank): 1 for rank in leave}, job.report()
    assert f"waits for allreduce.{name}, which this rank has not called yet" in job.stderr


def test_ranks_behind_others_in_the_tree_go_on_too(script, jobs) -> None:
    env = {"HOROVOD_CONTROL_FAN_OUT": "2"}
    text, expected = KINDS["skipped"]
    job = jobs(harness.python(5, script(HEAD + text), env=env)).succeed()

    assert job.stdout.count(f"has {expected(5)[0]:g}") == 5, job.report()
    assert warned(job) == {str(rank): 1 for rank in range(4)}, job.report()


AFTER_EARLY_END = """
# Several parameters, of which ranks use different ones; a metric between the passes, which rank 0 calls late.
params = [weight() for _ in range(3)]
named = [(f"p{i}", param) for i, param in enumerate(params)]
plain = torch.optim.SGD(params, lr=1.0)
opt = hvd.DistributedOptimizer(plain, named_parameters=named, op=hvd.Sum)
for step in range(3):
    opt.zero_grad()
    if rank != 0:
        metric("early")
    backward(params[0])
    if rank == 0:
        metric("early")
    # Rank 0 has told of its first pass, and nobody has answered: the next is told of after that.
    backward(params[1] if rank == 0 else params[2])
    with opt.skip_synchronize():
        if step == 1:
            opt.synchronize()
            torch.nn.utils.clip_grad_norm_(params, 1e9)
        opt.step()
tell(*params)
"""


def test_passes_that_follow_an_early_end_are_agreed_on_in_their_turn(script, jobs) -> None:
    job = jobs(harness.python(3, script(HEAD + AFTER_EARLY_END))).succeed()

    values = f"{3 * b(0, 1, 2)} {3 * b(0)} {3 * b(1, 2)}"
    assert job.stdout.count(f"has {values}") == 3, job.report()
    assert warned(job) == {"0": 1}, job.report()


LATE_ZEROS = """
# The others wait in backward for zeros that rank 0 sends in its step, and rank 0 for what they call before theirs.
v, w = weight(), weight()
plain = torch.optim.SGD([v, w], lr=1.0)
opt = hvd.DistributedOptimizer(plain, named_parameters=[("v", v), ("w", w)], op=hvd.Sum)
for step in range(3):
    opt.zero_grad()
    if rank != 0:
        metric("early")
    backward(v if rank == 0 else w)
    if rank == 0:
        metric("early")
    metric("late")
    STEP
tell(v, w)
"""


@pytest.mark.parametrize("step", ["opt.step()", "with opt.skip_synchronize(): opt.step()"])
def test_a_wait_for_gradients_that_others_send_as_zeros_ends_too(script, jobs, step) -> None:
    text = HEAD + LATE_ZEROS.replace("STEP", step)
    job = jobs(harness.python(3, script(text))).succeed()

    assert job.stdout.count(f"has {3 * b(0)} {3 * b(1, 2)}") == 3, job.report()
    assert warned(job) == {"0": 1, "1": 1, "2": 1}, job.report()
    assert "waits for allreduce.late, which this rank has not called yet" in job.stderr


SLOW = """
w = weight()
opt = optimizer("w", w)

class Slow(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        with open(sys.argv[1]) as file:
            file.read()
        return grad

handle = None
if rank == 1:
    # Others lack it, so this rank is asked whether it waits for it. It does not.
    handle = hvd.allreduce_async(torch.ones(1), name="metric", op=hvd.Sum)
backward(Slow.apply(w) if rank == 1 else w)
tell(-w.grad)
if handle is None:
    handle = hvd.allreduce_async(torch.ones(1), name="metric", op=hvd.Sum)
assert hvd.synchronize(handle).item() == size
opt.step()
"""


def test_a_rank_that_is_slow_in_backward_is_waited_for(script, jobs, tmp_path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    job = jobs(
        harness.python(3, script(HEAD + SLOW), str(pipe), env={"HOROVOD_LOG_LEVEL": "debug"})
    )
    job.wait_for("what they wait for", count=5)
    assert "has" not in job.stdout
    pipe.write_text("go on")
    job.succeed()

    assert job.stdout.count(f"has {b(0, 1, 2)}") == 3, job.report()
    assert not warned(job), job.report()
