"""Where the threads of this process stand, for reports about jobs that have come to a standstill."""

import sys
import sysconfig
import threading
from itertools import islice
from pathlib import Path
from types import FrameType

from horovod import _core

_PACKAGE = str(Path(__file__).resolve().parent.parent) + "/"


# Files of these are not the user's.
_INSTALLED = ("/site-packages/", "/dist-packages/", sysconfig.get_path("stdlib") + "/", "<frozen ")


def _frames(innermost: FrameType) -> list[tuple[str, int, str]]:
    """The innermost frames, and of a deeper stack the user's own in place of the outermost of these.

    A call such as Keras's `fit` has more frames of frameworks above the script's than a report has lines.
    """
    frame: FrameType | None = innermost
    frames: list[tuple[str, int, str]] = []
    while frame is not None:
        frames.append((frame.f_code.co_filename, frame.f_lineno or 0, frame.f_code.co_qualname))
        frame = frame.f_back
    own = [i for i, (file, _, _) in enumerate(frames) if not any(p in file for p in _INSTALLED)]
    kept = own[: _core.FRAMES_MAX // 2]
    kept += [i for i in range(len(frames)) if i not in kept]
    return [frames[i] for i in sorted(kept[: _core.FRAMES_MAX])]


def thread_stacks() -> list[tuple[str, list[tuple[str, int, str]]]]:
    """Return the name and the innermost frames (file, line, function), and the user's, of all other Python threads.

    The main thread comes first; threads of this package are left out.
    """
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    main, me = threading.main_thread().ident, threading.get_ident()
    stacks = {ident: frame for ident, frame in sys._current_frames().items() if ident != me}
    theirs = (ident for ident in stacks if not names.get(ident, "").startswith("hvd-"))
    ordered = sorted(theirs, key=lambda ident: ident != main)
    return [
        (names.get(ident, f"number {ident}"), _frames(stacks[ident]))
        for ident in islice(ordered, _core.THREADS_MAX)
    ]


def threads_within_calls() -> set[int]:
    """Return the idents of the threads, but the calling one, of which other code has called this package."""
    return {
        ident
        for ident, frame in sys._current_frames().items()
        if ident != threading.get_ident() and _is_within_call(frame)
    }


def _is_within_call(innermost: FrameType) -> bool:
    frame: FrameType | None = innermost
    called = False
    while frame is not None:
        file = frame.f_code.co_filename
        if file.startswith(_PACKAGE):
            called = True
        elif called and file != threading.__file__:
            return True
        frame = frame.f_back
    # A thread that this package has started, or that is not in it.
    return False
