"""The libraries for GPUs, found at run time: in which folders of packages the core looks, and what it has found."""

import importlib.util
from pathlib import Path

from horovod import _core

# Packages in whose folder `lib` NCCL is, as those that PyTorch requires.
_NCCL_PACKAGES = ("nvidia.nccl",)


def wheel_folders() -> list[str]:
    """Folders of installed packages that may hold `libnccl.so.2`; called by the core before it looks for it."""
    folders = []
    for package in _NCCL_PACKAGES:
        try:
            spec = importlib.util.find_spec(package)
        except (ImportError, ValueError):  # no `nvidia`, or one that is no package
            continue
        places = spec.submodule_search_locations if spec is not None else None
        folders += [str(Path(place) / "lib") for place in places or ()]
    return folders


def found() -> dict[str, tuple[str, str] | str]:
    """For "cuda" and "nccl" the version as people write it and the file, or why the library cannot be used.

    CUDA is not initialised, and no GPU is needed. Launchers ask for it by this name.
    """
    names = {"cuda": _cuda_version, "nccl": _nccl_version}
    libraries = _core.gpu_libraries()
    return {
        library: told if isinstance(told, str) else (names[library](told[1]), told[0])
        for library, told in libraries.items()
    }


def _cuda_version(code: int) -> str:
    return f"{code // 1000}.{code % 1000 // 10}"


def _nccl_version(code: int) -> str:
    return f"{code // 10000}.{code // 100 % 100}.{code % 100}"
