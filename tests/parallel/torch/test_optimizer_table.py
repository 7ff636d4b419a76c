"""Training with DistributedOptimizer equals training in one process on everybody's data: a table of options and of
what a script does between two steps.

Every row is carried out twice from the same weights: by the ranks, each with its own rows of a batch and the
distributed optimizer, and by an oracle, one process with the plain optimizer that runs the backward passes of all
ranks. Weights are compared after each step, and between ranks bit by bit at the end.
"""

import contextlib
import copy

import pytest
import torch
from optimizer_models import (
    FORKED,
    OPTIMIZERS,
    Words,
    autocast_loss,
    branch_of_a_rank,
    branches_in_turn,
    checkpointed,
    convolutions,
    float32,
    four_layers,
    gradients_are_channels_last,
    half_checkpointed,
    images,
    layers_in_turn,
    layers_loss,
    loss_of_one_model,
    makers,
    mean_square,
    parts_of,
    penalised,
    plain_and_checkpointed,
    table_is_sparse,
    two_layers,
    two_models,
    used_twice,
    words,
    words_loss,
)
from optimizer_support import assert_ranks_agree, assert_same_weights, small_model
from optimizer_worlds import (
    Row,
    World,
    add_group,
    ascend,
    at,
    autograd_grad,
    backward,
    clip,
    descend,
    each,
    failing_backward,
    freeze,
    gradients_agree,
    hook_of_the_user,
    other_collective,
    over,
    rewrite_rate,
    scaled_backward,
    scaler_step,
    set_one_pass,
    step,
    synchronize,
    times,
    unscale,
    with_options,
    without_sync,
    without_synchronizing,
    zero,
    zero_in_place,
    zero_model,
    zero_model_in_place,
)

import horovod.torch as hvd

hvd.init()
SIZE, RANK = hvd.size(), hvd.rank()
FP16 = {"compression": hvd.Compression.fp16}
# Each gradient leaves at once.
AT_ONCE = (("horovod.torch._gradient_sending._HAND_OVER_BYTES", 1),)
LATE = (("horovod.torch._gradient_sending._HAND_OVER_BYTES", 1 << 20),)


@pytest.fixture(autouse=True, scope="module")
def _dynamic_sets(_job):
    """The other files of this job began it without."""
    hvd.shutdown()
    hvd.init(process_sets="dynamic")
    yield
    hvd.shutdown()


def overflow_at_one_rank(step, rank):
    return step == 1 and rank == SIZE - 1


GROUPS = with_options({}, {"groups": 2})
PASSES = (zero, backward(0, 1 / 3), backward(1, 1 / 3), backward(2, 1 / 3), step)
SCALERS = ("SGD", "AdamW", "AdamW_fused")

