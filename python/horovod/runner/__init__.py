"""Python face of `horovodrun`, which is a program of its own."""
