"""The elastic loop, written once for all frameworks: train, and after each change of the job's members go on together.

A process of an elastic job goes through generations. In each one the ranks first agree on whose state they go on
from, bring everybody to it, and call the user's function. The generation ends when the function returns on all
ranks, when a rank is lost (state goes back to the last commit), or when members shall come or go (state stays).
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

# So many times in a row an operation may fail though nobody was lost and nothing was committed since: then it is not
# the membership that is wrong, and it would fail for ever.
_FRUITLESS_MAX = 3
# How long a process that has lost its GPU may take to end: what it does on its way out may wait for that GPU.
_END_WITHIN_S = 30.0


class State:
    """Training state that survives changes of the job's members: base class, for states of one's own.

    Parameters
    ----------
    bcast_object
        Sends an object to all ranks; by default `hvd.broadcast_object`.
    get_rank
        Says which rank this is; by default `hvd.rank`.
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
        """Add functions to be called after each change of members, in this order, before state is synced.

        Rank and size are the new ones then. They are called on ranks that were there before; they must not use
        collective operations, in which ranks that have just come would be missing.
        """
        self._reset_callbacks.extend(callbacks)

    def on_reset(self) -> None:
        """Called when the process has become a member of a new generation: `reset`, then the callbacks."""
        self._host_messages = HostMessages()
        self._seen, self._given = (0, 0), 0
        self.reset()
        for callback in self._reset_callbacks:
            callback()

    def on_hosts_updated(self, timestamp: float, update_result: int) -> None:
        """Take news about hosts from elsewhere than the launcher: 1 removed, 2 added, 3 both.

        The next `check_host_updates` raises on all ranks. The time is not used: news of one second are all news.
        """
        self._host_messages.put((timestamp, update_result))

    def commit(self) -> None:
        """Make the present state the one to go back to after a failure, then `check_host_updates`.

        Every rank has to call it equally often.
        """
        # Operations in flight on a GPU may yet fail: then the commit must not hold their results.
        _core.wait_for_devices()
        self.save()
        self._commits += 1
        self.check_host_updates()

    def check_host_updates(self) -> None:
        """Raise `HostsUpdatedInterrupt` on all ranks at the same call when members are to come or go.

        A collective operation, of some microseconds: every rank has to call it equally often.
        """
        announced, kind = _core.host_updates()
        for given_kind in self._host_messages.take_given():
            kind |= given_kind
            self._given += 1
        # Ranks hear the news at different moments; whoever knows most tells the others.
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
        """Take a snapshot in host memory; the one before is replaced."""
        raise NotImplementedError(f"{type(self).__name__} has to define save")

    def restore(self) -> None:
        """Go back to the last snapshot."""
        raise NotImplementedError(f"{type(self).__name__} has to define restore")

    def sync(self) -> None:
        """Give all ranks the live state of one of them: `_root_rank`, which is 0 unless 0 holds none."""
        raise NotImplementedError(f"{type(self).__name__} has to define sync")

    def reset(self) -> None:
        """Adapt to a new rank and size; called after each change of members, before callbacks and sync."""


class ObjectState(State):
    """State of plain Python objects, which are its attributes.

    Values have to be what can be copied and pickled. A snapshot is a deep copy, so that changes inside lists and
    dicts are taken back too.

    Parameters
    ----------
    bcast_object, get_rank
        As in `State`.
    kwargs
        Names and initial values of the attributes. Only these are saved, restored and synced.

    Raises
    ------
    ValueError
        A value, or what it holds, belongs to one rank, such as a `DistributedSampler`; also raised by `sync`.

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
        # Attributes have the names that the maker of the state gives them.
        def __getattr__(self, name: str) -> Any: ...
        def __setattr__(self, name: str, value: Any) -> None: ...

    def save(self) -> None:
        """Copy the attributes, deeply."""
        _core.wait_for_devices()
        self._saved_state = self._snapshot()

    def restore(self) -> None:
        """Set the attributes to copies of what was saved."""
        self._set_attributes(copy.deepcopy(self._saved_state))

    def sync(self) -> None:
        """Give all ranks the root's attributes as they are now, not as they were saved."""
        if not self._saved_state:
            return
        live = {name: getattr(self, name) for name in self._saved_state}
        _rank_aware.refuse(live)
        received = self._bcast_object(live, root_rank=self._root_rank)
        self._set_attributes(received)
        self._saved_state = copy.deepcopy(received)

    def _snapshot(self) -> dict[str, Any]:
        live = {name: getattr(self, name) for name in self._saved_state}
        try:
            return copy.deepcopy(live)  # as one, so that attributes that share an object still do
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
    """Training state of this process."""

    NOTHING = 0
    COMMITTED = 1  # its last snapshot, which may differ from other ranks'
    LIVE = 2  # more than its last snapshot, and the same as the ranks that stopped with it


