"""Values of variables outside of graphs: read and written as arrays, and broadcast without operations of TensorFlow."""

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
    """The values as arrays of their own."""
    tf_variables = [tf_variable(variable) for variable in variables]
    if session is not None:
        return [np.array(value) for value in session.run(tf_variables)] if tf_variables else []
    # Of a number without dimensions `numpy` makes no array.
    return [np.asarray(variable.numpy()) for variable in tf_variables]


def write_values(variables: Sequence[Any], values: Sequence[Any], session: Session = None) -> None:
    """Assign arrays to variables; with a session without adding anything to its graph, which may be finalized."""
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
    """Replace the content of arrays, contiguous and writable, by the root's; all are under way at once.

    Raises
    ------
    ValueError
        An array's elements are no numbers, such as strings.
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
    """Give variables the root's values, on all members of the set."""
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
    if code is None:  # such as 8-bit floats: their bytes
        sent = array.reshape(-1).view(np.uint8)
        code = CODES["uint8"]
    address = sent.__array_interface__["data"][0]
    return (address, address, code, sent.shape, array)
