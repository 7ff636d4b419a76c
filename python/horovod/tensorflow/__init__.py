"""Horovod for TensorFlow."""
