"""Functions on ranks in tasks that somebody else starts, here plain processes, whose agents dial the launcher."""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import io
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import harness
import strangers
from horovod.runner.agents import Invitation, run_on_agents, serve_as_agent

TASK = """
import os, sys
from horovod.runner.agents import Invitation, serve_as_agent
invitation = Invitation(tuple(os.environ.pop("ADDRESSES").split(",")), os.environ.pop("KEY"))
index, attempt = map(int, sys.argv[1:])
sys.exit(serve_as_agent(invitation, index=index, attempt=attempt, environment={"OF_TASK": str(index)}))
"""


class Processes:
    """Tasks as plain processes."""

    def __init__(self, count: int, cwd: Path | None = None, key: str | None = None) -> None:
        self.count = count
        self.cwd = cwd
        self.key = key
        self.problem: BaseException | None = None
        self.running: dict[int, subprocess.Popen[bytes]] = {}
        self.statuses: list[int] = []
        self.stops = 0

    def start(self, invitation: Invitation) -> None:
        self.invitation = invitation
        for index in range(self.count):
            self.start_one(index)

    def start_one(self, index: int, attempt: int = 0) -> None:
        self.running[index] = subprocess.Popen(
            [sys.executable, "-c", TASK, str(index), str(attempt)],
            env={
                **os.environ,
                "ADDRESSES": ",".join(self.invitation.addresses),
                "KEY": self.key or self.invitation.key,
                "BOTH": "task",
                "ENV_WINS": "task",
            },
            cwd=self.cwd,
        )

    def failure(self) -> BaseException | None:
        return self.problem

    def stop(self) -> None:
        self.stops += 1
        for process in self.running.values():
            try:
                self.statuses.append(process.wait(harness.REAP_LIMIT_S))
            except subprocess.TimeoutExpired:
                process.kill()
                raise


def in_time(call: Callable[[], Any]) -> Any:
    pool = concurrent.futures.ThreadPoolExecutor(1)
    try:
        return pool.submit(call).result(harness.LIMIT_S)
    finally:
        pool.shutdown(wait=False)


def run(func: Callable[..., Any], *args: Any, tasks: Processes, **more: Any) -> list[Any]:
    results = in_time(lambda: run_on_agents(func, args, tasks=tasks, **more))
    assert tasks.stops == 1
    return results


@pytest.mark.parametrize("is_elastic", [False, True])
def test_a_launcher_whose_agents_are_on_its_host_listens_on_the_loopback_only(
    is_elastic: bool,
) -> None:
    def work() -> str:
        import horovod.numpy as hvd

        hvd.init()
        return os.environ["HOROVOD_RENDEZVOUS"]

    class Observed(Processes):
        def start(self, invitation: Invitation) -> None:
            launchers = [
                int(pid)
                for pid in Path(f"/proc/self/task/{threading.get_native_id()}/children")
                .read_text()
                .split()
            ]
            self.bound = strangers.bound([os.getpid(), *launchers])
            super().start(invitation)

    tasks = Observed(2)
    tasks.are_on_this_host = True
    places = run(work, tasks=tasks, num_proc=2, is_elastic=is_elastic)
    assert tasks.bound
    hosts = {address[0] for family, address in tasks.bound if family != "unix"}
    hosts |= {
        at.rpartition(":")[0].strip("[]")
        for at in (*tasks.invitation.addresses, *",".join(places).split(","))
    }
    assert hosts <= {"127.0.0.1", "::1"}, (hosts, tasks.bound, places)


