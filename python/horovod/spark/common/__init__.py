"""Parts that the estimators of all frameworks share; see the submodules."""

import importlib.util as _util
import sys as _sys

from horovod._installation import command as _command


def _is_there(name: str) -> bool:
    if name in _sys.modules:
        return _sys.modules[name] is not None
    return _util.find_spec(name) is not None


_missing = [name for name in ("pyspark", "pyarrow", "fsspec") if not _is_there(name)]
if _missing:
    raise ImportError(
        f"estimators on Spark need {' and '.join(_missing)}, not installed for {_sys.executable}: "
        + _command("horovod-rs[spark]")
    )
