"""`backward()` waits for all ranks, but not for those that wait for what comes after it: then it ends at once.

The scripts are such as the original carries out. Settings are the defaults: a circle that is not ended in time ends
the job with the report of a standstill.

One job carries out all scripts, one after the other: making an optimizer imports PyTorch's compiler, which takes
longer than any of them.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterator

import pytest

import harness

WARNING = "backward() returned before the gradients of"

HEAD = """
import os, sys, warnings
import torch
import horovod.torch as hvd

# Python itself would say the same words of the same line once.
warnings.simplefilter("always")
hvd.init()
rank, size = hvd.rank(), hvd.size()
kind = ""

def begin(new):
    # Names are of this kind from here on, and so is what the rank says.
    global kind
    hvd.barrier()
    kind = new
    # In one piece: threads of the core write to the same pipe.
    os.write(2, f"begins: {kind}\\n".encode())

def weight():
    return torch.nn.Parameter(torch.zeros(4, dtype=torch.float64))

def distributed(plain, named, **kwargs):
    named = [(f"{kind}.{name}", param) for name, param in named]
    return hvd.DistributedOptimizer(plain, named_parameters=named, op=hvd.Sum, **kwargs)

def optimizer(name, param, **kwargs):
    # A step adds what all ranks have subtracted from the gradient.
    return distributed(torch.optim.SGD([param], lr=1.0), [(name, param)], **kwargs)

def backward(param, of=1.0):
    # Minus the gradient: a digit for each rank.
    (param * (-of * 4**rank)).sum().backward()

def metric(name):
    value = torch.tensor([float(rank)])
    return hvd.allreduce(value, name=f"{kind}.{name}", op=hvd.Sum).item()

def tell(*params):
    values = [f"{value:g}" for param in params for value in param.detach().unique().tolist()]
    print(f"{kind}: rank {rank} has {' '.join(values)}", flush=True)
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

AFTER_EARLY_END = """
# Several parameters, of which ranks use different ones; a metric between the passes, which rank 0 calls late.
params = [weight() for _ in range(3)]
named = [(f"p{i}", param) for i, param in enumerate(params)]
plain = torch.optim.SGD(params, lr=1.0)
opt = distributed(plain, named)
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

LATE_ZEROS = """
# The others wait in backward for zeros that rank 0 sends in its step, and rank 0 for what they call before theirs.
v, w = weight(), weight()
plain = torch.optim.SGD([v, w], lr=1.0)
opt = distributed(plain, [("v", v), ("w", w)])
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


def b(*ranks: int) -> int:
    return sum(4**rank for rank in ranks)


STEP, SKIPPING = "opt.step()", "with opt.skip_synchronize(): opt.step()"
KINDS = {
    "skipped": (SKIPPED, lambda n: [4 * b(*range(n)) - 2 * b(n - 1)]),
    "other side": (OTHER_SIDE, lambda n: [3 * b(*range(n))]),
    "two models": (TWO_MODELS, lambda n: [3 * b(*range(n)), 9 * b(*range(n))]),
    "uneven": (UNEVEN, lambda n: [3 * (2 * b(*range(n)) - b(0))]),
    # Passes that follow an early end are agreed on in their turn.
    "after an early end": (
        AFTER_EARLY_END,
        lambda n: [3 * b(*range(n)), 3 * b(0), 3 * b(*range(1, n))],
    ),
    # A wait for gradients that others send as zeros ends too.
    "late zeros": (LATE_ZEROS.replace("STEP", STEP), lambda n: [3 * b(0), 3 * b(*range(1, n))]),
    "late zeros, skipping": (
        LATE_ZEROS.replace("STEP", SKIPPING),
        lambda n: [3 * b(0), 3 * b(*range(1, n))],
    ),
}
# Which ranks are told to go on, and what for.
ENDED_EARLY = {
    "skipped": (lambda n: range(n - 1), "metric"),
    "other side": (lambda n: range(1, n), "loss"),
    "uneven": (lambda n: range(1), "first"),
    "after an early end": (lambda n: range(1), "early"),
    "late zeros": (range, "late"),
    "late zeros, skipping": (range, "late"),
}


def program(*kinds: str) -> str:
    return HEAD + "\n".join(f"begin({kind!r})\n{KINDS[kind][0]}" for kind in kinds)


def warned(job: harness.Job, kind: str) -> Counter[str]:
    """How often each rank has said in the script of this kind that its gradients are not reduced."""
    counts: Counter[str] = Counter()
    present: dict[str, str] = {}
    for line in job.stderr.splitlines():
        if match := re.match(r"\[(\d+)\]<stderr>:begins: (.*)", line):
            present[match[1]] = match[2]
        elif WARNING in line:
            rank = re.search(r"\[(\d+)\]", line)[1]
            counts[rank] += present[rank] == kind
    return +counts


ON_TWO = pytest.mark.thorough(
    also="tests/integration/test_soft_wait.py::test_scripts_of_the_original_go_on_and_are_told_once"
)


@pytest.fixture(
    scope="module",
    params=[pytest.param(2, marks=ON_TWO, id="2 ranks"), pytest.param(3, id="3 ranks")],
)
def all_kinds(request, tmp_path_factory) -> Iterator[tuple[int, harness.Job]]:
    path = tmp_path_factory.mktemp("soft") / "all.py"
    path.write_text(program(*KINDS))
    job = harness.python(request.param, path, forked=True)
    try:
        yield request.param, job.succeed()
    finally:
        job.close()


@pytest.mark.parametrize("kind", KINDS)
def test_scripts_of_the_original_go_on_and_are_told_once(all_kinds, kind) -> None:
    size, job = all_kinds
    values = " ".join(f"{value:g}" for value in KINDS[kind][1](size))
    for rank in range(size):
        assert f"{kind}: rank {rank} has {values}\n" in job.stdout + "\n", job.report()
    assert "stood still" not in job.stderr, job.report()
    counts = warned(job, kind)
    if kind not in ENDED_EARLY:
        # Two optimizers each; which rank is to go on depends on who came first.
        assert 1 <= max(counts.values(), default=0) <= 2, job.report()
        return
    ranks, name = ENDED_EARLY[kind]
    assert counts == {str(rank): 1 for rank in ranks(size)}, job.report()
    missing = f"waits for allreduce.{kind}.{name}, which this rank has not called yet"
    assert missing in job.stderr, job.report()


def test_ranks_behind_others_in_the_tree_go_on_too(script, jobs) -> None:
    env = {"HOROVOD_CONTROL_FAN_OUT": "2"}
    job = jobs(harness.python(4, script(program("skipped")), env=env, forked=True)).succeed()

    assert job.stdout.count(f"has {KINDS['skipped'][1](4)[0]:g}") == 4, job.report()
    assert warned(job, "skipped") == {str(rank): 1 for rank in range(3)}, job.report()


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
    env = {"HOROVOD_LOG_LEVEL": "debug"}
    job = jobs(harness.python(3, script(HEAD + SLOW), str(pipe), env=env, forked=True))
    job.wait_for("what they wait for", count=5)
    assert not re.search(r"rank \d has", job.stdout)
    pipe.write_text("go on")
    job.succeed()

    assert job.stdout.count(f"has {b(0, 1, 2)}") == 3, job.report()
    assert WARNING not in job.stderr, job.report()
