"""Messages of the frameworks about GPUs whose tensors go through host memory."""


def nccl_built() -> int:
    """0: operations of this framework go through host memory, where NCCL has no part.

    Those in programs that XLA compiles for GPUs do not, but Adasum is refused there. Scripts multiply the
    learning rate by `local_size()` where NCCL is used, since Adasum divides by it there.
    """
    return 0
