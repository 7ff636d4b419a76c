"""Without `lean_imports` each rank that trains would import PyTorch's compiler."""

from __future__ import annotations

import subprocess
import sys

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
