"""Output of `horovodrun --doctor` and `--check-build` about driver, NCCL and GPUs; the libraries are the double."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

import gpu_double
import harness

NOWHERE = "/nowhere/lib.so"
# As the driver's tool: so many GPUs, each of which reads the others' memory.
NVIDIA_SMI = """#!/bin/sh
case "$*" in
*topo*) printf '\\tGPU0\\tGPU1\\nGPU0\\tX\\tOK\\nGPU1\\tOK\\tX\\n' ;;
*) yes 'NVIDIA H100 80GB HBM3, 81559 MiB, 580.65.06' | head -n {gpus} ;;
esac
"""
# Of the hosts, all of them this one, the first that asks has an older NCCL.
PYTHON = """#!/bin/sh
mkdir {mark} 2>/dev/null && export GPU_DOUBLE=nccl_version=22703
exec {python} "$@"
"""


def program(path: Path, text: str) -> Path:
    path.write_text(text)
    path.chmod(0o755)
    return path


@pytest.fixture
def examine(jobs, tmp_path: Path):
    """Runs the doctor on machines with so many GPUs; the job, and what it found in JSON."""

    def start(gpus: int, *words: object, double: str = "", **env: str):
        tool = program(tmp_path / "nvidia-smi", NVIDIA_SMI.format(gpus=gpus))
        env = {"PATH": f"{tool.parent}:{os.environ['PATH']}", **env}
        command = [harness.HOROVODRUN, *map(str, words)]
        return jobs(harness.Job(command, env=gpu_double.environment(double, None, **env)))

    return start


def finding(job: harness.Job, what: str) -> dict:
    found = [one for one in json.loads(job.stdout)["findings"] if what in one["what"]]
    assert len(found) == 1, job.report()
    return found[0]


def test_a_host_that_has_all(examine) -> None:
    job = examine(2, "--doctor", "-np", 2).succeed()
    text = " ".join(job.stdout.split())
    assert "2 GPUs: NVIDIA H100 80GB HBM3, 81559 MiB, 580.65.06; NVIDIA H100" in text
    assert "CUDA 13.2, NCCL 2.30.7" in text
    for word in ("NCCL cannot", "CUDA cannot", "share", "nvidia-smi:"):
        assert word not in text, job.report()


def test_a_host_without_the_drivers_library(examine) -> None:
    job = examine(2, "--doctor=json", "-np", 2, HOROVOD_CUDA_LIBRARY=NOWHERE).succeed()
    found = finding(
        job, "there are GPUs, and CUDA cannot be used: libcuda.so.1 could not be loaded"
    )
    assert found["severity"] == "risk"
    assert NOWHERE in found["what"]
    assert "docker run --gpus all" in found["fix"]


def test_an_old_nccl_and_two_ranks_on_one_gpu(examine) -> None:
    job = examine(1, "--doctor=json", "-np", 2, double="nccl_version=21700").succeed()
    found = finding(job, "NCCL cannot be used, tensors on GPUs go through host memory")
    assert found["severity"] == "slow"
    assert "is version 2.17.0" in found["what"]
    assert "at least 2.18" in found["what"]
    assert "nvidia-nccl-cu13" in found["fix"]
    found = finding(job, "2 ranks share 1 GPU")
    assert found["severity"] == "note"
    assert "NCCL_MULTI_RANK_GPU_ENABLE=1" in found["what"]


def test_hosts_with_different_versions_of_nccl(examine, tmp_path: Path) -> None:
    text = PYTHON.format(mark=tmp_path / "asked", python=sys.executable)
    python = program(tmp_path / "python3", text)
    words = ("--doctor=json", "-H", "localhost:1,127.0.0.1:1", python, "-c", "pass")
    job = examine(1, *words).succeed()
    found = finding(job, "different versions of NCCL: 2.27.3 on ")
    assert "; 2.30.7 on " in found["what"]
    assert sorted(found["hosts"]) == ["127.0.0.1", "localhost"]
    assert "the same everywhere" in found["fix"]


LIBRARIES = {
    "found": ({}, "", "X", ("NCCL", "here it is 2.30.7 in "), ("driver", "here it is 13.2 in ")),
    "not found": (
        {"HOROVOD_NCCL_LIBRARY": NOWHERE, "HOROVOD_CUDA_LIBRARY": NOWHERE},
        "",
        " ",
        ("NCCL", f"not here. libnccl.so.2 could not be loaded; tried {NOWHERE}: "),
        ("driver", f"not here. libcuda.so.1 could not be loaded; tried {NOWHERE}: "),
    ),
    "no driver": (
        {"HOROVOD_CUDA_LIBRARY": NOWHERE},
        "",
        " ",
        ("NCCL", "here it is 2.30.7 in "),
        ("driver", f"not here. libcuda.so.1 could not be loaded; tried {NOWHERE}: "),
    ),
    "too old": (
        {},
        "nccl_version=21700,driver_version=11080",
        " ",
        ("NCCL", "not here. libnccl.so.2 is version 2.17.0"),
        ("driver", "not here. libcuda.so.1 is version CUDA 11.8"),
    ),
}


@pytest.mark.parametrize("case", LIBRARIES)
def test_what_this_installation_finds(case, jobs) -> None:
    env, double, mark, *expected = LIBRARIES[case]
    command = [harness.HOROVODRUN, "--check-build", "--verbose"]
    job = jobs(harness.Job(command, env=gpu_double.environment(double, None, **env))).succeed()
    assert f"\n    [{mark}] NCCL\n" in job.stdout
    assert f" was {'NOT ' if mark == ' ' else ''}built with NCCL.\n" in job.stdout
    for name, text in expected:
        [line] = [line for line in job.stdout.splitlines() if text in line]
        assert name in line.partition(" is not built in but found when it is needed: ")[0], line
