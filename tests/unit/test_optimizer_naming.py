"""Names and groups of gradients, without any peer."""

from __future__ import annotations

from horovod.common._optimizer_settings import names_on_the_wire


def parameters(*sizes: int) -> list[list[object]]:
    return [[object() for _ in range(n)] for n in sizes]


def test_default_names_tell_group_and_position():
    names, given = names_on_the_wire(parameters(2, 1), None)
    assert names == (
        ("allreduce.noname.0.0", "allreduce.noname.0.1"),
        ("allreduce.noname.1.0",),
    )
    assert given == {}


def test_prefixes_of_compiled_modules_are_dropped():
    groups = parameters(2)
    [[first, second]] = groups
    names, _ = names_on_the_wire(groups, [("_orig_mod.a", first), ("block._orig_mod.b", second)])
    assert names == (("a", "block.b"),)


def test_of_two_names_the_last_in_order_counts():
    groups = parameters(1)
    [[param]] = groups
    names, _ = names_on_the_wire(groups, [("z", param), ("a", param)])
    assert names == (("z",),)
