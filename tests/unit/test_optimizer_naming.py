"""Names and groups of gradients, without any peer."""

from __future__ import annotations

import pytest
import torch

from horovod.torch._optimizer_wrapping import names_on_the_wire
from horovod.torch.optimizer import _even_parts


def optimizer(*sizes: int) -> torch.optim.Optimizer:
    groups = [{"params": [torch.nn.Parameter(torch.zeros(1)) for _ in range(n)]} for n in sizes]
    return torch.optim.SGD(groups, lr=0.1)


def test_default_names_tell_group_and_position():
    names, given = names_on_the_wire(optimizer(2, 1), None)
    assert names == (
        ("allreduce.noname.0.0", "allreduce.noname.0.1"),
        ("allreduce.noname.1.0",),
    )
    assert given == {}


def test_prefixes_of_compiled_modules_are_dropped():
    opt = optimizer(2)
    first, second = opt.param_groups[0]["params"]
    names, _ = names_on_the_wire(opt, [("_orig_mod.a", first), ("block._orig_mod.b", second)])
    assert names == (("a", "block.b"),)


def test_of_two_names_the_last_in_order_counts():
    opt = optimizer(1)
    (param,) = opt.param_groups[0]["params"]
    names, _ = names_on_the_wire(opt, [("z", param), ("a", param)])
    assert names == (("z",),)


@pytest.mark.parametrize(
    ("count", "parts"),
    [
        (1, ["abcde"]),
        (2, ["abc", "de"]),
        (3, ["ab", "cd", "e"]),
        (7, ["a", "b", "c", "d", "e", "", ""]),
    ],
)
def test_groups_are_contiguous_and_the_first_are_longer(count, parts):
    assert list(_even_parts("abcde", count)) == parts
