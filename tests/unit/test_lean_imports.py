"""`lean_imports`: what it leaves out is imported when it is used, and one process compiles a program of JAX for all."""

from __future__ import annotations

import concurrent.futures
import subprocess
import sys
from pathlib import Path

import pytest

import harness

STEP = """
import sys
import lean_imports
import torch

weight = torch.nn.Parameter(torch.ones(1))
optimizer = torch.optim.SGD([weight], lr=1.0)

def step():
    (weight * 2).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    print(weight.item(), torch.is_grad_enabled(), "torch._dynamo" in sys.modules, flush=True)

step()
import torch._dynamo
step()
"""


def lines_of(program: str, **env: str) -> list[str]:
    """The output of a program."""
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={"PYTHONPATH": str(harness.RANK_SITE), **env},
        capture_output=True,
        text=True,
        timeout=harness.LIMIT_S,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_the_first_step_of_an_optimizer_does_not_import_the_compiler() -> None:
    pytest.importorskip("torch")
    assert lines_of(STEP) == ["-1.0 True False", "-3.0 True True"]


KERAS = """
import sys
import lean_imports
import keras

def draw():
    print(keras.random.uniform((2,), seed=1).shape[0], "torch._dynamo" in sys.modules, flush=True)

draw()
import torch._dynamo
draw()
"""


def test_keras_on_pytorch_does_not_import_the_compiler() -> None:
    pytest.importorskip("keras")
    assert lines_of(KERAS, KERAS_BACKEND="torch") == ["2 False", "2 True"]


FAKE = """
import sys
import lean_imports
import torch

print(torch.Generator().device, "torch._decomp" in sys.modules, flush=True)
with torch._subclasses.FakeTensorMode():
    print(*torch.nn.functional.pad(torch.ones(2, 3), (1, 1)).softmax(0).shape, flush=True)
print("torch._decomp" in sys.modules, flush=True)
"""


def test_shapes_of_tensors_without_data_are_computed_by_what_is_imported_on_demand() -> None:
    pytest.importorskip("torch")
    assert lines_of(FAKE) == ["cpu False", "2 5", "True"]


# No process compiles before all three have missed the program in the cache.
PROGRAM = """
import os
import time
import lean_imports
import jax
from jax._src import compiler

once = compiler._compile_and_write_cache

def after_all_missed(*args):
    missed = os.environ.get("MISSED")
    if missed:
        open(os.path.join(missed, str(os.getpid())), "w").close()
        while len(os.listdir(missed)) < 3:
            time.sleep(0.01)
    return once(*args)

compiler._compile_and_write_cache = after_all_missed

compiled = []
compile = compiler.backend_compile_and_load

def count(*args):
    compiled.append(args)
    return compile(*args)

compiler.backend_compile_and_load = count
print(jax.jit(lambda x: x * 3 + 1)(2.0), len(compiled), flush=True)
"""


def test_one_process_compiles_a_program_of_jax_for_all(tmp_path: Path) -> None:
    pytest.importorskip("jax")
    folder = {"JAX_COMPILATION_CACHE_DIR": str(tmp_path / "programs")}
    folder["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
    missed = tmp_path / "missed"
    missed.mkdir()
    with concurrent.futures.ThreadPoolExecutor(3) as pool:
        outputs = [*pool.map(lambda _: lines_of(PROGRAM, MISSED=str(missed), **folder), range(3))]
    assert sorted(outputs) == [["7.0 0"], ["7.0 0"], ["7.0 1"]]
    # No half of a program is left.
    assert {path.suffix for path in (tmp_path / "programs").iterdir()} == {"", ".lock"}


def test_without_a_folder_for_programs_a_process_compiles_its_own() -> None:
    pytest.importorskip("jax")
    assert lines_of(PROGRAM) == ["7.0 1"]


def test_a_folder_that_takes_no_file_is_no_failure(tmp_path: Path) -> None:
    pytest.importorskip("jax")
    folder = {"JAX_COMPILATION_CACHE_DIR": str(tmp_path / "file" / "folder")}
    (tmp_path / "file").touch()
    assert lines_of(PROGRAM, JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS="0", **folder) == ["7.0 1"]
