"""Training with DistributedOptimizer equals training in one process on everybody's data: a table of what a script does
between two steps, of options, and of what is trained.

Every row is carried out twice from the same weights: by the ranks, each with its own rows of a batch and the
distributed optimizer, and by an oracle, one process with the plain optimizer that runs the backward passes of all
ranks. Weights are compared after each step, and between ranks bit by bit at the end.
"""

import contextlib
import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import optimizer_events
import pytest
import torch
from optimizer_events import World
from optimizer_kinds import KINDS, OPTIMIZERS, usual_sgd
from optimizer_support import (
    assert_ranks_agree,
    assert_same_weights,
    batches,
    combined,
    mse,
    small_model,
)

import horovod.torch as hvd

hvd.init()
SIZE, RANK = hvd.size(), hvd.rank()
FP16 = {"compression": hvd.Compression.fp16}
BARE = {"zero_missing_gradients": False}
TWO, THREE = {"backward_passes_per_step": 2}, {"backward_passes_per_step": 3}
# Each gradient is sent at once, or all together.
AT_ONCE = (("horovod.torch._gradient_sending._host_bytes", lambda: 1),)
LATE = (("horovod.torch._gradient_sending._host_bytes", lambda: 1 << 20),)


@pytest.fixture(autouse=True, scope="module")
def _dynamic_sets(_job):
    """The other files of this job run without dynamic process sets."""
    hvd.shutdown()
    hvd.init(process_sets="dynamic")
    yield
    hvd.shutdown()


def usual_batch(model, seed):
    ((x, y),) = batches(1, dtype=next(model.parameters()).dtype, seed=seed)
    return x, y


@dataclass(frozen=True)
class Row:
    """The settings of both trainings, and the tolerance of their comparison."""

    name: str
    script: str = "zero first step"
    """Of each step: words of `optimizer_events`."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Of DistributedOptimizer; a process set by the ranks in it."""
    model: Callable[[], torch.nn.Module] = small_model
    make: Callable[[Iterable[torch.Tensor]], torch.optim.Optimizer] = usual_sgd
    params: Callable[[torch.nn.Module], Iterable[torch.Tensor]] = lambda model: model.parameters()
    batch: Callable[[torch.nn.Module, int], tuple[torch.Tensor, torch.Tensor]] = usual_batch
    loss: Callable[..., torch.Tensor] = lambda model, x, y, use: mse(model, x, y)
    use: Callable[[World, int, int], Any] = lambda world, number, rank: None
    """The part of the model that a rank uses in a pass."""
    before: str = ""
    """Events before the optimizer is wrapped, and after."""
    after: str = ""
    hooks: int = 0
    """The number of hooks that multiply the gradients of rank r by r + 1."""
    named: bool = True
    wait: bool = True
    wrapping: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext
    patches: Sequence[tuple[str, Any]] = ()
    tolerance: float = 1e-12

    def fills_missing_gradients(self) -> bool:
        """Whether parameters that no rank uses get zeros, on which weight decay acts."""
        return SIZE > 1 and self.options.get("zero_missing_gradients", True)


def row(name, script="zero first step", kind="small", **fields):
    return Row(name, script, **{**KINDS[kind], **fields})


def each(name, variants, script="zero first step", kind="small", **common):
    """One row per variant, which is fields of a row by a word for them; `script` and `kind` may be among them."""
    for word, fields in variants.items():
        merged = {"script": script, "kind": kind, **common, **fields}
        merged["options"] = {**common.get("options", {}), **fields.get("options", {})}
        yield row(f"{name}, {word}" if word else name, **merged)


def over(field, *values):
    """Variants that differ in one field."""
    return {f"{field}={value}": {field: value} for value in values}


def with_options(*variants):
    """Variants that differ in options of DistributedOptimizer."""
    return {_words(options): {"options": options} for options in variants}


def times(left, right):
    """All combinations of two sets of variants."""
    return {
        " ".join(filter(None, (word, other))): {
            **a,
            **b,
            "options": {**a.get("options", {}), **b.get("options", {})},
        }
        for word, a in left.items()
        for other, b in right.items()
    }


OP_NAMES = {hvd.Average: "Average", hvd.Sum: "Sum", hvd.Adasum: "Adasum"}


def _words(options):
    shown = {
        name: OP_NAMES[value] if name == "op" else getattr(value, "__name__", value)
        for name, value in options.items()
    }
    return " ".join(f"{name}={value}" for name, value in shown.items()) or "defaults"


GROUPS = with_options({}, {"groups": 2})
EVERY_GROUPS = with_options({}, {"groups": 1}, {"groups": 2}, {"groups": 3})
WAITS = over("wait", True, False)
SUM = {"op": hvd.Sum}
ADASUM = {"op": hvd.Adasum}
CLIPPED = "zero first clip step"
SCALED = {
    "unscaled, zeroed by the optimizer": {"script": "zero overflowing unscale clip scaler_step"},
    "unscaled, zeroed by the model": {"script": "zero_model overflowing unscale clip scaler_step"},
    "zeroed by the optimizer": {"script": "zero overflowing scaler_step"},
    "zeroed by the model": {"script": "zero_model overflowing scaler_step"},
}

