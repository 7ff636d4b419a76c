"""`horovodrun --top` in a pseudo-terminal: what it shows, its keys, and that it gives the terminal back."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import re
import select
import struct
import subprocess
import termios
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import harness

# Only a hang reaches this.
LIMIT_S = 300.0

# Rank 1 comes late: rank 0 waits for it until the test has seen that.
LATE = """
import sys, time
from pathlib import Path
import numpy as np
import horovod.numpy as hvd

hvd.init()
folder = Path(sys.argv[1])

def wait_for(condition):
    while not condition():
        time.sleep(0.01)

hvd.allreduce(np.ones(8, np.float32), name="first")
if hvd.rank() == 0:
    wait_for(lambda: len(hvd.stats()["ranks"]) == 2)
    print("READY", flush=True)
else:
    wait_for((folder / "late").exists)
hvd.allreduce(np.ones(8, np.float32), name="late")
if hvd.rank() == 0:
    wait_for((folder / "end").exists)
hvd.barrier()
"""


class Terminal:
    """A pseudo-terminal of 80 columns and 24 rows with a program in it."""

    def __init__(self, *options: str, term: str = "xterm") -> None:
        self.master, self.slave = pty.openpty()
        fcntl.ioctl(self.slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
        self.before = termios.tcgetattr(self.slave)
        self.process = subprocess.Popen(
            [str(harness.HOROVODRUN), *options],
            stdin=self.slave,
            stdout=self.slave,
            stderr=self.slave,
            env={**os.environ, "TERM": term, "NO_COLOR": "1"},
            start_new_session=True,
        )
        self.text = ""

    def frames(self) -> list[str]:
        """The frames so far as plain text, also one that has only come in part."""
        return [re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", part) for part in self.text.split("\x1b[H")]

    def wait_for(self, pattern: str) -> str:
        """Read until a whole frame has this pattern; return the frame."""
        deadline = time.monotonic() + LIMIT_S
        begin = len(self.frames()) - 1
        while True:
            frames = zip(self.frames(), self.text.split("\x1b[H"), strict=True)
            for frame, part in list(frames)[begin:]:
                if "\x1b[0m" in part and re.search(pattern, frame):
                    return frame.replace("\r", "")
            self.read(deadline)

    def read(self, deadline: float) -> None:
        assert time.monotonic() < deadline, self.text
        if select.select([self.master], [], [], 1.0)[0]:
            self.text += os.read(self.master, 65536).decode(errors="replace")

    def press(self, keys: str) -> None:
        os.write(self.master, keys.encode())

    def end(self) -> int:
        """Read until the program has ended; return its exit status."""
        deadline = time.monotonic() + LIMIT_S
        while (code := self.process.poll()) is None:
            self.read(deadline)
        while select.select([self.master], [], [], 0)[0]:
            self.text += os.read(self.master, 65536).decode(errors="replace")
        return code

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        for descriptor in (self.master, self.slave):
            os.close(descriptor)


@pytest.fixture
def terminal() -> Iterator[type]:
    with contextlib.ExitStack() as stack:

        def opened(*options: str, **more: str) -> Terminal:
            made = Terminal(*options, **more)
            stack.callback(made.close)
            return made

        yield opened


def test_a_job_is_shown_sorted_and_left(script, jobs, tmp_path: Path, terminal) -> None:
    job = jobs(harness.python(2, script(LATE), str(tmp_path), env={"HOROVOD_METRICS": "1"}))
    job.wait_for("READY")
    pid = job.rank_0()
    view = terminal(f"--top={pid}")
    frame = view.wait_for(r"for \d+ s waiting for rank 1 to begin \"allreduce\.late\"")
    lines = frame.split("\n")
    assert len(lines) == 24, lines
    assert max(map(len, lines)) <= 80, lines
    assert lines[0].startswith(f"job {pid}  2 ranks on 1 host, up ")
    assert re.search(r"^ +0 \S+ .*  rank 1$", frame, re.MULTILINE), frame
    assert re.search(r"s sort: rank  .* 1-2 of 2$", lines[-1]), lines[-1]

    view.press("s")
    view.wait_for("s sort: awaited  ")
    view.press("r")
    view.wait_for("sort: awaited, reversed")
    (tmp_path / "late").touch()
    (tmp_path / "end").touch()
    job.succeed()
    view.wait_for("the job has ended")
    view.press("q")
    assert view.end() == 0
    assert view.text.startswith("\x1b[?1049h\x1b[?25l")
    assert view.text.endswith("\x1b[?25h\x1b[?1049l"), "the screen is given back"
    assert termios.tcgetattr(view.slave) == view.before, "and the mode of the input"


def test_a_signal_gives_the_terminal_back(script, jobs, tmp_path: Path, terminal) -> None:
    (tmp_path / "late").touch()
    job = jobs(harness.python(2, script(LATE), str(tmp_path), env={"HOROVOD_METRICS": "1"}))
    job.wait_for("READY")
    view = terminal(f"--top={job.rank_0()}")
    view.wait_for("2 ranks on 1 host,")
    view.process.terminate()
    assert view.end() == 0
    assert view.text.endswith("\x1b[?25h\x1b[?1049l")
    assert termios.tcgetattr(view.slave) == view.before
    (tmp_path / "end").touch()
    job.succeed()


def test_a_pipe_is_refused_with_the_option_for_it(jobs) -> None:
    job = jobs(harness.Job([str(harness.HOROVODRUN), "--top"]))
    assert job.fail() == 2
    assert "--top needs a terminal" in job.stderr
    assert "--status prints the figures once" in job.stderr
    assert not job.stdout


def test_a_terminal_without_a_cursor_is_refused(terminal) -> None:
    view = terminal("--top", term="dumb")
    assert view.end() == 2
    assert "--status prints the figures once" in view.text


def test_a_process_that_is_no_rank_0_is_refused(terminal) -> None:
    view = terminal("--top=1")
    assert view.end() == 1
    assert "process 1 is no rank 0 of a measured job" in view.text
    assert "\x1b[?1049h" not in view.text
