"""`horovod.mxnet` in an environment of its own: MXNet needs an older NumPy than everything else.

`make .stamps/mxnet` makes it from requirements-mxnet.txt; `HVD_MXNET_PYTHON` names another interpreter. Ranks import
the same `horovod` as all other tests, through a folder that holds nothing else.
"""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

import pytest

import harness
import horovod

PYTHON = Path(os.environ.get("HVD_MXNET_PYTHON", harness.ROOT / ".venv-mxnet" / "bin" / "python"))
FILES = harness.TESTS / "environments" / "mxnet"
EXAMPLES = harness.ROOT / "examples" / "mxnet"

pytestmark = pytest.mark.skipif(
    not PYTHON.exists(), reason=f"MXNet's environment is not there: {PYTHON}"
)


@pytest.fixture
def run(tmp_path: Path, jobs):
    """Starts a job of so many ranks in MXNet's environment."""
    (tmp_path / "horovod").symlink_to(Path(horovod.__file__).parent)

    def start(np: int, *words: str | Path, **env: str) -> harness.Job:
        env = {"PYTHONPATH": f"{harness.RANK_SITE}:{tmp_path}", **env}
        return jobs(harness.horovodrun(np, [PYTHON, *words], env=env, cwd=harness.ROOT))

    return start


ON_TWO = pytest.mark.thorough(also="tests/test_mxnet.py::test_on_every_rank")


@pytest.mark.parametrize("np", [1, pytest.param(2, marks=ON_TWO), 3])
def test_on_every_rank(np: int, run, tmp_path: Path) -> None:
    words = [
        "-m",
        "pytest",
        "-x",
        "-q",
        "--tb=short",
        "--disable-warnings",
        "-p",
        "no:cacheprovider",
        "-p",
        "rank_report",
    ]
    run(np, *words, FILES, HVD_TEST_REPORT=str(tmp_path)).succeed()
    ranks = [(tmp_path / f"rank-{rank}.jsonl").read_text() for rank in range(np)]
    assert ranks[0].count("passed") > 30
    assert ranks == ranks[:1] * np, "ranks ran different tests"


# On other numbers of ranks the same lines run.
REST = pytest.mark.thorough(also="tests/test_mxnet.py::test_examples_learn")


@pytest.mark.parametrize(
    ("example", "np"),
    [
        ("mxnet_mnist.py", 2),
        ("mxnet_module_mnist.py", 2),
        *[pytest.param("mxnet_mnist.py", np, marks=REST) for np in (1, 3)],
        *[pytest.param("mxnet_module_mnist.py", np, marks=REST) for np in (1, 3)],
    ],
)
def test_examples_learn(np: int, example: str, run) -> None:
    job = run(np, EXAMPLES / example, "--epochs", "3").succeed()
    accuracies = re.findall(r"validation accuracy: ([\d.]+)", job.stdout)
    assert accuracies, job.report()
    assert float(accuracies[-1]) > 0.8


def test_an_example_starts_its_own_processes(run) -> None:
    words = ["--num-proc", "2", "--epochs", "2", "--fp16-allreduce"]
    run(1, EXAMPLES / "mxnet_mnist.py", *words, "--gradient-predivide-factor", "2").succeed()


def test_one_job_with_the_engine_without_threads(run, script) -> None:
    """MXNET_ENGINE_TYPE=NaiveEngine, with which users look for mistakes, runs every operation where it is called."""
    program = script(
        "import mxnet as mx, horovod.mxnet as hvd\n"
        "hvd.init()\n"
        "assert hvd.allreduce(mx.nd.ones((3,)), op=hvd.Sum).asnumpy().tolist() == [hvd.size()] * 3\n"
    )
    run(2, program, MXNET_ENGINE_TYPE="NaiveEngine").succeed()


def test_the_end_of_a_script_waits_for_what_is_in_the_engine(run, script) -> None:
    program = script(
        "import mxnet as mx, horovod.mxnet as hvd\n"
        "hvd.init()\n"
        "mine = mx.nd.ones((1 << 20,))\n"
        "for _ in range(30):\n"
        "    hvd.allreduce_(mine, op=hvd.Max)\n"
        "if hvd.rank() == 0:\n"
        "    assert mine.asnumpy().max() == 1\n"
    )
    run(2, program).succeed()


