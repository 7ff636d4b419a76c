"""Collectives inside of loops whose iterations TensorFlow runs side by side, or ahead of the script: refused."""

from __future__ import annotations

import os
import sys
from types import FrameType
from typing import Final

import tensorflow as tf

_VECTORIZED: Final = os.path.join("parallel_for", "control_flow_ops.py")
_OF_DATASETS: Final = os.path.join("data", "ops", "structured_function.py")
_PLACES: Final = {
    _VECTORIZED: "tf.vectorized_map, a Jacobian of a tape, or another parallel loop",
    _OF_DATASETS: "a function of a tf.data.Dataset, as of its map",
}


def refuse_inside(operation: str) -> None:
    """Raise if the operation that is about to be made would be part of such a loop.

    Every iteration has the same operation under the same name, in an order that is another one on each rank: one rank
    would have two of a name at a time, which is an error, and the others would wait for it.

    Raises
    ------
    NotImplementedError
        It would be. Nothing was sent.
    """
    if tf.executing_eagerly():
        return
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        for end, place in _PLACES.items():
            if frame.f_code.co_filename.endswith(end):
                raise NotImplementedError(
                    f"{operation} inside of {place}: its calls run in no order that the ranks share. Call it outside, "
                    "on the finished result."
                )
        frame = frame.f_back
