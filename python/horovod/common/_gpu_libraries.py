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


def rocm_folders() -> list[str]:
    """Folders of installed packages that may hold AMD's libraries: PyTorch's own, and ROCm's wheels beside it."""
    try:
        spec = importlib.util.find_spec("torch")
    except (ImportError, ValueError):
        return []
    places = [Path(place) for place in (spec and spec.submodule_search_locations) or ()]
    return [
        str(folder)
        for place in places
        for folder in (place / "lib", *sorted(place.parent.glob("_rocm_sdk_*/lib")))
        if folder.is_dir()
    ]


def found() -> dict[str, tuple[str, str] | str]:
    """For "cuda" and "nccl" the version as people write it and the file, or why the library cannot be used.

    With AMD's GPUs also "rocm", and "nccl" is AMD's.
    CUDA is not initialised, and no GPU is needed. Launchers ask for it by this name.
    """
    names = {"cuda": _cuda_version, "rocm": _rocm_version, "nccl": _nccl_version}
    libraries = _core.gpu_libraries()
    return {
        library: answer if isinstance(answer, str) else (names[library](answer[1]), answer[0])
        for library, answer in libraries.items()
    }


def _cuda_version(code: int) -> str:
    return f"{code // 1000}.{code % 1000 // 10}"


def _rocm_version(code: int) -> str:
    return f"{code // 10_000_000}.{code // 100_000 % 100}" if code else "an unknown version"


def _nccl_version(code: int) -> str:
    return f"{code // 10000}.{code // 100 % 100}.{code % 100}"
