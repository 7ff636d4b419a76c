"""The elastic loop of all frameworks: it calls the training function again after each change of the job's members.

A process of an elastic job passes through generations. At the beginning of each one the ranks agree on a root rank,
receive its state, and call the user's function. The generation ends when the function returns on all ranks, when a rank
is lost, or when members are to be added or removed. After a loss, states return to the last commit; otherwise they stay
as they are.
"""

import contextlib
import copy
import enum
import functools
import itertools
import logging
from collections import Counter
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar

from horovod import _core
from horovod.common import _consensus, _rank_aware
from horovod.common._news import HostMessages, HostUpdateResult, notification_manager
from horovod.common._objects import broadcast_object
from horovod.common.basics import basics
from horovod.common.exceptions import (
    HorovodInternalError,
    HorovodStalledError,
    HostsUpdatedInterrupt,
    WorkerRemovedError,
)
from horovod.common.process_sets import global_process_set

__all__ = ["ObjectState", "State", "notification_manager", "run", "run_fn"]

_log = logging.getLogger("horovod")
_S = TypeVar("_S", bound="State")
_P = ParamSpec("_P")
_T = TypeVar("_T")

# Failures without a commit after which the error is raised: consecutive ones with the same members, or losses of one
# rank. Another attempt would fail in the same way.
_FRUITLESS_MAX = 3
# Seconds in which a process that has lost its GPU must end. Without this limit cleanup code may wait for that GPU.
_END_WITHIN_S = 30.0


class State:
    """Training state that survives changes of the job's members. Derive from this class to define a kind of state.

    Parameters
    ----------
    bcast_object
        Function that sends an object to all ranks; default `hvd.broadcast_object`.
    get_rank
        Function that returns this process's rank; default `hvd.rank`.
    """

    def __init__(
        self,
        bcast_object: Callable[..., Any] | None = None,
        get_rank: Callable[[], int] | None = None,
    ) -> None:
        self._bcast_object = bcast_object or broadcast_object
        self._rank = get_rank or basics.rank
        self._root_rank = 0
        self._commits = 0
        self._seen = (0, 0)
        self._given = 0
        self._host_messages = HostMessages()
        self._reset_callbacks: list[Callable[[], Any]] = []

    def register_reset_callbacks(self, callbacks: Iterable[Callable[[], Any]]) -> None:
        """Add functions that are called after each change of members, in this order, before the state is synced.

        The functions see the new rank and size. Only ranks that were members before call them. The functions must not
        use collective operations, because new ranks would not take part.
        """
        self._reset_callbacks.extend(callbacks)

    def on_reset(self) -> None:
        """Call `reset` and then the callbacks; the elastic loop does this when a new generation begins."""
        self._host_messages = HostMessages()
        self._seen, self._given = (0, 0), 0
        self.reset()
        for callback in self._reset_callbacks:
            callback()

    def on_hosts_updated(self, timestamp: float, update_result: int) -> None:
        """Receive a host update from another source than the launcher: 1 removed, 2 added, 3 both.

        The next `check_host_updates` raises on all ranks. The timestamp is ignored: each call is a new update.
        """
        self._host_messages.put((timestamp, update_result))

    def commit(self) -> None:
        """Save the current state, to which a failure returns, and call `check_host_updates`.

        Every rank has to call `commit` equally often.
        """
        self._take_commit()
        self.check_host_updates()

    def _take_commit(self) -> None:
        # Operations in flight on a GPU may still fail, and a commit must not contain the results of failed ones.
        _core.wait_for_devices()
        self.save()
        self._commits += 1

    def check_host_updates(self) -> None:
        """Raise `HostsUpdatedInterrupt` in the same call of all ranks if members are to be added or removed.

        This is a collective operation of some microseconds. Every rank has to call it equally often.
        """
        announced, kind = _core.host_updates()
        for given_kind in self._host_messages.take_given():
            kind |= given_kind
            self._given += 1
        # Ranks receive host updates at different times; the maximum over all ranks includes the newest one.
        announced, given, removed, added = _consensus.greatest(
            [
                announced,
                self._given,
                kind & HostUpdateResult.removed,
                kind & HostUpdateResult.added,
            ],
            "elastic.host_updates",
        )
        if announced > self._seen[0] or given > self._seen[1]:
            self._seen = (announced, given)
            self._host_messages.acted_upon(announced)
            self._given = given
            raise HostsUpdatedInterrupt(skip_sync=bool(removed) and not added)

    def save(self) -> None:
        """Take a snapshot in host memory; it replaces the snapshot before."""
        raise NotImplementedError(f"{type(self).__name__} has to define save")

    def restore(self) -> None:
        """Set the state to the last snapshot."""
        raise NotImplementedError(f"{type(self).__name__} has to define restore")

    def sync(self) -> None:
        """Broadcast the current state of rank `_root_rank`: the first of the ranks that have the newest state."""
        raise NotImplementedError(f"{type(self).__name__} has to define sync")

    def reset(self) -> None:
        """Adapt to a new rank and size; called after each change of members, before the callbacks and the sync."""


