"""The benchmark's own parts: what it keeps of a run that broke, what it calls reached, what it writes into the page."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).resolve().parents[2] / "bench"


@pytest.fixture(autouse=True)
def _bench_modules(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCH))


@pytest.fixture
def run_script(tmp_path, monkeypatch):
    """Runs a few lines of Python as if a peer's launcher had started them."""
    import launch

    monkeypatch.setattr(launch, "command", lambda *_: [sys.executable])

    def run(text, limit_s=300):
        script = tmp_path / "rank.py"
        head = f"import os, sys, time; sys.path.insert(0, {str(BENCH)!r})\nimport launch\n"
        script.write_text(head + "report = launch.Report(sys.argv[2], 0)\n" + text)
        return launch.run("gloo", 2, str(script), limit_s=limit_s)

    return run


def test_a_peer_that_crashes_at_its_exit_keeps_its_results(run_script, capsys):
    records = run_script("report.add(case='a', seconds=[1.0]); report.done(); os.abort()")

    assert records == [{"case": "a", "seconds": [1.0]}]
    assert "gloo on 2 ranks had measured everything, then ended with exit code -6" in (
        capsys.readouterr().out
    )


def test_a_peer_that_breaks_off_is_not_taken_for_measured(run_script):
    import launch

    with pytest.raises(launch.PeerFailed, match=r"exit code 3:\n(?s:.*)the reason"):
        run_script("report.add(case='a', seconds=[1.0]); print('the reason'); sys.exit(3)")


def test_a_peer_that_hangs_is_ended(run_script):
    import launch

    with pytest.raises(launch.PeerFailed, match="exit code none within 1 s"):
        run_script("time.sleep(1000)", limit_s=1)


def test_ranks_but_the_first_report_nothing(tmp_path):
    import launch

    out = tmp_path / "results"
    launch.Report(str(out), 1).done()

    assert not out.exists()


@pytest.mark.parametrize(
    ("against", "ratio", "reached"),
    [
        ("gloo", 4.0, True),  # times faster: at least
        ("gloo", 3.9, False),
        ("mpi", 0.3, False),
        ("floor", 4.0, True),  # multiples of the floor: at most
        ("floor", 4.1, False),
        ("seconds", 4.1, False),
    ],
)
def test_targets_know_their_direction(against, ratio, reached):
    from cases import Target

    assert Target(against, 4.0).reached(ratio) is reached


def measured(**seconds):
    return {
        "ranks": 2,
        "seconds": {"allreduce f32 1 MiB": seconds},
        "skipped": {"mpi": "no mpirun"},
    }


def test_a_row_holds_spans_ratios_and_verdicts():
    import tables

    lines = tables.collectives(
        measured(horovod=[2e-4, 1e-4, 3e-4], gloo=[6e-4, 7e-4, 8e-4], floor=[5e-5])
    )

    assert lines[2] == (
        "| allreduce f32 1 MiB | 0.200 (0.100 to 0.300) | 0.700 (0.600 to 0.800) |  "
        "| 0.050 (0.050 to 0.050) | 3.50 (≥ 4 ✗) |  | 4.00 (≤ 7 ✓, stretch ≤ 4 ✓) |"
    )
    assert lines[-1] == "\nNot measured: Open MPI: no mpirun."


def test_more_ranks_than_processors_have_goals_of_their_own():
    from cases import CASES, targets_of

    goals = {
        case.name: {t.against: t.limit for t in targets_of(case, 4)}
        for case in CASES
        if case.group in ("latency", "resnet")
    }

    assert goals["allreduce f32 4 B"] == {"gloo": 1.0, "mpi": 0.25}
    assert goals["ResNet-50's 161 gradients"] == {"gloo": 8.0, "mpi": 1.0}


def test_hosts_are_held_against_iperf3_only_where_both_are_a_steady_flow():
    import hosts

    def row(link, case, bits_per_s, nbytes=64 << 20):
        record = {"link": link, "case": case, "bytes": nbytes, "bits_per_s": bits_per_s}
        record |= {"ranks_per_host": 2, "connections_per_peer": 4, "seconds": [0.1, 0.2, 0.3]}
        return hosts.table([record | {"iperf3_bits_per_s": 4e9}]).splitlines()[-1]

    start = "| delay | 2 | 4 | {} | 200.000 (100.000 to 300.000) | {} | "
    # 134 ms of sending at iperf3's rate, and 80 or 40 ms in which nothing can be sent.
    assert row("delay", "64 MiB", 2e9) == start.format("64 MiB", "2.00") + "50 % | 63 % |  |"
    assert row("delay", "64 MiB in a row", 4e9).endswith("| 100 % | 77 % |  |")
    assert row("delay", "4 x 64 MiB in a row", 4e9, 256 << 20).endswith("| 100 % | 93 % |  |")
    assert row("delay", "64 MiB, 4 in flight", 3.41e9).endswith("| 85 % (≥ 85 ✓) |  |  |")
    assert row("delay", "64 MiB, 4 in flight", 3.39e9).endswith("| 85 % (≥ 85 ✗) |  |  |")
    assert row("free", "64 MiB", 3e9).endswith("| 75 % (≥ 80 ✗) |  |  |")
    assert row("free", "4 B", 1e3, 4).endswith(" |  |  |  |  |")
    assert row("1gbit", "64 MiB", 0.95e9).endswith("| 24 % |  | 99.3 % (≥ 95 ✓) |")


