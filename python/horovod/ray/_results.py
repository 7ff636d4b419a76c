"""Results and failures of calls on the actors of a job."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import ray
from ray import exceptions

from horovod.common.exceptions import HorovodInternalError
from horovod.ray.worker import ActorPlace

__all__ = ["RanksEnded", "collect", "stored"]

# Seconds for the other ranks to end their calls after the call of one rank has failed.
_GRACE_S = 5.0


class RanksEnded(Exception):
    """The job cannot continue; `error` is the exception for the caller."""

    def __init__(self, error: Exception) -> None:
        # The text of Ray's error is a traceback; its `cause` is the exception of the function.
        super().__init__(repr(getattr(error, "cause", None) or error))
        self.error = error


class Call:
    """Calls `fn(*args, **kwargs)` on a rank, and ignores the executable that it is given."""

    def __init__(
        self, fn: Callable[..., Any], args: Sequence[Any] | None, kwargs: Mapping[str, Any] | None
    ) -> None:
        self._call = (fn, tuple(args or ()), dict(kwargs or {}))

    def __call__(self, _: Any) -> Any:
        fn, args, kwargs = self._call
        return fn(*args, **kwargs)


def stored(call: Any, what: str) -> Any:
    """Put the call into Ray's store, once for all ranks; `what` names it in errors."""
    try:
        return ray.put(call)
    except Exception as error:
        if isinstance(error, exceptions.RayError):
            raise
        raise TypeError(
            f"RayExecutor: {what} cannot be pickled, so it cannot be sent to the ranks; make what it cannot "
            f"take along inside the function. {error}"
        ) from error


def collect(
    references: Sequence[Any], where: Sequence[ActorPlace], ranks: Sequence[int]
) -> list[Any]:
    """Return the values of the references, in order.

    Raises
    ------
    Exception
        The exception of a rank; all ranks have ended their calls.
    RanksEnded
        A rank has died, or some are still busy although another one has failed.
    """
    places = {reference: place for place, reference in enumerate(references)}
    values: dict[int, Any] = {}
    failures: list[tuple[int, Exception]] = []
    pending = list(references)
    deadline = None
    while pending:
        left = None if deadline is None else max(0.0, deadline - time.monotonic())
        ready, pending = ray.wait(pending, num_returns=1, timeout=left)
        if not ready:
            break
        place = places[ready[0]]
        try:
            values[place] = ray.get(ready[0])
        except exceptions.RayActorError as error:
            raise RanksEnded(_death(ranks[place], where[place], error)) from error
        except Exception as error:
            failures.append((place, error))
            deadline = deadline or time.monotonic() + _GRACE_S
    if not failures:
        return [values[place] for place in range(len(references))]
    # An error that only tells of a lost rank is raised if there is no other.
    place, first = min(failures, key=lambda item: isinstance(item[1], HorovodInternalError))
    first.add_note(f"Raised on rank {ranks[place]} on {where[place]}.")
    if pending:
        busy = ", ".join(str(ranks[places[reference]]) for reference in pending)
        first.add_note(f"Rank {busy} had not ended its call {_GRACE_S:g} s later; all were ended.")
        raise RanksEnded(first)
    raise first


def _death(rank: int, place: ActorPlace, error: Exception) -> RuntimeError:
    cause = str(error).strip()
    return RuntimeError(
        f"RayExecutor: rank {rank} on {place} was lost, so all ranks were ended: {cause}"
    )
