"""How differences between replicas are named: sides, majorities, runs of ranks."""

import pytest

from horovod.common.consistency import Difference, _differences, describe


def differences(*rows):
    return _differences(["a", "b"], list(enumerate(rows)))


def test_equal_rows_differ_in_nothing():
    assert differences((1, 2), (1, 2), (1, 2)) == []


@pytest.mark.parametrize(
    ("sums", "ranks", "text"),
    [
        ((1, 1, 2, 1), (2,), "'b' on rank 2 differs from ranks 0-1, 3 (the majority)"),
        ((1, 2, 2, 2, 3), (0, 4), "'b' on ranks 0, 4 differs from ranks 1-3 (the majority)"),
        ((1, 2), (0, 1), "'b' differs between rank 0, rank 1 (no majority)"),
        ((1, 1, 2, 2), (0, 1, 2, 3), "'b' differs between ranks 0-1, ranks 2-3 (no majority)"),
    ],
)
def test_who_differs_from_whom(sums, ranks, text):
    (difference,) = differences(*((7, number) for number in sums))
    assert difference.name == "b"
    assert difference.ranks == ranks
    assert str(difference) == text


def test_few_of_many_are_listed():
    many = [Difference(f"layer{i}", ((0,), (1,))) for i in range(50)]
    text = describe(many, 60, " after step 7")
    assert "after step 7" in text
    assert "'layer3'" in text
    assert "'layer4'" not in text
    assert "50 of 60 tensors differ" in text
