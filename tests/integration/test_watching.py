"""The views of a running job: `hvd.stats()`, the page, the text for Prometheus, the file, `horovodrun --status`."""

from __future__ import annotations

import json
import re
import urllib.error
import urllib.request
from pathlib import Path

import pytest

import harness

# Measuring is off by default.
ON = {"HOROVOD_METRICS": "1"}

BEGIN = """
import json, os, sys, time
from pathlib import Path
import numpy as np
import horovod.numpy as hvd

hvd.init()
rank, size, folder = hvd.rank(), hvd.size(), Path(sys.argv[1])

def wait_for(condition):
    while not condition():
        time.sleep(0.01)
"""

# The last rank begins each operation when the others have: it comes last, by design.
LATE = (
    BEGIN
    + """
for step in range(20):
    if rank == size - 1:
        wait_for(lambda: all((folder / f"{step}.{other}").exists() for other in range(rank)))
    handle = hvd.allreduce_async(np.ones(100, np.float32), name="x", op=hvd.Sum)
    (folder / f"{step}.{rank}").touch()
    hvd.synchronize(handle)
own = hvd.stats()
assert [row["rank"] for row in own["ranks"]] == [rank] or rank == 0, own
if rank == 0:
    counted = lambda row: row["operations"].get("allreduce", {}).get("host", 0)
    wait_for(lambda: [counted(row) for row in hvd.stats()["ranks"]] == [20] * size)
    wait_for(lambda: sum(row["came_last"] for row in hvd.stats()["ranks"]) >= 19)
    print("STATS", json.dumps(hvd.stats()), flush=True)
hvd.barrier()
"""
)

# It lives until the test has seen enough.
RUNS = (
    BEGIN
    + """
hvd.allreduce(np.ones(256, np.float32), name="x", op=hvd.Sum)
if rank == 0:
    wait_for(lambda: [row["operations"] != {} for row in hvd.stats()["ranks"]] == [True] * size)
    print("READY", flush=True)
if rank == 0:
    wait_for((folder / "end").exists)
hvd.barrier()
"""
)


def stats_of(job: harness.Job) -> dict:
    line = next(line for line in job.stdout.splitlines() if "STATS" in line)
    return json.loads(line.split("STATS ", 1)[1])


@pytest.mark.parametrize(
    ("size", "env"),
    [
        pytest.param(3, {}, id="star"),
        # Rank 3 speaks through rank 1.
        pytest.param(4, {"HOROVOD_CONTROL_FAN_OUT": "2"}, id="tree"),
    ],
)
def test_rank_0_counts_for_all_ranks_and_knows_who_came_last(
    script, jobs, tmp_path: Path, size: int, env: dict[str, str]
) -> None:
    job = jobs(harness.python(size, script(LATE), str(tmp_path), env={**ON, **env})).succeed()
    stats = stats_of(job)
    assert (stats["rank"], stats["size"], stats["restarts"]) == (0, size, 0)
    ranks = stats["ranks"]
    assert [row["rank"] for row in ranks] == list(range(size))
    for row in ranks:
        assert row["operations"]["allreduce"] == {"host": 20}
        assert row["bytes"]["allreduce"] == {"host": 20 * 400}
        assert row["cache_hits"] + row["cache_misses"] >= 20
        assert row["memory_bytes"] <= row["peak_memory_bytes"]
        parts = row["waiting_seconds"] + row["communicating_seconds"] + row["computing_seconds"]
        assert parts == pytest.approx(row["elapsed_seconds"], abs=1e-6), row
        assert row["operation_seconds"] >= row["communicating_seconds"], row
    lasts = [row["came_last"] for row in ranks]
    assert lasts[-1] > sum(lasts[:-1]), lasts
    awaited = [row["awaited_seconds"] for row in ranks]
    assert awaited[-1] == max(awaited), awaited
    assert len(stats["hosts"]) == 1
    assert stats["hosts"][0]["processors"] > 0


def test_nothing_is_measured_where_nobody_asks_for_it(script, jobs, tmp_path: Path) -> None:
    text = (
        BEGIN
        + """
hvd.allreduce(np.ones(4, np.float32))
try:
    hvd.stats()
except ValueError as error:
    print("REFUSED", error, flush=True)
"""
    )
    job = jobs(harness.python(2, script(text), str(tmp_path))).succeed()
    refused = [line for line in job.stdout.splitlines() if "REFUSED" in line]
    assert len(refused) == 2
    assert "HOROVOD_METRICS was not set to 1" in refused[0]


def test_a_rank_that_measures_beside_one_that_does_not(script, jobs, tmp_path: Path) -> None:
    text = "import os\nif os.environ['HOROVOD_RANK'] == '0':\n    os.environ['HOROVOD_METRICS'] = '1'\n"
    text += BEGIN + "hvd.allreduce(np.ones(4, np.float32))\n"
    text += "if rank == 0:\n    assert [row['rank'] for row in hvd.stats()['ranks']] == [0]\nhvd.barrier()\n"
    jobs(harness.python(2, script(text), str(tmp_path))).succeed()


