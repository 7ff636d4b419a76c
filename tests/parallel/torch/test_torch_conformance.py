"""`horovod.torch` against the tables of tests/conformance."""

import numpy as np
import torch

import horovod.torch as hvd
from conformance import oracle
from conformance.adapter import Adapter, Fault
from conformance.of_torch import FAULTS, LAYOUTS
from conformance.suite import Conformance

UNSUPPORTED = (Fault.DTYPE, r"Tensor type torch\..* is not supported")

NO_TENSORS = {
    "array": (lambda: np.ones(3), Fault.NO_TENSOR, ""),
    "list": (lambda: [1.0, 2.0], Fault.NO_TENSOR, ""),
    "sparse": (lambda: torch.ones(3).to_sparse(), *UNSUPPORTED),
    "csr": (lambda: torch.ones(3, 3).to_sparse_csr(), *UNSUPPORTED),
    "meta": (lambda: torch.ones(3, device="meta"), *UNSUPPORTED),
    "quantized": (
        lambda: torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8),
        *UNSUPPORTED,
    ),
}


class Torch(Adapter):
    hvd = hvd
    splits = (list, tuple, np.array, torch.tensor, lambda s: torch.tensor(s, dtype=torch.int32))
    faults = FAULTS
    layouts = LAYOUTS
    no_tensors = NO_TENSORS

    def make(self, values, dtype):
        return torch.from_numpy(np.array(values)).to(getattr(torch, dtype))

    def read(self, tensor):
        dtype = str(tensor.dtype).removeprefix("torch.")
        wide = getattr(torch, oracle.storage(dtype).name)
        return tensor.detach().to(wide).numpy().copy(), dtype

    def place(self, tensor):
        return tensor.data_ptr(), tensor.stride()


class TestTorch(Conformance):
    adapters = (Torch(),)
