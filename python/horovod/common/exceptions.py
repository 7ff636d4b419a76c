"""The exceptions that Horovod raises beside Python's own."""


class HorovodInternalError(RuntimeError):
    """A collective operation failed: ranks disagree, a rank was lost, or Horovod is not running.

    The message names the tensor or the lost rank with its host, and the cause. Every rank that waits for the
    operation gets it. After a disagreement the job goes on; after a lost rank it has to be initialised again.
    """


class HorovodStalledError(HorovodInternalError):
    """The ranks wait for each other in a circle, so that none of them can ever go on: a mistake in the script.

    The message is the report: which rank waits for which tensor, where its threads stand, and what usually helps.
    Every rank gets it. Starting again from a checkpoint would only lead to the same place, so elastic training
    does not catch it.
    """


class HostsUpdatedInterrupt(RuntimeError):
    """The set of hosts of an elastic job changed; training state is intact.

    Parameters
    ----------
    skip_sync
        True when hosts were only removed, so that the remaining ranks still agree on the state.
    """

    def __init__(self, skip_sync: bool) -> None:
        super().__init__(skip_sync)
        self.skip_sync = skip_sync


class WorkerRemovedError(SystemExit):
    """This process is no longer part of its elastic job, because its host or slot was taken away.

    Raised by `init`. The process should end: if nobody catches this, it does, quietly and with status 0.
    """

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.code = 0


def get_version_mismatch_message(name: str, version: str, installed_version: str) -> str:
    """Return the text that tells which version of a framework was expected and which is installed."""
    return (
        f"Framework {name} installed with version {installed_version} but found version {version}.\n"
        "This can result in unexpected behavior including runtime errors."
    )


class HorovodVersionMismatchError(ImportError):
    """A framework is installed in another version than the one that Horovod was made for."""

    def __init__(self, name: str, version: str, installed_version: str) -> None:
        super().__init__(get_version_mismatch_message(name, version, installed_version))
        self.name = name
        self.version = version
        self.installed_version = installed_version