TRAINING = """
import os, sys, time
import mxnet as mx, horovod.mxnet as hvd
hvd.init()
net = mx.gluon.nn.Dense(4, in_units=8)
net.initialize()
hvd.broadcast_parameters(net.collect_params())
trainer = hvd.DistributedTrainer(net.collect_params(), "sgd")
step = 0
try:
    while True:
        with mx.autograd.record():
            loss = net(mx.nd.ones((2, 8))).sum()
        loss.backward()
        trainer.step(2)
        loss.wait_to_read()
        step += 1
        if step == 5:
            print(f"pid={os.getpid()} rank={hvd.rank()}", flush=True)
except mx.MXNetError as error:
    print("raised:", str(error).replace(chr(10), " "), flush=True)
    sys.exit(3)
"""


def test_the_others_of_a_killed_rank_raise(run, script) -> None:
    job = run(3, script(TRAINING))
    lines = job.wait_for("pid=", count=3)
    pids = {
        int(rank): int(pid) for pid, rank in re.findall(r"pid=(\d+) rank=(\d)", "\n".join(lines))
    }
    os.kill(pids[1], signal.SIGKILL)
    raised = job.wait_for("raised:", count=2)
    assert all("rank 1" in line.lower() for line in raised), raised
    job.fail()


CIRCLE = """
import mxnet as mx, horovod.mxnet as hvd
hvd.init()
x = mx.nd.ones((4,))
y = hvd.allreduce(x, name="a") if hvd.rank() == 0 else hvd.broadcast(x, 0, name="b")
y.wait_to_read()
"""


def test_ranks_that_wait_for_each_other_end(run, script) -> None:
    """Operations run in MXNet's engine, so that no thread is seen to wait for them."""
    job = run(2, script(CIRCLE))
    job.fail()
    harness.assert_circle(job)


INTERRUPTED = """
import os, signal, sys, threading
import mxnet as mx, horovod.mxnet as hvd

def end(number, frame):
    os.write(1, b"the handler runs\\n")
    os._exit(7)

for number in (signal.SIGINT, signal.SIGALRM, signal.SIGTERM):
    signal.signal(number, end)
hvd.init()
os.write(1, f"rank {hvd.rank()} is process {os.getpid()}\\n".encode())
if hvd.rank() == 1:
    threading.Event().wait()
x = mx.nd.ones((4,))
if sys.argv[1] == "read":
    hvd.allreduce(x, name="a").wait_to_read()
elif sys.argv[1] == "all":
    hvd.allreduce_(x, name="a")
    mx.nd.waitall()
elif sys.argv[1] == "gather":
    hvd.allgather(x, name="a")
elif sys.argv[1] == "end":
    hvd.allreduce_(x, name="a")
"""


@pytest.mark.parametrize(
    ("where", "number"),
    [
        ("read", signal.SIGINT),
        ("read", signal.SIGALRM),
        ("all", signal.SIGTERM),
        ("gather", signal.SIGINT),
        ("end", signal.SIGINT),
    ],
)
def test_a_signals_handler_runs(run, script, where: str, number: signal.Signals) -> None:
    """MXNet's waits cannot be interrupted, so the rank leaves the job. The core's own waits run handlers at once."""
    env = {"HOROVOD_STALL_DIAGNOSIS_SECONDS": "3"}
    if number != signal.SIGINT:
        env["HOROVOD_SIGNAL_GRACE_SECONDS"] = "1"
    job = run(2, script(INTERRUPTED), where, **env)
    (line,) = job.wait_for("rank 0 is process")
    # Then the operation is pending, and the main thread waits.
    job.wait_for("Missing call:")

    os.kill(int(line.split()[-1]), number)

    job.wait_for("the handler runs")
    assert job.fail() == 7
    leaves = f"the handler of {number.name} could not run" in job.stderr
    assert leaves == (where != "gather"), job.report()
