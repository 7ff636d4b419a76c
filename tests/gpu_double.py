"""Programs of ranks whose tensors lie on GPUs of the double, for jobs with settings, faults or ends of their own.

`make gpu-double` builds it. tests/parallel/gpu has what needs none of these.
"""

from __future__ import annotations

import harness

LIBRARY = str(harness.ROOT / ".stamps" / "gpu-double" / "libhorovod_gpu_double.so")
# Where ranks find what makes tensors of the double: `conftest`, `devices`, `cuda_double`.
FOLDER = str(harness.ROOT / "tests" / "parallel" / "gpu")

# Start of a rank's program. `before` runs before anything of the double is loaded, which reads its settings then.
_PRELUDE = """
import os, sys

rank = int(os.environ["HOROVOD_RANK"])
{before}
sys.path.insert(0, {folder!r})
import conftest  # the core's reader takes tensors of the double
import horovod.torch as hvd
import torch
from devices import OnGpu, Stream, count, module_on_gpu, on_gpu, stream, violations

def say(what):
    os.write(1, f"rank {{rank}}: {{' '.join(str(what).split())}}\\n".encode())

def tell(call):
    try:
        result = call()
    except Exception as error:
        say(f"{{type(error).__name__}}: {{error}}")
        return error
    say(result.cpu().tolist() if isinstance(result, torch.Tensor) else result)
"""


def environment(double: str = "", operations: str | None = "NCCL", **others: str) -> dict[str, str]:
    """Variables of a job whose ranks load the double, with these settings, in place of CUDA and NCCL."""
    chosen = {"HOROVOD_GPU_OPERATIONS": operations} if operations else {}
    return {
        "HOROVOD_CUDA_LIBRARY": LIBRARY,
        "HOROVOD_NCCL_LIBRARY": LIBRARY,
        "GPU_DOUBLE": double or "devices=4,seed=3",
        **chosen,
        **others,
    }


def program(body: str, before: str = "") -> str:
    """A rank's program: `body`, with the names of the prelude."""
    return _PRELUDE.format(before=before, folder=FOLDER) + body


def printed(job: harness.Job, rank: int) -> list[str]:
    """The texts of a rank, one text a call."""
    lines = [line.partition(f"rank {rank}: ") for line in job.stdout.splitlines()]
    return [text for before, found, text in lines if found and before in ("", f"[{rank}]<stdout>:")]
