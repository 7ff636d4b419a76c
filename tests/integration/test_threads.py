"""How many threads a rank's libraries use: `horovodrun` tells them where the user has not, init advises elsewhere."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from pathlib import Path

import pytest

import harness

NAMES = [
    "OMP_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "MKL_NUM_THREADS",
    "TF_NUM_INTRAOP_THREADS",
    "RAYON_NUM_THREADS",
]
UNSET: dict[str, str | None] = dict.fromkeys(NAMES)
SHOW = f"""
import os
print("threads", *(os.environ.get(name, "-") for name in {NAMES}))
"""
# A process that is bound to one core, on whatever machine this is, becomes horovodrun.
BOUND = f"""
import os, sys
os.sched_setaffinity(0, [min(os.sched_getaffinity(0))])
os.execv({str(harness.HOROVODRUN)!r}, ["horovodrun", *sys.argv[1:]])
"""


def shown(job: harness.Job) -> list[list[str]]:
    """The output of each rank."""
    job.succeed()
    lines = [line.split("threads ")[1] for line in job.stdout.splitlines() if "threads " in line]
    return [line.split() for line in lines]


def bound(script, jobs, words: list[str], env: dict[str, str | None]) -> harness.Job:
    launch = [sys.executable, str(script(BOUND)), *words, sys.executable, str(script(SHOW))]
    return jobs(harness.Job(launch, env={**UNSET, **env}))


@pytest.mark.parametrize("elastic", [[], ["--min-np", "2"]], ids=["fixed", "elastic"])
def test_each_rank_gets_its_share_of_the_cores(elastic, script, jobs) -> None:
    words = [*elastic, "-np", "2", "-H", "localhost:2"]
    job = bound(script, jobs, words, {})
    assert shown(job) == [["1"] * 5] * 2
    printed = [line for line in job.stderr.splitlines() if "OMP_NUM_THREADS" in line]
    assert printed == [
        "horovodrun: note: 1 thread for each rank (1 core for 2 ranks on localhost): OMP_NUM_THREADS was not set; "
        "set it for another number"
    ]


def test_what_the_user_has_set_stays(script, jobs) -> None:
    words = ["-np", "2"]
    job = bound(script, jobs, words, {"OMP_NUM_THREADS": "3"})
    # The others of linear algebra follow it by themselves.
    assert shown(job) == [["3", "-", "-", "1", "1"]] * 2
    assert "OMP_NUM_THREADS" not in job.stderr
    own = {"MKL_NUM_THREADS": "3", "TF_NUM_INTRAOP_THREADS": "2", "RAYON_NUM_THREADS": "4"}
    job = bound(script, jobs, words, own)
    assert shown(job) == [["1", "1", "3", "2", "4"]] * 2


def test_unbound_ranks_share_all_cores(script, jobs) -> None:
    job = jobs(harness.python(2, script(SHOW), env=UNSET))
    most = max(1, len(os.sched_getaffinity(0)) // 2)
    for values in shown(job):
        # A control group may allow less.
        assert len(set(values)) == 1
        assert 1 <= int(values[0]) <= most


def test_init_advises_where_another_launcher_has_set_nothing(script, jobs, tmp_path: Path) -> None:
    text = "from horovod import _core; _core.init(); _core.barrier(0); _core.shutdown()"
    path = script(text)
    folder = tmp_path / "shared"
    folder.mkdir()

    def printed(**more: str) -> str:
        env: dict[str, str | None] = {
            **UNSET,
            "HOROVOD_RENDEZVOUS_DIR": str(folder),
            "HOROVOD_SIZE": "2",
            **more,
        }
        ranks = [{**env, "HOROVOD_RANK": rank} for rank in "01"]
        words = [sys.executable, path]
        started = [jobs(harness.Job(words, env=own, own_shm=False)) for own in ranks]
        return "".join(job.succeed().stderr for job in started)

    # Two ranks that may run everywhere, once per host. Bound ones look as if somebody had seen to it.
    if 2 * len(os.sched_getaffinity(0)) > (os.cpu_count() or 1):
        assert printed().count("OMP_NUM_THREADS is not set") == 1
    assert "OMP_NUM_THREADS is not set" not in printed(MKL_NUM_THREADS="1")


# One thread watches all others of its rank while they reduce: what is set for a moment only is seen, too.
WATCH = """
import os, threading
from pathlib import Path