def wait_until(is_so: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + harness.REAP_LIMIT_S
    while not is_so():
        assert time.monotonic() < deadline, f"not in time: {what}"
        time.sleep(0.05)


def has_ended(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return True
    return state == "Z"


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [n for n in os.environ if n.startswith(("HOROVOD_", "OMPI_", "PMI"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


def test_results_come_in_the_order_of_tasks_from_the_tasks_own_places(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def work(base: int) -> Any:
        import numpy as np

        import horovod.numpy as hvd

        hvd.init()
        total = hvd.allreduce(np.array([hvd.rank() + 1.0]), op=hvd.Sum).item()
        print("said by", hvd.rank())
        names = ("BOTH", "ENV_WINS", "ONLY_CALLER", "CUDA_VISIBLE_DEVICES", "HOROVODRUN_AGENTS_KEY")
        variables = [os.environ.get(name) for name in names]
        left = [name for name in os.environ if name.startswith("HOROVODRUN_SET_")]
        places = (hvd.local_rank(), hvd.local_size(), hvd.cross_size())
        of_task = int(os.environ["OF_TASK"])
        return base + of_task, hvd.rank(), total, places, os.getcwd(), variables, left

    monkeypatch.setenv("BOTH", "caller")
    monkeypatch.setenv("ONLY_CALLER", "caller")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7")
    tasks = Processes(2, tmp_path)
    # The tasks inherit it from this process, but none of it is the launcher's.
    out = io.StringIO()
    results = run(work, 10, tasks=tasks, num_proc=2, env={"ENV_WINS": "env"}, stdout=out)
    variables = ["task", "env", "caller", "7", None]
    assert results == [
        (10 + rank, rank, 3.0, (rank, 2, 1), str(tmp_path), variables, []) for rank in range(2)
    ]
    assert tasks.statuses == [0, 0]
    assert "[1]<stdout>:said by 1\n" in out.getvalue()


def test_an_exception_of_a_rank_is_raised_and_the_others_end() -> None:
    def work() -> None:
        import horovod.numpy as hvd

        hvd.init()
        if hvd.rank() == 1:
            raise LookupError("of rank 1")
        hvd.barrier()

    tasks = Processes(2)
    with pytest.raises(LookupError, match="of rank 1") as raised:
        run(work, tasks=tasks, num_proc=2, network_interfaces=["lo"], caller="somebody.run")
    assert any("function of somebody.run on rank 1" in note for note in raised.value.__notes__)
    assert tasks.stops == 1
    assert tasks.statuses == [0, 0]


def test_an_executor_that_is_killed_takes_its_rank_with_it_and_is_named(tmp_path: Path) -> None:
    def work(folder: Path) -> None:
        import horovod.numpy as hvd

        hvd.init()
        file = folder / f"{hvd.rank()}.part"
        file.write_text(f"{os.getpid()} {os.getppid()}")
        file.rename(folder / str(hvd.rank()))
        # Only what kills it ends it, though its pipes are closed.
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        while True:
            hvd.barrier()

    tasks = Processes(2)

    def kill() -> None:
        wait_until(lambda: all((tmp_path / str(rank)).exists() for rank in range(2)), "ranks")
        tasks.running[1].kill()

    killer = threading.Thread(target=kill, daemon=True)
    killer.start()
    with pytest.raises(
        RuntimeError, match=r"rank 1 on \S+\[task 1\]: lost: the connection to its agent"
    ):
        run(work, tmp_path, tasks=tasks, num_proc=2)
    killer.join()
    for rank in range(2):
        for pid in map(int, (tmp_path / str(rank)).read_text().split()):
            wait_until(lambda pid=pid: has_ended(pid), f"end of {pid}")


def test_too_few_tasks_are_counted_and_the_missing_named() -> None:
    tasks = Processes(1)
    begun = time.monotonic()
    with pytest.raises(
        RuntimeError, match=r"1 of 3 tasks have come within 15 s, missing: tasks 1, 2"
    ):
        run(print, tasks=tasks, num_proc=3, start_timeout=15)
    assert time.monotonic() - begun >= 15
    assert (tasks.stops, tasks.statuses) == (1, [0])


def test_another_key_is_refused(capfd: pytest.CaptureFixture[str]) -> None:
    tasks = Processes(1, key="0" * 64)
    with pytest.raises(RuntimeError, match="0 of 1 tasks have come"):
        run(print, tasks=tasks, num_proc=1, start_timeout=15, network_interfaces=["lo"])
    printed = capfd.readouterr().err
    assert tasks.statuses == [1], printed
    assert "task 0 cannot reach the launcher" in printed
    assert "0000000000" not in printed


def test_what_hinders_the_tasks_is_raised_at_once() -> None:
    tasks = Processes(0)
    tasks.problem = LookupError("the cluster is full")
    with pytest.raises(LookupError, match="the cluster is full"):
        run(print, tasks=tasks, num_proc=2, start_timeout=250)
    assert tasks.stops == 1


def test_an_interrupted_caller_ends_all_tasks(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        "import sys, time\n"
        f"sys.path[:0] = {[str(harness.TESTS), str(Path(__file__).parent)]!r}\n"
        "from test_dialed_agents import Processes\n"
        "from horovod.runner.agents import run_on_agents\n"
        "def work():\n"
        "    print('runs', flush=True)\n"
        "    time.sleep(1000)\n"
        "tasks = Processes(1)\n"
        "try:\n"
        "    run_on_agents(work, tasks=tasks, num_proc=1)\n"
        "except KeyboardInterrupt:\n"
        "    print('statuses', tasks.stops, tasks.statuses, flush=True)\n"
    )
    with harness.Job([sys.executable, program]) as job:
        job.wait_for("runs")
        job.process.send_signal(signal.SIGINT)
        job.wait_for("statuses 1 [0]")


def test_an_elastic_job_goes_on_with_the_task_that_replaces_a_lost_one(tmp_path: Path) -> None:
    def work(folder: Path) -> tuple[int, ...]:
        import numpy as np

        import horovod.numpy as hvd
        from horovod.common import elastic

        hvd.init()

        @elastic.run
        def train(state: Any) -> int:
            while state.batch < 20 or hvd.size() < 2 or not (folder / "replaced").exists():
                hvd.allreduce(np.ones(2), name="x")
                state.batch += 1
                state.commit()
                if state.batch == 5 and hvd.rank() == 0:
                    (folder / "begun").touch()
                time.sleep(0.02)
            return state.batch

        state = elastic.ObjectState(hvd.broadcast_object, hvd.rank, batch=0)
        batch = train(state)
        places = hvd.local_rank(), hvd.local_size(), hvd.cross_rank(), hvd.cross_size()
        return batch, hvd.rank(), hvd.size(), *places

    tasks = Processes(2)

    def replace() -> None:
        wait_until((tmp_path / "begun").exists, "five batches")
        tasks.running[1].kill()
        tasks.running[1].wait()
        (tmp_path / "replaced").touch()
        tasks.start_one(1, attempt=1)

    replacer = threading.Thread(target=replace, daemon=True)
    replacer.start()
    err = io.StringIO()
    results = run(
        work, tmp_path, tasks=tasks, num_proc=2, min_num_proc=1, is_elastic=True, stderr=err
    )
    replacer.join()
    # The tasks are on one machine, each a host of its own to the launcher.
    assert [result[1:3] for result in results] == [(0, 2), (1, 2)]
    assert sorted(result[3] for result in results) == [0, 1]
    assert [result[4:] for result in results] == [(2, 0, 1)] * 2
    assert results[0][0] == results[1][0] >= 20
    assert tasks.statuses == [0, 0]
    assert "[task 1] was lost: the connection to its agent ended" in err.getvalue()


def test_an_agent_without_a_launcher_says_so(capfd: pytest.CaptureFixture[str]) -> None:
    invitation = Invitation(("nowhere",), "0" * 64)
    assert "000000" not in repr(invitation)
    assert dataclasses.astuple(invitation) == (("nowhere",), "0" * 64, False)
    assert in_time(lambda: serve_as_agent(invitation, index=0)) == 1
    assert 'addresses: "nowhere" is not ip:port' in capfd.readouterr().err


def test_what_runs_in_a_task_must_be_there() -> None:
    tasks = Processes(1)
    with contextlib.redirect_stderr(io.StringIO()), pytest.raises(RuntimeError) as raised:
        run(print, tasks=tasks, num_proc=1, executable="/no/such/python")
    assert "[task 0]: the command /no/such/python cannot be run" in str(raised.value)
    assert tasks.stops == 1
