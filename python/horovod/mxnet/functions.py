"""Bringing all ranks to the root's state: parameters, also those without a shape yet, and Python objects."""

from typing import Any

import mxnet as mx
from mxnet.gluon.parameter import DeferredInitializationError

from horovod.common._objects import allgather_object, broadcast_object
from horovod.common.basics import basics
from horovod.mxnet._operations import broadcast_

__all__ = ["allgather_object", "broadcast_object", "broadcast_parameters"]


def broadcast_parameters(params: Any, root_rank: int = 0, prefix: str | None = None) -> None:
    """Replace parameters on every rank by the root's, in place; typically right after initialising the model.

    A parameter whose shape is not known yet follows when it is, in the first forward pass of every rank.

    Parameters
    ----------
    params
        `block.collect_params()`, or a dict of arrays, as those of `module.get_params()`, or of gluon's parameters; the
        same keys on every rank.
    root_rank
        Global rank whose values are used.
    prefix
        Begins the names of the operations; two calls whose parameters have the same keys need different ones.

    Raises
    ------
    ValueError
        `params` is none of the above.
    AssertionError
        `prefix` is no string.
    MXNetError
        As in `broadcast_`.
    """
    if not isinstance(prefix, str | None):
        raise AssertionError(f"prefix must be a string or None, not {prefix!r}")
    if not isinstance(params, dict | mx.gluon.ParameterDict):
        raise ValueError(f"invalid params of type: {type(params)}")
    if basics.size() == 1:
        return
    for key in sorted(params.keys()):
        name, value = f"{prefix or ''}{key}", params[key]
        if not isinstance(value, mx.gluon.Parameter):
            broadcast_(value, root_rank, name)
            continue
        try:
            data = value.data()
        except DeferredInitializationError:
            _broadcast_when_initialized(value, root_rank, name)
        else:
            broadcast_(data, root_rank, name)


def _broadcast_when_initialized(param: Any, root_rank: int, name: str) -> None:
    initialize = param._init_impl

    def init_impl(*args: Any, **kwargs: Any) -> None:
        initialize(*args, **kwargs)
        broadcast_(param.data(), root_rank, name)

    param._init_impl = init_impl
