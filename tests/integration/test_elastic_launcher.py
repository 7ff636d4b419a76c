"""Elastic jobs from the launcher's side, with workers that use the core alone: who is told, restarted, removed, and
what ends the job. Training states and samplers have tests of their own."""

from __future__ import annotations

import os
import re
import signal
import sys

import pytest

import harness

# Counts steps together with the others, as hvd.elastic.run does with a model, until the file `stop` is there.
WORKER = """
import ctypes, os, signal, sys
from horovod import _core
from horovod.common import _ops
from horovod.common.exceptions import HorovodInternalError, WorkerRemovedError

stop = sys.argv[1]
for option in sys.argv[2:]:
    if option == f"die-in-slot-{os.environ['HOROVOD_LOCAL_RANK']}":
        print("dying early", flush=True)
        sys.exit(9)


def reduce(value, kind=_core.ALLREDUCE, op=_ops.Max, root=-1):
    cell = (ctypes.c_int64 * 1)(value)
    at = ctypes.addressof(cell)
    tensor = (at, at, 5, (1,), cell)
    _core.wait(_core.enqueue(("test", f"{kind}.{op}", 0), (kind, op, 1.0, 1.0, root, None), [tensor]))
    return cell[0]


def init():
    try:
        _core.init()
    except WorkerRemovedError as error:
        print(f"removed: {error}", flush=True)
        sys.exit(0)


step, is_done = 0, False
init()
while not is_done:
    try:
        if _core.needs_sync():
            step = reduce(step, _core.BROADCAST, _ops.Sum, 0)
        _core.hold_state()
        begun = False
        while not is_done:
            assert reduce(1, op=_ops.Sum) == _core.size()
            step += 1
            if step == 5 and f"leave-slot-{os.environ['HOROVOD_LOCAL_RANK']}" in sys.argv:
                sys.exit(0)
            if not begun:
                print(
                    f"round of {_core.size()}: rank {_core.rank()} slot {_core.local_rank()} on"
                    f" {_core.hostname()} is process {os.getpid()}, step {step}",
                    flush=True,
                )
                begun = True
            version, kind = _core.host_updates()
            if reduce(version):
                print(f"told of change {kind} at step {step}", flush=True)
                break
            is_done = reduce(os.path.exists(stop) and step >= 20) == 1
    except HorovodInternalError as error:
        print(f"lost somebody at step {step}: {error}", flush=True)
        _core.hold_state(False)
    if not is_done:
        _core.shutdown()
        init()
print(f"done at step {step}", flush=True)
_core.shutdown()
"""


class Elastic:
    """A job of such workers, the list of its hosts in a file that a script prints."""

    def __init__(self, script, jobs, tmp_path, np, *options, hosts=None, words=(), env=None):
        self.folder = tmp_path / f"job{len(list(tmp_path.iterdir()))}"
        self.folder.mkdir()
        self.stop = self.folder / "stop"
        self.hosts = self.folder / "hosts"
        self.begun = {}
        if hosts is not None:
            self.list(hosts)
            options = ("--host-discovery-script", f"cat {self.hosts}", *options)
        worker = [sys.executable, script(WORKER), str(self.stop), *words]
        self.job = jobs(harness.horovodrun(np, worker, *options, env=env))

    def list(self, *lines):
        """From now on these are the hosts."""
        self._forget_rounds()
        new = self.hosts.with_suffix(".new")
        new.write_text("".join(f"{line}\n" for line in lines))
        new.rename(self.hosts)

    def kill(self, *pids):
        self._forget_rounds()
        for pid in pids:
            os.kill(pid, signal.SIGKILL)

    def _forget_rounds(self):
        """`members` looks for what begins from here on."""
        if hasattr(self, "job"):
            sizes = re.findall(r"round of (\d+): ", self.job.stdout)
            self.begun = {int(size): sizes.count(size) for size in sizes}

    def members(self, size):
        """Wait until a round of this size has begun since the last change; the process of each rank."""
        count = self.begun.get(size, 0) + size
        while True:
            lines = self.job.wait_for(f"round of {size}: ", count=count)[-size:]
            found = [
                re.search(r"rank (\d+) slot \d+ on \S+ is process (\d+)", line) for line in lines
            ]
            pids = {int(m[1]): int(m[2]) for m in found}
            if len(pids) == size:
                return pids
            count += 1  # one that was broken off at once

    def finish(self):
        self.stop.touch()
        return self.job.succeed()


