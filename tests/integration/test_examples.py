"""The examples run as their users run them, at toy size; the usual script on 1 to 3 processes, with options on 2."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

import harness

EXAMPLES = harness.ROOT / "examples"
QUIET = {"TF_CPP_MIN_LOG_LEVEL": "3"}
BRIEF = (
    *("--batch-size", "2", "--num-iters", "1"),
    *("--num-warmup-batches", "1", "--num-batches-per-iter", "1"),
)
# Of Keras' models the one that compiles fastest.
SMALLEST = ("--model", "MobileNet", "--image-size", "32")


REST = pytest.mark.thorough(also="tests/integration/test_examples.py::test_the_usual_script")


# On other numbers of ranks it runs the same lines; that jobs of 1 and 3 ranks work is tested inside of ranks.
@pytest.mark.parametrize("np", [pytest.param(1, marks=REST), 2, pytest.param(3, marks=REST)])
def test_the_usual_script(np: int, jobs, tmp_path: Path) -> None:
    mnist = EXAMPLES / "pytorch" / "pytorch_mnist.py"
    job = jobs(
        harness.python(np, mnist, "--epochs", "2", "--no-cuda", "--data-dir", str(tmp_path))
    ).succeed()
    accuracies = re.findall(r"[Aa]ccuracy:? *([\d.]+) *%", job.stdout)
    assert accuracies, job.report()
    assert float(accuracies[-1]) > 80
    assert list(tmp_path.iterdir()), "rank 0 wrote no checkpoint"


@pytest.mark.parametrize(
    ("np", "words"),
    [
        (
            2,
            [
                *["pytorch/pytorch_mnist.py", "--epochs", "1", "--max-samples", "400"],
                "--fp16-allreduce",
                *["--gradient-predivide-factor", "2.0", "--use-mixed-precision"],
            ],
        ),
        (
            2,
            [
                *["pytorch/pytorch_mnist.py", "--epochs", "1", "--use-adasum"],
                *["--max-samples", "400"],
            ],
        ),
        (2, ["elastic/pytorch/pytorch_mnist_elastic.py", "--epochs", "1", "--use-adasum"]),
        (3, ["pytorch/pytorch_process_sets.py", "--steps", "20"]),
        (2, ["adasum/adasum_small_model.py", "--op", "Adasum", "--steps", "20"]),
    ],
    ids=lambda value: " ".join(value[:3:2]) if isinstance(value, list) else None,
)
def test_example_runs(np: int, words: list[str], jobs) -> None:
    jobs(harness.python(np, EXAMPLES / words[0], *words[1:], forked=True)).succeed()


def learns_digits(script: str, jobs) -> harness.Job:
    job = jobs(harness.python(2, EXAMPLES / "jax" / script, forked=True)).succeed()
    accuracy = re.search(r"accuracy ([\d.]+)%", job.stdout)
    assert accuracy, job.report()
    assert float(accuracy[1]) > 90
    return job


BENCHMARKS = [
    ["pytorch/pytorch_synthetic_benchmark.py", "--no-cuda"],
    # The size of images that bench/published.py takes.
    [
        *["pytorch/pytorch_synthetic_benchmark.py", "--model", "inception_v3"],
        *["--image-size", "128", "--no-allreduce"],
    ],
    ["jax/jax_synthetic_benchmark.py", *SMALLEST, "--fp16-allreduce"],
    ["tensorflow2/tensorflow2_synthetic_benchmark.py", *SMALLEST, "--fp16-allreduce"],
]


@pytest.mark.parametrize("words", BENCHMARKS, ids=lambda words: " ".join(words[:3:2]))
def test_a_benchmark_reports_its_rate(words: list[str], jobs, monkeypatch) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path, str(harness.ROOT / "bench")])
    import published

    script = EXAMPLES / words[0]
    job = jobs(harness.python(2, script, *words[1:], *BRIEF, env=QUIET, forked=True)).succeed()
    assert published.images_per_s(job.stdout) > 0


def test_flax_learns_digits(jobs) -> None:
    learns_digits("flax_digits.py", jobs)


def test_jax_learns_digits_with_the_same_losses_on_one_rank_and_on_two(jobs) -> None:
    on_two = learns_digits("jax_digits.py", jobs)
    words = [EXAMPLES / "jax" / "jax_digits.py", "--epochs", "3"]
    on_one = jobs(harness.python(1, *words, forked=True)).succeed()
    losses = [
        [float(loss) for loss in re.findall(r"loss ([\d.]+)", job.stdout)]
        for job in (on_one, on_two)
    ]
    assert (len(losses[0]), len(losses[1])) == (3, 10), losses
    assert losses[0] == pytest.approx(losses[1][:3], abs=1e-4)
