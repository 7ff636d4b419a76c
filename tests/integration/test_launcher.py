"""Arguments, environment and output of the ranks that `horovodrun` starts."""

from __future__ import annotations

import importlib.metadata
import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

import harness


def test_lines_carry_their_rank_and_are_never_torn(script, jobs) -> None:
    # Several threads' worth of output in odd pieces; every line must arrive whole.
    path = script(
        """
import os, sys
rank = os.environ["HOROVOD_RANK"]
line = f"<{rank}" + rank * 5000 + ">\\n"
for stream in (1, 2):
    data = (line * 40).encode()
    while data:
        data = data[os.write(stream, data[:777]):]
"""
    )
    job = jobs(harness.python(3, path)).succeed()
    for name, text in (("stdout", job.stdout), ("stderr", job.stderr)):
        lines = text.splitlines()
        whole = {f"[{rank}]<{name}>:<{rank}{str(rank) * 5000}>" for rank in range(3)}
        assert set(lines) == whole
        assert len(lines) == 120


def test_bytes_that_are_no_text_and_a_last_line_without_end_pass_through(script, jobs) -> None:
    job = jobs(
        harness.python(
            1, script("import os; os.write(1, b'\\xff\\xfe\\n'); os.write(1, b'no end')")
        )
    ).succeed()
    assert len(job.stdout.splitlines()) == 2
    assert job.stdout.endswith("[0]<stdout>:no end")


def test_output_folder_holds_one_pair_of_files_per_rank(script, jobs, tmp_path: Path) -> None:
    path = script(
        "import os, sys\nprint('out', os.environ['HOROVOD_RANK'])\nprint('err', file=sys.stderr)"
    )
    folder = tmp_path / "deep" / "logs"
    jobs(harness.python(2, path, options=["--output-filename", str(folder)])).succeed()
    for rank in range(2):
        assert f"out {rank}" in (folder / f"rank.{rank}" / "stdout").read_text()
        assert "err" in (folder / f"rank.{rank}" / "stderr").read_text()


def test_single_process_may_use_an_output_folder_too(script, jobs, tmp_path: Path) -> None:
    jobs(
        harness.python(
            1, script("print('out')"), options=["--output-filename", str(tmp_path / "logs")]
        )
    ).succeed()
    assert "out" in (tmp_path / "logs" / "rank.0" / "stdout").read_text()


def test_time_stands_before_the_rank_when_asked(script, jobs) -> None:
    job = jobs(
        harness.python(1, script("print('hello')"), options=["--prefix-output-with-timestamp"])
    ).succeed()
    assert re.search(
        r"^\w{3} \w{3} [ \d]\d \d\d:\d\d:\d\d \d{4}\[0\]<stdout>:hello$", job.stdout, re.MULTILINE
    )


def test_every_rank_learns_who_it_is(script, jobs) -> None:
    path = script(
        """
import os
names = "RANK SIZE LOCAL_RANK LOCAL_SIZE CROSS_RANK CROSS_SIZE".split()
print(*(os.environ["HOROVOD_" + name] for name in names), os.environ["HOROVOD_CONTROLLER"])
"""
    )
    # Values of an outer job must not leak in.
    job = jobs(harness.python(3, path, env={"HOROVOD_RANK": "77", "HOROVOD_SIZE": "99"})).succeed()
    expected = {f"[{rank}]<stdout>:{rank} 3 {rank} 3 0 1 gloo" for rank in range(3)}
    assert set(job.stdout.splitlines()) == expected


def test_starts_as_many_as_asked_not_as_many_as_there_are_slots(jobs) -> None:
    job = jobs(
        harness.horovodrun(2, [sys.executable, "-c", "print('here')"], "-H", "localhost:4")
    ).succeed()
    assert job.stdout.count("here") == 2


def test_host_listed_twice_counts_as_one_host(script, jobs) -> None:
    path = script("import os; print('local', os.environ['HOROVOD_LOCAL_RANK'])")
    job = jobs(harness.python(2, path, options=["-H", "localhost:1,localhost:1"])).succeed()
    assert {line.split(":")[1] for line in job.stdout.splitlines()} == {"local 0", "local 1"}


def test_options_reach_the_ranks_as_settings(script, jobs) -> None:
    path = script("import os; print(os.environ['HOROVOD_FUSION_THRESHOLD'], os.environ['MINE'])")
    job = jobs(
        harness.python(1, path, options=["--fusion-threshold-mb", "32"], env={"MINE": "a b'c"})
    ).succeed()
    assert job.stdout.endswith("33554432 a b'c")