@pytest.fixture
def elastic(script, jobs, tmp_path):
    return lambda np, *options, **kwargs: Elastic(script, jobs, tmp_path, np, *options, **kwargs)


def test_a_killed_worker_is_replaced_while_the_other_goes_on(elastic) -> None:
    run = elastic(2, "--min-np", "1", "-H", "localhost:2")
    first = run.members(2)
    run.kill(first[1])
    assert run.members(1) == {0: first[0]}, "the survivor keeps its process"
    again = run.members(2)
    assert again[0] == first[0]
    assert again[1] not in first.values()

    # The one that every worker gets the state from dies: the other takes its place.
    run.kill(again[0])
    third = run.members(2)
    assert third[0] == again[1]
    assert third[1] not in again.values()
    job = run.finish()

    assert "rank 1 on host localhost was killed by signal 9 (SIGKILL)" in job.stderr
    assert "1 rank goes on" in job.stderr
    assert "2 ranks go on, 1 of them new" in job.stderr
    assert len(re.findall(r"told of change 2", job.stdout)) == 2
    # No step is lost: who comes in begins where the survivor is.
    steps = [int(s) for s in re.findall(r"round of \d: rank 0 .* step (\d+)", job.stdout)]
    assert steps == sorted(steps)
    assert steps[-1] > 0


def test_hosts_come_and_go(elastic) -> None:
    run = elastic(1, "--min-np", "1", hosts="localhost:1")
    first = run.members(1)
    run.list("localhost:1", "127.0.0.1:2")
    grown = run.members(3)
    assert grown[0] == first[0], "who holds the state stays rank 0"

    # The host that holds rank 0 leaves: the others keep their order, and it ends by itself.
    run.list("127.0.0.1:2")
    left = run.members(2)
    assert [left[0], left[1]] == [grown[1], grown[2]]
    run.job.wait_for("removed: this process is no longer part of the job")

    # A list that cannot be had changes nothing; one without hosts leaves the last worker that holds the state alone.
    run.hosts.unlink()
    run.job.wait_for("the hosts stay as they were")
    run.list("127.0.0.1:1")
    assert run.members(1) == {0: left[0]}
    job = run.finish()
    assert "told of change 1" in job.stdout
    assert "told of change 2" in job.stdout
    assert "exited with" not in job.stderr, "nobody failed"


def test_a_slot_that_always_fails_rests_and_the_job_goes_on(elastic) -> None:
    run = elastic(1, "--min-np", "1", "-H", "localhost:2", words=["die-in-slot-1"])
    run.job.wait_for("slot 1 failed 3 times within 60 s and rests for 60 s")
    assert len(run.members(1)) == 1
    job = run.finish()
    assert job.stdout.count("dying early") == 3


@pytest.mark.parametrize(
    ("program", "error"),
    [
        (["-c", "import no_such_module"], "ModuleNotFoundError: No module named 'no_such_module'"),
        (["-c", "def f(:"], "SyntaxError: "),
        (["-m", "no_such_module"], ": No module named no_such_module"),
        (["-c", "import os, sys; os.execl(sys.executable, 'python', 'no.py')"], "can't open file "),
    ],
)
def test_a_script_that_cannot_start_ends_the_job_at_once(jobs, program, error) -> None:
    options = ("--min-np", "1", "-H", "localhost:2")
    job = jobs(harness.horovodrun(2, [sys.executable, *program], *options))
    assert job.fail() == (2 if error.startswith("can't") else 1)
    assert "the script cannot start: " in job.stderr
    assert error in job.stderr.rpartition("Last lines of its stderr:")[2]
    assert "no host is left" not in job.stderr


