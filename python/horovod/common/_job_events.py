"""A registry of objects that are told when the running job is over, and when all its ranks have joined."""

import weakref
from typing import Protocol


class HoldsOperations(Protocol):
    """Holder of operations of the running job, such as an optimizer."""

    def _hvd_forget_job(self) -> None: ...
    def _hvd_note_join(self) -> None: ...


_holders: "weakref.WeakSet[HoldsOperations]" = weakref.WeakSet()


def remember_until_job_ends(holder: HoldsOperations) -> None:
    """Have an object told when the job whose operations it remembers is over, and when all ranks have joined."""
    _holders.add(holder)


def forget_job() -> None:
    """Drop what was begun in a job that is over."""
    for holder in list(_holders):
        holder._hvd_forget_job()


def note_join() -> None:
    """Tell those that count steps that all ranks have joined, maybe after different numbers of them."""
    for holder in list(_holders):
        holder._hvd_note_join()
