"""A rank that is killed while `horovod.jax` trains: the others hear of it, and elastic training goes on."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import harness

WORKER = Path(__file__).with_name("jax_worker.py")


def test_the_others_raise_the_cores_words(jobs, tmp_path: Path) -> None:
    job = jobs(harness.python(3, WORKER, str(tmp_path), "1000000"))
    job.fail()
    errors = re.findall(r"rank (\d) got \w+: .*HorovodInternalError: (.*)", job.stdout)
    assert sorted(rank for rank, _ in errors) == ["0", "1"], job.report()
    assert all("rank 2" in words for _, words in errors), job.report()


def test_elastic_training_goes_on_with_the_same_weights(jobs, tmp_path: Path) -> None:
    command = [sys.executable, WORKER, str(tmp_path), "400", "elastic"]
    options = ("--min-np", "1", "-H", "localhost:2")
    env = {"HOROVOD_ELASTIC_SLOT_FAILURES": "100"}
    job = jobs(harness.horovodrun(2, command, *options, env=env)).succeed()
    assert "now: the last rank dies" in job.stdout
    again = [int(step) for step in re.findall(r"generation of \d from step (\d+)", job.stdout)]
    assert max(again) >= 5, "a committed step was lost"
    assert "done with" in job.stdout


PENDING = """
import jax, jax.numpy as jnp
import horovod.jax as hvd

hvd.init()

@jax.jit
def program(x):
    # Rank 0 comes to the collective much later than the others.
    x = jax.lax.fori_loop(0, jnp.where(hvd.rank() == 0, 300, 1), lambda _, y: y @ x, x)
    return hvd.allreduce(x, name="last")

result = program(jnp.eye(300))
print("the script of rank", hvd.rank(), "ends", flush=True)
"""


def test_a_script_may_end_in_the_middle_of_its_last_program(jobs, script) -> None:
    job = jobs(harness.python(2, script(PENDING))).succeed()
    assert job.stdout.count("the script of rank") == 2
