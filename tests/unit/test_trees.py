"""Nested state, rebuilt beside another tree."""

from __future__ import annotations

from collections import Counter, OrderedDict

import pytest

from horovod.common._trees import rebuilt


def seen(tree, other, path=""):
    """Every leaf with its counterpart and path, and the tree of the paths."""
    leaves = []

    def leaf(value, beside, where):
        leaves.append((value, beside, where))
        return where

    return leaves, rebuilt(tree, other, leaf, path)


def test_paths_are_keys_and_positions():
    tree = {"a": [1, (2, None)], 3: {"b": "text"}}
    leaves, paths = seen(tree, None)
    assert [(value, where) for value, _, where in leaves] == [
        (1, "a.0"),
        (2, "a.1.0"),
        (None, "a.1.1"),
        ("text", "3.b"),
    ]
    assert paths == {"a": ["a.0", ("a.1.0", "a.1.1")], 3: {"b": "3.b"}}
    assert seen(5, None, "top") == ([(5, None, "top")], "top")
    assert tree == {"a": [1, (2, None)], 3: {"b": "text"}}


@pytest.mark.parametrize(
    ("tree", "other", "beside"),
    [
        ([1, 2], [3, 4], [3, 4]),
        ([1, 2], [3], [None, None]),
        ([1, 2], (3, 4), [None, None]),
        ({"a": 1, "b": 2}, {"b": 3, "c": 4}, [None, 3]),
        ({"a": 1}, [1], [None]),
        ({"a": {"b": 1}}, {"a": 5}, [None]),
        (OrderedDict(a=1), {"a": 2}, [2]),
    ],
)
def test_a_counterpart_is_at_the_same_place_or_none(tree, other, beside):
    leaves, _ = seen(tree, other)
    assert [counterpart for _, counterpart, _ in leaves] == beside


def test_ordered_dicts_keep_their_attributes_and_other_classes_are_leaves():
    tree = OrderedDict(weight=1)
    tree._metadata = {"version": 2}
    _, result = seen(tree, None)
    assert type(result) is OrderedDict
    assert result._metadata == {"version": 2}
    assert seen(Counter(a=1), None)[0] == [(Counter(a=1), None, "")]
