"""The timeline at run time: files that begin and end when rank 0 says so, with every rank in them."""

import json
import os
import threading
from pathlib import Path

import pytest
import torch

import horovod.torch as hvd


@pytest.fixture
def dynamic(monkeypatch):
    """A job that may record, in place of the usual one."""
    hvd.shutdown()
    monkeypatch.setenv("HOROVOD_TIMELINE", "DYNAMIC")
    hvd.init()
    yield
    hvd.shutdown()


@pytest.fixture
def folder(tmp_path):
    """Rank 0's folder on all ranks: they share a host."""
    return Path(hvd.broadcast_object(str(tmp_path), name="folder of the timeline"))


def read(path):
    """All events; the ends of others have no name."""
    return [{"name": "", **event} for event in json.loads(path.read_text())]


def by_process(events, name):
    pids = {
        e["pid"] for e in events if e["name"] == "process_name" and e["args"].get("name") == name
    }
    return [e for e in events if e.get("pid") in pids and e["ph"] != "M"]


def names(events):
    found = [
        e["args"]["name"] for e in events if e.get("name") == "process_name" and "name" in e["args"]
    ]
    return [name for name in found if not name.startswith("rank ")]


def processes_of_ranks(events):
    found = [
        e["args"]["name"] for e in events if e.get("name") == "process_name" and "name" in e["args"]
    ]
    return sorted(name.split()[1] for name in found if name.startswith("rank "))


def assert_pairs_match(events):
    """On every track beginnings and ends match, and what is complete lies within what surrounds it."""
    open_by_track = {}
    for event in events:
        track = (event.get("pid"), event.get("tid"))
        if event["ph"] == "B":
            open_by_track.setdefault(track, []).append(event["ts"])
        elif event["ph"] == "E":
            assert open_by_track[track].pop() <= event["ts"]
    assert not any(open_by_track.values())


def test_a_start_without_the_setting_says_what_to_set(tmp_path):
    with pytest.raises(ValueError, match="Set HOROVOD_TIMELINE=DYNAMIC to enable dynamic timeline"):
        hvd.start_timeline(str(tmp_path / "timeline.json"), mark_cycles=True)
    assert hvd.stop_timeline() is None


def test_start_and_stop_need_init():
    hvd.shutdown()
    for call in (lambda: hvd.start_timeline("x"), hvd.stop_timeline):
        with pytest.raises(ValueError, match="has not been initialized"):
            call()


def test_two_files_one_after_the_other_hold_what_happened_meanwhile(dynamic, folder):
    first, second = folder / "first.json", folder / "second.json"
    hvd.allreduce(torch.ones(4), name="before")
    hvd.start_timeline(str(first), mark_cycles=True)
    hvd.barrier()  # rank 0 has begun
    hvd.allreduce(torch.ones(2, 3), name="one")
    hvd.barrier()
    hvd.stop_timeline()
    hvd.allreduce(torch.ones(4), name="between")
    hvd.start_timeline(second)  # any path-like object
    hvd.barrier()
    hvd.allreduce(torch.ones(4), name="two")
    hvd.allgather(torch.ones(hvd.rank() + 1, 2), name="rows")
    hvd.barrier()
    hvd.stop_timeline()
    hvd.barrier()

    everybody = [str(rank) for rank in range(hvd.size())]
    events = read(first)
    assert "allreduce.one" in names(events)
    assert not {"allreduce.before", "allreduce.between", "allreduce.two"} & set(names(events))
    assert any(e["name"] == "CYCLE_START" for e in events if e["ph"] == "i")
    assert processes_of_ranks(events) == everybody
    assert_pairs_match(events)
    track = by_process(events, "allreduce.one")
    assert sorted(e["name"] for e in track if e["ph"] == "X") == everybody
    assert [e["name"] for e in track if e["ph"] == "B"][:1] == ["NEGOTIATE_ALLREDUCE"]
    end = track[-1]
    assert end["ph"] == "E"
    assert end["args"]["dtype"] == "float32"
    assert end["args"]["shape"] == "[2, 3]"
    assert end["args"]["bytes"] == 24
    assert end["args"]["algorithm"].endswith("ALLREDUCE")

    events = read(second)
    assert {"allreduce.two", "allgather.rows"} <= set(names(events))
    assert "allreduce.one" not in names(events)
    assert not any(e["name"] == "CYCLE_START" for e in events if e["ph"] == "i")
    assert processes_of_ranks(events) == everybody
    assert_pairs_match(events)
    rows = sum(range(1, hvd.size() + 1))
    assert by_process(events, "allgather.rows")[-1]["args"]["shape"] == f"[{rows}, 2]"


def test_a_restart_on_the_same_path_empties_the_file(dynamic, folder):
    path = folder / "again.json"
    for name in ("first", "second"):
        hvd.start_timeline(str(path))
        hvd.barrier()
        hvd.allreduce(torch.ones(4), name=name)
        hvd.barrier()
        hvd.stop_timeline()
        hvd.barrier()
    assert "allreduce.second" in names(read(path))
    assert "allreduce.first" not in names(read(path))


def test_a_path_that_cannot_be_written_is_no_error_here(dynamic, folder):
    hvd.start_timeline(str(folder / "absent" / "timeline.json"))
    assert hvd.allreduce(torch.ones(1), op=hvd.Sum, name="x").item() == hvd.size()
    hvd.stop_timeline()


@pytest.mark.parametrize(
    "name", ['a "quoted" one', "back\\slash", "line\nbreak", "tab\tand \x01", "Grüße 🎉"]
)
def test_names_come_back_as_they_were(name, dynamic, folder):
    path = folder / "names.json"
    hvd.start_timeline(str(path))
    hvd.barrier()
    hvd.allreduce(torch.ones(4), name=name)
    hvd.barrier()
    hvd.stop_timeline()
    hvd.barrier()
    assert f"allreduce.{name}" in names(read(path))


def test_threads_that_submit_have_their_real_names(dynamic, folder):
    path = folder / "threads.json"
    hvd.start_timeline(str(path))
    hvd.barrier()
    hvd.allreduce(torch.ones(4), name="by the main thread")
    other = threading.Thread(target=lambda: hvd.allreduce(torch.ones(4), name="by another"))
    other.start()
    other.join()
    hvd.barrier()
    hvd.stop_timeline()
    hvd.barrier()
    events = read(path)
    ranks = {
        e["pid"]
        for e in events
        if e["name"] == "process_name" and "rank " in e["args"].get("name", "")
    }
    for pid in ranks:
        threads = {
            e["tid"]: e["args"]["name"]
            for e in events
            if e["name"] == "thread_name" and e["pid"] == pid
        }
        submitting = {e["tid"] for e in events if e.get("cat") == "submit" and e["pid"] == pid}
        running = {e["tid"] for e in events if e.get("cat") == "operation" and e["pid"] == pid}
        assert len(submitting) == 2
        assert running, "nobody ran"
        # Every thread that occurs is introduced, by the name that the system has for it.
        assert submitting | running <= set(threads)
        assert all(threads.values())
    mine = {e["tid"] for e in events if e.get("pid") == 1_000_000_000 + hvd.rank() and "tid" in e}
    assert os.getpid() in mine
