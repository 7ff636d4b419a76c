"""Errors and layouts of PyTorch's tensors, on every kind of device."""

import torch

from conformance.adapter import Fault

FAULTS = {Fault.NO_TENSOR: (TypeError, AttributeError)}
LAYOUTS = {
    "transposed": lambda t: t.transpose(0, 1).contiguous().transpose(0, 1),
    "reversed": lambda t: (
        t.permute(*range(t.ndim)[::-1]).contiguous().permute(*range(t.ndim)[::-1])
    ),
    "strided": lambda t: torch.stack([t, t], -1)[..., 0],
    "offset": lambda t: torch.cat([t, t])[len(t) :],
    "columns": lambda t: torch.cat([t, t], 1)[:, : t.shape[1]],
}
