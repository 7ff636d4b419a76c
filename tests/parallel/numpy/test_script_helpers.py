"""Helpers of `horovod.common` that all adapters export: metrics, NaN, norms, logs, calls on rank 0."""

import logging
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
    if SIZE < 3:
        pytest.skip("needs three ranks: a set of all ranks is no other one")
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


def test_finite_values_pass():
    values = {"loss": 0.5, "rows": [np.ones(3), None], "count": 3, "name": np.array(["a"])}
    hvd.check_finite(values)


def test_what_is_not_finite_on_one_rank_is_an_error_on_all():
    array = np.ones((2, 3), np.float16)
    if RANK == SIZE - 1:
        array[0] = [math.nan, math.inf, -math.inf]
    text = rf"^loss: rank {SIZE - 1}: 'layers\.1\.w' has 1 NaN and 2 infinite of 6 values\.$"
    with pytest.raises(FloatingPointError, match=text):
        hvd.check_finite({"layers": [0.0, {"w": array}]}, "loss")


def test_every_rank_and_eight_tensors_of_each_are_named():
    with pytest.raises(FloatingPointError) as raised:
        hvd.check_finite([(f"t{i}", math.nan) for i in range(10)])
    for rank in range(SIZE):
        assert f"rank {rank}: 't0' has 1 NaN" in str(raised.value)
    assert str(raised.value).count("2 more") == SIZE
    assert "t8" not in str(raised.value)


def test_norm_of_replicated_and_divided_gradients():
    # Large values, which overflow as squares of 16 bits.
    gradients = {"a": np.full(4, 300, np.float16), "b": [np.float32(800), None]}
    assert hvd.global_gradient_norm(gradients) == 1000
    own = np.full(1, 1000 * math.sqrt(3 / SIZE))
    assert hvd.global_gradient_norm(gradients, sharded=iter([own])) == pytest.approx(2000)
    assert math.isnan(hvd.global_gradient_norm(np.array([1, math.nan])))


def test_a_logger_knows_the_rank(caplog):
    log = hvd.rank_logger("of.a.script")
    with caplog.at_level(logging.INFO, "of.a.script"):
        log.info("epoch %d", 3)
        log.warning("late")
        hvd.rank_logger("of.a.script", everywhere=logging.INFO).info("all")
        log.debug("nobody")
    first = [f"rank {RANK}: epoch 3"] if RANK == 0 else []
    assert caplog.messages == [*first, f"rank {RANK}: late", f"rank {RANK}: all"]
