"""`horovod.torch` with tensors on GPUs against all tables of tests/conformance, which take minutes: second tier."""

import numpy as np
import torch
from devices import GpuTensor, number_of_gpus, on_gpu

import horovod.torch as hvd
from conformance import oracle
from conformance.adapter import Adapter
from conformance.of_torch import FAULTS, LAYOUTS
from conformance.suite import Conformance

hvd.init()
DEVICE = hvd.local_rank() % number_of_gpus()


class Gpu(Adapter):
    hvd = hvd
    # Ranks of one host that reduce by NCCL average in place of Adasum, as the original's do: test_gpu_operations.py.
    lacks = frozenset(["Adasum"] if hvd.nccl_built() else [])
    splits = (list, lambda s: on_gpu(torch.tensor(s, dtype=torch.int32), DEVICE))
    faults = FAULTS
    layouts = LAYOUTS

    def make(self, values, dtype):
        return on_gpu(torch.from_numpy(np.array(values)).to(getattr(torch, dtype)), DEVICE)

    def read(self, tensor):
        dtype = str(tensor.dtype).removeprefix("torch.")
        wide = getattr(torch, oracle.storage(dtype).name)
        if isinstance(tensor, GpuTensor):
            assert tensor.device == torch.device("cuda", DEVICE)
            host = tensor.cpu()
        else:
            # Splits that were given on the host come back there.
            assert tensor.dtype == torch.int32
            assert tensor.shape == (len(tensor),)
            host = tensor
        return host.detach().to(wide).numpy().copy(), dtype

    def place(self, tensor):
        return tensor.data_ptr(), tensor.stride()


class TestGpu(Conformance):
    adapters = (Gpu(),)
