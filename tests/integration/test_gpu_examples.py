"""PyTorch's examples with `--device cuda`, on GPUs of the double."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import gpu_double
import harness

EXAMPLES = harness.ROOT / "examples"

# The functions of `torch.cuda` and of models that the examples call: "cuda" is the rank's own GPU.
BODY = """
import runpy

import cuda_double

on_this_gpu = cuda_double.on_gpu
cuda_double.on_gpu = lambda tensor, device=0: on_this_gpu(tensor, rank)
torch.cuda.is_available = lambda: True
torch.cuda.set_device = lambda device: None
torch.cuda.manual_seed = lambda seed: None
torch.cuda.synchronize = lambda: cuda_double.current_stream(rank).synchronize()
torch.nn.Module.to = lambda module, device: module_on_gpu(module, rank)
sys.argv = {words}
with OnGpu():
    runpy.run_path(sys.argv[0], run_name="__main__")
say((count("ncclAllReduce") > 0, violations()))
"""


@pytest.mark.parametrize(
    "words",
    [
        ["pytorch/pytorch_mnist.py", "--epochs", "1", "--max-samples", "100"],
        [
            *["pytorch/pytorch_synthetic_benchmark.py", "--model", "tiny", "--batch-size", "2"],
            *["--num-warmup-batches", "1", "--num-batches-per-iter", "1", "--num-iters", "1"],
        ],
        ["pytorch/pytorch_process_sets.py", "--steps", "3"],
        ["adasum/adasum_small_model.py", "--steps", "10"],
        ["timeline/train_with_timeline.py", "--warm-up", "1", "--steps", "1"],
    ],
    ids=lambda words: Path(words[0]).stem,
)
def test_an_example_on_gpus(words, jobs, script, tmp_path: Path) -> None:
    argv = [str(EXAMPLES / words[0]), "--device", "cuda", *words[1:]]
    env = gpu_double.environment()
    if "timeline" in words[0]:
        argv += ["--timeline", str(tmp_path / "timeline.json")]
        env["HOROVOD_TIMELINE"] = "DYNAMIC"
    # Three ranks: in the example of process sets two of them are in one.
    path = script(gpu_double.program(BODY.replace("{words}", json.dumps(argv))))
    job = jobs(harness.python(3, path, env=env, forked=True)).succeed()
    assert [gpu_double.printed(job, rank)[-1] for rank in (0, 2)] == ["(True, [])"] * 2, (
        job.report()
    )
