"""Runs jobs through the installed `horovodrun`: with a hard limit, every rank's output and Python stacks when it
is reached, and a check that no process, shared-memory file or socket file is left behind.

That looks only at what the job's own processes make, as other programs of the machine come and go: processes carry
the job's mark in their environment, and `TMPDIR` and `/dev/shm` are folders of the job alone."""

from __future__ import annotations

import contextlib
import os
import re
import select
import shutil
import signal
import socket
import stat
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import lanes

TESTS = Path(__file__).resolve().parent
ROOT = TESTS.parent
RANK_SITE = TESTS / "rank_site"
# The launcher beside the interpreter that runs the tests, never another one from the PATH.
HOROVODRUN = Path(sysconfig.get_path("scripts")) / "horovodrun"
PRIVATE_SHM = TESTS / "private_shm.py"
SHM = Path("/dev/shm")

# Names that others in a rank give to shared memory and sockets: Python's and PyTorch's own multiprocessing, NCCL, CUDA.
# A rank that is killed leaves them behind, and that is theirs to mend.
OF_OTHERS = ("sem.mp-", "psm_", "torch_", "pymp-", "nccl-", "cuda.shm.")

# Settings of this package, and what tells a process that it is one of several.
NOT_HANDED_DOWN = (
    *("HOROVOD_", "PYTEST_", "HVD_TEST_"),
    *("OMPI_", "PMI", "MV2_", "JSM_", "PALS_", "FLUX_", "SLURM_"),
    *("RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "NODE_RANK", "WORLD_SIZE", "MASTER_", "PET_"),
    *("TF_CONFIG", "JOB_COMPLETION_INDEX", "SM_HOSTS", "VC_TASK_INDEX", "DMLC_"),
    *("JAX_PROCESS_ID", "JAX_NUM_PROCESSES"),
    *("PBS_", "LSB_", "PE_HOSTFILE", "OAR_", "SGE_", "SM_CURRENT_HOST"),
    # JAX sets these in the process of the tests, once one of them has imported it.
    *("TF_CPP_MIN_LOG_LEVEL", "TPU_SKIP_MDS_QUERY", "TF2_BEHAVIOR"),
)

# Variables of jobs whose ranks are forked (tests/rank_site/forked_ranks.py): the server's socket, and the file that has
# the processor time of each such rank.
FORKS, FORKED_S = "HVD_TEST_FORKS", "HVD_TEST_FORKED_S"

# Only what hangs reaches these, on the slowest and most loaded machine: how long a job may take, and its processes to
# disappear after the launcher has ended.
LIMIT_S = 900.0
REAP_LIMIT_S = 60.0

# How the launcher reports the rank that failed first, and how it marks what a rank printed.
FIRST_FAILURE = re.compile(
    r"horovodrun: (rank (\d+) on host \S+ (?:exited with|was killed|was lost|did not answer).*)"
)
# The maximum number of its lines at the top of a report.
LINES_OF_FIRST_FAILURE = 80


class Job:
    """One run of a program in its own session, and all its descendants wherever they are re-parented to."""

    def __init__(
        self,
        command: Sequence[str | os.PathLike[str]],
        *,
        limit_s: float = LIMIT_S,
        env: Mapping[str, str | None] | None = None,
        cwd: str | os.PathLike[str] | None = None,
        own_shm: bool = True,
        forked: bool = False,
    ) -> None:
        """`own_shm=False` is for ranks that the test starts one by one: they are to share memory.

        `forked=True` saves the time in which ranks import frameworks, where a test is about what they do then
        (tests/rank_site/forked_ranks.py).
        """
        self.command = [os.fspath(word) for word in command]
        self.deadline = time.monotonic() + limit_s
        self.limit_s = limit_s
        self.mark = f"HVD_TEST_JOB={uuid.uuid4().hex}"
        if log := os.environ.get("HVD_TEST_JOBS"):
            with open(log, "a") as counted:
                counted.write(f"{self.mark}\n")
        self.folder = Path(tempfile.mkdtemp(prefix="hvd-test-"))
        self.forked = forked
        self.shm = _shm_folder() if own_shm else None
        self._changed = threading.Condition()
        self._lines: list[tuple[str, str]] = []
        self._open_streams = 2
        self._closed = False
        self.process = subprocess.Popen(
            self._started_by() + self.command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=self._environment(env or {}),
            cwd=cwd or self.folder,
            start_new_session=True,
        )
        for name, stream in (("out", self.process.stdout), ("err", self.process.stderr)):
            threading.Thread(target=self._read, args=(name, stream), daemon=True).start()

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- what it printed

    @property
    def stdout(self) -> str:
        """The launcher's standard output so far."""
        return self._text("out")

    @property
    def stderr(self) -> str:
        """The launcher's standard error so far."""
        return self._text("err")

    def wait_for(self, text: str, *, count: int = 1, limit_s: float | None = None) -> list[str]:
        """Wait until `count` lines contain `text`, and return them."""
        deadline = self.deadline
        if limit_s is not None:
            deadline = min(deadline, time.monotonic() + limit_s)
        while True:
            with self._changed:
                found = [line for _, line in self._lines if text in line]
                if len(found) >= count:
                    return found
                if not self._open_streams:
                    raise AssertionError(
                        f"ended with {len(found)} of {count} lines containing {text!r}\n{self.report()}"
                    )
                self._changed.wait(max(0.0, deadline - time.monotonic()))
            if time.monotonic() >= deadline:
                self._time_out(f"{len(found)} of {count} lines containing {text!r}")

    # -- how it ends

    def wait(self, *, limit_s: float | None = None) -> int:
        """Wait for the launcher and everything it started; return its exit status as a shell would show it."""
        deadline = self.deadline
        if limit_s is not None:
            deadline = min(deadline, time.monotonic() + limit_s)
        try:
            code = self.process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            self._time_out("the launcher did not end")
        with self._changed:
            self._changed.wait_for(lambda: not self._open_streams, timeout=REAP_LIMIT_S)
        return code if code >= 0 else 128 - code

    def succeed(self) -> Job:
        """Wait, and demand exit status 0 and nothing left behind."""
        code = self.wait()
        assert code == 0, f"exit status {code}\n{self.report()}"
        self.assert_nothing_left()
        return self

    def fail(self) -> int:
        """Wait, demand a non-zero exit status without a panic, and nothing left behind; return the status."""
        code = self.wait()
        assert code != 0, f"exit status 0, a failure was expected\n{self.report()}"
        assert "panicked at" not in self.stderr, f"a panic\n{self.report()}"
        self.assert_nothing_left()
        return code

    def members(self) -> list[int]:
        """Every living process of this job: they carry its mark in their environment."""
        mark = self.mark.encode()
        found = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                with contextlib.suppress(OSError):
                    if mark in _environment_of(entry).split(b"\0"):
                        found.append(int(entry.name))
        return found

    def rank_0(self) -> int:
        """The process of rank 0 of this job, which is measured, by the list of jobs."""
        shown = subprocess.run(
            [HOROVODRUN, "--status"], capture_output=True, text=True, timeout=self.limit_s
        )
        members = self.members()
        numbers = map(int, re.findall(r"^job (\d+): ", shown.stdout, re.MULTILINE))
        found = next((number for number in numbers if number in members), None)
        assert found is not None, f"{shown}\n{self.report()}"
        return found

    def _members_left(self) -> list[int]:
        """As `members`, but empty only if two scans are: a process that ended meanwhile may have started another."""
        return self.members() or self.members()

    def wait_until_gone(self, limit_s: float = REAP_LIMIT_S) -> None:
        """Wait until no process of the job is alive."""
        if members := wait_for_processes_to_end(self._members_left, limit_s):
            left = "\n".join(_describe(pid) for pid in members)
            raise AssertionError(f"processes left behind:\n{left}\n{self.report(stacks=True)}")

    def assert_nothing_left(self) -> None:
        """No process, no shared-memory file, no socket file."""
        self.wait_until_gone()
        files = [str(path) for path in self._shm_files()] + sorted(_socket_files(self.folder))
        assert not files, f"files left behind: {files}\n{self.report()}"

    def kill(self) -> None:
        """Kill every process of the job, also those that others start meanwhile."""
        deadline = time.monotonic() + REAP_LIMIT_S
        while (members := self._members_left()) and time.monotonic() < deadline:
            for pid in members:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            _wait_for_exit(members[0], 1.0)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(REAP_LIMIT_S)

    def close(self) -> None:
        """End what still runs and remove the job's folder."""
        if not self._closed:
            self._closed = True
            self.kill()
            lanes.note_processor_s(self.folder / FORKED_S)
            shutil.rmtree(self.folder, ignore_errors=True)
            if self.shm is not None:
                shutil.rmtree(self.shm, ignore_errors=True)

    def sees_shared_memory(self) -> bool:
        """Whether this system lets the job have a `/dev/shm` of its own; else nobody can tell whose files are whose."""
        return self.shm is not None and self.shm.is_dir()

    def report(self, *, stacks: bool = False) -> str:
        """Everything known about the job, for a failing test: what failed first comes first."""
        parts = [self._first_failure()]
        parts.append(f"--- command: {' '.join(self.command)}")
        parts.append("--- standard output\n" + self.stdout)
        parts.append("--- standard error\n" + self.stderr)
        if stacks:
            parts.append("--- Python stacks\n" + self._stacks())
        return "\n".join(parts)

    # -- internals

    def _first_failure(self) -> str:
        """The rank that failed first and its last lines; where none is known, the last lines of all."""
        with self._changed:
            lines = list(self._lines)
        found = next(filter(None, (FIRST_FAILURE.match(line) for _, line in lines)), None)
        if found is None:
            title, own = "no rank is known to have failed first; the last lines", list(lines)
        else:
            title, label = (
                f"failed first: {found[1]}",
                re.compile(rf".{{0,60}}?\[{found[2]}\]<std(?:out|err)>:"),
            )
            own = [line for line in lines if label.match(line[1])]
        shown = own[-LINES_OF_FIRST_FAILURE:]
        left_out = f" (its last {len(shown)} of {len(own)} lines)" if len(shown) < len(own) else ""
        return "\n".join([f"--- {title}{left_out}", *(line for _, line in shown)])

    def _started_by(self) -> list[str]:
        if self.shm is None:
            return []
        return [sys.executable, "-ISs", os.fspath(PRIVATE_SHM), os.fspath(self.shm)]

    def _shm_files(self) -> list[Path]:
        """Files that the job has left in its `/dev/shm`."""
        if self.shm is None:
            return []
        return [path for path in _entries(self.shm) if not path.name.startswith(OF_OTHERS)]

    def _environment(self, changes: Mapping[str, str | None]) -> dict[str, str]:
        env = _usual_environment()
        if self.forked and FORKS in os.environ:
            env[FORKS] = os.environ[FORKS]
            env[FORKED_S] = str(self.folder / FORKED_S)
        env["TMPDIR"] = str(self.folder)
        env["HVD_TEST_STACKS"] = str(self.folder / "stacks")
        (self.folder / "stacks").mkdir()
        name, _, value = self.mark.partition("=")
        env[name] = value
        for key, new in changes.items():
            if new is None:
                env.pop(key, None)
            else:
                env[key] = new
        return env

    def _read(self, name: str, stream: object) -> None:
        for line in stream:  # type: ignore[attr-defined]
            with self._changed:
                self._lines.append((name, line.decode(errors="replace").rstrip("\n")))
                self._changed.notify_all()
        with self._changed:
            self._open_streams -= 1
            self._changed.notify_all()

    def _text(self, name: str) -> str:
        with self._changed:
            return "\n".join(line for source, line in self._lines if source == name)

    def _stacks(self) -> str:
        """Ask every Python process of the job for its stacks and collect them."""
        asked = []
        for pid in self.members():
            if _catches(pid, signal.SIGUSR1):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGUSR1)
                    asked.append(pid)
        if asked:
            # The handler runs at once, even in a thread that is stuck in native code; the file tells when.
            deadline = time.monotonic() + 20.0
            while time.monotonic() < deadline and not all(self._stack_of(pid) for pid in asked):
                select.select([], [], [], 0.05)
        texts = [f"{_describe(pid)}\n{self._stack_of(pid) or '(no answer)'}" for pid in asked]
        return "\n".join(texts) or "(no Python process)"

    def _stack_of(self, pid: int) -> str:
        with contextlib.suppress(OSError):
            return (self.folder / "stacks" / f"{pid}.txt").read_text()
        return ""

    def _time_out(self, what: str) -> None:
        text = self.report(stacks=True)
        self.kill()
        raise AssertionError(
            f"time limit reached ({self.limit_s:.0f} s for the job): {what}\n{text}"
        )