def test_a_rank_that_does_not_measure_passes_on_the_reports_from_below(
    script, jobs, tmp_path: Path
) -> None:
    # Rank 3 speaks through rank 1.
    text = (
        "import os\nif os.environ['HOROVOD_RANK'] == '1':\n    del os.environ['HOROVOD_METRICS']\n"
        + BEGIN
        + """
hvd.allreduce(np.ones(4, np.float32))
if rank == 0:
    wait_for(lambda: [row["rank"] for row in hvd.stats()["ranks"]] == [0, 2, 3])
hvd.barrier()
"""
    )
    env = {**ON, "HOROVOD_CONTROL_FAN_OUT": "2"}
    jobs(harness.python(4, script(text), str(tmp_path), env=env)).succeed()


def test_a_hang_names_the_ranks_that_are_waited_for(script, jobs, tmp_path: Path) -> None:
    text = (
        BEGIN
        + """
if rank == 1:
    wait_for((folder / "end").exists)
handle = hvd.allreduce_async(np.ones(4, np.float32), name="late")
if rank == 0:
    wait_for(lambda: hvd.stats()["waiting_for"])
    [hang] = hvd.stats()["waiting_for"]
    assert (hang["ranks"], hang["operation"], hang["operations"]) == ([1], "allreduce.late", 1), hang
    assert hang["seconds"] >= 2 and hang["process_set"] == 0, hang
    print("READY", flush=True)
hvd.synchronize(handle)
if rank == 0:
    wait_for(lambda: not hvd.stats()["waiting_for"])
hvd.barrier()
"""
    )
    job = jobs(harness.python(2, script(text), str(tmp_path), env=ON))
    job.wait_for("READY")
    shown = jobs(harness.Job([str(harness.HOROVODRUN), "--status"])).succeed().stdout
    line = r'^for \d+\.\d s waiting for rank 1 on \S+ to begin "allreduce\.late"$'
    assert re.search(line, shown, re.MULTILINE), shown
    (tmp_path / "end").touch()
    job.succeed()


def test_a_slow_rank_is_named_with_the_likely_cause(script, jobs, tmp_path: Path) -> None:
    text = (
        BEGIN
        + """
found = np.zeros(1, np.float32)
while not found[0]:
    if rank == 1:
        with hvd.phase("data"):
            time.sleep(0.2)  # a slow loader
    slow = hvd.stats()["slow"] if rank == 0 else None
    if slow is not None:
        print("SLOW", json.dumps(slow), flush=True)
        found[0] = 1
    hvd.allreduce_(found, name="found", op=hvd.Sum)
    hvd.step()
"""
    )
    job = jobs(harness.python(2, script(text), str(tmp_path), env=ON)).succeed()
    line = next(line for line in job.stdout.splitlines() if "SLOW" in line)
    slow = json.loads(line.split("SLOW ", 1)[1])
    assert (slow["ranks"], slow["cause"]) == ([1], "input"), slow
    assert slow["steps"] >= 20
    assert slow["lost"] >= 0.05
    assert slow["explained"] >= 0.8
    assert slow["text"].startswith("rank 1 on ")
    assert "Likely cause: input. Waiting for data takes" in job.stderr, job.report()


def lines_of_url(job: harness.Job) -> str:
    found = re.search(
        r"horovod: the job's figures are at (http://\S+)", f"{job.stderr}\n{job.stdout}"
    )
    assert found, job.report()
    return found.group(1)


def get(url: str) -> tuple[str, str]:
    with urllib.request.urlopen(url, timeout=60) as answer:
        return answer.read().decode(), answer.headers["Content-Type"]


def test_page_and_text_are_shown_to_who_has_the_token(script, jobs, tmp_path: Path) -> None:
    job = jobs(harness.python(2, script(RUNS), str(tmp_path), options=["--metrics-port", "0"]))
    job.wait_for("READY")
    url = lines_of_url(job)
    assert url.startswith("http://127.0.0.1:")

    page, kind = get(url)
    assert kind == "text/html; charset=utf-8"
    assert "<title>Horovod job</title>" in page
    text, kind = get(url + "metrics")
    assert kind.startswith("application/openmetrics-text; version=1.0.0")
    assert text.endswith("# EOF\n")
    for rank in (0, 1):
        operations = rf'^horovod_operations_total\{{rank="{rank}",host="[^"]+",kind="allreduce",link="host"\}} 1\.0$'
        assert re.search(operations, text, re.MULTILINE), text
    stats = json.loads(get(url + "stats.json")[0])
    assert [row["rank"] for row in stats["ranks"]] == [0, 1]
    assert [row["bytes"]["allreduce"]["host"] for row in stats["ranks"]] == [1024, 1024]

    without = re.sub(r"/[0-9a-f]{32}/$", "/", url)
    assert without != url
    for refused in (without, without + "metrics", without + "0" * 32 + "/metrics"):
        with pytest.raises(urllib.error.HTTPError, match="404"):
            get(refused)
    (tmp_path / "end").touch()
    job.succeed()


