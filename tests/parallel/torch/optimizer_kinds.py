"""The optimizers and models of `test_optimizer_table.py`, their losses, and the parts of a model that a rank uses."""

import torch
from optimizer_support import Forked, mse, small_model
from torch.utils.checkpoint import checkpoint

import horovod.torch as hvd


def float32():
    return small_model(dtype=torch.float32)


OPTIMIZERS = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, nesterov=True),
    "Adam": lambda p: torch.optim.Adam(p, lr=0.01),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.01),
    "AdamW_foreach": lambda p: torch.optim.AdamW(p, lr=0.01, foreach=True),
    "AdamW_fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.01),
    "Adadelta": lambda p: torch.optim.Adadelta(p),
    "Adamax": lambda p: torch.optim.Adamax(p),
    "NAdam": lambda p: torch.optim.NAdam(p),
    "RAdam": lambda p: torch.optim.RAdam(p),
    "RMSprop": lambda p: torch.optim.RMSprop(p, momentum=0.5, centered=True),
    "ASGD": lambda p: torch.optim.ASGD(p),
}


# Models of which each rank uses some parts, and the choice of these parts.


def forked_loss(model, x, y, use):
    return model(x, **use).pow(2).mean()


def branches_in_turn(world, number, rank):
    return {"left": (world.step + rank) % 2 == 0, "right": (number + rank) % 3 == 0}


def branch_of_a_rank(world, number, rank):
    """Nobody uses the idle one."""
    return {"left": rank % 2 == 0, "right": rank % 2 == 1}


def four_layers():
    torch.manual_seed(0)
    return torch.nn.ModuleList(torch.nn.Linear(5, 2) for _ in range(4)).double()


def layers_in_turn(world, number, rank):
    """Rank r uses layer r in one pass, all in the next, layer r + 1 in the last."""
    return [[rank % 4], range(4), [(rank + 1) % 4]][number]


def layers_loss(model, x, y, use):
    return sum(model[layer](x).pow(2).mean() for layer in use)


def two_models():
    return torch.nn.ModuleList([small_model(), small_model(2)])


def loss_of_one_model(model, x, y, use):
    return mse(model[use], x, y)


def used_twice():
    torch.manual_seed(4)
    square = torch.nn.Linear(5, 5).double()
    return torch.nn.Sequential(square, square, small_model())


def convolutions():
    torch.manual_seed(3)
    layers = torch.nn.Conv2d(3, 4, 3), torch.nn.ReLU(), torch.nn.Conv2d(4, 2, 3)
    return torch.nn.Sequential(*layers).double().to(memory_format=torch.channels_last)


def images(model, seed):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(3 * hvd.size(), 3, 8, 8, generator=generator, dtype=torch.float64)
    return x.to(memory_format=torch.channels_last), x


def mean_square(model, x, y, use):
    return model(x).pow(2).mean()


def autocast_loss(model, x, y, use):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return mse(model, x, y)


def checkpointed(*bounds, reentrant=True):
    """A loss whose model is cut into parts, all but the last of which are computed again in backward."""

    def loss(model, x, y, use):
        out = x.clone().requires_grad_()
        for begin, end in zip((0, *bounds), bounds, strict=False):
            out = checkpoint(model[begin:end], out, use_reentrant=reentrant)
        return (model[bounds[-1] :](out) - y).pow(2).mean()

    return loss


def two_layers():
    torch.manual_seed(0)
    return torch.nn.ModuleList([torch.nn.Linear(5, 5), torch.nn.Linear(5, 2)]).double()


def plain_and_checkpointed(plain_first):
    """Parameters get several gradients within one pass, some in a pass inside the pass."""

    def loss(model, x, y, use):
        def again(rows):
            return checkpoint(model[0], rows, use_reentrant=True).tanh()

        def plain(rows):
            return model[0](rows).tanh()

        parts = [plain, again, again]
        for part in parts if plain_first else parts[::-1]:
            x = part(x if x.requires_grad else x.clone().requires_grad_())
        return (model[1](x) - y).pow(2).mean()

    return loss


def penalised(model, x, y, use):
    """torch.autograd.grad runs tensor hooks but accumulates nothing."""
    loss = mse(model, x, y)
    grads = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
    single = torch.autograd.grad(loss, model[0].weight, create_graph=True)[0]
    return loss + sum(g.pow(2).sum() for g in grads) * 0.1 + single.sum() * 0.01


class Words(torch.nn.Module):
    """Two tables with sparse gradients."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(7)
        self.table = torch.nn.Embedding(11, 4, sparse=True).double()
        self.spare = torch.nn.Embedding(11, 4, sparse=True).double()
        self.out = torch.nn.Linear(4, 1).double()

    def forward(self, words, spare):
        found = self.table(words).mean(1)
        return self.out(found + self.spare(words).sum(1) if spare else found)


def words(model, seed):
    found = torch.randint(0, 11, (hvd.size() * 3, 6), generator=torch.Generator().manual_seed(seed))
    return found, found


def words_loss(model, x, y, use):
    return model(x, spare=use).pow(2).mean()


def parts_of(model):
    """Each rank names its parameters in an order of its own."""
    params = list(model.parameters())
    return params[hvd.rank() :] + params[: hvd.rank()]


def usual_sgd(params):
    return torch.optim.SGD(params, lr=0.1, momentum=0.9, weight_decay=0.01)


FORKED = {"model": Forked, "loss": forked_loss}
WORDS = {
    "model": Words,
    "batch": words,
    "loss": words_loss,
    "make": lambda params: torch.optim.SGD(params, lr=0.5),
}

KINDS = {
    "small": {},
    "float32": {"model": float32},
    "bfloat16": {"model": lambda: small_model(dtype=torch.bfloat16), "tolerance": 5e-2},
    "float16": {"model": lambda: small_model(dtype=torch.float16), "tolerance": 5e-2},
    "autocast": {"model": float32, "loss": autocast_loss, "tolerance": 5e-2},
    "used twice": {"model": used_twice},
    "two models": {
        "model": two_models,
        "loss": loss_of_one_model,
        "use": lambda _, number, rank: number,
    },
    "channels last": {"model": convolutions, "batch": images, "loss": mean_square},
    "checkpointed": {"loss": checkpointed(2, reentrant=False)},
    "checkpointed, reentrant": {"loss": checkpointed(2)},
    "checkpointed in parts": {"loss": checkpointed(1, 3, 4)},
    "plain, then checkpointed": {"model": two_layers, "loss": plain_and_checkpointed(True)},
    "checkpointed, then plain": {"model": two_layers, "loss": plain_and_checkpointed(False)},
    "penalised": {"loss": penalised, "tolerance": 1e-10},
    "layers in turn": {"model": four_layers, "loss": layers_loss, "use": layers_in_turn},
    "branch of a rank": {**FORKED, "use": branch_of_a_rank},
    "branch of rank 0": {**FORKED, "use": lambda world, number, rank: {"left": rank == 0}},
    "branches in turn": {**FORKED, "use": branches_in_turn},
    "words": {**WORDS, "use": lambda world, number, rank: True},
    "words of rank 0": {**WORDS, "use": lambda world, number, rank: rank == 0},
    "parameters in turn": {"params": parts_of},
    "without the last layer": {"params": lambda model: model[:2].parameters()},
    **{name: {"make": make, "tolerance": 1e-9} for name, make in OPTIMIZERS.items()},
}