def horovodrun(
    np: int, command: Iterable[str | os.PathLike[str]], *options: str, **kwargs: object
) -> Job:
    """Start `horovodrun -np NP OPTIONS COMMAND`."""
    words = [os.fspath(HOROVODRUN), "-np", str(np), *options, *map(os.fspath, command)]
    return Job(words, **kwargs)  # type: ignore[arg-type]


def python(
    np: int,
    script: str | os.PathLike[str],
    *args: str,
    options: Sequence[str] = (),
    **kwargs: object,
) -> Job:
    """Start a Python script on NP ranks with the interpreter that runs the tests."""
    return horovodrun(np, [sys.executable, os.fspath(script), *args], *options, **kwargs)


@contextlib.contextmanager
def fork_server() -> Iterator[None]:
    """The server that ranks of jobs with `forked=True` are forked from, for jobs of this process and its children."""
    # No TemporaryDirectory: each child would remove it at exit.
    folder = tempfile.mkdtemp(prefix="hvd-forks-")
    path = os.path.join(folder, "socket")
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(path)
        listener.listen(64)
        server = subprocess.Popen(
            [sys.executable, RANK_SITE / "forked_ranks.py", str(listener.fileno())],
            stdin=subprocess.PIPE,
            # Frameworks print while they are imported. If an import fails, the rank itself tells why.
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            pass_fds=[listener.fileno()],
            env=_usual_environment() | {"HOME": folder},
            cwd=folder,
            # Ctrl-C interrupts the tests, which then end their jobs.
            start_new_session=True,
        )
    os.environ[FORKS] = path
    try:
        yield
    finally:
        del os.environ[FORKS]
        try:
            server.communicate(timeout=REAP_LIMIT_S)
        finally:
            # All that it has forked ends with it.
            server.kill()
            shutil.rmtree(folder, ignore_errors=True)


