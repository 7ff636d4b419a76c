"""Where jobs across hosts run: hosts of our own, each on one end of a wire that is its only link."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1] / "hosts"))

import network
import wire

import harness

LAST = "host-b"


def why_not() -> str | None:
    """Why there cannot be any here; None when there can."""
    if not Path("/dev/net/tun").exists():
        return "no /dev/net/tun"
    return network.why_not()


class Ground:
    """Two hosts; the wire can be made as bad as one likes."""

    hosts = f"host-a:2,{LAST}:1"

    def __init__(self) -> None:
        self.net = network.Network(2)
        addresses = [host.address for host in self.net.hosts]
        for host in self.net.hosts:
            network.run("ip", "-n", host.namespace, "link", "del", "eth0")
        self.wire = wire.Wire(self.net.hosts, addresses=addresses, whole=False)
        self._before: list[set[int]] = []

    def start(self, command: Sequence[str | os.PathLike[str]], **kwargs: object) -> harness.Job:
        """Run a command line of horovodrun on the first host."""
        self._before = [host.pids() for host in self.net.hosts]
        program, *words = command
        ssh = ["-p", str(network.SSH_PORT), "-i", str(self.net.folder / "user")]
        job = harness.Job(self.net.hosts[0].enter([program, *ssh, *words]), **kwargs)
        return job

    def assert_nothing_left(self) -> None:
        """No process on any host that was not there before, sshd's of the job included."""
        for host, before in zip(self.net.hosts, self._before, strict=True):
            left = harness.wait_for_processes_to_end(
                lambda host=host, before=before: host.pids() - before
            )
            assert not left, f"processes left on {host.name}: {left}"

    def close(self) -> None:
        self.wire.close()
        self.net.down()
