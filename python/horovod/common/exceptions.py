"""The exceptions that Horovod raises beside Python's own."""


class HorovodInternalError(RuntimeError):
    """A collective operation failed: ranks disagree, a rank was lost, or Horovod is not running.

    The message names the tensor or the lost rank with its host, and the cause. Every rank that waits for the
    operation gets it. After a disagreement the job goes on; after a lost rank it has to be initialised again.

    Attributes
    ----------
    rank, host
        The rank that was lost, and its host; `rank` alone: the one that left the job or kept the others waiting too
        long. None where no rank is to blame.
    cause
        Why the job cannot go on: how the lost rank ended, what is wrong with the network, or which operation
        does not end on GPUs.
    tensor
        Full name of the tensor, of which the ranks disagree or want what cannot be done, such as
        `allreduce.fc1.weight`.
    sides
        Two ranks that disagree, each with what it asked for: `((0, "float32"), (3, "float64"))`.
    """

    rank: int | None = None
    host: str | None = None
    cause: str | None = None
    tensor: str | None = None
    sides: tuple[tuple[int, str], tuple[int, str]] | None = None


class DuplicateNameError(ValueError):
    """This rank has an operation of the same kind and name under way; nothing was sent.

    Attributes
    ----------
    tensor
        The full name, such as `allreduce.fc1.weight`.
    """

    tensor: str | None = None


class HorovodNotInitializedError(HorovodInternalError, ValueError):
    """There is no job: `hvd.init()` was not called, or `hvd.shutdown()` was, or this process is a forked child.

    Raised by queries and operations alike. It is a `ValueError`, as scripts and libraries expect it of `rank()` and
    its kind, and a `HorovodInternalError`, as they expect it of operations.
    """


class HorovodStalledError(HorovodInternalError):
    """The ranks wait for each other in a circle, so that none of them can ever go on: a mistake in the script.

    The message is the report: which rank waits for which tensor, where its threads stand, and what usually helps.
    Every rank gets it. Starting again from a checkpoint would only lead to the same place, so elastic training
    does not catch it.
    """


class ReplicasDifferError(RuntimeError):
    """The ranks do not hold the same values.

    `check_consistency` raises it after the same step on every rank. With `HOROVOD_CHECK_REPLICAS=error` the next
    operation of each rank raises it after training has begun. The message names tensors and ranks.
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
