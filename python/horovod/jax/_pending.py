"""Programs of JAX that run when the job is left: those are waited for, as their collectives need this rank."""

import contextlib

import jax

from horovod.common._signals import want_handlers_to_run
from horovod.common.basics import drain_before_leaving

want_handlers_to_run()


@drain_before_leaving
def await_programs() -> None:
    """Return when all arrays that anybody still has are computed, or have failed.

    JAX returns from a program before it has run, so a script may end, and this rank leave, in the middle of one.
    """
    for array in jax.live_arrays():  # type: ignore[no-untyped-call]
        # A failed or donated array has nothing to wait for.
        with contextlib.suppress(Exception):
            array.block_until_ready()
