"""Events of `horovodrun` for programs, one line of JSON for each event."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading

import pytest

import harness


def events_of(*words: str, on_event=lambda process, event: None) -> list[dict[str, object]]:
    """Run it to its end and return all of them."""
    readable, writable = os.pipe()
    env = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(harness.NOT_HANDED_DOWN)
    }
    env |= {"OMP_NUM_THREADS": "1", "HOROVODRUN_EVENTS_FD": str(writable)}
    process = subprocess.Popen(
        [harness.HOROVODRUN, *words],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env=env,
        pass_fds=[writable],
    )
    os.close(writable)
    limit = threading.Timer(harness.LIMIT_S, process.kill)
    limit.start()
    events = []
    try:
        with open(readable) as lines:
            for line in lines:
                events.append(json.loads(line))
                on_event(process, events[-1])
        status = process.wait()
    finally:
        limit.cancel()
        process.kill()
    assert events[0]["event"] == "begin"
    assert events[0]["version"] == 1
    assert (events[-1]["event"], events[-1]["status"]) == ("end", status)
    return events


def of_kind(events: list[dict[str, object]], kind: str) -> list[dict[str, object]]:
    return [event for event in events if event["event"] == kind]


def test_a_job_from_its_beginning_to_its_end() -> None:
    script = "import horovod.numpy as hvd; hvd.init(); hvd.barrier()"
    events = events_of("-np", "2", sys.executable, "-c", script)
    started = of_kind(events, "started")
    assert sorted(event["worker"] for event in started) == [0, 1]
    assert all(event["host"] == "localhost" and event["pid"] for event in started)
    assert of_kind(events, "round") == [{"event": "round", "workers": [0, 1]}]
    ended = of_kind(events, "ended")
    assert sorted((event["worker"], event["code"]) for event in ended) == [(0, 0), (1, 0)]
    assert events[-1] == {"event": "end", "status": 0, "outcome": "success", "report": ""}


def test_a_failure_has_the_rank_to_blame_and_its_error_lines() -> None:
    script = "[ $HOROVOD_RANK = 0 ] || { echo why >&2; exit 3; }; exec sleep 1000"
    events = events_of("-np", "2", "sh", "-c", script)
    first, second = of_kind(events, "ended")
    assert (first["worker"], first["code"]) == (1, 3)
    assert (second["worker"], second["signal"]) == (0, signal.SIGTERM)
    assert events[-1]["outcome"] == "failure"
    assert str(events[-1]["report"]).startswith(
        "rank 1 on host localhost exited with code 3. Last lines of its stderr:\n    why\nthe others: rank 0 ended by"
    )


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["-np", "many", "true"], 'invalid whole number: "many"'),
        (
            ["-np", "2", "-H", "localhost:1", "true"],
            "more processes (2) than there are available slots (1)",
        ),
    ],
)
def test_a_wrong_call_is_told_apart_from_a_rank_with_the_same_status(words, text) -> None:
    events = events_of(*words)
    assert [event["event"] for event in events] == ["begin", "end"]
    assert events[-1]["outcome"] == "usage"
    assert text in str(events[-1]["report"])
    rank = events_of("-np", "1", "sh", "-c", "exit 2")
    assert (rank[-1]["status"], rank[-1]["outcome"]) == (2, "failure")


def test_a_signal_to_the_launcher() -> None:
    def interrupt(process, event) -> None:
        if event["event"] == "started":
            process.send_signal(signal.SIGTERM)

    events = events_of("-np", "1", "sleep", "1000", on_event=interrupt)
    assert (events[-1]["status"], events[-1]["outcome"]) == (143, "interrupted")


def test_ranks_have_neither_the_descriptor_nor_its_number() -> None:
    # The first process that it starts would have it still open.
    script = (
        'test -z "$HOROVODRUN_EVENTS_FD" && ! ls -l /proc/$$/fd /proc/$PPID/fd | grep -F "$PIPE"'
    )
    readable, writable = os.pipe()
    try:
        pipe = os.readlink(f"/proc/self/fd/{writable}")
        env = dict(os.environ, PIPE=pipe, HOROVODRUN_EVENTS_FD=str(writable))
        subprocess.run(
            [harness.HOROVODRUN, "-np", "1", "sh", "-c", script],
            env=env,
            pass_fds=[writable],
            check=True,
            timeout=harness.LIMIT_S,
        )
    finally:
        os.close(writable)
        os.close(readable)


def test_an_elastic_job_tells_of_every_worker_and_round() -> None:
    # Worker 0 dies in the first round; another comes for it.
    script = (
        "import os, horovod.numpy as hvd\n"
        "while True:\n"
        "    hvd.init()\n"
        "    try:\n"
        "        hvd.barrier()\n"
        "        if os.environ['HOROVOD_ELASTIC_WORKER'] == '0': os._exit(7)\n"
        "        hvd.barrier()\n"
        "        break\n"
        "    except hvd.HorovodInternalError:\n"
        "        hvd.shutdown()\n"
    )
    events = events_of(
        *("-np", "2", "--min-np", "2", "-H", "localhost:2"), sys.executable, "-c", script
    )
    assert sorted(event["worker"] for event in of_kind(events, "started")) == [0, 1, 2]
    rounds = [event["workers"] for event in of_kind(events, "round")]
    assert sorted(rounds[0]) == [0, 1]
    assert sorted(rounds[-1]) == [1, 2]
    ended = {event["worker"]: event["code"] for event in of_kind(events, "ended")}
    assert ended == {0: 7, 1: 0, 2: 0}
    assert events[-1]["outcome"] == "success"