class ObjectState(State):
    """State whose attributes are plain Python objects.

    Values have to support copying and pickling. A snapshot is a deep copy, so that `restore` also undoes changes inside
    lists and dicts.

    Parameters
    ----------
    bcast_object, get_rank
        As in `State`.
    kwargs
        Names and initial values of the attributes. Only these are saved, restored and synced.

    Raises
    ------
    ValueError
        A value, or an object inside it, belongs to one rank, such as a `DistributedSampler`. `sync` raises this too.

    Examples
    --------
    >>> state = ObjectState(epoch=0, losses=[])
    """

    def __init__(
        self,
        bcast_object: Callable[..., Any] | None = None,
        get_rank: Callable[[], int] | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(bcast_object, get_rank)
        _rank_aware.refuse(kwargs)
        self._saved_state: dict[str, Any] = kwargs
        self._set_attributes(kwargs)
        self._saved_state = self._snapshot()

    if TYPE_CHECKING:
        # The caller of the constructor names the attributes.
        def __getattr__(self, name: str) -> Any: ...
        def __setattr__(self, name: str, value: Any) -> None: ...

    def save(self) -> None:
        """Store deep copies of the attributes."""
        _core.wait_for_devices()
        self._saved_state = self._snapshot()

    def restore(self) -> None:
        """Set the attributes to copies of the saved values."""
        self._set_attributes(copy.deepcopy(self._saved_state))

    def sync(self) -> None:
        """Set the attributes on all ranks to the root's current values, and save them."""
        if not self._saved_state:
            return
        live = {name: getattr(self, name) for name in self._saved_state}
        _rank_aware.refuse(live)
        received = self._bcast_object(live, root_rank=self._root_rank)
        self._set_attributes(received)
        self._saved_state = copy.deepcopy(received)

    _parts_of_checkpoint = frozenset({"values"})

    def _saved(self) -> dict[str, Any]:
        """Return the content of a checkpoint: the last snapshot, to be pickled before the next one."""
        return {"values": self._saved_state}

    def _load_saved(self, saved: dict[str, Any]) -> None:
        """Set the state to the content of a checkpoint.

        Raises
        ------
        ValueError
            The content is of another kind of state, or has other attributes than this state.
        """
        if others := saved.keys() - self._parts_of_checkpoint:
            raise ValueError(
                f"the file also has {sorted(others)}, which {type(self).__qualname__} does not read: resume with the "
                "kind of state that was saved"
            )
        if saved["values"].keys() != self._saved_state.keys():
            raise ValueError(
                f"the file has the attributes {sorted(saved['values'])}, the state has {sorted(self._saved_state)}"
            )
        self._set_attributes(saved["values"])

    def _snapshot(self) -> dict[str, Any]:
        live = {name: getattr(self, name) for name in self._saved_state}
        try:
            # One call copies all attributes, so that attributes that share an object still share it.
            return copy.deepcopy(live)
        except Exception as error:
            for name, value in live.items():
                _explain_if_not_copied(name, value, error)
            raise

    def _set_attributes(self, values: dict[str, Any]) -> None:
        for name, value in values.items():
            setattr(self, name, value)


def _explain_if_not_copied(name: str, value: Any, error: Exception) -> None:
    try:
        copy.deepcopy(value)
    except Exception:
        error.add_note(
            f"The attribute {name!r} of the elastic state, a {type(value).__name__}, cannot be copied. State holds "
            "what is saved and sent to new ranks; keep other objects outside of it."
        )


class _TrainingState(enum.IntEnum):
    """Which training state this process has."""

    NOTHING = 0
    COMMITTED = 1  # the last snapshot, which may differ from the snapshots of other ranks
    LIVE = 2  # a state newer than the last snapshot, and equal on all ranks that were interrupted together


# Counts calls of decorated functions: all ranks have to be in the call of the same number.
_runs = itertools.count(1)


def run_fn(
    func: Callable[Concatenate[_S, _P], _T], reset: Callable[[], Any]
) -> Callable[Concatenate[_S, _P], _T]:
    """Return a function that calls the training function `func(state, ...)` again after changes of the job's members.

    Parameters
    ----------
    func
        Function that is called in each generation of the job with the state from which to continue. The wrapper returns
        its result.
    reset
        Function that leaves the job and joins its next generation.
    """

    @functools.wraps(func)
    def wrapper(state: _S, *args: _P.args, **kwargs: _P.kwargs) -> _T:
        notification_manager.register_listener(state)
        try:
            return _Run(state, reset).until_done(lambda: func(state, *args, **kwargs))
        finally:
            notification_manager.remove_listener(state)

    return wrapper  # type: ignore[return-value] # its first parameter has a name


def run(func: Callable[Concatenate[_S, _P], _T]) -> Callable[Concatenate[_S, _P], _T]:
    """Decorate the training function `func(state, ...)` so that it is called again when the job's members change.

    Before each call all ranks have the same state. After a rank was lost, that is the state of the last
    `state.commit()`. After a change of hosts, that is the current state. The function therefore has to continue from
    the position in its state, not from the beginning. The decorated function also works in jobs that are not elastic.

    Errors other than `HorovodInternalError` and `HostsUpdatedInterrupt` end the process. Do not use collective
    operations between `hvd.init()` and the call of the function: a worker that joins later would wait forever.

    Examples
    --------
    >>> @hvd.elastic.run
    ... def train(state):
    ...     for state.epoch in range(state.epoch, epochs):
    ...         train_one_epoch(state)
    ...         state.commit()
    >>> train(hvd.elastic.TorchState(model, optimizer, epoch=0))  # or another state
    """
    return run_fn(func, basics.begin_again)


def _ends_for_its_gpu(error: HorovodInternalError) -> bool:
    """Return whether this process must end with this error because it cannot use its GPU again; note that in the error.

    A new process can use the GPU.
    """
    with contextlib.suppress(HorovodInternalError):
        _core.wait_for_devices()  # until aborted operations have ended on the GPU, or cannot end
    loss = _core.gpu_loss()
    if loss is None:
        return False
    error.add_note(f"This process ends, for {loss}: only another one can use the GPU again.")
    _core.end_within(_END_WITHIN_S)
    return True


class _Run:
    """One call of a decorated function, through all its generations."""

    def __init__(self, state: State, reset: Callable[[], Any]) -> None:
        self._state = state
        self._reset = reset
        self._number = next(_runs)
        self._training_state = _TrainingState.NOTHING
        self._sync_wanted = True
        self._commits_at_start = 0
        self._members_changed = True
        self._fruitless = 0
        self._size = 0
        self._is_training = False
        # Number of losses of each rank in the training function since the last commit.
        self._losses: Counter[int] = Counter()

    def until_done(self, func: Callable[[], _T]) -> _T:
        _core.size()  # raises if `init` was not called
        while True:
            # No exception may stay referenced while this waits for the next generation: its traceback references the
            # function's variables, including data readers and their threads.
            outcome = self._generation(func)
            if isinstance(outcome, _Done):
                result: _T = outcome.result
                return result
            self._begin_next(outcome)

    def _generation(self, func: Callable[[], Any]) -> "_Done | str":
        """Run one generation; return the function's result, or the reason for the next generation."""
        try:
            self._is_training = False
            self._agree_and_sync()
            self._is_training = True
            result = func()
        except HorovodStalledError:
            raise  # the same calls would stall again
        except HorovodInternalError as error:
            # This check precedes `restore`, which would write to a GPU whose operations may never end.
            if _ends_for_its_gpu(error):
                raise
            self._raise_if_fruitless(error)
            self._state.restore()
            if self._training_state is not _TrainingState.NOTHING:
                self._hold(_TrainingState.COMMITTED)
            return f"{_words(error)}; going back to the last commit"
        except HostsUpdatedInterrupt as interrupt:
            self._sync_wanted = not interrupt.skip_sync
            return "members of the job come or go; state stays as it is"
        try:
            # No rank leaves before all have returned: a rank that restores its state needs the others again.
            if _core.is_elastic():
                _core.wait_for_devices()
                _core.barrier(global_process_set.process_set_id)
        except HorovodInternalError as error:
            return f"{_words(error)}; this rank was done, others may not be"
        return _Done(result)

    def _begin_next(self, reason: str) -> None:
        before = f"rank {_core.rank()} of {_core.size()}" if _core.is_initialized() else "no rank"
        _log.warning("Elastic training is interrupted on %s: %s.", before, reason)
        while True:
            try:
                self._reset()
                break
            except HorovodInternalError as error:
                if _ends_for_its_gpu(error):
                    raise
                _log.warning("A rank was lost while the next generation began: %s", error)
            except WorkerRemovedError as error:
                _log.warning("This process (%s before) ends: %s", before, error)
                raise  # ends the process with status 0
        _log.warning(
            "Elastic training goes on as rank %d of %d (%s before).",
            *(_core.rank(), _core.size(), before),
        )
        self._state.on_reset()

    def _agree_and_sync(self) -> None:
        """Sync all ranks to the newest state unless their states are equal; the current members decide."""
        state = self._state
        # A generation that ended because of a host update may have committed before.
        if state._commits != self._commits_at_start:
            self._losses.clear()
        mine = [self._number, self._training_state, state._commits, self._sync_wanted]
        losses = [self._losses[rank] for rank in range(_core.size())]
        everyone = _consensus.everyones([*mine, *losses], "elastic.agree")
        self._raise_if_elsewhere([entry[0] for entry in everyone])
        # New ranks copy the counts, because the ranks that counted may be lost next. Counts of a rank that missed the
        # newest commit are ignored: they include losses before that commit.
        newest = max(entry[2] for entry in everyone)
        counts = [entry[4:] for entry in everyone if entry[2] == newest]
        if state._commits != newest:
            self._losses.clear()
        # Counts of ranks that this generation lacks stay: such a rank may come back and be lost again.
        self._losses |= Counter(dict(enumerate(map(max, zip(*counts, strict=True)))))
        states = [(training_state, commits) for _, training_state, commits, *_ in everyone]
        changed = len(everyone) != self._size or any(
            training_state == _TrainingState.NOTHING for training_state, _ in states
        )
        self._members_changed, self._size = changed, len(everyone)
        if any(entry[3] for entry in everyone) or set(states) != {
            (_TrainingState.LIVE, state._commits)
        }:
            # The root has the newest commit. Among ranks with that commit, a live state has precedence, then the lower
            # rank.
            root = max(range(len(states)), key=lambda r: (states[r][0] > 0, *states[r][::-1], -r))
            state._root_rank = root
            state.sync()
            state.save()  # a failure must not return new ranks to the state before this sync
            state._commits = states[root][1] + 1
        self._sync_wanted = False
        self._commits_at_start = state._commits
        self._hold(_TrainingState.LIVE)

    def _hold(self, training_state: _TrainingState) -> None:
        self._training_state = training_state
        _core.hold_state(training_state is _TrainingState.LIVE)

    def _raise_if_elsewhere(self, numbers: list[int]) -> None:
        if len(set(numbers)) > 1:
            calls = ", ".join(f"rank {rank}: {number}" for rank, number in enumerate(numbers))
            raise RuntimeError(
                f"Ranks are in different calls of functions decorated with hvd.elastic.run ({calls}). A worker that "
                "joins begins with the first call, where the others no longer are: use one decorated function "
                "per script, and keep in its state how far it has come."
            )

    def _raise_if_fruitless(self, error: HorovodInternalError) -> None:
        """Raise an error that repeats without a commit in between, because another attempt would not help.

        Either the members stay the same, such as after a mismatch between ranks, or one rank is lost repeatedly.
        """
        has_committed = self._state._commits != self._commits_at_start
        self._raise_if_lost_again(error, has_committed)
        if self._members_changed or has_committed:
            self._fruitless = 0
            # Each commit counts once: the next generation may fail before it sets `_commits_at_start`.
            self._commits_at_start = self._state._commits
            return
        self._fruitless += 1
        if self._fruitless >= _FRUITLESS_MAX:
            error.add_note(
                f"Elastic training gave up: this is the failure number {self._fruitless} in a row with the same "
                "members and without a commit in between, so another attempt would not help."
            )
            raise error

    def _raise_if_lost_again(self, error: HorovodInternalError, has_committed: bool) -> None:
        if error.rank is None or not self._is_training:
            return
        if has_committed:
            self._losses.clear()
        self._losses[error.rank] += 1
        if self._losses[error.rank] >= _FRUITLESS_MAX:
            error.add_note(
                f"Elastic training gave up: rank {error.rank} was lost {self._losses[error.rank]} times without a "
                "commit in between, so another attempt would not help. Its own output says why it ended."
            )
            raise error


def _words(error: Exception) -> str:
    return str(error).rstrip(".")


class _Done:
    """Result of the user's function in a generation that has ended on all ranks."""

    def __init__(self, result: Any) -> None:
        self.result = result
