"""The published numbers: the fit finds the constants, the step overlaps, and the page shows errors on other points."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

BENCH = Path(__file__).resolve().parents[2] / "bench"


@pytest.fixture(autouse=True)
def _bench_modules(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCH))
    # bench/hosts.py adds its folders.
    monkeypatch.setattr(sys, "path", list(sys.path))


def points(plane: Any, *hosts: int) -> list[Any]:
    from data_plane import Point

    rates, sizes = (1e8, 4e8, 1e10), (1 << 18, 1 << 22)
    return [
        Point(h, rate, size, plane.seconds(h, rate, size))
        for h in hosts
        for rate in rates
        for size in sizes
    ]


def test_the_fit_finds_the_constants_of_its_points():
    from data_plane import DataPlane, fit

    plane = DataPlane(start_s=2e-4, host_s=1e-4, wire=1.05, fill_bytes=60_000)
    found = fit(points(plane, 2, 3))
    assert (found.start_s, found.host_s) == pytest.approx((2e-4, 1e-4))
    assert (found.wire, found.fill_bytes) == pytest.approx((1.05, 60_000))
    assert max(found.errors(points(plane, 4, 128))) < 1e-6


def test_a_constant_is_never_negative():
    from data_plane import DataPlane, fit

    found = fit(points(DataPlane(start_s=-1e-4, host_s=3e-4, wire=1.05, fill_bytes=0), 2, 3))
    assert found.start_s == 0
    assert found.host_s > 0
    assert found.wire == pytest.approx(1.05, rel=0.05)


def test_the_fit_is_the_best_of_those_without_a_negative_constant():
    from data_plane import Point, fit

    # Without a bound two constants are negative. Leaving out the more negative one first, then the next, keeps `start`.
    cases = ((2, 1 << 18, 7), (2, 1 << 22, 6), (3, 1 << 18, 9), (3, 1 << 22, 5), (4, 1 << 20, 1))
    measured = [Point(hosts, 8e9, nbytes, ms / 1e3) for hosts, nbytes, ms in cases]
    found = fit(measured)
    assert (found.start_s, found.wire) == pytest.approx((1.779e-4, 0.741), rel=1e-3)
    assert (found.host_s, found.fill_bytes) == (0, 0)
    assert sum(error**2 for error in found.errors(measured)) == pytest.approx(2.1427, rel=1e-4)


def test_gradients_of_more_than_the_fusion_threshold_are_sent_one_after_the_other():
    from data_plane import FUSED_BYTES, DataPlane, Layer, step_seconds

    # A second for each execution. All gradients are ready at the same time: the first layer has all the work.
    plane = DataPlane(start_s=1.0, host_s=0, wire=0, fill_bytes=0)

    def seconds(*sizes: int) -> float:
        layers = [Layer(0.0, size) for size in sizes]
        return step_seconds([*layers, Layer(1.0, 0)], 3.0, 8, 8e9, plane) - 3.0

    half = FUSED_BYTES // 2
    assert seconds(half, half) == 1.0
    assert seconds(half, half + 1) == 2.0
    assert seconds(half, 3 * half, half) == 3.0


def test_an_allreduce_of_a_large_vector_takes_its_bytes_over_the_rate():
    from data_plane import DataPlane

    plane = DataPlane(0, 0, wire=1.0, fill_bytes=0)
    # Two hosts: each sends half and gets half, then the same with the results.
    assert plane.seconds(2, 8e9, 1e9) == pytest.approx(1.0)
    assert plane.seconds(4, 8e9, 1e9) == pytest.approx(1.5)


# Two hosts of four accelerators. An allreduce of 1 GB takes a second.
@pytest.mark.parametrize(
    ("accelerators", "gigabytes", "seconds"),
    [
        (4, (1.0, 1.0), 3.0),  # one server: no link
        (8, (0.0, 0.5), 3.0),  # hidden behind the first layer's backward pass
        (8, (0.0, 5.0), 7.0),  # begins when the last layer is done, after 2 s
        (8, (0.5, 0.0), 3.5),  # the first layer's gradients are the last
        (8, (0.5, 1.5), 4.0),  # two allreduces, one after the other
    ],
)
def test_gradients_are_sent_while_the_backward_pass_goes_on(accelerators, gigabytes, seconds):
    from data_plane import DataPlane, Layer, efficiency, step_seconds

    layers = [Layer(1.0, int(size * 1e9)) for size in gigabytes]
    plane = DataPlane(0, 0, wire=1.0, fill_bytes=0)
    step = (layers, 3.0, accelerators, 8e9, plane)
    assert step_seconds(*step) == pytest.approx(seconds)
    assert efficiency(*step) == pytest.approx(3.0 / seconds)


def test_the_rate_that_an_example_reports_is_read():
    import published

    text = "[0]<stdout>:Total img/sec on 2 CPU(s): 52.3 +-0.8\n"
    assert published.images_per_s(text) == 52.3
    with pytest.raises(SystemExit, match="expected one line"):
        published.images_per_s("Killed\n")


def test_the_error_is_that_of_points_that_the_fit_has_not_seen():
    import published
    from data_plane import DataPlane

    plane = DataPlane(start_s=2e-4, host_s=1e-4, wire=1.05, fill_bytes=60_000)
    used, others = points(plane, 2, 3), points(plane, 4)
    found = [
        {**vars(point), "seconds": point.seconds * (1 if fitted else 2), "fitted": fitted}
        for fitted, part in ((True, used), (False, others))
        for point in part
    ]
    links = {"points": found, "free_bits_per_s": 1e10}
    layers = {name: [{"work": 1.0, "nbytes": 10**8}] for name in published.NETS}
    model = published.modelled(links, layers)
    text = published.links_table(model)[0]
    assert "Error on the 6 points that were not used: 50.0% on average, 50.0% at most" in text
    assert "on the 12 that were: 0.0% and 0.0%" in text
    rows = published.model_table(model, links)[2:]
    assert len(rows) == 2 * len(published.NETS)
    assert [row.split(" | ")[-1] for row in rows if "90%" in row.split(" | ")[-1]] == ["90% |"] * 2


def test_runs_that_other_work_disturbed_are_left_out():
    import published

    runs = [
        {"framework": "JAX", "model": name, "rows": [], "disturbed": texts}
        for name, texts in (("VGG-16", []), ("ResNet-50", ["other processes used 20 %"]))
    ]
    found = published.undisturbed({"runs": runs, "skipped": None})
    assert found == {"runs": runs[:1], "skipped": None}
    assert published.undisturbed({"runs": runs[1:], "skipped": None}) is None


def test_a_share_is_that_of_ranks_that_send_no_gradients():
    import published

    rows = [
        {"ranks": 1, "hosts": 1, "together": 10.0, "apart": 10.0},
        {"ranks": 2, "hosts": 2, "together": 12.0, "apart": 16.0},
    ]
    run = {"framework": "JAX", "model": "VGG-16", "rows": rows}
    table = published.training_table({"runs": [run], "skipped": None})
    assert table[-1] == "| JAX | VGG-16 | 10.0 (100%) |  |  |  | 12.0 (75%) |  |"
