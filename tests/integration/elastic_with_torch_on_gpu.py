"""The training of elastic_worker.py with PyTorch on a GPU of the double."""

from __future__ import annotations

import atexit
import sys
from pathlib import Path

import numpy as np
import torch

from horovod.torch import _optimizer_state

sys.path.insert(0, str(Path(__file__).parents[1] / "parallel" / "gpu"))
import elastic_with_torch
from cuda_double import OnGpu, module_on_gpu
from double_streams import count, violations
from elastic_with_torch import hvd

import conftest  # noqa: F401  the core's reader takes tensors of the double

# A subclass of tensors is not sent as data.
_optimizer_state._is_dense = lambda value: isinstance(value, torch.Tensor)
State = elastic_with_torch.State


class Training(elastic_with_torch.Training):
    """On the GPU of the process's place on its host, which it keeps."""

    def __init__(self, samples: int) -> None:
        self.gpu = hvd.local_rank()
        super().__init__(samples)
        atexit.register(self._note_the_end)

    def _note_the_end(self) -> None:
        hvd.shutdown()
        made = count("ncclCommInitRankConfig")
        print(f"GPU {self.gpu}: {made} communicators, violations {violations()}", flush=True)

    def on_device(self, model: torch.nn.Module) -> torch.nn.Module:
        return module_on_gpu(model, self.gpu)

    def begin_step(self, step: int) -> None:
        with OnGpu():
            super().begin_step(step)

    def end_step(self) -> None:
        with OnGpu():
            super().end_step()

    def weights(self) -> list[np.ndarray]:
        return [param.detach().cpu().numpy() for param in self.model.parameters()]