def assert_circle(job: Job) -> None:
    """Check that two ranks were ended because they waited for each other, and that both sides were named."""
    assert "the ranks wait for each other in a circle" in job.stderr, job.report()
    assert "neither computes nor waits for an operation" not in job.stderr, job.report()
    for rank in (0, 1):
        words = rf"rank {rank} on \S+, process \d+: has not asked for \S.*; it waits for \S"
        assert re.search(words, job.stderr), job.report()


def _usual_environment() -> dict[str, str]:
    """The variables that all jobs have."""
    env = {k: v for k, v in os.environ.items() if not k.startswith(NOT_HANDED_DOWN)}
    env["PATH"] = f"{HOROVODRUN.parent}:{env.get('PATH', '')}"
    env["PYTHONPATH"] = f"{RANK_SITE}:{env.get('PYTHONPATH', '')}".rstrip(":")
    env["PYTHONDONTWRITEBYTECODE"] = "1"
    # Ranks share few cores here; more threads than that would only fight.
    env["OMP_NUM_THREADS"] = "1"
    return env


def _shm_folder() -> Path | None:
    """A folder in shared memory that a job can have as its `/dev/shm`."""
    try:
        folder = Path(tempfile.mkdtemp(prefix="hvd-test-", dir=SHM))
    except OSError:
        return None
    # As the one that it replaces: some tests run programs as other users.
    folder.chmod(0o1777)
    return folder