# Counts calls of decorated functions: ranks have to be in the same one.
_runs = itertools.count(1)


def run_fn(
    func: Callable[Concatenate[_S, _P], _T], reset: Callable[[], Any]
) -> Callable[Concatenate[_S, _P], _T]:
    """Make a training function `func(state, ...)` survive changes of the job's members.

    Parameters
    ----------
    func
        Called in each generation of the job with the state to go on from. Its result is returned.
    reset
        Leaves the job and becomes a member of its next generation.
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
    """Decorate the training function `func(state, ...)`: it is called again whenever the job's members change.

    Before each call all ranks have the same state. After a lost rank that is the state of the last
    `state.commit()`; after a change of hosts it is the state as it is. So the function has to go on from where
    its state says, not from the beginning. It also works in jobs that are not elastic.

    Errors other than `HorovodInternalError` and `HostsUpdatedInterrupt` end the process. Between `hvd.init()` and the
    call of the function no collective operation may be used: a worker that joins later would wait for ever.

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
    """Whether this process must end with this error: it can never use its GPU again, another one can."""
    with contextlib.suppress(HorovodInternalError):
        _core.wait_for_devices()  # until what was aborted has ended there, or is known not to
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
        # By rank, how often it was lost while training since the last commit.
        self._losses: Counter[int] = Counter()

    def until_done(self, func: Callable[[], _T]) -> _T:
        _core.size()  # the well-known error before init
        while True:
            # Nothing of a failure may stay alive while waiting for the next generation: its traceback holds
            # the function's variables, and with them readers and their threads.
            outcome = self._generation(func)
            if isinstance(outcome, _Done):
                result: _T = outcome.result
                return result
            self._begin_next(outcome)

    def _generation(self, func: Callable[[], Any]) -> "_Done | str":
        """Take part until its end; the result, or the reason for the next generation."""
        try:
            self._is_training = False
            self._agree_and_sync()
            self._is_training = True
            result = func()
        except HorovodStalledError:
            raise  # the same calls would lead to the same place
        except HorovodInternalError as error:
            # Before anything is put back on a GPU that may never come to rest.
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
            # Nobody leaves before all are done: a rank that needs the others once more would find none.
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
                raise  # which ends the process with status 0
        _log.warning(
            "Elastic training goes on as rank %d of %d (%s before).",
            *(_core.rank(), _core.size(), before),
        )
        self._state.on_reset()

    def _agree_and_sync(self) -> None:
        """Bring all ranks to one state, unless they have it: decided by those who are there now."""
        state = self._state
        # The last generation may have committed, and ended for a change of hosts.
        if state._commits != self._commits_at_start:
            self._losses.clear()
        mine = [self._number, self._training_state, state._commits, self._sync_wanted]
        losses = [self._losses[rank] for rank in range(_core.size())]
        everyone = _consensus.everyones([*mine, *losses], "elastic.agree")
        self._raise_if_elsewhere([entry[0] for entry in everyone])
        # New ranks take over the counts: the ranks that have them may be lost next. A rank that has missed the newest
        # commit counts losses from before it.
        newest = max(entry[2] for entry in everyone)
        counts = [entry[4:] for entry in everyone if entry[2] == newest]
        self._losses = Counter(dict(enumerate(map(max, zip(*counts, strict=True)))))
        states = [(training_state, commits) for _, training_state, commits, *_ in everyone]
        changed = len(everyone) != self._size or any(
            training_state == _TrainingState.NOTHING for training_state, _ in states
        )
        self._members_changed, self._size = changed, len(everyone)
        if any(entry[3] for entry in everyone) or set(states) != {
            (_TrainingState.LIVE, state._commits)
        }:
            # The newest commit wins, then what went on since; the first rank among equals.
            root = max(range(len(states)), key=lambda r: (states[r][0] > 0, *states[r][::-1], -r))
            state._root_rank = root
            state.sync()
            state.save()  # or a failure would take ranks that have just come back to before they came
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
        """Raise an error that repeats without a commit in between: another attempt would not help.

        Either no rank is lost, as when ranks disagree, or a rank is lost again and again: its script fails.
        """
        has_committed = self._state._commits != self._commits_at_start
        self._raise_if_lost_again(error, has_committed)
        if self._members_changed or has_committed:
            self._fruitless = 0
            # Commits count once: the next round may fail before it comes to its own start.
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
    """The result of the user's function."""

    def __init__(self, result: Any) -> None:
        self.result = result
