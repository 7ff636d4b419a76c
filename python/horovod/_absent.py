"""Names of the original that do not exist here: one table of advice, which the ImportError shows.

Packages and scripts import modules of the original's launcher and adapters. Where a small module can do what they
want, it exists (`horovod.runner.util.threads`, `horovod.runner.elastic.discovery`, ...). For the others a stub that
imports and then does nothing would only move the failure to where nobody understands it.
"""

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Sequence
from types import FrameType, ModuleType
from typing import NoReturn

_CALL = "start jobs with the program horovodrun, or with horovod.run(func, num_proc=..., hosts=...) from Python"
_ELASTIC = (
    "elastic jobs are driven by the program horovodrun: horovodrun --host-discovery-script ..., or "
    "horovod.run(func, min_num_proc=..., max_num_proc=..., host_discovery_script=...)"
)
_RENDEZVOUS = (
    "ranks meet through the rendezvous of horovodrun; "
    "without it set HOROVOD_RANK0_ADDRESS or HOROVOD_RENDEZVOUS_DIR"
)
_SERVICES = "there are no services that run what is sent to them; " + _CALL
_ROWS = (
    "estimators read their Parquet data by themselves, a share of its rows on each rank; for loops of your own "
    "there is horovod.data"
)

_SAVED = "estimators, and the models that fit() returns, save what they hold: estimator.save(path), model.save(path)"

_SPARK = "call functions on ranks in Spark's tasks with horovod.spark.run, or elastic with horovod.spark.run_elastic"

# Modules, submodules included, and names in modules that exist, after a colon.
_INSTEAD = {
    "horovod.spark.data_loaders": _ROWS,
    "horovod.spark.common.datamodule": _ROWS,
    "horovod.spark.keras.datamodule": _ROWS,
    "horovod.spark.lightning.datamodule": _ROWS,
    "horovod.spark.torch.datamodule": _ROWS,
    "horovod.spark.driver": _SPARK,
    "horovod.spark.gloo_run": _SPARK,
    "horovod.spark.mpi_run": f"there is no MPI here; {_SPARK}",
    "horovod.spark.tensorflow": (
        "call horovod.tensorflow.data.compute_worker.main on ranks by horovod.spark.run, with a file that all hosts see"
    ),
    "horovod.spark.common.cache": "horovod.spark.common.util.prepare_data knows what it has written",
    "horovod.spark.common.constants": "estimators need no such choice: they read rows in a fixed amount of memory",
    "horovod.spark.keras.util": _SAVED,
    "horovod.spark.lightning.util": _SAVED,
    "horovod.spark.torch.util": _SAVED,
    "horovod.runner.gloo_run": _CALL,
    "horovod.runner.mpi_run": f"there is no MPI here; {_CALL}; ranks that mpirun starts find each other by themselves",
    "horovod.runner.js_run": f"{_CALL}; ranks that jsrun starts find each other by themselves",
    "horovod.runner.task_fn": _SERVICES,
    "horovod.runner.task": _SERVICES,
    "horovod.runner.driver": f"{_SERVICES}; horovodrun --doctor says which addresses hosts reach each other by",
    "horovod.runner.service": _SERVICES,
    "horovod.runner.http.http_client": _RENDEZVOUS,
    "horovod.runner.http.http_server:KVStoreHandler": _RENDEZVOUS,
    "horovod.runner.http.http_server:KVStoreServer": _RENDEZVOUS,
    "horovod.runner.http.http_server:RendezvousHandler": _RENDEZVOUS,
    "horovod.runner.common.service.driver_service": _SERVICES,
    "horovod.runner.common.service.task_service": _SERVICES,
    "horovod.runner.common.util.network": _SERVICES,
    "horovod.runner.common.util.settings": f"arguments take its place: {_CALL}",
    "horovod.runner.common.util.config_parser": "horovodrun --config-file reads the same YAML; "
    + _CALL,
    "horovod.runner.common.util.safe_shell_exec": (
        "use subprocess.run(..., start_new_session=True); horovodrun finds and ends all processes of its ranks itself"
    ),
    "horovod.runner.common.util.tiny_shell_exec": "use subprocess.run",
    "horovod.runner.util.network": "Python's socket module has gethostname and getaddrinfo; "
    + _CALL,
    "horovod.runner.util.remote": _CALL,
    "horovod.runner.util.streams": "use os.pipe or io.BytesIO",
    "horovod.runner.util.cache": "nothing is cached between jobs",
    "horovod.runner.util.lsf": _CALL,
    "horovod.runner.elastic.driver": _ELASTIC,
    "horovod.runner.elastic.registration": _ELASTIC,
    "horovod.runner.elastic.rendezvous": _ELASTIC,
    "horovod.runner.elastic.settings": f"arguments take its place: {_ELASTIC}",
    "horovod.runner.elastic.constants": "horovodrun --help names the options that set such values",
    "horovod.runner.elastic.discovery:DiscoveredHosts": _ELASTIC,
    "horovod.runner.elastic.discovery:HostManager": _ELASTIC,
    "horovod.runner.elastic.discovery:HostState": _ELASTIC,
    "horovod.runner.launch:parse_args": "horovodrun parses its own options; " + _CALL,
    "horovod.runner.launch:check_build": "run the program: horovodrun --check-build",
    "horovod.runner.launch:run_controller": _CALL,
}


def advice(name: str) -> str | None:
    """Advice on importing a module, or `module:name`, of the original's; None if it is none of them."""
    where = name
    while where:
        if where in _INSTEAD:
            shown = where.replace(":", ".")
            return (
                f"{shown} of the original Horovod does not exist in horovod-rs: {_INSTEAD[where]}"
            )
        where = where.rpartition(".")[0] if ":" not in where else ""
    return None


def raise_missing(module: str, name: str) -> NoReturn:
    """The end of a module's `__getattr__` for a name that the module does not have."""
    text = advice(f"{module}:{name}")
    if text is None:
        raise AttributeError(f"module {module!r} has no attribute {name!r}")
    raise _error(text, sys._getframe(2))


def raise_unavailable(text: str) -> NoReturn:
    """The end of a module's `__getattr__` for a name that cannot be had here; the text says why."""
    raise _error(text, sys._getframe(2))


def _error(text: str, asks: FrameType) -> AttributeError | ImportError:
    """The error for the code that asks a module for a name.

    A name that is not there is an AttributeError, for `hasattr` and whoever looks through modules. Of the text of that
    error `from module import name` would show nothing, so the statement gets an ImportError.
    """
    return ImportError(text) if _imports(asks) else AttributeError(text)


def _imports(frame: FrameType) -> bool:
    """Whether a frame is in the middle of `from ... import ...`."""
    from opcode import opmap

    return frame.f_code.co_code[frame.f_lasti] == opmap["IMPORT_FROM"]


class _Finder(importlib.abc.MetaPathFinder):
    """Last in line: asked for modules of this package that nobody else has found."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if not fullname.startswith("horovod."):
            return None
        text = advice(fullname)
        # A mere query for the module (`importlib.util.find_spec`) gets the plain answer.
        if text is None or not sys._getframe(2).f_code.co_name.startswith("_find_and_load"):
            return None
        # With a `name`, `from horovod import tensorflow` would hide the text behind its own.
        raise ModuleNotFoundError(text)


def install() -> None:
    """Make imports of what is absent say what to use instead; again does nothing."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.append(_Finder())
