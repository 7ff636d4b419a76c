"""Failures of collective operations, found in the exceptions that frameworks make of them."""

from __future__ import annotations

import re

from horovod.common.exceptions import HorovodInternalError

# How the core begins to say that the job cannot go on.
_JOB_ENDED = re.compile(r"Horovod (?:lost a member of the job|has been shut down)[^\n]*")


def as_horovod_error(error: BaseException) -> HorovodInternalError | None:
    """The failure of a collective operation that is the cause of an exception; None if it has another.

    A framework's own exception tells it by the core's text; one that came while cleaning up, by its context.
    """
    seen: set[int] = set()
    current: BaseException | None = error
    while current is not None and id(current) not in seen:
        seen.add(id(current))
        if isinstance(current, HorovodInternalError):
            return current
        found = _JOB_ENDED.search(str(current))
        if found:
            return HorovodInternalError(found[0])
        current = current.__cause__ or current.__context__
    return None