def threads():
    found = {}
    for task in Path("/proc/self/task").iterdir():
        try:
            lines = (task / "status").read_text().splitlines()
        except OSError:  # it has just ended
            continue
        fields = dict(line.split(":\\t", 1) for line in lines if ":\\t" in line)
        found[int(task.name)] = (fields["Name"], fields["Cpus_allowed_list"])
    return found

import numpy as np
import horovod.numpy as hvd

me = threading.get_native_id()
over = threading.Event()
look = threading.Event()
looked = threading.Event()
def stand_by():
    over.wait()
bystander = threading.Thread(target=stand_by)
bystander.start()
before = threads()
hvd.init()
added = []
while before[me][0] in (added or before[me]):  # a new thread has its creator's name until it gives itself one
    added = sorted(name for tid, (name, _) in threads().items() if tid not in before)
print("added", added, flush=True)
moved = set()
def watch():
    while look.wait() and not over.is_set():
        look.clear()
        for tid, (name, mask) in threads().items():
            if mask != before[me][1]:
                moved.add("the caller" if tid == me else name)
        looked.set()
watcher = threading.Thread(target=watch)
watcher.start()
for step in range(500):
    if step % 10 == 0:
        look.set()  # while the next ones run
    hvd.allreduce(np.ones(4, np.float32), name="x")
looked.wait()
over.set()
look.set()
bystander.join()
watcher.join()
print("moved", sorted(moved - {"the caller"}), flush=True)
print("left", sorted({mask for _, mask in threads().values()} - {before[me][1]}), flush=True)
hvd.shutdown()
"""


def test_a_rank_adds_one_thread_and_moves_none_but_the_one_that_waits(script, jobs) -> None:
    ranks = 4
    job = jobs(harness.python(ranks, script(WATCH), env={"OMP_NUM_THREADS": "1"}))
    job.succeed()
    printed = [line.split("<stdout>:")[1] for line in job.stdout.splitlines()]
    assert printed.count("added ['horovod-engine']") == ranks, job.report()
    assert printed.count("moved []") == ranks, job.report()
    assert printed.count("left []") == ranks, job.report()


@pytest.mark.parametrize("elastic", [False, True], ids=["fixed", "elastic"])
def test_the_launcher_has_the_threads_that_its_documentation_lists(elastic, script, jobs) -> None:
    words = ["-np", "2", "-H", "localhost:2"]
    if elastic:
        words = ["-np", "2", "--host-discovery-script", "echo localhost:2"]
    rank = script(
        "import os, signal; from horovod import _core; _core.init(); "
        "print('pid', os.getpid(), flush=True); signal.pause()"
    )
    job = jobs(harness.Job([harness.HOROVODRUN, *words, sys.executable, str(rank)]))
    ranks = [int(line.split("pid ")[1]) for line in job.wait_for("pid ", count=2)]
    agent = parent(ranks[0])
    launcher = parent(agent)
    assert agent == parent(ranks[1])
    # Names of hosts may still be looked up, by threads that have their creator's name until they give themselves one.
    expected = ["horovodrun", "hvd-rendezvous", "output", *(["discovery"] if elastic else [])]
    for pid, names in ((agent, ["horovodrun"]), (launcher, sorted(expected))):
        deadline = time.monotonic() + harness.REAP_LIMIT_S
        while threads(pid) != names:
            assert time.monotonic() < deadline, f"{threads(pid)}, not {names}\n{job.report()}"
            time.sleep(0.02)
    os.kill(launcher, signal.SIGTERM)
    job.fail()


def parent(pid: int) -> int:
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.split("\nPPid:")[1].split()[0])


def threads(pid: int) -> list[str]:
    found = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(OSError):  # it has just ended
            found.append((task / "comm").read_text().strip())
    return sorted(found)
