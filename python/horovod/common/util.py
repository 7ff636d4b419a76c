"""Helpers that scripts and integrations import: probes of what is installed, and small list tools."""

import functools
import importlib.util
import itertools
import os
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import ParamSpec, TypeVar

from horovod.common._ops import resolve_op
from horovod.common.basics import basics
from horovod.common.exceptions import HorovodVersionMismatchError

_T = TypeVar("_T")
_P = ParamSpec("_P")

EXTENSIONS = ["tensorflow", "torch", "mxnet"]

# A probe imports a whole framework, which may take long on a cold file system but must not hang a launcher.
_PROBE_TIMEOUT_S = 120


def get_ext_suffix() -> str:
    """Return the file suffix of extension modules for this interpreter."""
    return str(sysconfig.get_config_var("EXT_SUFFIX") or ".so")


def get_extension_full_path(pkg_path: str, *args: str) -> str:
    """Return where an extension module called `args[-1]` below `pkg_path`'s folder would lie."""
    if not args:
        raise ValueError("get_extension_full_path needs the name of the extension")
    return os.path.join(os.path.dirname(pkg_path), *args[:-1], args[-1] + get_ext_suffix())


def check_extension(ext_name: str, ext_env_var: str, pkg_path: str, *args: str) -> None:
    """Raise ImportError unless the adapter `ext_name`, such as "horovod.torch", is part of this build.

    No adapter has a library of its own any more, hence `pkg_path` and `args` only serve the message.
    """
    del ext_env_var
    if not _has_module(ext_name):
        path = get_extension_full_path(pkg_path, *args) if args else pkg_path
        raise ImportError(
            f"Extension {ext_name} has not been built: {path} not found\n"
            "This version of horovod-rs has no support for that framework."
        )


def extension_available(ext_base_name: str, verbose: bool = False) -> bool:
    """Whether a framework ("torch", ...) is installed and supported; nothing is imported."""
    available = _has_module(f"horovod.{ext_base_name}") and _has_module(ext_base_name)
    if verbose:
        state = "available" if available else "not available"
        sys.stdout.write(f"Extension {ext_base_name} is {state}.\n")
    return available


@functools.cache
def gpu_available(ext_base_name: str, verbose: bool = False) -> bool:
    """Whether a framework ("torch", ...) sees a GPU.

    Asked in a process of its own, because the question may initialise the GPU driver, which a process that
    forks later must not do. The answer is remembered.
    """
    if not extension_available(ext_base_name):
        return False
    probe = (
        "import importlib, sys; "
        f"sys.exit(not importlib.import_module('horovod.{ext_base_name}')._check_has_gpu())"
    )
    try:
        done = subprocess.run(
            [sys.executable, "-c", probe],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=None if verbose else subprocess.DEVNULL,
            timeout=_PROBE_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return False
    return done.returncode == 0


def mpi_built(verbose: bool = False) -> bool:
    """Whether communicators of MPI can be used: mpi4py is installed."""
    del verbose
    return basics.mpi_built()


def gloo_built(verbose: bool = False) -> bool:
    """Whether the built-in transport exists, under the name that launchers know."""
    del verbose
    return basics.gloo_built()


def nccl_built(verbose: bool = False) -> int:
    """NCCL's version code, 0 without NCCL."""
    del verbose
    return basics.nccl_built()


def ddl_built(verbose: bool = False) -> bool:
    """Whether Horovod can use DDL."""
    del verbose
    return basics.ddl_built()


def ccl_built(verbose: bool = False) -> bool:
    """Whether Horovod can use oneCCL."""
    del verbose
    return basics.ccl_built()


@contextmanager
def env(**kwargs: str | None) -> Iterator[None]:
    """Set environment variables inside a `with` block and restore them after it; None values are ignored."""
    changes = {key: value for key, value in kwargs.items() if value is not None}
    before = {key: os.environ.get(key) for key in changes}
    os.environ.update(changes)
    try:
        yield
    finally:
        for key, value in before.items():
            if value is None:
                os.environ.pop(key, None)
            else:
                os.environ[key] = value


def get_average_backwards_compatibility_fun(
    reduce_ops: object,
) -> Callable[[int | None, bool | None], int]:
    """Return `f(op, average)`, which gives the operator's code; the codes are the same in every framework."""
    del reduce_ops
    return resolve_op


def num_rank_is_power_2(num_rank: int) -> bool:
    """Whether a number of ranks is a power of two."""
    return num_rank > 0 and num_rank & (num_rank - 1) == 0


def split_list(items: Sequence[_T], num_parts: int) -> list[Sequence[_T]]:
    """Cut a list into `num_parts` neighbouring pieces, the first ones longer by one where it does not divide."""
    length, longer = divmod(len(items), num_parts)
    starts = [i * length + min(i, longer) for i in range(num_parts + 1)]
    return [items[a:b] for a, b in itertools.pairwise(starts)]


def is_iterable(x: object) -> bool:
    """Whether `iter` accepts the object."""
    try:
        iter(x)  # type: ignore[call-overload]
    except TypeError:
        return False
    return True


def check_installed_version(
    name: str, version: str, exception: BaseException | None = None
) -> None:
    """Accept any version of a framework: nothing in Horovod is compiled against one.

    Raises
    ------
    HorovodVersionMismatchError
        `exception`, the failure of the caller's import, is given; it becomes the cause.
    """
    if exception is not None:
        raise HorovodVersionMismatchError(name, version, version) from exception


def is_version_greater_equal_than(ver: str, target: str) -> bool:
    """Whether version `ver` is at least `target`, which must have three parts, such as "2.1.0".

    Raises
    ------
    ValueError
        Not two strings, or `target` does not have three numeric parts.
    """
    if not isinstance(ver, str) or not isinstance(target, str):
        raise ValueError("This function only accepts string arguments.")
    wanted = target.split(".")
    if len(wanted) != 3 or not all(part.isdigit() for part in wanted):
        raise ValueError(
            f"We only accept target version values in the form of a.b.c, not {target!r}."
        )
    have = [_leading_number(part) for part in ver.split(".")[:3]]
    have += [0] * (3 - len(have))
    return have >= [int(part) for part in wanted]


def _leading_number(part: str) -> int:
    digits = ""
    for char in part:
        if not char.isdigit():
            break
        digits += char
    return int(digits or 0)


def _cache(f: Callable[_P, _T]) -> Callable[_P, _T]:
    """Remember a function's results by its arguments."""
    return functools.cache(f)  # type: ignore[return-value]


def _has_module(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ImportError:
        return False
