"""Modules below `horovod.runner` that launchers of others import."""

from __future__ import annotations

import os
import pickle
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import harness
from horovod import _core
from horovod.runner import _launching, _payloads
from horovod.runner.common.util import codec, env, host_hash, hosts, secret, timeout


def test_lists_of_hosts() -> None:
    assert hosts.parse_hosts("a:2, u@b.c-d:0,[::1]:3") == [
        hosts.HostInfo("a", 2),
        hosts.HostInfo("u@b.c-d", 0),
        hosts.HostInfo("[::1]", 3),
    ]
    assert hosts.HostInfo.from_string("h:2") == hosts.HostInfo("h", 2)
    assert hosts.parse_hosts("a:2, ") == hosts.parse_hosts("a:2")
    assert hosts.parse_hosts_and_slots("a:2,b:1,a:1") == (["a", "b"], {"a": 3, "b": 1})
    for bad in ("a", "a:x", "", "a:1,,", ",", "a b:1", "-o:1"):
        with pytest.raises(ValueError, match="Invalid host input"):
            hosts.parse_hosts(bad)
    with pytest.raises(ValueError, match="expected one host"):
        hosts.HostInfo.from_string("a:1,b:2")


def test_hostfiles(tmp_path) -> None:
    file = tmp_path / "hosts"
    file.write_text("# mine\n\na slots=2 max-slots=4\nb:3\nc  # one\nd slots = 5\n")
    assert hosts.parse_host_files(file) == "a:2,b:3,c:1,d:5"
    file.write_text("a slots=2\nb slots\n")
    with pytest.raises(ValueError, match="line 2"):
        hosts.parse_host_files(file)
    with pytest.raises(FileNotFoundError, match="no-such-file cannot be read"):
        hosts.parse_host_files(tmp_path / "no-such-file")


def test_a_hostfile_without_an_end_is_not_read_to_it() -> None:
    with pytest.raises(ValueError, match="longer than 4194304 bytes"):
        hosts.parse_host_files("/dev/zero")


def test_slots_are_filled_host_by_host() -> None:
    found = hosts.get_host_assignments(hosts.parse_hosts("a:2,b:4,c:1"), 7)
    assert [slot.to_response_string() for slot in found] == [
        "0,7,0,2,0,3",
        "1,7,1,2,0,2",
        "2,7,0,4,1,3",
        "3,7,1,4,1,2",
        "4,7,2,4,0,1",
        "5,7,3,4,0,1",
        "6,7,0,1,2,3",
    ]
    assert [slot.hostname for slot in found] == ["a", "a", "b", "b", "b", "b", "c"]
    # Without a largest number all slots are used; callers of others rely on it.
    assert len(hosts.get_host_assignments(hosts.parse_hosts("a:4"), 1)) == 4
    capped = hosts.get_host_assignments(hosts.parse_hosts("a:4"), 1, 2)
    assert [(slot.size, slot.local_size) for slot in capped] == [(2, 2), (2, 2)]
    twice = hosts.get_host_assignments(hosts.parse_hosts("a:1,a:1"), 2)
    assert [slot.local_rank for slot in twice] == [0, 1]
    with pytest.raises(
        ValueError, match=r"more processes \(3\) than there are available slots \(2\)"
    ):
        hosts.get_host_assignments(hosts.parse_hosts("a:2"), 3)
    assert hosts.INVALID_SLOT_INFO.rank == -1


def test_rank_and_size_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HOROVOD_RANK", "HOROVOD_SIZE", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMI_SIZE"):
        monkeypatch.delenv(name, raising=False)
    assert env.get_env_rank_and_size() == (0, 1)
    monkeypatch.setenv("PMI_RANK", "2")
    with pytest.raises(RuntimeError, match="only one of PMI_RANK and PMI_SIZE"):
        env.get_env_rank_and_size()
    monkeypatch.setenv("PMI_SIZE", "3")
    assert env.get_env_rank_and_size() == (2, 3)
    assert env.is_exportable("PATH")
    assert not env.is_exportable("BASH_FUNC_module%%")
    assert not env.is_exportable("CUDA_VISIBLE_DEVICES")


