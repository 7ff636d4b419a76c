"""HorovodRunner's part for TensorFlow."""
