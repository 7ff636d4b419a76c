"""`horovodrun --trace`: a timeline of the next moments of a running job, which need not have been started for it."""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import signal
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path

import pytest

import harness

# Only a hang reaches this.
LIMIT_S = 300

# The job runs operations until the test has seen enough; all ranks stop at the same one.
STEPS = """
import sys
from pathlib import Path
import numpy as np
import horovod.numpy as hvd

hvd.init()
folder = Path(sys.argv[1])
is_end = np.zeros(1, np.int32)
while not hvd.allreduce(is_end, name="is the end", op=hvd.Sum)[0]:
    hvd.allreduce(np.ones(64, np.float32), name="gradient")
    if hvd.rank() == 0:
        if not (folder / "ready").exists() and len(hvd.stats()["ranks"]) == 2:
            (folder / "ready").touch()
            print("READY", flush=True)
        is_end[:] = (folder / "end").exists()
"""


# A trace is longer than a file of rank 0 may be, its head is not.
FULL = """
import resource
import horovod.numpy as hvd
hvd.init()
if hvd.rank() == 0:
    resource.setrlimit(resource.RLIMIT_FSIZE, (8192, 8192))
"""


def started(script, jobs, tmp_path: Path, text: str = STEPS, **more) -> harness.Job:
    env = {"HOROVOD_METRICS": "1", **more.pop("env", {})}
    job = jobs(harness.python(2, script(text), str(tmp_path), env=env, **more))
    job.wait_for("READY")
    return job


def trace(folder: Path, lasting: str, job: int) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [harness.HOROVODRUN, "--trace", lasting, str(job)],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )


def check_events(record: Callable[[], str]) -> None:
    """The events are those of both ranks, in the form of any timeline.

    A short recording on a loaded machine may have no operation of a rank; then another one is made.
    """
    deadline = time.monotonic() + LIMIT_S
    while True:
        events = json.loads(record())
        names = {event.get("args", {}).get("name", "") for event in events}
        operations = [event for event in events if event.get("cat") == "operation"]
        ranks = {event["pid"] - 1_000_000_000 for event in operations}
        if ranks == {0, 1} and "gradient" in " ".join(names):
            break
        assert ranks <= {0, 1}
        assert time.monotonic() < deadline, events
    assert {name.split(" on ")[0] for name in names if " on " in name} == {"rank 0", "rank 1"}


def test_a_running_job_is_recorded_without_a_restart(script, jobs, tmp_path: Path) -> None:
    job = started(script, jobs, tmp_path)
    pid = job.rank_0()
    here = tmp_path / "here"
    here.mkdir()

    def record() -> str:
        recorded = trace(here, "200ms", pid)
        assert recorded.returncode == 0, recorded
        name = recorded.stdout.splitlines()[0]
        assert name.startswith(f"horovod-trace-{pid}-")
        return (here / name).read_text()

    check_events(record)
    check_events(record)
    count = len(list(here.iterdir()))
    assert count >= 2
    (tmp_path / "end").touch()
    job.succeed()
    gone = trace(here, "200ms", pid)
    assert gone.returncode == 1
    assert f"process {pid} is no rank 0 of a measured job" in gone.stderr
    assert len(list(here.iterdir())) == count, "no file of a trace that failed"


def threads_of(pid: int) -> set[str]:
    """The names of a process' threads; those that end meanwhile are left out."""
    names = set()
    for task in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(OSError):
            names.add((task / "comm").read_text().strip())
    return names


def long_trace(jobs, folder: Path, pid: int) -> harness.Job:
    """A command that records ten minutes, once it does."""
    command = [str(harness.HOROVODRUN), "--trace", "10m", str(pid)]
    waiting = jobs(harness.Job(command, cwd=folder))
    # The thread that writes the file begins after the recording. Linux cuts names of threads.
    deadline = time.monotonic() + LIMIT_S
    while "horovod-timeline"[:15] not in threads_of(pid):
        assert waiting.process.poll() is None, waiting.report()
        assert time.monotonic() < deadline
    return waiting


def test_the_end_of_the_job_ends_the_trace(script, jobs, tmp_path: Path) -> None:
    job = started(script, jobs, tmp_path)
    pid = job.rank_0()
    here = tmp_path / "here"
    here.mkdir()
    waiting = long_trace(jobs, here, pid)
    (tmp_path / "end").touch()
    job.succeed()
    waiting.succeed()
    events = json.loads((here / waiting.stdout.splitlines()[0]).read_text())
    assert any(event.get("cat") == "operation" for event in events)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_recording_and_leaves_no_file(
    script, jobs, tmp_path: Path, number: signal.Signals
) -> None:
    job = started(script, jobs, tmp_path)
    pid = job.rank_0()
    here = tmp_path / "here"
    here.mkdir()
    waiting = long_trace(jobs, here, pid)
    waiting.process.send_signal(number)
    assert waiting.fail() == 128 + number
    assert not list(here.iterdir())
    # Rank 0 has noticed when it records the next one.
    deadline = time.monotonic() + LIMIT_S
    while (recorded := trace(here, "200ms", pid)).returncode != 0:
        assert "another trace is being recorded" in recorded.stderr, recorded
        assert time.monotonic() < deadline
    (tmp_path / "end").touch()
    job.succeed()


