"""Hosts of our own on one machine: network namespaces joined by a bridge, each with its own name, files and sshd.

All names carry the process id of the test run; what a crashed run left behind is removed by the next one.
Nothing outside the namespaces is changed: /etc/hosts and the ssh configuration are replaced by mounts that
only the namespace's processes see.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

SSHD = "/usr/sbin/sshd"
SSH_PORT = 2222
PREFIX = "hvdt"
# A routing table of the namespaces that leads nowhere.
MISROUTED = "77"
# Only what hangs reaches it: how long a killed process may take to end.
END_LIMIT_S = 60.0


def why_not() -> str | None:
    """Why hosts cannot be made here; None when they can."""
    if os.geteuid() != 0:
        return "hosts of our own need root (network namespaces)"
    for program, package in (
        ("ip", "iproute2"),
        ("ssh", "openssh-client"),
        (SSHD, "openssh-server"),
    ):
        if not shutil.which(program):
            return f"{program} is not installed (Debian package {package})"
    probe = subprocess.run(
        ["unshare", "--net", "--uts", "--mount", "true"],
        capture_output=True,
        text=True,
        check=False,
    )
    if probe.returncode:
        return f"namespaces are not allowed here: {probe.stderr.strip()}"
    return None


class Network:
    """A bridge and hosts `a`, `b`, ... on it, for one test module."""

    def __init__(self, count: int) -> None:
        sweep()
        self.folder = Path(tempfile.mkdtemp(prefix="hvd-hosts-"))
        self.folder.chmod(0o755)
        self.bridge = f"{PREFIX}{os.getpid()}"
        # Addresses from the block reserved for tests between networks; each run takes its own corner.
        corner = os.getpid() % 250
        self.hosts = [
            Host(
                self,
                f"host-{chr(97 + i)}",
                f"198.18.{corner}.{i + 1}",
                f"fd12:3456:{corner:x}::{i + 1}",
                f"{self.bridge}-{i}",
            )
            for i in range(count)
        ]
        try:
            self._up()
        except BaseException:
            self.down()
            raise

    def _up(self) -> None:
        run("ip", "link", "add", self.bridge, "type", "bridge")
        run("ip", "link", "set", self.bridge, "up")
        for key in ("user", "wrong", "server"):
            run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(self.folder / key))
        shutil.copy(self.folder / "user.pub", self.folder / "authorized_keys")
        names = "".join(
            f"{host.address} {host.name}\n{host.address6} {host.name6}\n" for host in self.hosts
        )
        (self.folder / "hosts").write_text("127.0.0.1 localhost\n::1 localhost\n" + names)
        server = (self.folder / "server.pub").read_text().split()
        known = "".join(
            f"[{name}]:{SSH_PORT} {server[0]} {server[1]}\n"
            for host in self.hosts
            for name in (host.name, host.name6, host.address6)
        )
        (self.folder / "known_hosts").write_text(known)
        (self.folder / "ssh_config").write_text(
            f"UserKnownHostsFile {self.folder}/known_hosts\nGlobalKnownHostsFile none\n"
            f"StrictHostKeyChecking yes\nIdentitiesOnly yes\nIdentityAgent none\n"
        )
        (self.folder / "sshd_config").write_text(
            f"Port {SSH_PORT}\nHostKey {self.folder}/server\nPidFile none\nUsePAM no\nStrictModes no\n"
            f"AuthorizedKeysFile {self.folder}/authorized_keys\nPermitRootLogin yes\n"
            f"PasswordAuthentication no\nMaxStartups 100\n"
        )
        for host in self.hosts:
            host.up()

    def down(self) -> None:
        """Remove everything."""
        for host in self.hosts:
            host.down()
        subprocess.run(["ip", "link", "del", self.bridge], capture_output=True, check=False)
        shutil.rmtree(self.folder, ignore_errors=True)


class Host:
    """One host: a network namespace, and a shell command line that enters it under its name."""

    def __init__(
        self, network: Network, name: str, address: str, address6: str, namespace: str
    ) -> None:
        self.network = network
        self.name = name
        # Means the second address, which is of IP version 6.
        self.name6 = f"{name}-six"
        self.address = address
        self.address6 = address6
        self.namespace = namespace
        # Its interface as seen from outside: all that enters and leaves the host passes here.
        self.outside = _outside(namespace)
        self.sshd: subprocess.Popen[bytes] | None = None

    def up(self) -> None:
        """Make it and start its sshd; returns when sshd answers."""
        run("ip", "netns", "add", self.namespace)
        run("ip", "-n", self.namespace, "link", "set", "lo", "up")
        run(
            "ip",
            "link",
            "add",
            self.outside,
            "type",
            "veth",
            "peer",
            "name",
            "eth0",
            "netns",
            self.namespace,
        )
        run("ip", "link", "set", self.outside, "master", self.network.bridge, "up")
        self.add_address4()
        run(
            "ip", "-n", self.namespace, "addr", "add", f"{self.address6}/64", "dev", "eth0", "nodad"
        )
        run("ip", "-n", self.namespace, "link", "set", "eth0", "up")
        self.start_sshd()

    def start_sshd(self) -> None:
        """Start its sshd; returns when that answers."""
        # sshd keeps its empty folder under /run; a /run of its own leaves the machine's alone.
        daemon = (
            "mount -t tmpfs tmpfs /run && mkdir -m 755 /run/sshd && "
            f"exec {SSHD} -D -e -f {self.network.folder}/sshd_config"
        )
        self.sshd = subprocess.Popen(
            self.enter(["sh", "-c", daemon]),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        assert self.sshd.stderr is not None
        for line in self.sshd.stderr:
            if b"Server listening" in line:
                return
        raise RuntimeError(f"sshd did not start on {self.name}")

    def add_address4(self) -> None:
        """Give it its address of IP version 4."""
        run("ip", "-n", self.namespace, "addr", "add", f"{self.address}/24", "dev", "eth0")

    def remove_address4(self) -> None:
        """Leave it with IP version 6 only."""
        run("ip", "-n", self.namespace, "addr", "del", f"{self.address}/24", "dev", "eth0")

    def add_black_hole(self, address: str) -> None:
        """Make an address that swallows every packet: on the wire, but of no host. It goes with this host."""
        nobody = ("lladdr", "02:00:00:00:00:01", "dev", "eth0", "nud", "permanent")
        run("ip", "-n", self.namespace, "route", "add", f"{address}/32", "dev", "eth0")
        run("ip", "-n", self.namespace, "neigh", "add", address, *nobody)

    def swallow(self, other: Host) -> None:
        """Make what goes from here to the other host vanish on the way, unless a port below 10000 listens, as ssh's."""
        self._misroute(other)

    def refuse(self, other: Host) -> None:
        """Leave no route from here to the other host, except to and from ports below 10000, as ssh's."""
        self._misroute(other, "unreachable")

    def _misroute(self, other: Host, *via: str) -> None:
        # Routes decide, not a firewall: every kernel has these. Ranks listen on ports above 10000.
        for family, address, nobody in (
            ("-4", other.address, f"{other.address.rpartition('.')[0]}.250"),
            ("-6", other.address6, f"{other.address6.rpartition(':')[0]}:fa"),
        ):
            ip = ("ip", "-n", self.namespace, family)
            if not via:
                # To a neighbour that does not exist, but whose address on the wire is known.
                silent = ("lladdr", "02:00:00:00:00:01", "dev", "eth0", "nud", "permanent")
                run(*ip, "neigh", "replace", nobody, *silent)
                route = (address, "via", nobody, "dev", "eth0")
            else:
                route = (*via, address)
            run(*ip, "route", "replace", *route, "table", MISROUTED)
            # By the other side's port: its own a connection has only after the way is chosen.
            to = ("to", address, "ipproto", "tcp")
            run(*ip, "rule", "add", "pref", "50", *to, "sport", "1-9999", "table", "main")
            run(*ip, "rule", "add", "pref", "51", *to, "dport", "10000-65534", "table", MISROUTED)

    def restore_routes(self) -> None:
        """Undo `swallow` and `refuse`."""
        for family in ("-4", "-6"):
            for preference in ("50", "51"):
                ip = ("ip", "-n", self.namespace, family)
                run(*ip, "rule", "del", "pref", preference)

    def narrow(self, mtu: int) -> None:
        """Make large packets from this host vanish on the way, of which it learns nothing."""
        run("ip", "link", "set", self.outside, "mtu", str(mtu))
        # Else the kernel hands several packets on as one, whose size it does not look at.
        run("ip", "-n", self.namespace, "link", "set", "eth0", "gso_max_segs", "1")

    def widen(self) -> None:
        """Undo `narrow`."""
        run("ip", "link", "set", self.outside, "mtu", "1500")
        run("ip", "-n", self.namespace, "link", "set", "eth0", "gso_max_segs", "65535")

    def add_bridge(self, name: str, address: str) -> None:
        """Give it an interface behind which nothing is, as docker0 is without containers."""
        run("ip", "-n", self.namespace, "link", "add", name, "type", "bridge")
        run("ip", "-n", self.namespace, "addr", "add", address, "dev", name)
        run("ip", "-n", self.namespace, "link", "set", name, "up")

    def remove_link(self, name: str) -> None:
        """Remove such an interface."""
        run("ip", "-n", self.namespace, "link", "del", name)

    def cut_off(self) -> None:
        """From now on its packets, and those for it, vanish without a word."""
        run("ip", "link", "set", self.outside, "nomaster")

    def connect_again(self) -> None:
        """Undo `cut_off`."""
        run("ip", "link", "set", self.outside, "master", self.network.bridge)

    def enter(self, command: Sequence[str | os.PathLike[str]]) -> list[str]:
        """The command, to be run on this host."""
        folder = self.network.folder
        setup = (
            f"hostname {self.name} && mount --bind {folder}/hosts /etc/hosts && "
            f'mount --bind {folder}/ssh_config /etc/ssh/ssh_config && exec "$@"'
        )
        wrap = ["ip", "netns", "exec", self.namespace, "unshare", "--uts", "--mount"]
        return [*wrap, "sh", "-c", setup, "sh", *map(os.fspath, command)]

    def pids(self) -> set[int]:
        """Processes on this host, its sshd left out."""
        server = {self.sshd.pid} if self.sshd else set()
        return _pids_of(self.namespace) - server

    def crash(self) -> None:
        """End all its processes at once, its sshd too."""
        assert self.sshd is not None
        self.sshd.kill()
        self.sshd.wait(END_LIMIT_S)
        _end_all(self.namespace)

    def down(self) -> None:
        """End all its processes and remove it."""
        _remove_namespace(self.namespace)
        if self.sshd:
            self.sshd.wait(END_LIMIT_S)