def _socket_files(folder: Path) -> set[str]:
    """Socket files in a folder and one level below: where programs put them."""
    found = set()
    for place in [folder, *_entries(folder)]:
        if place.name.startswith(OF_OTHERS):
            continue
        for path in _entries(place):
            with contextlib.suppress(OSError):
                if stat.S_ISSOCK(path.lstat().st_mode):
                    found.add(str(path))
    return found


def _entries(folder: Path) -> list[Path]:
    """Entries of a folder; none if it is no folder, or has just gone."""
    try:
        return list(folder.iterdir())
    except OSError:
        return []


def _wait_for_exit(pid: int, limit_s: float) -> None:
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        select.select([handle], [], [], limit_s)
    finally:
        os.close(handle)


def _catches(pid: int, number: int) -> bool:
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("SigCgt:"):
                return bool(int(line.split()[1], 16) >> (number - 1) & 1)
    return False


def command_line(pid: int) -> list[bytes]:
    """The words of a process's command; none if it has ended, or is just executing a program."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[:-1]
    return []


def wait_for_processes_to_end(
    present: Callable[[], Iterable[int]], limit_s: float = REAP_LIMIT_S
) -> list[int]:
    """Wait until `present` returns no process; call it again after each exit. Return the processes that stay."""
    deadline = time.monotonic() + limit_s
    while left := list(present()):
        remaining = deadline - time.monotonic()
        if remaining <= 0:
            break
        _wait_for_exit(left[0], remaining)
    return left


def environment_of(pid: int) -> dict[str, str]:
    """The variables of a process; none if it has ended."""
    with contextlib.suppress(OSError):
        words = _environment_of(Path(f"/proc/{pid}")).decode(errors="replace").split("\0")
        return dict(word.split("=", 1) for word in words if "=" in word)
    return {}


def _environment_of(process: Path) -> bytes:
    """The environment of a process, given its folder in `/proc`: the new one during `execve`.

    During `execve` the file is empty, also if the memory is replaced between open and read. So an empty environment
    counts only if its end is known and equals its beginning, or if the process is a zombie or a kernel thread.
    The end also equals the beginning for a moment of `execve`, before the kernel notes where the new code begins.
    """
    # Only a process that a device blocks reaches this.
    deadline = time.monotonic() + 10.0
    while True:
        variables = (process / "environ").read_bytes()
        if variables or time.monotonic() > deadline:
            return variables
        fields = (process / "stat").read_text().rpartition(")")[2].split()
        state, flags, code = fields[0], int(fields[6]), int(fields[23])
        begin, end = int(fields[47]), int(fields[48])
        is_of_the_kernel = bool(flags & 0x0020_0000)
        if state in "ZX" or is_of_the_kernel or (begin == end != 0 and code != 0):
            return b""
        os.sched_yield()


def _describe(pid: int) -> str:
    with contextlib.suppress(OSError):
        words = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ")
        variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        rank = [word for word in variables if word.startswith(b"HOROVOD_RANK=")]
        return f"process {pid} {rank}: {words.decode(errors='replace').strip()}"
    return f"process {pid} (gone)"
