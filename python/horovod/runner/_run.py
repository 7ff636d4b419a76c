"""`horovod.run`: call a function on several ranks and return their results."""

from __future__ import annotations

import operator
import os
import socket
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from horovod.runner._launching import WorkerTraceback, launch, pickled, results
from horovod.runner._options import JobOptions
from horovod.runner.launch import find_horovodrun

__all__ = ["WorkerTraceback", "run"]


def run(
    func: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    num_proc: int = 1,
    min_num_proc: int | None = None,
    max_num_proc: int | None = None,
    slots: int | None = None,
    reset_limit: int | None = None,
    cooldown_range: Sequence[int] | None = None,
    host_discovery_script: str | None = None,
    hosts: str | None = None,
    hostfile: str | os.PathLike[str] | None = None,
    start_timeout: int | None = None,
    ssh_port: int | None = None,
    ssh_identity_file: str | os.PathLike[str] | None = None,
    disable_cache: bool | None = None,
    output_filename: str | os.PathLike[str] | None = None,
    verbose: bool | int | None = None,
    use_gloo: bool | None = None,
    use_mpi: bool | None = None,
    mpi_args: str | None = None,
    network_interfaces: Sequence[str] | None = None,
    executable: str | os.PathLike[str] | None = None,
    network_interface: str | None = None,
    np: int | None = None,
    min_np: int | None = None,
    max_np: int | None = None,
) -> list[Any]:
    """Call `func(*args, **kwargs)` on `num_proc` ranks and return their results in the order of ranks.

    The function may be defined anywhere, also in a notebook or in the calling script. The script needs no
    `if __name__ == "__main__"`. Function and results are sent over authenticated, encrypted connections; their size is
    not limited. The ranks' output appears on `sys.stdout` and `sys.stderr` of the caller. Any thread may call `run`.
    Ctrl-C ends the ranks, and no signal handler is changed.

    Parameters
    ----------
    func, args, kwargs
        Function to call, and its arguments.
    num_proc
        Number of ranks; in an elastic job, the number of ranks that must be available at the start.
    min_num_proc, max_num_proc, slots, reset_limit, cooldown_range, host_discovery_script
        As `--min-np`, `--max-np`, `--slots-per-host`, `--reset-limit`, `--blacklist-cooldown-range` and
        `--host-discovery-script` of `horovodrun`.
    hosts, hostfile
        Hosts and their slots, such as `host1:2,host2:2`, or a file of hosts; default this host.
    start_timeout, ssh_port, ssh_identity_file, output_filename, verbose, network_interfaces
        As the options of `horovodrun`.
    use_mpi, mpi_args
        As `--mpi` and `--mpi-args` of `horovodrun`: the `mpirun` in `PATH` starts the ranks.
    disable_cache, use_gloo
        Accepted, with no effect: nothing is cached, and Horovod's own transport is always used.
    executable
        Path of the Python that runs the ranks; default the caller's.
    np, min_np, max_np, network_interface
        Deprecated names of `num_proc`, `min_num_proc`, `max_num_proc` and `network_interfaces`.

    Raises
    ------
    Exception
        The exception of the function on a rank, with `WorkerTraceback` as its cause and a note that names the rank.
        Its class also derives from `RuntimeError` where Python allows that. If several ranks failed, one exception is
        raised, preferably one that does not only report the loss of another rank.
    RuntimeError
        The ranks could not be started; a rank ended without a result (it was killed, or called `sys.exit`); or a result
        or exception cannot be pickled.
    ValueError
        Arguments exclude each other, or the launcher refuses them; no rank was started.
    """
    if not callable(func):
        raise TypeError(f"horovod.run: func: expected a function, got {func!r}")
    num_proc = _whole("num_proc", _renamed("np", np, "num_proc", num_proc))
    min_num_proc = _renamed("min_np", min_np, "min_num_proc", min_num_proc)
    if min_num_proc is not None:
        min_num_proc = _whole("min_num_proc", min_num_proc)
    max_num_proc = _renamed("max_np", max_np, "max_num_proc", max_num_proc)
    if network_interface is not None:
        split = network_interface.rstrip().removesuffix(",").split(",")
        network_interfaces = _renamed(
            "network_interface", split, "network_interfaces", network_interfaces
        )
    if hosts is not None and hostfile is not None:
        raise ValueError("Argument hosts and hostfile only allow one provided.")
    if use_gloo and use_mpi:
        raise ValueError("Argument use_gloo and use_mpi only allow one set True.")
    if hosts is None and hostfile is None and host_discovery_script is None:
        # Without hosts the launcher would use the hosts of the allocation in a batch job.
        hosts = f"localhost:{num_proc}"
    options = JobOptions(
        num_proc=num_proc,
        min_num_proc=min_num_proc,
        max_num_proc=max_num_proc,
        slots=slots,
        reset_limit=reset_limit,
        cooldown_range=cooldown_range,
        host_discovery_script=host_discovery_script,
        hosts=hosts,
        hostfile=hostfile,
        start_timeout=start_timeout,
        ssh_port=ssh_port,
        ssh_identity_file=ssh_identity_file,
        output_filename=output_filename,
        disable_cache=disable_cache,
        verbose=verbose,
        use_gloo=use_gloo,
        use_mpi=use_mpi,
        mpi_args=mpi_args,
        network_interfaces=network_interfaces,
        executable=executable,
    )
    return _run(pickled(func, args, kwargs), options)


def _run(content: bytes, options: JobOptions) -> list[Any]:
    hosts = (options.hosts or "").split(",")
    elsewhere = options.hostfile is not None or options.host_discovery_script is not None
    is_local = not elsewhere and all(_is_this_host(item) for item in hosts)
    python = sys.executable if options.executable is None else os.fspath(options.executable)
    command = [find_horovodrun(), *options.words(), python, "-m", "horovod.runner.run_task"]
    outcomes, report = launch(command, content, options, is_local=is_local)
    return results(outcomes, report, options.ranks_min)


def _whole(name: str, value: Any) -> int:
    try:
        return operator.index(value)
    except TypeError:
        raise TypeError(f"horovod.run: {name}: expected a whole number, got {value!r}") from None


def _renamed(old_name: str, old: Any, name: str, value: Any) -> Any:
    if old is None:
        return value
    warnings.warn(f"{old_name} is deprecated, use {name} instead", DeprecationWarning, stacklevel=3)
    return old


def _is_this_host(item: str) -> bool:
    name = item.strip().rsplit(":", 1)[0]
    return name in ("", "localhost", "127.0.0.1", socket.gethostname())