def test_jobs_that_cannot_go_on_end_and_say_why(elastic) -> None:
    # Every slot fails again and again: the exit code is that of the last.
    run = elastic(2, "--min-np", "1", "-H", "localhost:2", words=["die-in-slot-0", "die-in-slot-1"])
    assert run.job.fail() == 9
    assert "all its slots failed again and again" in run.job.stderr
    assert "no host is left that could run a worker" in run.job.stderr

    # Too few are left, and too few come in time.
    run = elastic(
        2, "--min-np", "2", "--elastic-timeout", "20", "-H", "localhost:2",
        env={"HOROVOD_ELASTIC_SLOT_FAILURES": "1"},
    )  # fmt: skip
    run.kill(run.members(2)[1])
    assert run.job.fail() == 128 + signal.SIGKILL
    assert "2 workers are needed (--min-np), 1 are ready" in run.job.stderr
    assert "localhost:2 (1 run, 1 rest after failures)" in run.job.stderr

    # One change too many.
    run = elastic(2, "--min-np", "1", "--reset-limit", "0", "-H", "localhost:2")
    run.kill(run.members(2)[0])
    assert run.job.fail() == 128 + signal.SIGKILL
    assert "--reset-limit 0" in run.job.stderr

    # All who held the state are gone at once.
    run = elastic(2, "--min-np", "1", "-H", "localhost:2")
    run.kill(*run.members(2).values())
    run.job.fail()
    assert "every worker that held the training state has ended" in run.job.stderr


def test_who_leaves_early_with_0_is_named_and_too_few_have_a_status_of_their_own(elastic) -> None:
    run = elastic(2, "--min-np", "2", "-H", "localhost:2", words=["leave-slot-1"])
    run.members(1)
    run.stop.touch()
    assert run.job.fail() == 75
    for text in (
        "rank 1 on host localhost ended with 0 while 1 other goes on",
        "nothing is started any more",
        "1 left are fewer than --min-np 2",
        "the job will end with status 75",
    ):
        assert text in run.job.stderr, run.job.report()


def test_a_job_that_waits_says_for_whom(elastic) -> None:
    run = elastic(2, hosts="localhost:1")
    run.job.wait_for(
        "waiting for 10 s: 2 workers are needed (-np), 0 are ready; hosts: localhost:1 (0 run)"
    )
    run.list("localhost:2")
    run.members(2)
    run.finish()


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (["--host-discovery-script", "exit 7"], "failed with exit code 7"),
        (["--host-discovery-script", "echo localhost"], "--slots-per-host"),
        (["--min-np", "3"], "--min-np 3 is more than -np 2"),
        (["--min-np", "1", "--max-np", "1"], "--max-np 1 is less than -np 2"),
        (["--host-discovery-script", "sleep 60", "--elastic-timeout", "1"], "script has not ended"),
        (["--min-np", "1", "--output-filename", "/dev/null"], "cannot create /dev/null/rank.0"),
        (["--min-np", "1", "--blacklist-cooldown-range", "9", "3"], "the smaller one first"),
        (["--min-np", "1", "-H", "localhost:1"], "Requested more processes (2)"),
    ],
)
def test_bad_options_are_refused(options, text, jobs) -> None:
    job = jobs(harness.horovodrun(2, ["true"], *options))
    assert job.fail() in (1, 2)
    assert text in job.stderr


def test_a_signal_ends_everything(elastic) -> None:
    run = elastic(2, "--min-np", "1", "-H", "localhost:2,127.0.0.1:2")
    run.members(4)
    run.job.process.send_signal(signal.SIGTERM)
    assert run.job.fail() == 128 + signal.SIGTERM


def test_commands_that_never_meet_run_once_each(jobs, tmp_path) -> None:
    job = jobs(harness.horovodrun(2, ["sh", "-c", "echo ran"], "--min-np", "1"))
    assert job.succeed().stdout.count("ran") == 2
