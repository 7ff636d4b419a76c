"""`python -m horovod.runner.join`: its arguments, and what it says where it cannot join."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading

import pytest

import harness
from horovod.runner import join


@pytest.mark.parametrize(
    ("variable", "host", "index"),
    [("3", "node-7", 3), (None, "train-worker-12", 12), (None, "n-0", 0)],
)
def test_a_worker_knows_its_number(
    monkeypatch: pytest.MonkeyPatch, variable: str | None, host: str, index: int
) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: host)
    monkeypatch.delenv("JOB_COMPLETION_INDEX", raising=False)
    if variable is not None:
        monkeypatch.setenv("JOB_COMPLETION_INDEX", variable)
    assert join._own_index() == index


def test_a_worker_without_a_number_says_what_to_set(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: "laptop")
    monkeypatch.delenv("JOB_COMPLETION_INDEX", raising=False)
    assert join.main(["first:29500"]) == 2
    text = capfd.readouterr().err
    assert "JOB_COMPLETION_INDEX" in text
    assert "'laptop'" in text
    assert "--index" in text
    assert join.main(["first:29500", "--index", "-1"]) == 2
    assert "--index must be at least 0, got -1" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["first"], "must be host:port, got 'first'"),
        (["first:0"], "must be host:port, got 'first:0'"),
        (["first:1", "--slots", "0"], "at least 1, got '0'"),
    ],
)
def test_wrong_arguments_are_named(
    words: list[str], why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        join.main(words)
    assert why in capsys.readouterr().err


def test_addresses() -> None:
    assert join._address("a.b:29500") == ("a.b", 29500)
    assert join._address("[::1]:7") == ("::1", 7)


def _join(launcher: str, **variables: str | None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "horovod.runner.join", launcher, "--index", "0"]
    with harness.Job([*command, "--timeout", "1"], env=variables) as job:
        status = job.wait()
        return subprocess.CompletedProcess(command, status, job.stdout, job.stderr)


def test_a_launcher_that_is_not_there_is_named(port: int) -> None:
    done = _join(f"127.0.0.1:{port}", HOROVOD_JOB_KEY="ab" * 32)
    assert done.returncode == 1
    assert f"127.0.0.1:{port}: connection refused" in done.stderr
    done = _join("no-such-host.invalid:29500", HOROVOD_JOB_KEY="ab" * 32)
    assert done.returncode == 1
    assert "no-such-host.invalid has no address" in done.stderr


def test_a_missing_key_is_named_on_both_sides(port: int, tmp_path) -> None:
    nothing = {"HOROVOD_JOB_KEY": None, "HOROVOD_JOB_KEY_FILE": None}
    done = _join(f"127.0.0.1:{port}", **nothing)
    assert done.returncode == 1
    assert "set HOROVOD_JOB_KEY_FILE to a file with 64 hex digits" in done.stderr
    command = [harness.HOROVODRUN, "-np", "1", "--agents-port", str(port), "true"]
    with harness.Job(command, env=nothing) as job:
        assert job.wait() == 2
        assert (
            "--agents-port: neither HOROVOD_JOB_KEY_FILE nor HOROVOD_JOB_KEY is set" in job.stderr
        )
    key = tmp_path / "key"
    key.write_text("ab" * 32)
    key.chmod(0o644)
    with harness.Job(command, env={**nothing, "HOROVOD_JOB_KEY_FILE": str(key)}) as job:
        assert job.wait() == 2
        assert "everybody on this machine may read it (mode 644): chmod 600" in job.stderr


def test_a_rank_that_could_not_be_started_is_no_success(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise OSError("no agent")

    monkeypatch.setattr(join, "start_agent", fail)
    monkeypatch.setattr(threading, "excepthook", lambda _: None)
    # The test's own process keeps its handler.
    monkeypatch.setattr(join.signal, "signal", lambda *_: None)
    assert join.main(["127.0.0.1:1", "--index", "0", "--slots", "2"]) == 1
