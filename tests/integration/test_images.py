"""Dockerfile, compose file and conda files of deploy/: linted and against their schemas; an image where buildah is.

tests/hosts/test_pods.py runs the commands of the compose file.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

import charts
import metadata_wheel

IMAGES = charts.ROOT / "deploy" / "images"
CONDA = charts.ROOT / "deploy" / "conda"


def _python(program: str, *words: str) -> subprocess.CompletedProcess[str]:
    python = charts.TOOLS / "bin" / "python"
    if not python.exists():
        pytest.skip("NOT RUN: what knows these files is not installed (make chart-tools)")
    return subprocess.run(
        [str(python), "-c", program, *words],
        capture_output=True,
        text=True,
        check=False,
        timeout=charts.LIMIT_S,
    )


def test_the_dockerfile_has_no_faults_that_hadolint_knows() -> None:
    done = subprocess.run(
        [charts.tool("hadolint"), str(IMAGES / "Dockerfile")],
        capture_output=True,
        text=True,
        check=False,
        timeout=charts.LIMIT_S,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_image_runs_as_a_user_without_rights() -> None:
    lines = (IMAGES / "Dockerfile").read_text().splitlines()
    assert [line for line in lines if line.startswith("USER")] == ["USER 1000:1000"]


COMPOSE = """
import sys, yaml
from compose_spec import ComposeSpecification, Service
text = open(sys.argv[1]).read().replace(*sys.argv[2:4])
document = yaml.safe_load(text)
ComposeSpecification.model_validate(document)
known = set(Service.model_fields) | {field.alias for field in Service.model_fields.values()}
for name, service in document["services"].items():
    if unknown := set(service) - known:
        sys.exit(f"{name}: unknown {unknown}")
"""


def test_the_compose_file_has_only_fields_that_compose_knows() -> None:
    file = str(IMAGES / "compose.yaml")
    done = _python(COMPOSE, file, "", "")
    assert done.returncode == 0, done.stderr
    assert "unknown {'hostnam'}" in _python(COMPOSE, file, "hostname", "hostnam").stderr


RECIPE = """
import sys
from rattler_build import Stage0Recipe
Stage0Recipe.from_yaml(open(sys.argv[1]).read().replace(*sys.argv[2:4]))
"""


def test_the_conda_recipe_is_one_for_rattler_build() -> None:
    file = str(CONDA / "recipe.yaml")
    done = _python(RECIPE, file, "", "")
    assert done.returncode == 0, done.stderr
    assert (
        "unknown field 'run_constrains'"
        in _python(RECIPE, file, "constraints", "constrains").stderr
    )


@pytest.mark.parametrize("name", ["environment.yml", "environment-cuda.yml"])
def test_conda_environments_name_what_the_wheel_needs(name: str) -> None:
    environment = yaml.safe_load((CONDA / name).read_text())
    assert set(environment) == {"name", "channels", "dependencies"}
    names = {re.match(r"[\w.-]+", entry)[0] for entry in environment["dependencies"]}
    required = metadata_wheel.read_project()["dependencies"]
    assert {re.match(r"[\w.-]+", entry)[0] for entry in required} <= names
    assert {"python", "pip"} <= names


def test_all_files_name_this_version() -> None:
    version = metadata_wheel.version_of_workspace()
    for file in sorted((charts.ROOT / "deploy").rglob("*")):
        if file.is_file():
            for found in re.findall(r"\b0\.\d+\.\d+\b", file.read_text()):
                assert found == version, file


WORK = """
import os
import numpy as np
import horovod.numpy as hvd
hvd.init()
total = hvd.allreduce(np.ones(1), op=hvd.Sum)
os.write(1, f"user {os.getuid()}: sum {total[0]}\\n".encode())
"""


@pytest.mark.thorough(
    also="tests/integration/test_images.py::test_the_dockerfile_has_no_faults_that_hadolint_knows"
)
def test_the_image_is_built_and_trains(tmp_path: Path) -> None:
    """On a base of Debian, with NumPy as framework. HVD_TEST_BASE names an archive of a root file system to use."""
    wheels = sorted((charts.ROOT / ".stamps" / "quick-dist").glob("*.whl"))
    for program in ("buildah", "mmdebstrap"):
        if not shutil.which(program) or os.geteuid() != 0 or not wheels:
            pytest.skip(f"NOT RUN: building an image needs root, `make install` and {program}")
    storage = ["--root", str(tmp_path / "storage"), "--runroot", str(tmp_path / "run")]
    environment = {**os.environ, "STORAGE_DRIVER": "vfs", "BUILDAH_ISOLATION": "chroot"}

    def run(*words: object) -> str:
        done = subprocess.run(
            [str(word) for word in words],
            env=environment, capture_output=True, text=True, check=False, timeout=charts.LIMIT_S,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout.strip()

    def buildah(command: str, *words: object) -> str:
        return run("buildah", *storage, command, *words)

    base = os.environ.get("HVD_TEST_BASE")
    if base is None:
        base = tmp_path / "base.tar"
        packages = "--include=python3-minimal,python3-pip"
        run("mmdebstrap", "--quiet", "--variant=minbase", packages, "bookworm", base)
    context = tmp_path / "context"
    (context / "dist").mkdir(parents=True)
    for wheel in wheels:
        shutil.copy(wheel, context / "dist")
    try:
        empty = buildah("from", "scratch")
        buildah("add", "-q", empty, base, "/")
        # Debian's pip asks for this; the certificates are this machine's.
        certificates = "/etc/ssl/certs"
        for variable in (
            "PIP_BREAK_SYSTEM_PACKAGES=1",
            f"PIP_CERT={certificates}/ca-certificates.crt",
        ):
            buildah("config", "--env", variable, empty)
        buildah("commit", "-q", empty, "localhost/base:1")
        arguments = ("BASE=localhost/base:1", "PACKAGES=numpy", "INDEX=https://pypi.org/simple")
        options = [word for argument in arguments for word in ("--build-arg", argument)]
        options += [
            "--ulimit",
            "nofile=1024:20000",
            "--volume",
            f"{certificates}:{certificates}:ro",
        ]
        buildah("bud", *options, "-f", IMAGES / "Dockerfile", "-t", "localhost/horovod:1", context)
        container = buildah("from", "localhost/horovod:1")
        # A container of this kind takes the user from the command line.
        inside = ("run", "--user", "1000:1000", container, "--")
        printed = buildah(*inside, "horovodrun", "-np", "2", "python3", "-c", WORK)
        assert printed.count("user 1000: sum 2.0") == 2
    finally:
        for command in ("rm", "rmi"):
            subprocess.run(
                ["buildah", *storage, command, "--all"],
                env=environment,
                capture_output=True,
                check=False,
            )
