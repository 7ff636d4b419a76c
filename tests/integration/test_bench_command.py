"""`python -m horovod.bench` on real ranks: every collective, type and operator, checked; its JSON; its refusals."""

from __future__ import annotations

import json
import sys

import pytest

import gpu_double
import harness

COMMAND = [sys.executable, "-m", "horovod.bench"]
FEW = ["-n", "2", "-w", "1"]


def run(np, *words, code=0, env=None):
    job = harness.horovodrun(np, [*COMMAND, *words], env=env)
    try:
        assert job.wait() == code, job.report()
        job.assert_nothing_left()
        return job
    finally:
        job.close()


@pytest.mark.parametrize("np", [1, 2, 3])
def test_every_collective_type_and_operator_is_right(np, tmp_path):
    out = tmp_path / "out.json"
    words = ["-b", "64", "-e", "300K", "-f", "64", "-d", "all", "-o", "all", "-p", "both"]
    job = run(np, *words, *FEW, "--json", str(out))

    found = json.loads(out.read_text())
    assert found["ranks"] == list(range(np))
    assert len(found["hosts"]) == np
    results = found["results"]
    reductions = 13 * 6 - 1 - 9  # bool has no average, whole numbers and bool no Adasum
    scattered = 13 * 2 - 1  # sums and averages only
    assert len(results) == 3 * (2 * reductions + scattered + 2 * 13 + 13 + 13) + 1
    assert {r["wrong"] for r in results} == {0, None}
    assert [r["collective"] for r in results if r["wrong"] is None] == ["barrier"]
    assert all(len(r["seconds_by_rank"]) == np for r in results)
    assert "# all right: " in job.stdout


@pytest.mark.parametrize("np", [1, 2])
def test_everything_is_right_on_gpus_of_the_double(np, tmp_path):
    out = tmp_path / "out.json"
    words = ["--device", "cuda", "-b", "64", "-e", "64K", "-f", "1024", "-d", "all", "-o", "all"]
    env = gpu_double.environment("devices=2,seed=3")
    job = run(np, *words, "-p", "both", *FEW, "--json", str(out), env=env)

    found = json.loads(out.read_text())
    assert found["device"] == "cuda"
    assert {r["wrong"] for r in found["results"] if r["collective"] != "barrier"} == {0}
    assert all(r["seconds"]["median"] > 0 for r in found["results"])
    assert "# data on GPUs, NCCL 2.30.7; times are means" in job.stdout


def test_a_gpu_that_is_not_there_is_said_of_every_rank():
    env = gpu_double.environment("no_device", None)
    job = run(2, "--device", "cuda", code=2, env=env)
    for rank in range(2):
        assert f"rank {rank} on " in job.stderr
    assert "--device cuda cannot be used" in job.stderr
    assert "cuInit returned 100" in job.stderr


def test_bandwidths_are_those_of_nccl_tests(tmp_path):
    out = tmp_path / "out.json"
    run(3, "-b", "12K", "-e", "12K", *FEW, "--json", str(out))

    factors = {}
    for result in json.loads(out.read_text())["results"]:
        if result["collective"] != "barrier":
            assert result["bytes"] == 12288
            algbw = result["bytes"] / result["seconds"]["median"]
            assert result["algbw_bytes_per_second"] == pytest.approx(algbw)
            factors[result["collective"]] = result["busbw_bytes_per_second"] / algbw
    assert factors == pytest.approx(
        {
            "allreduce": 4 / 3,
            "allgather": 2 / 3,
            "broadcast": 1,
            "alltoall": 2 / 3,
            "reducescatter": 2 / 3,
        }
    )


def test_some_ranks_measure_while_the_others_wait(tmp_path):
    out = tmp_path / "out.json"
    run(3, "-e", "4K", *FEW, "--process-set", "1-2", "-r", "2", "--json", str(out))

    found = json.loads(out.read_text())
    assert found["ranks"] == [1, 2]
    assert all(len(r["seconds_by_rank"]) == 2 and not r["wrong"] for r in found["results"])


def test_json_can_be_all_of_the_output():
    job = harness.Job([*COMMAND, "allgather", "-e", "4", *FEW, "--json", "-"])
    try:
        assert job.wait() == 0, job.report()
        assert json.loads(job.stdout)["results"][0]["collective"] == "allgather"
    finally:
        job.close()


@pytest.mark.parametrize(
    ("words", "verdict"),
    [
        (["-d", "float8"], "argument -d/--dtype: unknown: 'float8'"),
        (["--process-set", "0,2"], "--process-set names rank 2, the job has 2 ranks"),
        (["-r", "2"], "--root 2 does not take part"),
    ],
)
def test_one_rank_says_what_is_wrong_with_the_command_line(words, verdict):
    job = run(2, *words, code=2)

    ranks = [
        line.split(">:")[0] for line in job.stderr.splitlines() if verdict in line and ">:" in line
    ]
    assert ranks == ["[0]<stderr"], job.report()
    assert "Traceback" not in job.stderr
