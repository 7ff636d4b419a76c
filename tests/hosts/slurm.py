"""A cluster of Slurm on the hosts of a test: munge, slurmctld, and one slurmd on each host."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import network

# Only a failure takes so long.
START_LIMIT_S = 60.0
# Each node has more processors than the machine may have, so that no test depends on their number.
CPUS = 64
# Debian has the daemons in folders that the PATH of a user may lack.
SEARCH_PATH = f"{os.environ['PATH']}:/usr/sbin:/sbin"

_SETTINGS = """
ClusterName=test
SlurmctldHost={first.name}({first.address})
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={munge}/socket
CredType=cred/munge
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
MpiDefault=none
ReturnToService=2
SlurmdParameters=config_overrides
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
TmpFS={folder}/tmp-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
JobRequeue=1
PartitionName=all Nodes=ALL Default=YES State=UP MaxTime=INFINITE
"""


def why_not() -> str | None:
    """Why there can be no cluster here; None when there can."""
    for program, package in (
        ("munged", "munge"),
        ("slurmctld", "slurmctld"),
        ("slurmd", "slurmd"),
        ("srun", "slurm-client"),
    ):
        if not shutil.which(program, path=SEARCH_PATH):
            return f"{program} is not installed (Debian package {package})"
    return None


class NotReady(Exception):
    """Something of the cluster is not there in time; with the end of the daemons' logs."""


class Slurm:
    """The cluster. `env` is for commands of Slurm; run them on a host (`Host.enter`)."""

    def __init__(self, net: network.Network) -> None:
        self.folder = net.folder / "slurm"
        self.hosts = net.hosts
        munge = self.folder / "munge"
        for folder in (self.folder, self.folder / "state"):
            folder.mkdir()
        # Its daemon refuses a folder that others may read.
        munge.mkdir(mode=0o700)
        (munge / "key").write_bytes(secrets.token_bytes(1024))
        (munge / "key").chmod(0o600)
        settings = _SETTINGS.format(first=self.hosts[0], munge=munge, folder=self.folder)
        for host in self.hosts:
            settings += f"NodeName={host.name} NodeAddr={host.address} CPUs={CPUS}\n"
            for kind in ("spool", "tmp"):
                (self.folder / f"{kind}-{host.name}").mkdir()
        (self.folder / "slurm.conf").write_text(settings)
        (self.folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\nCgroupAutomount=no\n")
        self.env = {"SLURM_CONF": str(self.folder / "slurm.conf")}
        self._pmix = self._complete_pmix()
        self._daemons: list[subprocess.Popen[bytes]] = []
        try:
            self._up(munge)
        except BaseException:
            self.down()
            raise

    def _up(self, munge: Path) -> None:
        files = {"key-file": "key", "socket": "socket", "pid-file": "pid", "log-file": "log"}
        files["seed-file"] = "seed"
        words = [f"--{option}={munge / name}" for option, name in files.items()]
        self._start(["munged", "--foreground", "--force", *words])
        self.wait_until("munged", lambda: (munge / "socket").exists())
        self._start(self.enter(self.hosts[0], ["slurmctld", "-D"]))
        for host in self.hosts:
            # It does not start without cgroups, which the settings leave unused.
            daemon = f"mount -t tmpfs tmpfs /sys/fs/cgroup && exec slurmd -D -N {host.name}"
            self._start(self.enter(host, ["sh", "-c", daemon]))
        self.wait_until("every node", lambda: self._idle_nodes() == len(self.hosts))

    def _start(self, command: list[str]) -> None:
        environment = {**os.environ, **self.env, "PATH": SEARCH_PATH}
        nothing = subprocess.DEVNULL
        self._daemons.append(
            subprocess.Popen(
                command, env=environment, stdin=nothing, stdout=nothing, stderr=nothing
            )
        )

    def wait_until(self, what: str, is_ready: Callable[[], bool]) -> None:
        """Wait; an error with the daemons' logs if it takes too long."""
        deadline = time.monotonic() + START_LIMIT_S
        while not is_ready():
            if time.monotonic() > deadline:
                logs = [log.read_text()[-2000:] for log in sorted(self.folder.glob("*.log"))]
                raise NotReady("\n".join([f"{what} is not ready", *logs]))
            time.sleep(0.05)

    def _idle_nodes(self) -> int:
        return self.ask("sinfo", "--noheader", "--Node", "--format=%T").split().count("idle")

    def ask(self, *command: str) -> str:
        """The output of a command on the first host; empty if it fails."""
        done = subprocess.run(
            self.enter(self.hosts[0], command),
            env={**os.environ, **self.env},
            capture_output=True,
            text=True,
            check=False,
            timeout=START_LIMIT_S,
        )
        return "" if done.returncode else done.stdout

    def enter(self, host: network.Host, command: Sequence[str]) -> list[str]:
        """The command, to be run on this host, where Slurm finds its PMIx."""
        if self._pmix is None:
            return host.enter(command)
        mount = f'mount --bind {self.folder}/pmix {self._pmix} && exec "$@"'
        return host.enter(["sh", "-c", mount, "sh", *command])

    def has_pmix(self) -> bool:
        """Whether `srun --mpi=pmix` works."""
        return self._pmix is not None

    def _complete_pmix(self) -> Path | None:
        """The folder of PMIx. Its copy has the name that Slurm opens, which only the package for developers has."""
        for libraries in Path("/usr/lib").glob("*-linux-gnu/pmix2/lib"):
            shutil.copytree(libraries, self.folder / "pmix", symlinks=True)
            name = self.folder / "pmix" / "libpmix.so"
            if not name.exists():
                name.symlink_to("libpmix.so.2")
            return libraries
        return None

    def down(self) -> None:
        """End its daemons; what they started ends with the hosts."""
        for daemon in reversed(self._daemons):
            daemon.terminate()
        for daemon in self._daemons:
            with contextlib.suppress(subprocess.TimeoutExpired):
                daemon.wait(network.END_LIMIT_S)
                continue
            daemon.kill()
            daemon.wait()
