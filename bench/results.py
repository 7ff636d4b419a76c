"""Results kept between runs: one JSON file for each part in bench-output/.

So a part can be measured anew without the others, and the report is always made of all that is there.
"""

from __future__ import annotations

import datetime
import json
import os
import platform
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "bench-output"


class Results:
    """A folder of results by the name of their part."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    def load(self, part: str) -> Any:
        """The result of an earlier run, or None."""
        path = self.folder / f"{part}.json"
        return json.loads(path.read_text()) if path.exists() else None

    def store(self, part: str, found: Any) -> None:
        """Replace what is there."""
        path = self.folder / f"{part}.json"
        new = path.with_suffix(".new")
        new.write_text(json.dumps(found, indent=1))
        new.replace(path)


def machine() -> str:
    """The machine and what ran on it, in one sentence."""
    packages = ", ".join(
        f"{label} {version}"
        for label, name in (("PyTorch", "torch"), ("mpi4py", "mpi4py"))
        if (version := _version(name))
    )
    commit = _output("git", "-C", str(ROOT), "describe", "--always", "--dirty")
    today = datetime.datetime.now(datetime.UTC).date()
    return (
        f"{_processor()}, {os.cpu_count()} processors, Linux {platform.release()}; {packages}; "
        f"OMP_NUM_THREADS=1; commit {commit or 'unknown'}, {today}"
    )


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _output(*words: str) -> str:
    try:
        return subprocess.run(words, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""
