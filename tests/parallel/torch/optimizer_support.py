"""Common to the optimizer tests: small models, data that every rank knows, training in one process to compare."""

import copy

import torch

import horovod.torch as hvd

BATCH = 3
INPUTS, OUTPUTS = 5, 2


def small_model(seed=1, dtype=torch.float64):
    """The same model on every rank: two layers and a bit of everything that has parameters."""
    torch.manual_seed(seed)
    model = torch.nn.Sequential(
        torch.nn.Linear(INPUTS, 7),
        torch.nn.LayerNorm(7),
        torch.nn.Tanh(),
        torch.nn.Linear(7, OUTPUTS, bias=False),
    )
    return model.to(dtype)


class Forked(torch.nn.Module):
    """Two branches behind one trunk, of which a call may use either, both or none."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(5)
        self.trunk = torch.nn.Linear(5, 4).double()
        self.left = torch.nn.Linear(4, 2).double()
        self.right = torch.nn.Linear(4, 2).double()
        self.idle = torch.nn.Linear(4, 2).double()

    def forward(self, x, left=True, right=True):
        hidden = self.trunk(x).tanh()
        total = hidden.sum(1, keepdim=True)
        if left:
            total = total + self.left(hidden)
        if right:
            total = total + self.right(hidden)
        return total


def batches(steps, count=None, dtype=torch.float64, seed=0):
    """Per step the global batch: `count` (all ranks) times BATCH rows of inputs and targets."""
    count = hvd.size() if count is None else count
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        x = torch.randn(count * BATCH, INPUTS, generator=generator, dtype=torch.float64)
        y = torch.randn(count * BATCH, OUTPUTS, generator=generator, dtype=torch.float64)
        yield x.to(dtype), y.to(dtype)


def mine(tensor, index=None):
    """This rank's rows of a global batch."""
    index = hvd.rank() if index is None else index
    return tensor[index * BATCH : (index + 1) * BATCH]


def mse(model, x, y):
    return (model(x) - y).pow(2).mean()


def train_alone(model, make_optimizer, data, between=lambda model: None):
    """Train a copy of `model` in one process with the plain optimizer on whole batches."""
    model = copy.deepcopy(model)
    optimizer = make_optimizer(model.parameters())
    for x, y in data:
        optimizer.zero_grad()
        mse(model, x, y).backward()
        between(model)
        optimizer.step()
    return model


def assert_same_weights(model, expected, tolerance=1e-12):
    for (name, got), want in zip(model.named_parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(
            got, want, rtol=tolerance, atol=tolerance, msg=lambda m, n=name: f"{n}: {m}"
        )


def assert_ranks_agree(model, process_set=hvd.global_process_set):
    """All ranks hold bitwise the same parameters."""
    flat = torch.cat([p.detach().double().flatten() for p in model.parameters()])
    rows = hvd.allgather(flat.unsqueeze(0), process_set=process_set)
    for row in rows:
        assert torch.equal(row, flat)


def adasum(a, b):
    """Two moves become one: parallel ones are averaged, orthogonal ones are added."""
    dot, aa, bb = float((a * b).sum()), float((a * a).sum()), float((b * b).sum())
    left = 1 - dot / (2 * aa) if aa > 0 else 1.0
    right = 1 - dot / (2 * bb) if bb > 0 else 1.0
    return left * a + right * b


def combined(moves):
    """The Adasum of all moves: of neighbours, then of pairs; by `allreduce` if their number is no power of two."""
    if len(moves) & (len(moves) - 1):
        own = torch.from_numpy(moves[hvd.rank()].copy())
        return hvd.allreduce(own, op=hvd.Adasum, name="reference").numpy()
    while len(moves) > 1:
        moves = [adasum(moves[i], moves[i + 1]) for i in range(0, len(moves), 2)]
    return moves[0]
