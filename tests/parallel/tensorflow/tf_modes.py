"""Running a function on arrays in TensorFlow's three ways: eagerly, in `tf.function`, in a graph with a session."""

import numpy as np
import tensorflow as tf

MODES = ["eager", "function", "session"]


def run(mode, function, *arrays):
    """Call `function` with tensors that hold the arrays; its results as arrays."""
    if mode == "session":
        with tf.Graph().as_default(), tf.compat.v1.Session() as session:
            inputs = [tf.compat.v1.placeholder(a.dtype, a.shape) for a in map(np.asarray, arrays)]
            outputs = function(*inputs)
            session.run(tf.compat.v1.global_variables_initializer())
            return session.run(outputs, dict(zip(inputs, arrays, strict=True)))
    called = tf.function(function) if mode == "function" else function
    results = called(*map(tf.constant, arrays))
    return tf.nest.map_structure(np.asarray, results)