def test_arguments_pass_untouched(script, jobs) -> None:
    path = script("import sys; print(sys.argv[1:])")
    words = ["-np", "7", "--verbose", "two words", "'quoted'", "$HOME", "", "*"]
    job = jobs(harness.python(1, path, *words)).succeed()
    assert job.stdout.endswith(repr(words))


def test_job_key_is_on_no_command_line(script, jobs, tmp_path: Path) -> None:
    stop = tmp_path / "stop"
    path = script(
        """
import os, pathlib, sys
print("key", os.environ["HOROVOD_JOB_KEY"], flush=True)
pathlib.Path(sys.argv[1]).open().read()
"""
    )
    harness.os.mkfifo(stop)
    job = jobs(harness.python(2, path, str(stop)))
    keys = {line.split()[-1] for line in job.wait_for("key ", count=2)}
    assert len(keys) == 1
    key = keys.pop()
    assert re.fullmatch("[0-9a-f]{64}", key)
    words = [word for pid in job.members() for word in harness.command_line(pid)]
    assert str(path).encode() in words
    assert not any(key.encode() in word for word in words)
    stop.write_text("go\n" * 2)
    job.kill()


def test_two_jobs_have_different_keys(script, jobs) -> None:
    path = script("import os; print(os.environ['HOROVOD_JOB_KEY'])")
    outputs = {jobs(harness.python(1, path)).succeed().stdout for _ in range(2)}
    assert len(outputs) == 2


def test_background_child_that_holds_the_output_does_not_hold_the_launcher(script, jobs) -> None:
    path = script(
        """
import subprocess, sys
subprocess.Popen([sys.executable, "-c", "import threading; threading.Event().wait()"])
print("done", flush=True)
"""
    )
    job = jobs(harness.python(1, path)).succeed()
    assert "done" in job.stdout


def test_version_is_a_bare_number(jobs) -> None:
    job = jobs(harness.Job([harness.HOROVODRUN, "--version"])).succeed()
    assert re.fullmatch(r"\d+\.\d+\.\d+\S*", job.stdout.strip())


def test_check_build_has_the_layout_that_programs_read(jobs) -> None:
    import horovod
    from horovod.torch import cuda_built, nccl_built, rocm_built

    nccl = "X" if nccl_built() and (cuda_built() or rocm_built()) else " "
    done = subprocess.run(
        [harness.HOROVODRUN, "--check-build"],
        capture_output=True,
        text=True,
        timeout=harness.LIMIT_S,
        check=True,
    )
    assert done.stdout == (
        f"Horovod v{horovod.__version__}:\n\nAvailable Frameworks:\n"
        "    [X] TensorFlow\n    [X] PyTorch\n    [ ] MXNet\n    [X] JAX\n    [X] Keras\n\n"
        "Available Controllers:\n"
        "    [ ] MPI\n    [X] Gloo\n\nAvailable Tensor Operations:\n"
        f"    [{nccl}] NCCL\n    [ ] DDL\n    [ ] CCL\n    [ ] MPI\n    [X] Gloo    \n"
    )
    job = jobs(harness.Job([harness.HOROVODRUN, "--check-build", "--verbose"])).succeed()
    assert (
        "Extension torch was built.\nPyTorch " + importlib.metadata.version("torch").split("+")[0]
        in job.stdout
    )
    assert "Extension tensorflow was built with Gloo." in job.stdout  # of the first that is there


def test_variables_of_the_originals_build_are_said_to_have_no_effect() -> None:
    def complaint(**variables: str) -> str:
        env = {name: value for name, value in os.environ.items() if name != "HOROVOD_WITH_MPI"}
        done = subprocess.run(
            [harness.HOROVODRUN, "--check-build"],
            env={**env, **variables},
            capture_output=True,
            text=True,
            timeout=harness.LIMIT_S,
            check=True,
        )
        assert done.stdout.startswith("Horovod v")
        return done.stderr

    printed = complaint(HOROVOD_WITH_MPI="1", HOROVOD_NCCL_LINK="STATIC")
    assert "note: HOROVOD_NCCL_LINK, HOROVOD_WITH_MPI have no effect: nothing is built" in printed
    assert "no effect" not in complaint(HOROVOD_CYCLE_TIME="1", HOROVOD_GPU_OPERATIONS="NCCL")


@pytest.mark.parametrize("np", [1, 2])
def test_host_name_given_is_what_ranks_see(np, script, jobs) -> None:
    path = script("import os; print(os.environ['HOROVOD_HOSTNAME'])")
    job = jobs(harness.python(np, path, options=["-H", f"{socket.gethostname()}:{np}"])).succeed()
    assert job.stdout.count(socket.gethostname()) == np
