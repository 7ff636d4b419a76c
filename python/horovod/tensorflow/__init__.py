"""Collective operations on TensorFlow's tensors."""
