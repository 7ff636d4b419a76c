"""Start `horovodrun` from Python: `python -m horovod.runner.launch -np 2 python train.py`."""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import sys
import sysconfig
from pathlib import Path
from typing import NoReturn

from horovod import _absent

__all__ = ["find_horovodrun", "run_commandline"]

# The folder of the imported package `horovod`.
_PACKAGE = Path(__file__).absolute().parent.parent


def find_horovodrun() -> str:
    """Return the path of the installed program `horovodrun`.

    The program that was installed with this package has precedence. The package may be in an environment below this
    one (`python -m venv --system-site-packages`), in the user's packages, or in a folder (`pip install --target`). If
    the installation has no record of the program, these places are searched in order: the scripts of this environment,
    the interpreter's folder, the user's scripts, the PATH.

    Raises
    ------
    FileNotFoundError
        The program is in none of these places; the message lists them.
    """
    user_scheme = sysconfig.get_preferred_scheme("user")
    places = [
        *_recorded(),
        # `pip install --target` moves files without updating the record.
        _PACKAGE.parent / "bin",
        Path(sysconfig.get_path("scripts")),
        Path(sys.executable).parent,
        Path(sysconfig.get_path("scripts", user_scheme)),
    ]
    for place in places:
        program = place / "horovodrun"
        if os.access(program, os.X_OK):
            return str(program)
    on_path = shutil.which("horovodrun")
    if on_path is not None:
        return on_path
    tried = ", ".join(str(place) for place in places)
    raise FileNotFoundError(f"horovodrun was found neither in {tried} nor on the PATH")


def _recorded() -> list[Path]:
    """Return the folders of `horovodrun` in the record of the distribution that contains this package."""
    places = []
    for distribution in importlib.metadata.distributions(name="horovod"):
        if not _is_same(Path(str(distribution.locate_file("horovod"))), _PACKAGE):
            continue
        for file in distribution.files or []:
            if file.name == "horovodrun":
                places.append(Path(str(file.locate())).parent.resolve())
    return places


def _is_same(one: Path, other: Path) -> bool:
    try:
        return one.samefile(other)
    except OSError:
        return False


def run_commandline() -> NoReturn:
    """Replace this process by `horovodrun` with the same arguments; does not return."""
    program = find_horovodrun()
    os.execv(program, [program, *sys.argv[1:]])


def __getattr__(name: str) -> NoReturn:
    # The name is a literal, because `__name__` differs when this file is run.
    _absent.raise_missing("horovod.runner.launch", name)


if __name__ == "__main__":
    run_commandline()
