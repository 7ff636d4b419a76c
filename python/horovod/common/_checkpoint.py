"""A file from which a training goes on: written as a whole by rank 0, read by rank 0, sent to all ranks.

It holds the last snapshot of a state of `hvd.elastic`, which knows for each framework how values are saved and synced.
"""

import contextlib
import os
import pickle
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from horovod import _core
from horovod.common import _consensus
from horovod.common._objects import broadcast_object
from horovod.common.basics import basics
from horovod.common.elastic import ObjectState

# The exit status of a process that SIGTERM has ended, as shells have it.
_TERMINATED = 128 + signal.SIGTERM


class Checkpoint:
    """Saves a state into a file, and goes on from it. Every rank makes the same calls; only rank 0 needs the file.

    The file is replaced as a whole: a job that is killed meanwhile leaves the former one. It is a pickle, which runs
    code when it is read: resume from your own files only.

    Parameters
    ----------
    state
        A state of `hvd.elastic`, such as `TorchState`, `KerasState` or `JaxState`; the job need not be elastic.
    path
        The file. Its folder must exist.

    Examples
    --------
    >>> state = hvd.elastic.TorchState(model, optimizer, step=0)
    >>> checkpoint = hvd.Checkpoint(state, "training.checkpoint")
    >>> checkpoint.resume()
    >>> while state.step < steps:
    ...     train_one_step(state)
    ...     state.step += 1
    ...     if state.step % 1000 == 0:
    ...         checkpoint.save()
    ...     checkpoint.end_step()
    """

    def __init__(self, state: ObjectState, path: str | os.PathLike[str]) -> None:
        if not isinstance(state, ObjectState):
            raise ValueError(
                f"hvd.Checkpoint(state, path): the state is a {type(state).__qualname__}, expected a state of "
                "hvd.elastic, such as ObjectState."
            )
        self._state = state
        self._path = Path(path).absolute()
        self._ends_on_sigterm = False

    def resume(self) -> bool:
        """Give all ranks the state of the file, and return True. Without a file leave the state, and return False.

        Raises
        ------
        ValueError
            On all ranks alike: rank 0 could not read the file, the file does not fit the state, or its folder does not
            exist.
        """

        def load() -> bool:
            try:
                content = self._path.read_bytes()
            except FileNotFoundError:
                # Without the folder each save would fail.
                if not self._path.parent.is_dir():
                    raise
                return False
            saved = pickle.loads(content)
            if not isinstance(saved, dict) or "values" not in saved:
                raise ValueError(
                    f"it holds a {type(saved).__qualname__}, expected what hvd.Checkpoint.save has written"
                )
            self._state._load_saved(saved)
            return True

        is_found = self._on_rank_zero(load, f"Cannot resume from {self._path}", ValueError)
        if is_found:
            self._state._root_rank = 0
            self._state.sync()
        return is_found

    def save(self) -> None:
        """Write the state into the file.

        Raises
        ------
        OSError
            On all ranks: rank 0 could not write the file, or another rank could not copy its state. A rank that cannot
            copy its own raises the cause. The former file is unchanged.
        """
        cause = None
        try:
            self._state._take_commit()
        except Exception as error:  # of a value that cannot be copied
            cause = error
        (has_failed,) = _consensus.greatest([cause is not None], "checkpoint.save")
        if cause is not None:
            raise cause
        if has_failed:
            raise OSError(
                f"Cannot save to {self._path}: a rank could not copy its state, its own error has the cause"
            )

        def write() -> bool:
            content = pickle.dumps(self._state._saved(), pickle.HIGHEST_PROTOCOL)
            _replace(self._path, content)
            return True

        self._on_rank_zero(write, f"Cannot save to {self._path}", OSError)

    def end_step(self) -> None:
        """Leave the job here if a rank has received SIGTERM, as before a host is taken away; save before that.

        The first call replaces the process's handler of SIGTERM. From then on SIGTERM ends this process only here. If
        one rank has received it, all ranks save, and then end with exit status 143. In an elastic job only ranks that
        have received SIGTERM end, and the others go on from this save. Costs some ten microseconds.

        Call it in the main thread: in other threads Python sets no handlers, and SIGTERM ends the process at once.

        Raises
        ------
        SystemExit
            This process ends.
        OSError
            As in `save`.
        """
        if not self._ends_on_sigterm:
            self._ends_on_sigterm = _sigterm.begin_to_note()
        (is_asked,) = _consensus.greatest([_sigterm.has_come], "checkpoint.end_step")
        if not is_asked:
            return
        self.save()
        if _sigterm.has_come or not _core.is_elastic():
            _sigterm.has_come = False
            sys.exit(_TERMINATED)

    def _on_rank_zero(self, function: Callable[[], bool], what: str, kind: type[Exception]) -> bool:
        """Call the function on rank 0. All ranks get its result, or an error of this kind."""
        outcome: tuple[bool, str | None] = (False, None)
        cause = None
        if basics.rank() == 0:
            try:
                outcome = (function(), None)
            except Exception as error:  # also of a framework, and of what a pickle holds
                outcome = (False, f"{what}: {type(error).__name__}: {error}")
                cause = error
        result, text = broadcast_object(outcome, 0, "checkpoint.outcome")
        if text is not None:
            raise kind(text) from cause
        return bool(result)


class _Sigterm:
    """Notes that the process has received SIGTERM, for all its checkpoints: a script may make another one meanwhile."""

    def __init__(self) -> None:
        self.has_come = False
        self._former: Any = signal.SIG_DFL
        os.register_at_fork(after_in_child=self._leave_to_parent)

    def begin_to_note(self) -> bool:
        """Replace the handler, and return whether this could be done: Python refuses it outside of the main thread."""
        if threading.current_thread() is not threading.main_thread():
            return False
        former = signal.signal(signal.SIGTERM, self._note)
        if former != self._note:
            # None is a handler that is not of Python.
            self._former = signal.SIG_DFL if former is None else former
        return True

    def _note(self, *_: object) -> None:
        self.has_come = True

    def _leave_to_parent(self) -> None:
        """In a forked child SIGTERM ends the process as before: `Pool.terminate` sends it to workers, and waits."""
        self.has_come = False
        if signal.getsignal(signal.SIGTERM) == self._note:
            signal.signal(signal.SIGTERM, self._former)


_sigterm = _Sigterm()


def _replace(path: Path, content: bytes) -> None:
    """Write the file so that it is the former or the new one as a whole, also after a loss of power."""
    new = path.with_name(f"{path.name}.new")
    try:
        with new.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        new.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            new.unlink()
        raise
    # Some network filesystems cannot do this with a folder. The file is complete without it.
    with contextlib.suppress(OSError):
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
