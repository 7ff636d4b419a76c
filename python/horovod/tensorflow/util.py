"""Helpers under an import path of the original, for packages that use it."""

import tensorflow as tf

from horovod.common.util import _cache
from horovod.tensorflow._variables import refs_to_vars, vars_to_refs

__all__ = ["_cache", "_executing_eagerly", "_make_subgraph", "refs_to_vars", "vars_to_refs"]

_executing_eagerly = tf.executing_eagerly
_make_subgraph = tf.function