ROWS = [
    # ---- one pass per step
    *each("gradients are averaged", over("named", True, False)),
    *each("every optimizer", makers(), tolerance=1e-9, steps=4),
    *each(
        "options",
        with_options(
            {"op": hvd.Sum},
            {"gradient_predivide_factor": 4.0},
            {"gradient_predivide_factor": 4.0, "groups": 2},
            *({"groups": groups} for groups in (1, 2, 3, 50)),
        ),
    ),
    *each("half as many bytes", GROUPS, options=FP16, tolerance=5e-3),
    Row("a module used twice", model=used_twice),
    Row("built under no_grad", wrapping=torch.no_grad),
    Row("ranks name parameters in other orders", params=parts_of, options={"groups": 2}),
    Row("waiting in the step only", wait=False),
    Row(
        "the rate is rewritten",
        (zero, backward(), rewrite_rate, step),
        make=OPTIMIZERS["Adam"],
        tolerance=1e-9,
    ),
    Row(
        "channels last",
        (zero, backward(), gradients_are_channels_last, step),
        model=convolutions,
        batch=images,
        loss=mean_square,
    ),
    *each(
        "half parameters",
        {
            str(d): {"model": lambda d=d: small_model(dtype=d)}
            for d in (torch.bfloat16, torch.float16)
        },
        tolerance=5e-2,
    ),
    Row("autocast", model=float32, loss=autocast_loss, tolerance=5e-2),
    *each(
        "a part checkpointed",
        {f"reentrant={r}": {"loss": half_checkpointed(r)} for r in (False, True)},
    ),
    Row("all layers checkpointed", loss=checkpointed(0, 1, 3)),
    *each(
        "checkpointed and plain",
        times(
            {
                word: {"loss": plain_and_checkpointed(word == "plain first")}
                for word in ("plain first", "checkpoint first")
            },
            with_options({}, {"groups": 1}, {"op": hvd.Sum}),
        ),
        model=two_layers,
        patches=AT_ONCE,
    ),
    Row("a gradient penalty", (zero, backward(), clip, step), loss=penalised, tolerance=1e-10),
    Row(
        "a model cast after wrapping",
        (zero, backward(), clip, step),
        model=float32,
        after=(lambda world: world.model.double(),),
    ),
    # ---- between backward and step
    *each("clipping", with_options({}, {"groups": 2}), events=(zero, backward(), clip, step)),
    Row(
        "clipping half as many bytes", (zero, backward(), clip, step), options=FP16, tolerance=1e-3
    ),
    Row(
        "clipping after synchronize",
        (zero, backward(), synchronize, clip, without_synchronizing(step)),
    ),
    Row(
        "skip_synchronize nested and held open",
        (
            without_synchronizing(
                lambda world: [
                    act(world)
                    for act in (zero, backward(), synchronize, clip, without_synchronizing(step))
                ]
            ),
        ),
    ),
    Row(
        "clipping with a torch that does not tell when a pass ends",
        (zero, backward(), clip, step),
        before=(freeze(1),),
        patches=(("horovod.torch._gradient_reducer.queue_callback", None),),
    ),
    Row("autograd.grad in between", (zero, backward(), autograd_grad, step)),
    Row(
        "sharpness-aware minimisation",
        (backward(), ascend, zero, backward(), descend, step, zero),
        tolerance=1e-9,
    ),
    # ---- hooks of the user
    *each(
        "a hook of the user",
        {
            "before wrapping": {
                "before": (hook_of_the_user,),
                "local_factor": lambda rank: rank + 1,
            },
            "after wrapping": {"after": (hook_of_the_user,), "local_factor": lambda rank: rank + 1},
            "both": {
                "before": (hook_of_the_user,),
                "after": (hook_of_the_user,),
                "local_factor": lambda rank: (rank + 1) ** 2,
            },
            "groups": {
                "after": (hook_of_the_user,),
                "local_factor": lambda rank: rank + 1,
                "options": {"groups": 2},
            },
            "fp16": {
                "after": (hook_of_the_user,),
                "local_factor": lambda rank: rank + 1,
                "options": FP16,
                "tolerance": 1e-1,
            },
        },
        patches=AT_ONCE,
    ),
    # ---- several passes per step
    *each(
        "accumulation",
        times(
            with_options({"backward_passes_per_step": 2}, {"backward_passes_per_step": 3}), GROUPS
        ),
        events=(zero, backward(0, 0.5), backward(1, 0.5), step),
    ),
    Row("an early step", options={"backward_passes_per_step": 4}),
    Row(
        "passes set after wrapping",
        (zero, backward(), gradients_agree, step),
        options={"backward_passes_per_step": 4},
        after=(set_one_pass,),
    ),
    Row(
        "clipping what was accumulated",
        (zero, backward(0), backward(1), clip, step),
        options={"backward_passes_per_step": 2},
        make=OPTIMIZERS["Adam"],
        tolerance=1e-9,
    ),
    Row("no_sync", (zero, without_sync(backward(0)), backward(1), step)),
    Row(
        "a pass for each of two models",
        (zero, backward(0), backward(1), step),
        model=two_models,
        loss=loss_of_one_model,
        use=lambda world, number, rank: number,
    ),
    *each(
        "several passes add up",
        times(
            with_options(
                {},
                {"groups": 2},
                {"backward_passes_per_step": 2},
                {"op": hvd.Sum},
                {"op": hvd.Sum, "groups": 2, "backward_passes_per_step": 2},
                {"gradient_predivide_factor": 2.0},
            ),
            over("wait", True, False),
        ),
        events=PASSES,
    ),
    *each(
        "passes that reach other parameters each",
        times(with_options({}, {"groups": 1}, {"groups": 2}), over("wait", True, False)),
        events=(zero, backward(0), backward(1), backward(2), step),
        model=four_layers,
        loss=layers_loss,
        use=layers_in_turn,
        options={"zero_missing_gradients": False},
        patches=AT_ONCE,
    ),
    *each(
        "a pass that only rank 0 ran, at an early step",
        over("wait", True, False),
        events=(zero, backward(times=lambda rank: 2 if rank == 0 else 1), step),
        options={"backward_passes_per_step": 3},
    ),
    *each(
        "passes that only rank 0 ran, without waiting in backward",
        GROUPS,
        events=(zero, backward(times=lambda rank: 3 if rank == 0 else 1), step),
        wait=False,
    ),
    # ---- passes that are thrown away
    *each(
        "a batch is skipped",
        {
            "": {},
            "without waiting": {"wait": False},
            "groups": {"options": {"groups": 2}},
        },
        events=(zero, backward(0, 5.0), zero, backward(0, 7.0), zero, backward(), step),
    ),
    *each(
        "a batch is skipped by the model",
        {"": {}, "without waiting": {"wait": False}, "sum": {"options": {"op": hvd.Sum}}},
        events=(
            zero_model,
            backward(0, 5.0),
            zero_model,
            backward(0, 7.0),
            zero_model,
            backward(),
            step,
        ),
    ),
    *each(
        "a batch is skipped by the model in place",
        with_options({}, {"op": hvd.Sum}),
        events=(
            zero_model_in_place,
            backward(0, 5.0),
            zero_model_in_place,
            backward(0, 7.0),
            zero_model_in_place,
            backward(),
            step,
        ),
    ),
    Row(
        "zero_grad in the middle of an accumulation",
        (zero, backward(0), zero, backward(1), backward(2), step),
        options={"backward_passes_per_step": 2},
    ),
    *each(
        "backward fails half way",
        times(
            {
                word: {"events": (clear, failing_backward, clear, backward(), clip, step)}
                for word, clear in (
                    ("zeroed by the optimizer", zero),
                    ("zeroed by the model", zero_model),
                )
            },
            {
                "at once": {"patches": AT_ONCE},
                "late": {"patches": LATE},
                "groups": {"patches": AT_ONCE, "options": {"groups": 2}},
            },
        ),
    ),
    # ---- parameters that only some ranks use, or nobody
    Row(
        "clipping with branches of some ranks",
        (zero, backward(), clip, step),
        use=branch_of_a_rank,
        **FORKED,
    ),
    *each(
        "branches in turn",
        with_options({}, {"groups": 1}, {"groups": 2}, {"groups": 3}),
        use=branches_in_turn,
        steps=4,
        **FORKED,
    ),
    *each(
        "branches in turn, two passes",
        with_options(
            *(
                {"backward_passes_per_step": 2, **g}
                for g in ({}, {"groups": 1}, {"groups": 2}, {"groups": 3})
            )
        ),
        events=(zero, backward(0), backward(1), step),
        use=branches_in_turn,
        steps=4,
        **FORKED,
    ),
    Row(
        "another collective while branches are unused",
        (zero, backward(), other_collective, step),
        use=lambda world, number, rank: {"left": rank == 0},
        **{**FORKED, "options": {}},
    ),
    Row(
        "zeroed instead of none",
        (zero_in_place, backward(), clip, step),
        use=branch_of_a_rank,
        **{**FORKED, "options": {}},
    ),
    # ---- freezing, thawing, new groups
    Row(
        "thawed after wrapping",
        (zero, at(2, freeze(0, thaw=True)), backward(), clip, step),
        before=(freeze(0),),
        steps=4,
    ),
    *each("frozen after wrapping", GROUPS, after=(freeze(3),)),
    *each(
        "a group added after wrapping",
        times(
            over("named", True, False),
            {
                to: {"events": (at(1, add_group(to)), zero, backward(), clip, step)}
                for to in ("optimizer", "original")
            },
        ),
        before=(freeze(3),),
        params=lambda model: model[:2].parameters(),
        steps=4,
    ),
    # ---- loss scaling
    *each(
        "infinity on one rank",
        times(
            makers(*SCALERS),
            {
                f"{word}, zeroed by the {whose}": {
                    "events": (clear, scaled_backward(overflow_at_one_rank), *between, scaler_step)
                }
                for word, between in (("unscaled", (unscale, clip)), ("not unscaled", ()))
                for whose, clear in (("optimizer", zero), ("model", zero_model))
            },
        ),
        model=float32,
        steps=4,
        tolerance=1e-4,
    ),
    Row(
        "scaled and clipped",
        (zero, scaled_backward(), unscale, clip, scaler_step),
        model=float32,
        steps=4,
        tolerance=1e-5,
    ),
    Row(
        "scaled as the MNIST example writes it",
        (zero, scaled_backward(), synchronize, unscale, without_synchronizing(scaler_step)),
        model=float32,
        tolerance=1e-5,
    ),
    # ---- sparse gradients: rank 0 alone looks into the second table
    *each(
        "sparse embeddings",
        times(
            with_options({"sparse_as_dense": False}, {"sparse_as_dense": True}),
            {"": {"tolerance": 1e-12}, "fp16": {"options": FP16, "tolerance": 1e-2}},
            with_options({}, {"groups": 1}),
        ),
        events=(zero, backward(), table_is_sparse, step),
        model=Words,
        make=lambda params: torch.optim.SGD(params, lr=0.5),
        batch=words,
        loss=words_loss,
        use=lambda world, number, rank: rank == 0,
        options={"zero_missing_gradients": False},
    ),
    Row(
        "sparse gradients of several passes",
        (zero, backward(0), backward(1, 2.0), step),
        model=Words,
        make=lambda params: torch.optim.SGD(params, lr=0.5),
        batch=words,
        loss=words_loss,
        use=lambda world, number, rank: True,
    ),
    # ---- without rank 0 where there are enough ranks; the others train on their own data
    *each(
        "a process set",
        GROUPS,
        events=(zero, backward(), clip, step),
        options={"process_set": range(1, SIZE)},
    ),
]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_training_equals_that_of_one_process(row, monkeypatch):
    for target, value in row.patches:
        monkeypatch.setattr(target, value)
    with in_set(row.options) as (options, ranks):
        model = row.model()
        oracle = World(row, copy.deepcopy(model), ranks, is_oracle=True)
        world = World(row, model, [RANK], is_oracle=False)
        both = (world, oracle)
        run(both, row.before)
        world.distribute(options)
        run(both, row.after)
        for number in range(row.steps):
            world.step = oracle.step = number
            run(both, row.events)
            assert_same_weights(model, oracle.model, row.tolerance)
            assert world.scaler.get_scale() == oracle.scaler.get_scale()
        agreeing = options.get("process_set", hvd.global_process_set)
        if agreeing.included():
            assert_ranks_agree(model, agreeing)


def run(worlds, events):
    for world in worlds:
        for event in events:
            event(world)


@contextlib.contextmanager
def in_set(options):
    """The options with a process set in place of its ranks, and the ranks that train with this one."""
    members = list(options.get("process_set", range(SIZE)))
    if len(members) == SIZE or not members:
        yield (
            {name: value for name, value in options.items() if name != "process_set"},
            list(range(SIZE)),
        )
        return
    chosen = hvd.add_process_set(members)
    try:
        yield {**options, "process_set": chosen}, members if chosen.included() else [RANK]
    finally:
        hvd.remove_process_set(chosen)