def test_half_a_trace_is_an_error(script, jobs, tmp_path: Path) -> None:
    job = started(script, jobs, tmp_path, FULL + STEPS)
    here = tmp_path / "here"
    here.mkdir()
    recorded = trace(here, "1s", job.rank_0())
    assert recorded.returncode == 1
    assert "the trace is not whole: File too large" in recorded.stderr, recorded
    assert not list(here.iterdir())
    (tmp_path / "end").touch()
    job.succeed()


def test_a_timeline_of_the_script_goes_on(script, jobs, tmp_path: Path) -> None:
    timeline = tmp_path / "timeline.json"
    job = started(script, jobs, tmp_path, options=["--timeline-filename", str(timeline)])
    refused = trace(tmp_path, "200ms", job.rank_0())
    assert refused.returncode == 1
    assert "a timeline is being recorded already" in refused.stderr
    (tmp_path / "end").touch()
    job.succeed()
    check_events(timeline.read_text)


@pytest.mark.parametrize("words", [["5h"], ["0"], ["5s", "train.py"], ["5s", "1", "2"]])
def test_a_wrong_time_or_job_is_refused(jobs, words: list[str]) -> None:
    job = jobs(harness.Job([str(harness.HOROVODRUN), "--trace", *words]))
    assert job.fail() == 2
    assert "argument --trace: " in job.stderr


def test_the_page_records_for_who_has_the_token(script, jobs, tmp_path: Path) -> None:
    job = started(script, jobs, tmp_path, options=["--metrics-port", "0"])
    job.wait_for("figures are at")
    [url] = re.findall(r"figures are at (http://\S+)", f"{job.stderr}\n{job.stdout}")

    def record() -> str:
        with urllib.request.urlopen(url + "trace/200", timeout=LIMIT_S) as answer:
            assert answer.headers["Content-Type"] == "application/json"
            return answer.read().decode()

    check_events(record)
    for refused in (re.sub(r"[0-9a-f]{32}", "0" * 32, url) + "trace/200", url + "trace/0"):
        with pytest.raises(urllib.error.HTTPError, match="404"):
            urllib.request.urlopen(refused, timeout=LIMIT_S)
    (tmp_path / "end").touch()
    job.succeed()


@pytest.mark.skipif(
    shutil.which("node") is None, reason="NOT RUN: no node to read the page's script"
)
def test_the_script_of_the_page_hands_the_trace_to_the_viewer(tmp_path: Path) -> None:
    """The page's functions with a made document and window: PING, PONG, then the bytes, to the viewer alone."""
    page = (harness.ROOT / "crates/horovod-metrics/src/page.html").read_text()
    script = page.split("<script>", 1)[1].split("</script>", 1)[0]
    program = tmp_path / "page.js"
    program.write_text(PAGE_DOUBLE.replace("SCRIPT", json.dumps(script)))
    done = subprocess.run(["node", program], capture_output=True, text=True, timeout=LIMIT_S)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines() == [
        "fetch trace/5000",
        "open https://ui.perfetto.dev",
        "PING to https://ui.perfetto.dev",
        "3 bytes to https://ui.perfetto.dev",
        "Opened in the viewer.",
        "The viewer does not answer: save the file, and open it in https://ui.perfetto.dev or chrome://tracing.",
    ]


PAGE_DOUBLE = """
const elements = {};
const element = () => ({
  children: [], dataset: {}, value: "5", listeners: {},
  append(...all) { this.children.push(...all); }, setAttribute() {}, removeAttribute() {},
  addEventListener(name, call) { this.listeners[name] = call; },
});
globalThis.document = {getElementById: id => elements[id] ??= element(), createElement: element};
globalThis.location = {protocol: "file:"};
const listeners = new Set();
globalThis.addEventListener = (_, call) => listeners.add(call);
globalThis.removeEventListener = (_, call) => listeners.delete(call);
globalThis.fetch = async path => {
  console.log("fetch " + path);
  return {ok: true, arrayBuffer: async () => new ArrayBuffer(3)};
};
let ticks = [];
globalThis.setInterval = call => ticks.push(call);
globalThis.clearInterval = () => { ticks = []; };
const tell = event => [...listeners].forEach(call => call(event));
const viewer = {closed: false, postMessage(what, to) {
  console.log((what === "PING" ? "PING" : what.perfetto.buffer.byteLength + " bytes") + " to " + to);
}};
globalThis.window = {open: url => { console.log("open " + url); return viewer; }};
(0, eval)(SCRIPT);
(async () => {
  await elements["trace-record"].listeners.click();
  const isHidden = ["trace-open", "trace-save"].some(id => elements[id].hidden !== false);
  if (isHidden) throw new Error("nothing is offered");
  elements["trace-open"].listeners.click();
  ticks[0]();
  tell({source: viewer, origin: "https://elsewhere.example", data: "PONG"});
  tell({source: viewer, origin: "https://ui.perfetto.dev", data: "PONG"});
  console.log(elements["trace-state"].textContent);
  window.open = () => null;
  elements["trace-open"].listeners.click();
  console.log(elements["trace-state"].textContent);
})();
"""
