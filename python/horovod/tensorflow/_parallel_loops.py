"""Refuses collectives in loops whose iterations TensorFlow runs concurrently or ahead of the script."""

from __future__ import annotations

import os
import sys
from types import FrameType
from typing import Final

import tensorflow as tf

_VECTORIZED: Final = os.path.join("parallel_for", "control_flow_ops.py")
_OF_DATASETS: Final = os.path.join("data", "ops", "structured_function.py")
# The file in which AutoGraph converts `for batch in dataset` of a `tf.function` to a scan of the dataset.
_AUTOGRAPH_LOOP: Final = os.path.join("data", "ops", "dataset_autograph.py")
_PLACES: Final = {
    _VECTORIZED: "tf.vectorized_map, a Jacobian of a tape, or another parallel loop",
    _OF_DATASETS: "a function of a tf.data.Dataset, as of its map",
}


def refuse_inside(operation: str) -> None:
    """Raise if the operation would be added to the graph of a loop whose iterations run concurrently or ahead.

    All iterations run the operation under the same name, in an order that differs between ranks. A rank would start two
    operations of one name at the same time, which is an error, and the other ranks would wait.

    A loop over a dataset in a `tf.function` is allowed: its iterations run one after the other.

    Raises
    ------
    NotImplementedError
        The operation would be part of a concurrent loop or a function of a dataset. Nothing was sent.
    """
    if tf.executing_eagerly():
        return
    frame: FrameType | None = sys._getframe(1)
    # Whether the next enclosing function of a dataset is the body of AutoGraph's loop.
    is_sequential = False
    while frame is not None:
        code = frame.f_code
        if code.co_filename.endswith(_AUTOGRAPH_LOOP):
            is_sequential = code.co_name in ("scan_body", "main_path")
        for end, place in _PLACES.items():
            if is_sequential and end == _OF_DATASETS:
                continue
            if code.co_filename.endswith(end):
                raise NotImplementedError(
                    f"{operation} inside of {place}: its calls run in no order that the ranks share. Call it outside, "
                    "on the finished result."
                )
        frame = frame.f_back
