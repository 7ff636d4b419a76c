"""Kinds of changes of hosts, and who hears of them in a worker."""

from horovod.common._news import HostUpdateResult, WorkerNotificationManager

__all__ = ["HostUpdateResult", "WorkerNotificationManager"]
