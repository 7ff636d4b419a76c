"""The tables of `docs/names.md`, checked inside ranks against the package that they are about."""

import importlib
import re
from pathlib import Path

_PAGE = Path(__file__).resolve().parents[2] / "docs" / "names.md"


def check(package):
    """The names of a package's table can be imported, and with those of `horovod.common.api` they are all it has."""
    hvd = importlib.import_module(package)
    shared = importlib.import_module("horovod.common.api")
    prefix = re.escape(package)
    others = {"horovod.tensorflow": r"(?!keras\.)"}.get(package, "")
    listed = re.findall(rf"^\| `{prefix}\.({others}[\w.]+)` \| ", _PAGE.read_text(), re.MULTILINE)
    assert len(listed) > 5
    for name in listed:
        *modules, last = name.split(".")
        owner = hvd
        for i, word in enumerate(modules):
            module = f"{package}.{'.'.join(modules[: i + 1])}"
            owner = getattr(owner, word, None) or importlib.import_module(module)
        assert hasattr(owner, last), name
    inherited = [name for name in shared.__all__ if hasattr(hvd, name) and name not in listed]
    assert [n for n in inherited if getattr(hvd, n) is not getattr(shared, n)] == []
    assert set(hvd.__all__) - set(inherited) <= set(listed), (
        "names that docs/names.md does not have"
    )
