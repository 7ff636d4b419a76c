"""Preprocessing by a job of its own: TensorFlow's tf.data service, started and found by Horovod's ranks."""
