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
        self._is_asked_to_end = False

    def resume(self) -> bool:
        """Give all ranks the state of the file, and return True. Without a file leave the state, and return False.

        Raises
        ------
        ValueError
            On all ranks alike: rank 0 could not read the file, or it does not fit the state.
        """

        def load() -> bool:
            try:
                content = self._path.read_bytes()
            except FileNotFoundError:
                return False
            self._state._load_saved(pickle.loads(content))
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
            On all ranks alike: rank 0 could not write the file. The former file is unchanged.
        """
        self._state.save()
        self._state._commits += 1

        def write() -> bool:
            content = pickle.dumps(self._state._saved(), pickle.HIGHEST_PROTOCOL)
            _replace(self._path, content)
            return True

        self._on_rank_zero(write, f"Cannot save to {self._path}", OSError)

    def end_step(self) -> None:
        """Leave the job here if a rank has received SIGTERM, as before a host is taken away; save before that.

        From the first call on, SIGTERM ends this process only here. If one rank has received it, all ranks save. All
        ranks then end with exit status 143. In an elastic job only ranks that have received SIGTERM end, and the others
        go on from this save. Costs some ten microseconds.

        Raises
        ------
        SystemExit
            This process ends.
        OSError
            As in `save`.
        """
        if not self._ends_on_sigterm:
            self._ends_on_sigterm = True
            # Handlers run in the main thread, and are set there.
            if threading.current_thread() is threading.main_thread():
                signal.signal(signal.SIGTERM, self._note_sigterm)
        (is_asked,) = _consensus.greatest([self._is_asked_to_end], "checkpoint.end_step")
        if not is_asked:
            return
        self.save()
        if self._is_asked_to_end or not _core.is_elastic():
            sys.exit(_TERMINATED)

    def _note_sigterm(self, *_: object) -> None:
        self._is_asked_to_end = True

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
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
