"""Errors of `horovod.spark` where one of its requirements is not installed."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

import harness

CALL = "import horovod.spark; horovod.spark.run(print)"


def last_line(code: str, *absent: str, **variables: str) -> str:
    """Of the error of a program that cannot import these packages."""
    hidden = "".join(f"sys.modules[{name!r}] = None\n" for name in absent)
    done = subprocess.run(
        [sys.executable, "-c", f"import sys\n{hidden}{code}"],
        stderr=subprocess.PIPE,
        env={**os.environ, **variables},
        timeout=harness.LIMIT_S,
    )
    assert done.returncode == 1
    return done.stderr.decode().strip().splitlines()[-1]


@pytest.mark.parametrize(
    ("code", "package"),
    [
        (CALL, "pyspark"),
        (CALL.replace("run", "run_elastic"), "pyspark"),
        ("import horovod.spark.torch", "pyspark"),
        ("import horovod.spark.keras", "pyspark"),
        ("import horovod.spark.lightning", "pyspark"),
        ("import horovod.spark.torch", "pyarrow"),
        ("from horovod.spark.common.store import Store", "fsspec"),
    ],
)
def test_packages_are_named_with_how_to_get_them(code: str, package: str) -> None:
    printed = last_line(code, package)
    assert printed.startswith("ImportError: ")
    assert f"need {package}" in printed.replace("needs", "need")
    assert "pip install --find-links dist 'horovod-rs[spark]'" in printed


def test_a_missing_java_is_named() -> None:
    pytest.importorskip("pyspark")
    printed = last_line("import os; os.environ.pop('JAVA_HOME', None)\n" + CALL, PATH="/nowhere")
    assert "Could not find an active SparkContext" in printed
    assert "needs Java (17 or newer" in printed
    assert "Java" not in last_line(CALL, JAVA_HOME="/somewhere")


def test_ray_is_named() -> None:
    printed = last_line("import horovod.ray", "ray")
    assert printed.startswith("ImportError: horovod.ray needs Ray")
    assert "pip install --find-links dist 'horovod-rs[ray]'" in printed
