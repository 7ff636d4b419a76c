"""The options of a job, shared by all functions that start one."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping, Sequence
from typing import TextIO

__all__ = ["JobOptions"]

# Fields of `JobOptions` that become an option of `horovodrun` with a value.
_VALUES = {
    "num_proc": "-np",
    "min_num_proc": "--min-np",
    "max_num_proc": "--max-np",
    "slots": "--slots-per-host",
    "reset_limit": "--reset-limit",
    "hosts": "-H",
    "hostfile": "--hostfile",
    "host_discovery_script": "--host-discovery-script",
    "elastic_timeout": "--elastic-timeout",
    "start_timeout": "--start-timeout",
    "ssh_port": "-p",
    "ssh_identity_file": "-i",
    "output_filename": "--output-filename",
}
_SWITCHES = {
    "prefix_output_with_timestamp": "--prefix-output-with-timestamp",
    "disable_cache": "--disable-cache",
    "verbose": "--verbose",
    "use_gloo": "--gloo",
    "use_mpi": "--mpi",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class JobOptions:
    """Options of `horovod.run` and `run_on_agents`, whose docstrings describe them; None is the launcher's default."""

    num_proc: int
    min_num_proc: int | None = None
    max_num_proc: int | None = None
    slots: int | None = None
    reset_limit: int | None = None
    cooldown_range: Sequence[int] | None = None
    host_discovery_script: str | None = None
    hosts: str | None = None
    hostfile: str | os.PathLike[str] | None = None
    elastic_timeout: int | None = None
    start_timeout: int | None = None
    ssh_port: int | None = None
    ssh_identity_file: str | os.PathLike[str] | None = None
    output_filename: str | os.PathLike[str] | None = None
    prefix_output_with_timestamp: bool = False
    disable_cache: bool | None = None
    verbose: bool | int | None = None
    use_gloo: bool | None = None
    use_mpi: bool | None = None
    mpi_args: str | None = None
    network_interfaces: Sequence[str] | None = None
    executable: str | os.PathLike[str] | None = None
    is_elastic: bool = False
    env: Mapping[str, str] | None = None
    stdout: TextIO | None = None
    stderr: TextIO | None = None
    caller: str = "horovod.run"

    @property
    def ranks_min(self) -> int:
        """Return the fewest ranks with which the job can run."""
        return self.min_num_proc or self.num_proc

    @property
    def interfaces(self) -> list[str]:
        """Return the names of the interfaces to use; an empty list means all."""
        return list(self.network_interfaces or [])

    def words(self) -> list[str]:
        """Return the options as arguments of `horovodrun`."""
        words: list[str] = []
        for field, name in _VALUES.items():
            if (value := getattr(self, field)) is not None:
                words += [name, str(value)]
        if self.cooldown_range is not None:
            if len(self.cooldown_range) != 2:
                raise ValueError(
                    f"{self.caller}: cooldown_range: expected two numbers of seconds, the first and the longest time "
                    f"for which a host that failed is left alone; got {self.cooldown_range!r}"
                )
            words += ["--blacklist-cooldown-range", *map(str, self.cooldown_range)]
        if self.interfaces:
            words += ["--network-interfaces", ",".join(self.interfaces)]
        if self.mpi_args is not None:
            words.append(f"--mpi-args={self.mpi_args}")
        return words + [name for field, name in _SWITCHES.items() if getattr(self, field)]
