"""Python interface of the program `horovodrun`; `run` calls a function on several ranks."""

from horovod.runner._run import WorkerTraceback, run

__all__ = ["WorkerTraceback", "run"]