def test_only_what_stands_between_the_markers_is_replaced(tmp_path):
    import report

    page = tmp_path / "performance.md"
    page.write_text(f"before\n{report.BEGIN}\nold\n{report.END}\nafter\n")

    report.write(page, ["| new |", ""])

    assert page.read_text() == f"before\n{report.BEGIN}\n\n| new |\n\n{report.END}\nafter\n"


def test_sections_that_were_not_measured_stay(tmp_path):
    import report

    page = tmp_path / "performance.md"
    old = "### Idle\n\n| old |\n\n### Two hosts\n\n| kept |\n"
    page.write_text(f"{report.BEGIN}\n\n{old}\n{report.END}\n")

    report.write(page, ["### Idle", "", "| new |", "", "### Start", "", "| more |", ""])

    whole = "### Idle\n\n| new |\n\n### Two hosts\n\n| kept |\n\n### Start\n\n| more |\n"
    assert page.read_text() == f"{report.BEGIN}\n\n{whole}\n{report.END}\n"


def test_a_page_without_markers_is_left_alone(tmp_path):
    import report

    page = tmp_path / "performance.md"
    page.write_text("no markers")

    with pytest.raises(SystemExit, match="needs one line"):
        report.write(page, ["new"])
    assert page.read_text() == "no markers"


def test_the_pages_have_their_markers():
    import published
    import report

    for page, begin in (("performance.md", report.BEGIN), ("scaling.md", published.BEGIN)):
        text = (BENCH.parent / "docs" / page).read_text()

        assert text.index(begin) < text.index(report.END)


def test_resnet50_has_its_parameters():
    import math

    from cases import resnet50_shapes

    shapes = resnet50_shapes()

    assert len(shapes) == 161
    assert sum(map(math.prod, shapes)) == 25_557_032


def test_figures_of_gpus_are_held_against_their_goals():
    import gpu

    def run(plain, horovod, again, **calls):
        seconds = {"plain": [plain] * 3, "horovod": [horovod] * 3, "plain again": [again] * 3}
        return {"ranks": 1, "peer": "horovod", "steps": {"net": seconds}, **calls}

    ours = run(0.100, 0.1005, 0.100, submission_us=4.0, bytes_beside=30 << 20, latency_us=9.0)
    peer = {"ranks": 1, "bytes_beside": 20 << 20, "steps": {"net": {"ddp": [0.201]}}}
    assert gpu.goals(ours, peer) == [
        "4.00 us a tensor: reached",
        "net: a step 1.0050 of plain PyTorch's, equal runs up to 1.0000: reached",
        "10 MiB of GPU memory more than torch.distributed: reached",
    ]
    slow = run(0.100, 0.102, 0.100, submission_us=6.0, bytes_beside=37 << 20, latency_us=9.0)
    assert all(line.endswith(": not reached") for line in gpu.goals(slow, peer))
    # A difference no larger than that between equal runs is not held against ours.
    noisy = run(0.100, 0.107, 0.110, submission_us=4.0, bytes_beside=0, latency_us=9.0)
    assert gpu.goals(noisy, None)[1].endswith(": reached")
    assert gpu.against_ddp(ours, peer) == ["net, 1 ranks: a step 0.500 of DDP's"]


def test_goals_of_rust_are_held_against_the_engine_pytorch_and_a_flat_tensor():
    import frameworks

    def goals(rust_4_b, many, step):
        rust = {
            "4 B": [rust_4_b],
            "4 B, the engine's submit and wait": [5e-6],
            "64 MiB, in place": [1.03e-2],
        }
        candle = {"2,000 tensors of 1,000": [many], "1 tensor of 2,000,000": [1e-3]}
        candle |= {"a CNN's step": [step], "a CNN's step with one flat allreduce": [1e-2]}
        seconds = {"torch": {"64 MiB, in place": [1e-2]}, "rust": rust, "candle": candle}
        found = frameworks.goals({"seconds": seconds})
        return [(measured, limit[-1]) for _, measured, limit in found]

    assert goals(6.5e-6, 3.3e-3, 1.06e-2) == [
        ("1.50 us", "✓"), ("1.03", "✓"), ("1.30", "✓"), ("1.06", "✓"),
    ]  # fmt: skip
    assert goals(6.6e-6, 3.4e-3, 1.08e-2) == [
        ("1.60 us", "✗"), ("1.03", "✓"), ("1.40", "✗"), ("1.08", "✗"),
    ]  # fmt: skip


def test_a_program_of_rust_needs_no_interpreter():
    import launch

    assert launch.command("horovod", 2, python=None)[1:] == ["-np", "2"]
