"""Helpers of `horovod.common` that all adapters export: averages of metrics, calls on rank 0."""

import math

import numpy as np
import pytest

import horovod.numpy as hvd

hvd.init()
SIZE, RANK = hvd.size(), hvd.rank()


def test_metrics_are_averaged_and_equal_everywhere():
    averages = hvd.average_metrics({"loss": RANK + 0.5, "one": np.float32(1), "array": np.ones(1)})
    assert averages == {"loss": (SIZE - 1) / 2 + 0.5, "one": 1.0, "array": 1.0}
    assert hvd.allgather_object(averages) == [averages] * SIZE


def test_weights_count():
    # As many samples as the rank's number: rank 0 has none, and its value is not used.
    value = math.nan if RANK == 0 else float(RANK)
    if SIZE == 1:
        with pytest.raises(ValueError, match="weight is 0 on all ranks"):
            hvd.average_metrics({"x": value}, weight=RANK)
        return
    ranks = range(SIZE)
    want = sum(rank * rank for rank in ranks) / sum(ranks)
    assert hvd.average_metrics({"x": value}, weight=RANK)["x"] == pytest.approx(want, rel=1e-12)


def test_of_a_process_set():
    if SIZE < 2:
        pytest.skip("needs two ranks")
    hvd.shutdown()
    pair = hvd.ProcessSet([0, SIZE - 1])
    hvd.init(process_sets=[pair])
    if pair.included():
        averages = hvd.average_metrics({"x": RANK}, process_set=pair)
        assert averages == {"x": (SIZE - 1) / 2}
        wrong = {"x": 1} if RANK == 0 else {}
        with pytest.raises(ValueError, match=rf"rank {SIZE - 1} has the metrics \[\], rank 0 has"):
            hvd.average_metrics(wrong, process_set=pair)
    hvd.barrier()
    hvd.shutdown()
    hvd.init()


@pytest.mark.parametrize(
    ("metrics", "weight", "text"),
    [
        ({"x": "fast"}, 1, "has no number for 'x', but str"),
        ({"x": np.ones(2)}, 1, "has no number for 'x', but ndarray"),
        ({"x": 10**400}, 1, "has no number for 'x', but int"),
        ([1.0], 1, "has list for its metrics"),
        ({"x": 1}, -1, "has the weight -1"),
        ({"x": 1}, math.inf, "has the weight inf"),
        ({"x": 1}, None, "has no number as its weight"),
    ],
)
def test_a_mistake_of_one_rank_is_an_error_on_all(metrics, weight, text):
    last = SIZE - 1
    mine = (metrics, weight) if last == RANK else ({"x": 1}, 1)
    with pytest.raises(ValueError, match=rf"^average_metrics: rank {last} {text}"):
        hvd.average_metrics(*mine)


def test_a_function_runs_on_rank_0_only():
    calls = []

    @hvd.on_rank_zero
    def save(value, *, factor):
        """Save."""
        calls.append(value)
        return value * factor

    assert save(3, factor=2) == (6 if RANK == 0 else None)
    assert calls == ([3] if RANK == 0 else [])
    assert (save.__name__, save.__doc__) == ("save", "Save.")