ROWS = [
    # ---- one pass per step
    *each("gradients are averaged", over("named", True, False)),
    *each("every optimizer", over("kind", *OPTIMIZERS)),
    *each("options", with_options(SUM, *({"groups": groups} for groups in (1, 2, 3, 50)))),
    *each("predivided", GROUPS, options={"gradient_predivide_factor": 4.0}),
    *each("half as many bytes", GROUPS, options=FP16, tolerance=5e-3),
    *each(
        "models",
        over("kind", "used twice", "bfloat16", "float16", "autocast"),
    ),
    *each("each rank has its own order of parameters", GROUPS, kind="parameters in turn"),
    *each(
        "computed again", over("kind", *(kind for kind in KINDS if kind.startswith("checkpointed")))
    ),
    *each(
        "computed again and plainly",
        times(
            over("kind", "plain, then checkpointed", "checkpointed, then plain"),
            with_options({}, {"groups": 1}, SUM),
        ),
        patches=AT_ONCE,
    ),
    row("in the memory of images", "zero first gradients_are_channels_last step", "channels last"),
    row("built under no_grad", wrapping=torch.no_grad),
    row("waiting in the step only", wait=False),
    # ---- between backward and step
    row("the rate is rewritten", "zero first rewrite_rate step", "Adam"),
    *each("clipping", GROUPS, CLIPPED),
    row("clipping half as many bytes", CLIPPED, options=FP16, tolerance=1e-3),
    row("clipping after synchronize", "zero first synchronize clip only_step"),
    row("skip_synchronize nested and held open", "all_in_skip_synchronize"),
    row(
        "clipping with a torch that does not tell when a pass ends",
        CLIPPED,
        before="freeze_second",
        patches=(("horovod.torch._gradient_reducer.queue_callback", None),),
    ),
    row("clipping with a gradient penalty", CLIPPED, "penalised"),
    row("clipping a model cast after wrapping", CLIPPED, "float32", after="cast"),
    row("autograd.grad in between", "zero first autograd_grad step"),
    row(
        "sharpness-aware minimisation", "first ascend zero first descend step zero", tolerance=1e-9
    ),
    *each(
        "a hook of the user",
        {
            "before wrapping": {"before": "hook_of_the_user", "hooks": 1},
            "after wrapping": {"after": "hook_of_the_user", "hooks": 1},
            "both": {"before": "hook_of_the_user", "after": "hook_of_the_user", "hooks": 2},
            "groups": {"after": "hook_of_the_user", "hooks": 1, "options": {"groups": 2}},
            "fp16": {"after": "hook_of_the_user", "hooks": 1, "options": FP16, "tolerance": 1e-1},
        },
        patches=AT_ONCE,
    ),
    # ---- several passes per step
    *each("accumulation of two", GROUPS, "zero half_first half_second step", options=TWO),
    *each("accumulation of three", GROUPS, "zero first second third step", options=THREE),
    row("an early step", options={"backward_passes_per_step": 4}),
    row(
        "passes set after wrapping",
        "zero first gradients_agree step",
        options=THREE,
        after="set_one_pass",
    ),
    row("clipping what was accumulated", "zero first second clip step", "Adam", options=TWO),
    row("no_sync", "zero unsynced_first second step"),
    row("a pass for each of two models", "zero first second step", "two models"),
    *each(
        "several passes add up",
        times(
            with_options(
                {},
                {"groups": 2},
                TWO,
                SUM,
                {**SUM, **TWO, "groups": 2},
                {"gradient_predivide_factor": 2.0},
            ),
            WAITS,
        ),
        "zero first second third step",
    ),
    *each(
        "passes that reach other parameters each",
        times(with_options({}, {"groups": 1}, {"groups": 2}), WAITS),
        "zero first second third step",
        "layers in turn",
        options=BARE,
        patches=AT_ONCE,
    ),
    *each("passes of one rank, an early step", WAITS, "zero twice_on_rank_0 step", options=THREE),
    *each("passes of one rank", GROUPS, "zero three_times_on_rank_0 step", wait=False),
    # ---- passes that are thrown away
    *each(
        "skipped",
        {"": {}, "without waiting": {"wait": False}, "groups": {"options": {"groups": 2}}},
        "zero thrown_away zero thrown_away zero first step",
    ),
    *each(
        "skipped, zeroed by the model",
        {"": {}, "without waiting": {"wait": False}, "sum": {"options": SUM}},
        "zero_model thrown_away zero_model thrown_away zero_model first step",
    ),
    *each(
        "skipped, zeroed by the model in place",
        with_options({}, SUM),
        "zero_model_in_place thrown_away zero_model_in_place thrown_away zero_model_in_place first step",
    ),
    row("skipped amid an accumulation", "zero first zero second third step", options=TWO),
    *each(
        "backward fails half way",
        times(
            over(
                "script",
                "zero failing_backward zero first clip step",
                "zero_model failing_backward zero_model first clip step",
            ),
            {
                "at once": {"patches": AT_ONCE},
                "late": {"patches": LATE},
                "groups": {"patches": AT_ONCE, "options": {"groups": 2}},
            },
        ),
    ),
    # ---- parameters that only some ranks use, or nobody
    row("clipping with branches of some ranks", CLIPPED, "branch of a rank", options=BARE),
    row("zeroed instead of none", "zero_in_place first clip step", "branch of a rank"),
    *each("used by some", EVERY_GROUPS, kind="branches in turn", options=BARE),
    *each(
        "used by some in two passes",
        EVERY_GROUPS,
        "zero first second step",
        "branches in turn",
        options={**BARE, **TWO},
    ),
    row("another collective amid a step", "zero first other_collective step", "branch of rank 0"),
    # ---- freezing, thawing, new groups
    row("thawed after wrapping", "zero thaw_first_later first clip step", before="freeze_first"),
    *each("frozen after wrapping", GROUPS, after="freeze_last"),
    *each(
        "a group added after wrapping",
        times(
            over("named", True, False),
            over("script", *(f"{add} {CLIPPED}" for add in ("add_group", "add_group_to_original"))),
        ),
        kind="without the last layer",
        before="freeze_last",
    ),
    # ---- loss scaling
    *each(
        "infinity on one rank",
        times(
            {name: {"make": OPTIMIZERS[name]} for name in ("SGD", "AdamW", "AdamW_fused")}, SCALED
        ),
        kind="float32",
        tolerance=1e-4,
    ),
    row("scaled and clipped", "zero scaled unscale clip scaler_step", "float32", tolerance=1e-5),
    row(
        "scaled as the MNIST example writes it",
        "zero scaled synchronize unscale only_scaler_step",
        "float32",
        tolerance=1e-5,
    ),
    # ---- sparse gradients
    *each(
        "sparse embeddings",
        times(
            times(
                with_options({"sparse_as_dense": False}, {"sparse_as_dense": True}),
                {"": {}, "fp16": {"options": FP16, "tolerance": 1e-2}},
            ),
            with_options({}, {"groups": 1}),
        ),
        "zero first table_is_sparse step",
        "words of rank 0",
        options=BARE,
    ),
    row("sparse gradients of several passes", "zero first twice_second step", "words"),
    # ---- without rank 0 where there are enough ranks; the others train on their own data
    *each("a process set", GROUPS, CLIPPED, options={"process_set": range(1, SIZE)}),
    # ---- local steps, of which Adasum combines the moves
    *each(
        "Adasum",
        times(over("named", True, False), over("kind", "SGD", "Adam")),
        options=ADASUM,
    ),
    row("Adasum of half as many bytes", options={**ADASUM, **FP16}, tolerance=5e-3),
    row("Adasum skips a batch", "thrown_away zero first second step zero", options=ADASUM),
    row("Adasum accumulates", "zero first second step", options={**ADASUM, **TWO}),
]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_training_equals_that_of_one_process(row, monkeypatch):
    for target, value in row.patches:
        monkeypatch.setattr(target, value)
    with in_set(row.options) as (options, ranks):
        model = row.model()
        is_adasum = options.get("op") == hvd.Adasum and SIZE > 1
        parts = [[rank] for rank in ranks] if is_adasum else [ranks]
        oracles = [World(row, copy.deepcopy(model), part, is_oracle=True) for part in parts]
        world = World(row, model, [RANK], is_oracle=False)
        both = [world, *oracles]
        run(both, row.before)
        world.distribute(options)
        run(both, row.after)
        for number in range(3):
            for each_world in both:
                each_world.step = number
            before = copy.deepcopy(oracles[0].model)
            run(both, row.script)
            if is_adasum:
                combine(oracles, before)
            assert_same_weights(model, oracles[0].model, row.tolerance)
            assert world.scaler.get_scale() == oracles[0].scaler.get_scale()
        agreeing = options.get("process_set", hvd.global_process_set)
        if agreeing.included():
            assert_ranks_agree(model, agreeing)


def run(worlds, script):
    for world in worlds:
        for word in script.split():
            getattr(optimizer_events, word)(world)


def combine(worlds, before):
    """Each world has taken a local step: have all of them take the combined one."""
    with torch.no_grad():
        for start, *params in zip(
            before.parameters(), *(w.model.parameters() for w in worlds), strict=True
        ):
            move = torch.from_numpy(combined([(param - start).numpy() for param in params]))
            for param in params:
                param.copy_(start + move)


@contextlib.contextmanager
def in_set(options):
    """The options with a process set in place of its ranks, and the ranks that train with this one."""
    members = list(options.get("process_set", range(SIZE)))
    if len(members) == SIZE or not members:
        yield {name: options[name] for name in options if name != "process_set"}, list(range(SIZE))
        return
    chosen = hvd.add_process_set(members)
    try:
        yield {**options, "process_set": chosen}, members if chosen.included() else [RANK]
    finally:
        hvd.remove_process_set(chosen)
