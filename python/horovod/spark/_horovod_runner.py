"""`HorovodRunner`: a function on ranks in Spark tasks or in processes of the driver, and what ranks tell the driver."""

from __future__ import annotations

import io
import json
import os
import re
import sys
import warnings
from collections.abc import Callable
from typing import Any, TextIO, cast

import horovod
from horovod.spark import runner

_ALL, _CALLBACK_ONLY = "all", "log_callback_only"
_MESSAGE_LENGTH_MAX = 4000
_MARK = "horovod-log-to-driver:"
# In the environment of ranks whose output is filtered.
_IS_FILTERED = "_HOROVOD_LOG_TO_DRIVER"
_FROM_RANK = re.compile(r"\[\d+\]<std(out|err)>:")


class HorovodRunner:
    """Runs a function on ranks, and returns what it returned on rank 0.

    Parameters
    ----------
    np
        Above 0 so many ranks, each in a slot of Spark; below 0 so many processes on the driver's host; 0, which is
        deprecated, a rank for every slot of Spark.
    driver_log_verbosity
        `"all"`: what ranks print appears on the driver. `"log_callback_only"`: only what they give `log_to_driver`.
        With `np` below 0 everything does.
    """

    def __init__(self, *, np: int, driver_log_verbosity: str = _CALLBACK_ONLY) -> None:
        if not isinstance(np, int):
            raise TypeError(f"HorovodRunner: np: expected a whole number, got {np!r}")
        if driver_log_verbosity not in (_ALL, _CALLBACK_ONLY):
            raise ValueError(
                f"HorovodRunner: driver_log_verbosity: expected {_ALL!r} or {_CALLBACK_ONLY!r}, got "
                f"{driver_log_verbosity!r}"
            )
        if np == 0:
            text = "HorovodRunner(np=0) is deprecated: say how many ranks"
            warnings.warn(text, DeprecationWarning, stacklevel=2)
        self.num_processor = np
        self._shows_all = driver_log_verbosity == _ALL

    def run(self, main: Callable[..., Any], **kwargs: Any) -> Any:
        """Call `main(**kwargs)` on every rank and return what rank 0's call returned.

        Raises
        ------
        Exception
            As from `horovod.run` and `horovod.spark.run`.
        """
        if self.num_processor < 0:
            return horovod.run(main, kwargs=kwargs, num_proc=-self.num_processor)[0]
        out, err = (None, None) if self._shows_all else (_filter("stdout"), _filter("stderr"))
        results = runner.run(
            main,
            kwargs=kwargs,
            num_proc=self.num_processor or None,
            env=None if self._shows_all else {_IS_FILTERED: "1"},
            stdout=out,
            stderr=err,
        )
        return results[0]


def log_to_driver(message: str) -> None:
    """Show a text of a rank on the driver's standard output; only its first 4000 characters."""
    text = str(message)[:_MESSAGE_LENGTH_MAX]
    line = f"{_MARK}{json.dumps(text)}" if _IS_FILTERED in os.environ else text
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def _filter(name: str) -> TextIO:
    return cast("TextIO", _Filter(name))


class _Filter(io.TextIOBase):
    """Of what ranks print only what was given `log_to_driver`; the launcher's own lines as they are."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._rest = ""

    def write(self, text: str) -> int:
        *lines, self._rest = (self._rest + text).split("\n")
        target = getattr(sys, self._name)
        for line in lines:
            of_rank = _FROM_RANK.match(line)
            _, mark, message = line.partition(_MARK)
            if of_rank is None:
                target.write(line + "\n")
            elif mark:
                target.write(json.loads(message) + "\n")
        target.flush()
        return len(text)
