"""A rank of `horovod.run`: fetches the function, calls it, and sends back its result or exception.

`horovodrun` starts this module as `python -m horovod.runner.run_task`; users do not start it.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import socket
import sys
import traceback
from typing import Any

import cloudpickle  # type: ignore[import-untyped]

from horovod import _core, progress
from horovod.common.basics import called_for_script
from horovod.runner import _payloads

# Seconds to try to reach the process that called `horovod.run`.
_TIMEOUT_S = 60.0


def main() -> int:
    """Fetch the function, call it, send its outcome, and return the exit status."""
    payloads = _payloads.Place.from_environment()
    # The function and child processes must not see the key.
    _payloads.Place.remove_from_environment()
    rank = int(os.environ["HOROVOD_RANK"])
    content = _core.fetch_payload(payloads.addresses, payloads.key, rank, _TIMEOUT_S)
    job = pickle.loads(content)
    with progress.sent_to(payloads):
        outcome = _call(job)
    rank = _core.rank() if _core.is_initialized() else int(os.environ["HOROVOD_RANK"])
    _core.deliver_payload(
        payloads.addresses, payloads.key, rank, pickle.dumps(outcome, protocol=5), _TIMEOUT_S
    )
    return outcome.exit_status


def _call(job: _payloads.FunctionCall) -> _payloads.Outcome:
    host = os.environ.get("HOROVOD_HOSTNAME") or socket.gethostname()
    try:
        # The rank can then import the caller's modules, if their folders exist on this host.
        sys.path.extend(place for place in job.sys_path if place not in sys.path)
        func, args, kwargs = cloudpickle.loads(job.function)
        with called_for_script():
            value = func(*args, **kwargs)
    except SystemExit as error:
        status = error.code if isinstance(error.code, int) else int(error.code is not None)
        text = f"the function called sys.exit({error.code!r})"
        return _payloads.Outcome(host, "exit", b"", text, status)
    except BaseException as error:
        text = "".join(traceback.format_exception(error))
        sys.stderr.write(f"User function raise error: {error}\n{text}")
        return _payloads.Outcome(host, "error", _pickled_exception(error), text, 1)
    try:
        content = cloudpickle.dumps(value, protocol=5)
    except Exception as error:
        text = f"the result, of type {type(value).__qualname__}, cannot be pickled: {error!r}"
        sys.stderr.write(text + "\n")
        return _payloads.Outcome(host, "unpicklable", b"", text, 1)
    return _payloads.Outcome(host, "result", content, "", 0)


def _pickled_exception(error: BaseException) -> bytes:
    """Return the pickled exception; empty if unpickling does not restore it, as with many custom constructors."""
    if not isinstance(error, Exception):
        return b""
    # Pickling calls the class with `args`, which fails or garbles the text where `__init__` takes something else.
    for packed in (error, _payloads.PackedException(error)):
        with contextlib.suppress(Exception):
            content: bytes = cloudpickle.dumps(packed, protocol=5)
            copy: Any = cloudpickle.loads(content)
            if type(copy) is type(error) and str(copy) == str(error):
                return content
    return b""


if __name__ == "__main__":
    sys.exit(main())