def sweep() -> None:
    """Remove what test runs that no longer exist have left."""
    listed = subprocess.run(
        ["ip", "netns", "list"], capture_output=True, text=True, check=False
    ).stdout
    for line in listed.splitlines():
        if (match := re.match(rf"{PREFIX}(\d+)-\d+\b", line)) and not Path(
            f"/proc/{match[1]}"
        ).exists():
            _remove_namespace(match[0])
    links = subprocess.run(
        ["ip", "-o", "link", "show", "type", "bridge"], capture_output=True, text=True, check=False
    ).stdout
    for name in re.findall(rf"\d+: ({PREFIX}\d+):", links):
        if not Path(f"/proc/{name.removeprefix(PREFIX)}").exists():
            subprocess.run(["ip", "link", "del", name], capture_output=True, check=False)


def _remove_namespace(name: str) -> None:
    _end_all(name)
    # With its namespace it would go as well, but later: the next network's link of the same name would meet it.
    subprocess.run(["ip", "link", "del", _outside(name)], capture_output=True, check=False)
    subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)


def _pids_of(namespace: str) -> set[int]:
    """The processes in a namespace."""
    done = subprocess.run(
        ["ip", "netns", "pids", namespace], capture_output=True, text=True, check=False
    )
    return set(map(int, done.stdout.split()))


def _end_all(namespace: str) -> None:
    """End all processes in a namespace, those too that others of them start meanwhile."""
    deadline = time.monotonic() + END_LIMIT_S
    while (pids := _pids_of(namespace)) and time.monotonic() < deadline:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def _outside(namespace: str) -> str:
    """A host's interface as seen from outside; the kernel allows 15 characters."""
    return namespace[:15]


def run(*command: str) -> None:
    """Run a command that must succeed."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()}")
