"""Reads, writes and broadcasts the values of variables as arrays, without adding operations to graphs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from horovod import _core
from horovod.common._dtypes import CODES
from horovod.common._operations import Entry, start, wait_for_all
from horovod.common.basics import basics
from horovod.common.process_sets import ProcessSet, global_process_set
from horovod.tensorflow._variables import tf_variable

Session = Any


def read_values(variables: Sequence[Any], session: Session = None) -> list[Any]:
    """Return the values as arrays that share no memory with the variables."""
    tf_variables = [tf_variable(variable) for variable in variables]
    if session is not None:
        return [np.array(value) for value in session.run(tf_variables)] if tf_variables else []
    # `numpy()` of a scalar variable does not return an array.
    return [np.asarray(variable.numpy()) for variable in tf_variables]


def write_values(variables: Sequence[Any], values: Sequence[Any], session: Session = None) -> None:
    """Assign arrays to variables; with a session, add nothing to its graph, which may be finalized."""
    for variable, value in zip(map(tf_variable, variables), values, strict=True):
        if session is None:
            variable.assign(value)
        else:
            variable.load(value, session)


def broadcast_values(
    arrays: Sequence[Any],
    root_rank: int,
    name: str,
    process_set: ProcessSet = global_process_set,
) -> None:
    """Overwrite contiguous, writable arrays with the root's arrays; all broadcasts are started before the first wait.

    Raises
    ------
    ValueError
        An array's elements are not numbers, but for example strings.
    HorovodInternalError
        Ranks disagree, or a rank was lost.
    """
    entries = [_entry(array) for array in arrays]
    handles = [
        start(
            _core.BROADCAST,
            "broadcast",
            f"{name}.{position}",
            (entry,),
            process_set.process_set_id,
            root_rank=root_rank,
        )
        for position, entry in enumerate(entries)
    ]
    wait_for_all(handles)


def broadcast_variable_values(
    variables: Sequence[Any],
    root_rank: int,
    name: str,
    process_set: ProcessSet = global_process_set,
    session: Session = None,
) -> None:
    """Assign the root's values to the variables of all members of the set."""
    if not variables:
        return
    values = read_values(variables, session)
    broadcast_values(values, root_rank, name, process_set)
    if basics.rank() != root_rank:
        write_values(variables, values, session)


def _entry(array: Any) -> Entry:
    if array.dtype.kind in "OSU":
        raise ValueError(
            f"A variable with elements of type {array.dtype} cannot be broadcast: only numbers and bools can. Use "
            "hvd.broadcast_object for other values."
        )
    sent = array
    if array.dtype.kind == "c":
        sent = array.reshape(-1).view(array.real.dtype)
    code = CODES.get(sent.dtype.name)
    if code is None:  # such as 8-bit floats, which are sent as bytes
        sent = array.reshape(-1).view(np.uint8)
        code = CODES["uint8"]
    address = sent.__array_interface__["data"][0]
    return (address, address, code, sent.shape, array)
