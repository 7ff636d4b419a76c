"""`horovod.run` with members that change: every argument for it, a rank that is killed, limits, exceptions."""

from __future__ import annotations

import concurrent.futures
import contextlib
import functools
import io
import os
from pathlib import Path

import pytest

import horovod


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [n for n in os.environ if n.startswith(("HOROVOD_", "OMPI_", "PMI"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


def run(func, *args, **kwargs):
    """`horovod.run` with a limit; what it returned, and all that was printed."""
    out = io.StringIO()
    pool = concurrent.futures.ThreadPoolExecutor(1)
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
            call = functools.partial(horovod.run, func, args, **kwargs)
            return pool.submit(call).result(90), out.getvalue()
    except BaseException as error:
        error.add_note(out.getvalue())
        raise
    finally:
        pool.shutdown(wait=False)


def train_with_a_death(folder: str, victim: int, with_torch: bool = False):
    """Adds up until a rank has died and another has come in its place; what each step adds is known."""
    import signal

    from horovod.common import elastic

    if with_torch:
        import torch

        import horovod.torch as hvd

        block = torch.ones(100)
        state = hvd.elastic.TorchState(torch.nn.Linear(1, 1), step=0, total=0, sizes=[])
    else:
        import numpy as np

        import horovod.numpy as hvd

        block = np.ones(100, np.float32)
        state = elastic.ObjectState(hvd.broadcast_object, hvd.rank, step=0, total=0, sizes=[])
    hvd.init()

    @elastic.run
    def train(state):
        died = Path(folder, "died")
        state.sizes.append(hvd.size())
        while state.step < 10 or hvd.size() < 2:
            ones = hvd.allreduce(block, op=hvd.Average, name="ones")
            state.total += state.step * int(ones.sum())
            state.step += 1
            if state.step == 5 and hvd.rank() == victim and not died.exists():
                died.touch()
                os.kill(os.getpid(), signal.SIGKILL)
            state.commit()
        return hvd.rank(), hvd.size(), os.getpid(), state.step, state.total, state.sizes

    return train(state)


def test_a_job_shrinks_and_grows_back(tmp_path: Path) -> None:
    script = tmp_path / "hosts"
    script.write_text("#!/bin/sh\necho localhost\n")
    script.chmod(0o755)
    results, printed = run(
        train_with_a_death,
        str(tmp_path),
        1,
        True,
        num_proc=2,
        min_num_proc=1,
        max_num_proc=2,
        slots=2,
        reset_limit=5,
        cooldown_range=(1, 2),
        host_discovery_script=str(script),
        output_filename=str(tmp_path / "output"),
    )
    # As many as there surely are: the smallest number that was allowed.
    [(rank, size, _, step, total, sizes)] = results
    assert (rank, size) == (0, 2)
    assert total == sum(i * 100 for i in range(step)), printed
    assert sizes == [2, 1, 2], printed
    assert "rank 1 on host localhost was killed by signal 9" in printed
    assert (tmp_path / "output" / "rank.1" / "stdout").exists()


def test_a_job_that_needs_all_ranks_waits_for_the_new_one(tmp_path: Path) -> None:
    # The rank with the state becomes rank 0 where that was lost.
    results, printed = run(train_with_a_death, str(tmp_path), 0, num_proc=2, min_num_proc=2)
    assert [result[:2] for result in results] == [(0, 2), (1, 2)]
    assert results[0][3:] == results[1][3:]
    step, total, sizes = results[0][3:]
    assert step == 10, printed
    assert total == sum(i * 100 for i in range(10)), printed
    assert sizes == [2, 2], printed


def fail_always():
    raise ValueError("the data is not there")


def die_always():
    import signal

    import numpy as np

    import horovod.numpy as hvd
    from horovod.common import elastic

    hvd.init()
    state = elastic.ObjectState(hvd.broadcast_object, hvd.rank)

    @elastic.run
    def train(state):
        hvd.allreduce(np.ones(1, np.float32), name="one")
        if hvd.rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        while True:
            hvd.allreduce(np.ones(1, np.float32), name="one")
            state.commit()

    train(state)


def test_an_exception_that_every_attempt_raises_is_raised_here() -> None:
    with pytest.raises(ValueError, match="the data is not there") as caught:
        run(fail_always, num_proc=2, min_num_proc=2)
    assert any("Raised by the function of horovod.run on rank" in n for n in caught.value.__notes__)


def test_the_reset_limit_ends_it() -> None:
    with pytest.raises(RuntimeError, match="changed once more than --reset-limit 1 allows"):
        run(die_always, num_proc=2, min_num_proc=2, reset_limit=1)


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        ({"min_num_proc": 3}, "--min-np 3 is more than -np 2"),
        ({"min_num_proc": 1, "max_num_proc": 1}, "--max-np 1 is less than -np 2"),
        ({"min_num_proc": 1, "cooldown_range": (5, 1)}, "the smaller one first, got 5 1"),
        ({"min_num_proc": 1, "cooldown_range": (5,)}, "expected two numbers of seconds"),
        ({"min_num_proc": 1, "reset_limit": -1}, "must be >= 0"),
    ],
)
def test_wrong_arguments_are_refused_before_anything_starts(wrong, text) -> None:
    with pytest.raises(ValueError, match=text):
        run(fail_always, num_proc=2, **wrong)
