"""Environment variables of ranks."""

import os
import re

__all__ = ["get_env_rank_and_size", "is_exportable"]

# Functions of the shell, and what is true of one process or one host only.
_NOT_EXPORTED = re.compile("BASH_FUNC_.*|OLDPWD|.*CUDA_VISIBLE_DEVICES|_HOROVOD_SECRET_KEY")

_RANK_AND_SIZE = (
    ("HOROVOD_RANK", "HOROVOD_SIZE"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("PMI_RANK", "PMI_SIZE"),
)


def is_exportable(v: str) -> bool:
    """Whether a variable of this name may be passed on to ranks on other hosts."""
    return _NOT_EXPORTED.match(v) is None


def get_env_rank_and_size() -> tuple[int, int]:
    """Rank and size from what the launcher has set; (0, 1) without one.

    Raises
    ------
    RuntimeError
        Only one of a pair is set.
    """
    for rank_name, size_name in _RANK_AND_SIZE:
        rank, size = os.environ.get(rank_name), os.environ.get(size_name)
        if rank is not None and size is not None:
            return int(rank), int(size)
        if rank is not None or size is not None:
            raise RuntimeError(
                f"Could not determine process rank and size: only one of {rank_name} and {size_name} "
                "found in environment"
            )
    return 0, 1
