"""Which hosts there are, and how many processes each takes: what a discovery script says, as objects."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping
from typing import NoReturn

from horovod import _absent

__all__ = ["FixedHosts", "HostDiscovery", "HostDiscoveryScript"]


class HostDiscovery:
    """Says which hosts there are: base class, for discoveries of one's own."""

    def find_available_hosts_and_slots(self) -> dict[str, int]:
        """Number of slots of each host that can be used now."""
        raise NotImplementedError(
            f"{type(self).__name__} has to define find_available_hosts_and_slots"
        )


class HostDiscoveryScript(HostDiscovery):
    """The output of a script: a line `name` or `name:slots` per host.

    Parameters
    ----------
    discovery_script
        Command line for the shell.
    slots
        Slots of a host whose line tells none.
    """

    def __init__(self, discovery_script: str, slots: int | None = None) -> None:
        self._discovery_script = discovery_script
        self._default_slots = slots

    def find_available_hosts_and_slots(self) -> dict[str, int]:
        """Run the script."""
        done = subprocess.run(
            self._discovery_script, shell=True, stdout=subprocess.PIPE, text=True, check=False
        )
        if done.returncode != 0:
            raise RuntimeError(
                f"Failed to execute discovery script: {self._discovery_script}. Exit code: {done.returncode}"
            )
        found: dict[str, int] = {}
        for line in filter(None, map(str.strip, done.stdout.splitlines())):
            name, colon, slots = line.rpartition(":")
            if colon:
                found[name] = int(slots)
            elif self._default_slots is not None:
                found[line] = self._default_slots
            else:
                raise ValueError(
                    f"discovery script {self._discovery_script!r}: the line {line!r} tells no slots; expected "
                    "`name:slots`, or slots for all hosts"
                )
        return found


class FixedHosts(HostDiscovery):
    """Hosts that are as given, until others are set."""

    def __init__(self, host_slots: Mapping[str, int]) -> None:
        self._host_slots = dict(host_slots)

    def find_available_hosts_and_slots(self) -> dict[str, int]:
        """The given hosts."""
        return self._host_slots

    def set(self, host_slots: Mapping[str, int]) -> None:
        """Replace them."""
        self._host_slots = dict(host_slots)


def __getattr__(name: str) -> NoReturn:
    _absent.raise_missing(__name__, name)