def test_a_token_and_a_file_of_the_users_choice(script, jobs, tmp_path: Path) -> None:
    token, textfile = "a-token_of-16-characters", tmp_path / "job.prom"
    options = ["--metrics-port", "0", "--metrics-textfile", str(textfile)]
    env = {"HOROVOD_METRICS_TOKEN": token}
    job = jobs(harness.python(2, script(RUNS), str(tmp_path), options=options, env=env))
    job.wait_for("READY")
    shown = lines_of_url(job)
    assert shown.endswith("/<HOROVOD_METRICS_TOKEN>/")
    page, _ = get(shown.replace("<HOROVOD_METRICS_TOKEN>", token))
    assert "<title>Horovod job</title>" in page
    (tmp_path / "end").touch()
    job.succeed()
    assert token not in job.stdout + job.stderr
    text = textfile.read_text()
    assert "# TYPE horovod_operations_total counter\n" in text
    assert 'rank="1"' in text
    assert [path.name for path in tmp_path.glob("job.prom*")] == ["job.prom"]


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("HOROVOD_METRICS_TOKEN", "short", "HOROVOD_METRICS_TOKEN has 5 characters"),
        ("HOROVOD_METRICS_TOKEN", "with/a/slash/and-more", "letters, digits, - or _"),
        ("HOROVOD_METRICS_ADDRESS", "everywhere", "HOROVOD_METRICS_ADDRESS=everywhere"),
        ("HOROVOD_METRICS_PORT", "65536", "HOROVOD_METRICS_PORT"),
    ],
)
def test_a_wrong_setting_is_an_error_of_init(
    script, jobs, tmp_path: Path, name: str, value: str, expected: str
) -> None:
    job = jobs(harness.python(1, script(BEGIN), str(tmp_path), env={name: value}))
    assert job.fail() != 0
    assert expected in job.stderr + job.stdout


def test_the_secret_stays_from_one_init_to_the_next(script, jobs, tmp_path: Path) -> None:
    text = BEGIN + "hvd.shutdown()\nhvd.init()\nhvd.barrier()\n"
    job = jobs(harness.python(2, script(text), str(tmp_path), options=["--metrics-port", "0"]))
    job.succeed()
    secrets = re.findall(r"figures are at http://[^/]+/([0-9a-f]{32})/", job.stderr + job.stdout)
    assert len(secrets) == 2, job.report()
    assert secrets[0] == secrets[1]


def test_a_relative_file_stays_where_it_was_meant_at_init(script, jobs, tmp_path: Path) -> None:
    for folder in ("at-init", "later"):
        (tmp_path / folder).mkdir()
    text = (
        "import os, sys\nos.chdir(os.path.join(sys.argv[1], 'at-init'))\n"
        + BEGIN
        + "os.chdir(folder / 'later')\nhvd.barrier()\n"
    )
    options = ["--metrics-textfile", "job.prom"]
    jobs(harness.python(2, script(text), str(tmp_path), options=options)).succeed()
    assert [path.parent.name for path in tmp_path.rglob("job.prom*")] == ["at-init"]


def test_a_command_shows_running_jobs(script, jobs, tmp_path: Path) -> None:
    job = jobs(harness.python(2, script(RUNS), str(tmp_path), env=ON))
    job.wait_for("READY")
    shown = jobs(harness.Job([str(harness.HOROVODRUN), "--status"])).succeed().stdout
    ours = list(map(int, re.findall(r"^job (\d+): 2 ranks, ", shown, re.MULTILINE)))
    assert ours, shown
    assert set(ours) & set(job.members()), "rank 0 of this job is one of them"
    own = next(pid for pid in ours if pid in job.members())
    one = jobs(harness.Job([str(harness.HOROVODRUN), f"--status={own}"])).succeed().stdout
    assert one.startswith(f"job {own}: 2 ranks, ")
    assert len(re.findall(r"^ +[01] .*%", one, re.MULTILINE)) == 2, one
    (tmp_path / "end").touch()
    job.succeed()
    gone = jobs(harness.Job([str(harness.HOROVODRUN), f"--status={own}"]))
    assert gone.fail() == 1
    assert f"process {own} is no rank 0 of a job" in gone.stderr


def test_marks_of_steps_and_input(script, jobs, tmp_path: Path) -> None:
    text = (
        BEGIN
        + """
for step in range(3):
    with hvd.phase("data"):
        wait_for(lambda begin=time.monotonic(): time.monotonic() > begin)
    hvd.step()
row = hvd.stats()["ranks"][0]
assert row["steps"] == 3 and row["input_seconds"] > 0, row
try:
    with hvd.phase("lunch"):
        pass
except ValueError as error:
    print("REFUSED", error, flush=True)
"""
    )
    job = jobs(harness.python(2, script(text), str(tmp_path), env=ON)).succeed()
    refused = [line for line in job.stdout.splitlines() if "REFUSED" in line]
    assert len(refused) == 2
    assert 'expected "data"' in refused[0]
