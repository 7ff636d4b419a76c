"""What `lean_imports` spares ranks: without it each rank that trains would import PyTorch's compiler."""

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


def test_the_first_step_of_an_optimizer_does_not_import_the_compiler() -> None:
    pytest.importorskip("torch")
    words = [sys.executable, "-c", STEP]
    done = subprocess.run(
        words,
        env={"PYTHONPATH": str(harness.RANK_SITE)},
        capture_output=True,
        text=True,
        timeout=harness.LIMIT_S,
    )
    assert done.stdout.splitlines() == ["-1.0 True False", "-3.0 True True"], done.stderr