def test_small_helpers() -> None:
    key = secret.make_secret_key()
    digest = secret.compute_digest(key, b"x")
    assert secret.check_digest(key, b"x", digest)
    assert not secret.check_digest(key, b"y", digest)
    assert codec.loads_base64(codec.dumps_base64(lambda: 5))() == 5
    assert isinstance(codec.dumps_base64(1, to_ascii=False), bytes)
    ample = timeout.Timeout(3600, "{activity} took {timeout}")
    assert 0 < ample.remaining() <= 3600
    ample.check_time_out_for("it")
    over = timeout.Timeout(-1, "{activity} took {timeout}")
    with pytest.raises(timeout.TimeoutException, match="it took -1"):
        over.check_time_out_for("it")
    assert over.remaining() == 0
    assert host_hash.host_hash() == host_hash.host_hash()
    assert host_hash.host_hash("salt") != host_hash.host_hash()


def test_the_module_runs_the_launcher() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "horovod.runner.launch", "--version"],
        capture_output=True,
        text=True,
        timeout=harness.LIMIT_S,
        check=True,
    )
    assert done.stdout.strip() == _core.__version__


@pytest.fixture
def layer(tmp_path: Path) -> Path:
    """A folder with this package in it, to be put before all others, as one layer of an environment."""
    site = tmp_path / "layer" / "lib" / "site-packages"
    site.mkdir(parents=True)
    # A copy: what this environment's own record says is not of it.
    shutil.copytree(Path(_core.__file__).parent, site / "horovod")
    return site


def found_from(site: Path) -> str:
    """Which `horovodrun` the package in a folder takes."""
    code = "from horovod.runner import launch; print(launch.find_horovodrun())"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": str(site)},
        capture_output=True,
        text=True,
        timeout=harness.LIMIT_S,
        check=True,
    )
    return done.stdout.strip()


def program(place: Path) -> Path:
    place.mkdir(parents=True, exist_ok=True)
    file = place / "horovodrun"
    file.write_text("#!/bin/sh\n")
    file.chmod(0o755)
    return file


def record(site: Path, rows: str) -> None:
    info = site / "horovod-9.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.4\nName: horovod\nVersion: 9.0\n")
    (info / "RECORD").write_text(rows)


def test_the_launcher_that_was_installed_with_the_package_counts(
    tmp_path: Path, layer: Path
) -> None:
    # The environment below has its own programs; the interpreter is another layer's.
    launcher = program(tmp_path / "layer" / "bin")
    record(layer, "horovod/__init__.py,,\n../../bin/horovodrun,,\n")
    assert found_from(layer) == str(launcher)


def test_the_launcher_of_another_installation_does_not_count(tmp_path: Path, layer: Path) -> None:
    # A distribution without this package's files, such as one hidden by a layer above it.
    other = tmp_path / "other"
    program(other / "bin")
    record(other, "horovod/__init__.py,,\nbin/horovodrun,,\n")
    (other / "horovod").mkdir()
    code = "import sys; sys.path.insert(0, sys.argv[1]); from horovod.runner import launch; "
    code += "print(launch._recorded())"
    done = subprocess.run(
        [sys.executable, "-c", code, str(other)],
        env={**os.environ, "PYTHONPATH": str(layer)},
        capture_output=True,
        text=True,
        timeout=harness.LIMIT_S,
        check=False,
    )
    assert done.stdout.strip() == "[]", done.stderr


def test_the_launcher_is_found_where_pip_puts_it_with_target(tmp_path: Path, layer: Path) -> None:
    # `pip install --target` leaves a record of where things were before it moved them.
    launcher = program(layer / "bin")
    record(layer, "horovod/__init__.py,,\n../../bin/horovodrun,,\n")
    assert found_from(layer) == str(launcher)


@pytest.mark.parametrize(
    "words",
    [
        "HorovodInternalError: the job has ended",
        "UnknownError: Horovod has been shut down: the script of rank 1 has ended with an exception",
        "UnknownError: Horovod lost a member of the job: rank 1 on host a",
    ],
)
def test_the_exception_of_a_rank_has_precedence_over_those_that_follow_from_it(words) -> None:
    """Also where it comes later. TensorFlow's errors have a class of their own."""
    outcomes = [
        (0, _payloads.Outcome("a", "error", b"", words, 1)),
        (1, _payloads.Outcome("a", "error", pickle.dumps(LookupError("of rank 1")), "", 1)),
    ]
    with pytest.raises(LookupError, match="of rank 1"):
        _launching.results(outcomes, "rank 1 exited with code 1", 2)
