"""What HorovodRunner has for TensorFlow."""
