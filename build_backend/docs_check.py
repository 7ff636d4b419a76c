"""Compares the API's reference with the installed modules: `python build_backend/docs_check.py`, run by `make docs`.

The reference is read from sources. Here the modules are imported, as users do, and each function and class has to have
the parameters that the reference shows.
"""

from __future__ import annotations

import importlib
import inspect
import json
import os
import sys

from docs_site import SIGNATURES


def differences(module: str, shown: dict[str, list[str]]) -> list[str]:
    """Names of a module whose parameters are not those of the reference."""
    imported = importlib.import_module(module)
    found = []
    for name, parameters in shown.items():
        value = getattr(imported, name)
        if inspect.isclass(value) and issubclass(value, BaseException):
            continue  # they take the arguments of any exception
        if getattr(value, "_is_protocol", False):
            continue  # nothing makes one: programs write classes with its methods
        actual = list(inspect.signature(value).parameters)
        if actual != parameters:
            found.append(f"{module}.{name}: the reference shows {parameters}, Python has {actual}")
    return found


def main() -> int:
    """Compare all modules whose framework is installed; 1 if something differs."""
    # Frameworks print much, and no GPU is needed.
    os.environ |= {"TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": ""}
    found: list[str] = []
    compared = 0
    for module, shown in json.loads(SIGNATURES.read_text()).items():
        try:
            found += differences(module, shown)
            compared += len(shown)
        except ImportError as error:
            print(f"not compared: {module} ({str(error).splitlines()[0]})")
    print("\n".join([*found, f"{compared} signatures compared, {len(found)} differ"]))
    if found:
        print("If the installed package is older than the sources: make install")
    return 1 if found or not compared else 0


if __name__ == "__main__":
    sys.exit(main())
