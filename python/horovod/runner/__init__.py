"""Python face of `horovodrun`, which is a program of its own; and `run`, which calls a function on many ranks."""

from horovod.runner._run import WorkerTraceback, run

__all__ = ["WorkerTraceback", "run"]
