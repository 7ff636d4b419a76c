"""The table of seeded faults fits the tree: each text is there once, and each test that shall notice it exists."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import test_parallel

ROOT = Path(__file__).resolve().parents[2]
TABLE = ROOT / "tests" / "seeded_faults" / "table.py"


def _module(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(name, TABLE.with_name(f"{name}.py"))
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


table, run = _module("table"), _module("run")


def test_there_are_at_least_thirty_with_names_of_their_own() -> None:
    names = [fault.name for fault in table.FAULTS]
    assert len(set(names)) == len(names) >= 30


def test_they_are_spread_over_all_that_is_shipped() -> None:
    """Every crate that ends up in the wheel, and every adapter."""
    files = [fault.file for fault in table.FAULTS]
    crates = {path.parent.name for path in ROOT.glob("crates/*/Cargo.toml")}
    for crate in crates - {"horovod-sim", "horovod-fuzz", "horovod-gpu-double", "horovod-settings"}:
        assert any(file.startswith(f"crates/{crate}/") for file in files), crate
    for part in ("common", "torch", "tensorflow", "_keras", "jax", "mxnet", "data", "spark", "ray"):
        assert any(file.startswith(f"python/horovod/{part}/") for file in files), part


@pytest.mark.parametrize("fault", table.FAULTS, ids=lambda fault: fault.name)
def test_the_text_is_there_once_and_the_tests_exist(fault: Any) -> None:
    text = (ROOT / fault.file).read_text()
    assert text.count(fault.old) == 1, f"{fault.file} has it {text.count(fault.old)} times"
    assert fault.new != fault.old
    tests = fault.tests
    if isinstance(tests, table.Rust):
        sources = [path.read_text() for path in (ROOT / "crates" / tests.crate).rglob("*.rs")]
        for name in tests.names:
            assert any(re.search(rf"fn \w*{name}\w*\(", source) for source in sources), name
        return
    for node in tests.nodes:
        file, _, name = node.partition("[")[0].partition("::")
        assert f"def {name}(" in (ROOT / "tests" / file).read_text(), node
        if isinstance(tests, table.Ranks):
            part = test_parallel.Part(ROOT / "tests" / file, tests.environment)
            assert part.runs_on(tests.np, is_thorough=False), "the first tier does not run this"


def test_files_with_another_date_and_the_same_text_are_no_change(tmp_path: Path) -> None:
    def git(*words: str) -> None:
        own = ["-c", "user.name=test", "-c", "user.email=test@localhost"]
        subprocess.run(["git", *own, *words], cwd=tmp_path, check=True)

    git("init", "--quiet")
    file = tmp_path / "file"
    file.write_text("text\n")
    git("add", "file")
    git("commit", "--quiet", "--message", "one")
    head = subprocess.check_output(["git", "rev-parse", "HEAD"], cwd=tmp_path, text=True).strip()
    os.utime(file, (1.0, 1.0))
    assert run.commit_of(tmp_path) == head
