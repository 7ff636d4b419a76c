"""`horovod.run`: functions called on ranks, from scripts, threads and notebooks."""

from __future__ import annotations

import concurrent.futures
import contextlib
import functools
import inspect
import io
import os
import pickle
import signal
import subprocess
import sys
import traceback
import warnings
from pathlib import Path

import pytest

import harness
import horovod
from horovod import runner


def in_time(call, limit_s: float = harness.LIMIT_S):
    """Run a call in another thread, which `horovod.run` allows, and give up after a while."""
    pool = concurrent.futures.ThreadPoolExecutor(1)
    try:
        return pool.submit(call).result(limit_s)
    finally:
        pool.shutdown(wait=False)


def run(func, *args, **kwargs):
    """`horovod.run` with a limit and the tests' environment."""
    return in_time(functools.partial(horovod.run, func, args, **kwargs))


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [n for n in os.environ if n.startswith(("HOROVOD_", "OMPI_", "PMI"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


def test_results_come_in_the_order_of_ranks_and_output_to_the_callers_streams() -> None:
    def work(base, *, factor):
        import sys

        import horovod.numpy as hvd

        hvd.init()
        total = hvd.allreduce(__import__("numpy").array([hvd.rank() + 1.0]), op=hvd.Sum)
        print("said by", hvd.rank())
        print("err by", hvd.rank(), file=sys.stderr)
        return base + factor * hvd.rank(), total.item()

    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        results = in_time(lambda: horovod.run(work, (100,), {"factor": 10}, num_proc=3))
    assert results == [(100, 6.0), (110, 6.0), (120, 6.0)]
    for rank in range(3):
        assert f"[{rank}]<stdout>:said by {rank}\n" in out.getvalue()
        assert f"[{rank}]<stderr>:err by {rank}\n" in err.getvalue()


def test_large_arguments_and_results_travel_whole_and_the_key_is_nowhere() -> None:
    def work(block):
        import os

        # Settings that nobody made are not passed on either.
        unwanted = ("HOROVOD_RUN_", "HOROVOD_CYCLE_TIME", "HOROVOD_CACHE_CAPACITY")
        seen = [name for name in os.environ if name.startswith(unwanted)]
        with open("/proc/self/cmdline", "rb") as file:
            words = file.read()
        return block * 2, hash(block), seen, len(words)

    block = os.urandom(1 << 20) * 100
    for double, _, seen, words in run(work, block, num_proc=2):
        assert double == block * 2
        assert seen == []
        assert words < 1000


def test_all_ranks_are_on_this_host_also_in_a_batch_job_of_several(monkeypatch) -> None:
    allocation = {
        "JOB_ID": "1",
        "JOB_NODELIST": "localhost,other.invalid",
        "TASKS_PER_NODE": "1(x2)",
    }
    for name, value in allocation.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    assert run(lambda: 7, num_proc=2) == [7, 7]


def test_an_exception_is_raised_again_with_the_ranks_traceback(capfd) -> None:
    def inner(rank):
        raise KeyError(f"missing on {rank}")

    def work():
        import horovod.numpy as hvd

        hvd.init()
        if hvd.rank() == 1:
            inner(hvd.rank())
        hvd.allreduce(__import__("numpy").ones(1), name="never")

    with pytest.raises(KeyError, match="missing on 1") as caught:
        run(work, num_proc=2)
    assert any("rank 1 on host" in note for note in caught.value.__notes__)
    cause = caught.value.__cause__
    assert isinstance(cause, runner.WorkerTraceback)
    assert "in inner" in str(cause)
    assert "rank 1 on host localhost" in str(cause)


def test_an_exception_with_arguments_of_its_own_is_raised_as_it_is() -> None:
    class HttpError(Exception):
        def __init__(self, code, reason):
            super().__init__(f"{code}: {reason}")
            self.code = code

    class Prefixed(Exception):
        def __init__(self, text):
            super().__init__(f"sorry, {text}")

    def work(error, *args):
        raise error(*args)

    with pytest.raises(HttpError, match="404: no such data") as caught:
        run(work, HttpError, 404, "no such data")
    assert caught.value.code == 404
    with pytest.raises(Prefixed) as caught:
        run(work, Prefixed, "full")
    assert str(caught.value) == "sorry, full"


def test_an_exception_is_of_its_own_class_and_a_runtime_error() -> None:
    class HttpError(Exception):
        def __init__(self, code, reason):
            super().__init__(f"{code}: {reason}")
            self.code = code

    def work(kind, *args):
        raise kind(*args)

    def bytes_that_are_no_text():
        b"\xff".decode()

    with pytest.raises(RuntimeError, match="out of range") as caught:
        run(work, ValueError, "out of range")
    assert isinstance(caught.value, ValueError)
    assert any("rank 0 on host" in note for note in caught.value.__notes__)
    assert isinstance(caught.value.__cause__, runner.WorkerTraceback)
    with pytest.raises(ValueError, match="out of range") as caught:
        run(work, ValueError, "out of range")
    assert traceback.format_exception_only(caught.value)[0] == "ValueError: out of range\n"
    again = pickle.loads(pickle.dumps(caught.value))
    assert isinstance(again, ValueError)
    assert isinstance(again, RuntimeError)
    with pytest.raises(RuntimeError) as caught:
        run(work, FileNotFoundError, 2, "gone", "data.txt")
    assert (caught.value.errno, caught.value.filename) == (2, "data.txt")
    with pytest.raises(RuntimeError) as caught:
        run(work, HttpError, 404, "gone")
    assert (type(caught.value).__name__, caught.value.code) == ("HttpError", 404)
    with pytest.raises(UnicodeDecodeError) as caught:
        run(bytes_that_are_no_text)
    assert isinstance(caught.value, RuntimeError)
    assert caught.value.object == b"\xff"


def test_exceptions_that_cannot_be_pickled_keep_their_text() -> None:
    def work():
        class Odd(Exception):
            def __init__(self, a, b):
                super().__init__(f"{a} and {b}")
                self.lock = __import__("threading").Lock()

        raise Odd(1, 2)

    with pytest.raises(RuntimeError, match=r"the function failed on rank 0 .*Odd: 1 and 2"):
        run(work)


def leave(status):
    """A function that ends its process."""
    sys.exit(status)


@pytest.mark.parametrize("status", [0, 3, "text"])
def test_a_function_that_exits_has_no_result(status) -> None:
    with pytest.raises(RuntimeError, match=rf"sys.exit\({status!r}\), so there is no result"):
        run(leave, status)


def test_a_killed_rank_and_an_unpicklable_result_are_named() -> None:
    def kill():
        import os
        import signal

        os.kill(os.getpid(), signal.SIGKILL)

    with pytest.raises(
        RuntimeError, match=r"no result from rank 0; .*killed by signal 9 \(SIGKILL\)"
    ):
        run(kill)
    with pytest.raises(RuntimeError, match=r"rank 0 .*the result, of type lock, cannot be pickled"):
        run(lambda: __import__("threading").Lock())

    def fail_hard():
        os.write(2, b"out of luck\n")
        os._exit(5)

    with pytest.raises(RuntimeError, match=r"exited with code 5.*stderr:\n    out of luck"):
        run(fail_hard)
    with pytest.raises(RuntimeError, match="no result from rank 0; every rank exited with code 0"):
        run(lambda: __import__("os")._exit(0))


def test_arguments_are_checked_and_old_names_work() -> None:
    with pytest.raises(ValueError, match="hosts and hostfile only allow one"):
        horovod.run(len, hosts="a:1", hostfile="f")
    with pytest.raises(ValueError, match="use_gloo and use_mpi only allow one"):
        horovod.run(len, use_gloo=True, use_mpi=True)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        results = horovod.run(os.getpid, np=2, use_gloo=True, hosts="localhost:4", verbose=1)
    assert len(set(results)) == 2
    assert any(
        issubclass(w.category, DeprecationWarning) and "num_proc" in str(w.message) for w in caught
    )
    for wrong, kind, text in [
        (
            {"num_proc": 2, "hosts": "localhost:1"},
            ValueError,
            r"more processes \(2\) than there are",
        ),
        ({"hosts": "a-host:x"}, ValueError, "run: Invalid host input"),
        ({"network_interfaces": ["nope"]}, ValueError, 'no network interface "nope" that is up'),
        ({"num_proc": "2"}, TypeError, "num_proc: expected a whole number, got '2'"),
    ]:
        with pytest.raises(kind, match=text):
            run(os.getpid, **wrong)
    with pytest.raises(TypeError, match="func: expected a function, got 3"):
        run(3)


def test_parameters_are_in_the_originals_order() -> None:
    assert " ".join(inspect.signature(horovod.run).parameters) == (
        "func args kwargs num_proc min_num_proc max_num_proc slots reset_limit cooldown_range host_discovery_script "
        "hosts hostfile start_timeout ssh_port ssh_identity_file disable_cache output_filename verbose use_gloo "
        "use_mpi mpi_args network_interfaces executable network_interface np min_np max_np"
    )


def test_a_script_needs_no_main_guard_and_may_import_what_lies_beside_it(
    jobs, tmp_path: Path
) -> None:
    (tmp_path / "beside.py").write_text("def value(): return 'beside'\n")
    main = tmp_path / "main.py"
    main.write_text(
        "import horovod, beside\nprint('once')\n"
        "def work(x): return x + beside.value()\n"
        "print(horovod.run(work, ('x-',), num_proc=2))\n"
        "print(horovod.runner.run(beside.value))\n"
    )
    job = jobs(harness.Job([sys.executable, main], cwd="/")).succeed()
    assert job.stdout.splitlines() == ["once", "['x-beside', 'x-beside']", "['beside']"]
    # As a notebook: the functions are in no file at all.
    typed = "import horovod\ndef work(): return helper() + 1\ndef helper(): return 6\nprint(horovod.run(work))"
    job = jobs(harness.Job([sys.executable, "-c", typed])).succeed()
    assert job.stdout.strip() == "[7]"


INTERRUPTED = """
import os, signal, sys, time
import horovod
handler = signal.getsignal(signal.SIGINT)
def work():
    import time
    print("working", flush=True)
    time.sleep(1000)
try:
    horovod.run(work, num_proc=2)
except KeyboardInterrupt:
    print("interrupted", signal.getsignal(signal.SIGINT) is handler, flush=True)
print("again", horovod.run(lambda: 7), flush=True)
"""


def test_ctrl_c_ends_the_ranks_and_the_next_call_works(script, jobs) -> None:
    job = jobs(harness.Job([sys.executable, script(INTERRUPTED)]))
    job.wait_for("<stdout>:working", count=2)
    job.process.send_signal(signal.SIGINT)
    job.succeed()
    assert "interrupted True" in job.stdout
    assert "again [7]" in job.stdout


def test_nothing_outlives_a_caller_that_is_killed(script, jobs) -> None:
    job = jobs(harness.Job([sys.executable, script(INTERRUPTED)]))
    job.wait_for("<stdout>:working", count=2)
    job.process.kill()
    job.wait()
    job.assert_nothing_left()


def test_the_program_of_a_rank_refuses_to_be_run_by_hand() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "horovod.runner.run_task"],
        capture_output=True,
        text=True,
        timeout=harness.LIMIT_S,
        check=False,
    )
    assert done.returncode == 1
    assert "started by horovod.run() only" in done.stderr
