"""The lines that `stage.py` prints while a slow stage runs, and when the stage fails."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import harness

BUILD = harness.ROOT / "build_backend"
QUICKLY = """
import sys
from pathlib import Path
import stage
stage.EVERY_S = 0.05
sys.exit(stage.main("a stage", Path(sys.argv[1]), sys.argv[2:]))
"""


def start(log: Path, *command: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", QUICKLY, str(log), *command],
        cwd=BUILD,
        stdout=subprocess.PIPE,
        text=True,
    )


def test_lines_say_how_long_it_runs_and_what_it_does(tmp_path: Path) -> None:
    may_end, log = tmp_path / "end", tmp_path / "logs" / "log"
    wheel = "torch-2.15.0-cp311-cp311-manylinux_2_28_x86_64.whl (820.3 MB)"
    command = (
        f"printf 'one\\n\\033[1m{wheel}\\033[0m\\n'; until [ -e {may_end} ]; do sleep 0.02; done"
    )
    process = start(log, "bash", "-c", command)
    assert process.stdout is not None
    assert process.stdout.readline() == "a stage: begins\n"
    assert any(line.endswith(" s, torch-2.15.0 (820.3 MB)\n") for line in process.stdout)
    may_end.touch()
    *_, last = process.stdout
    assert last.startswith("a stage: done after ")
    assert process.wait(harness.LIMIT_S) == 0
    assert log.read_text().splitlines()[0] == "one"


def test_a_failure_shows_the_end_of_the_log(tmp_path: Path) -> None:
    process = start(tmp_path / "log", "bash", "-c", "seq 100; exit 3")
    text, _ = process.communicate(timeout=harness.LIMIT_S)
    assert process.returncode == 3
    assert "a stage: FAILED after " in text
    lines = text.splitlines()
    assert lines[-1] == "100"
    assert "41" in lines
    assert "40" not in lines
