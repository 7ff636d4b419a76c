"""Start `horovodrun` from Python: `python -m horovod.runner.launch -np 2 python train.py`."""

from __future__ import annotations

import os
import shutil
import sys
import sysconfig
from pathlib import Path
from typing import NoReturn

__all__ = ["find_horovodrun", "run_commandline"]


def find_horovodrun() -> str:
    """Return the path of the installed program.

    It is looked for where this installation puts its scripts, beside the interpreter, among the user's own
    scripts (`pip install --user`), and then on the PATH.

    Raises
    ------
    FileNotFoundError
        It is in none of these places; the message lists them.
    """
    user_scheme = sysconfig.get_preferred_scheme("user")
    places = [
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
    looked = ", ".join(str(place) for place in places)
    raise FileNotFoundError(f"horovodrun was found neither in {looked} nor on the PATH")


def run_commandline() -> NoReturn:
    """Become `horovodrun` with this process's arguments; does not return."""
    program = find_horovodrun()
    os.execv(program, [program, *sys.argv[1:]])


if __name__ == "__main__":
    run_commandline()
