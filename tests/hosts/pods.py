"""A small kubelet: plays the pods of manifests, each on a host of network.py.

A pod has a network namespace and a name of its own. Its root file system is this machine's, read-only. Its process has
another user, no capability and only the manifest's command and environment. Secrets and empty folders are at their
mount points; the folder /app of the image is one of the test. Deleting a pod kills its whole process tree.

Not played: images, limits of resources, probes, network policies, and Kubernetes' own controllers.
"""

from __future__ import annotations

import base64
import contextlib
import os
import shlex
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import network

import harness

Manifest = Mapping[str, Any]


class Pod:
    """One pod that runs on a host."""

    def __init__(self, host: network.Host, job: harness.Job, main: bytes, known: set[int]) -> None:
        self.host = host
        self.job = job
        # A word of the main process, and of no other.
        self._main = main
        self._known = known

    def pids(self) -> set[int]:
        """Its processes."""
        return self.host.pids() - self._known

    def terminate(self) -> None:
        """Send SIGTERM to its main process, as Kubernetes does before it kills."""
        for pid in self.pids():
            command = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
            if self._main in command:
                os.kill(pid, signal.SIGTERM)
                return
        raise AssertionError(f"no process has {self._main!r} among its words")

    def delete(self) -> None:
        """Kill every process of the pod, as a node that is lost does."""
        deadline = time.monotonic() + network.END_LIMIT_S
        while (pids := self.pids()) and time.monotonic() < deadline:
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)


class Player:
    """Starts pods."""

    def __init__(
        self,
        manifests: Sequence[Manifest],
        jobs: Callable[[harness.Job], harness.Job],
        app: Path,
        names: Mapping[str, network.Host],
    ) -> None:
        """`app` is the folder /app; `names` are those of Services and pods that resolve, each to its pod's host."""
        self._manifests = manifests
        self._jobs = jobs
        self._app = app
        self._names = names

    def secret(self, name: str) -> dict[str, str]:
        """The content of a Secret among the manifests."""
        for manifest in self._manifests:
            if manifest["kind"] == "Secret" and manifest["metadata"]["name"] == name:
                data = manifest["data"].items()
                return {key: base64.b64decode(text).decode() for key, text in data}
        raise AssertionError(f"no Secret {name} among the manifests")

    def start(
        self,
        template: Manifest,
        host: network.Host,
        *,
        index: int | None = None,
        secret: Mapping[str, str] | None = None,
        variables: Mapping[str, str] | None = None,
    ) -> Pod:
        """Start a pod of this template.

        `index` is that of an indexed job, `secret` replaces the Secret, `variables` are those that an operator adds.
        """
        spec = template["spec"]
        [container] = spec["containers"]
        environment = {entry["name"]: entry["value"] for entry in container.get("env", [])}
        environment |= variables or {}
        if index is not None:
            environment["JOB_COMPLETION_INDEX"] = str(index)
        # Of the image.
        environment["PATH"] = f"{Path(sys.executable).parent}:/usr/bin:/bin"
        environment["OMP_NUM_THREADS"] = "1"
        words = [word.replace("/app/", f"{self._app}/") for word in container["command"]]
        assigned = [f"{name}={value}" for name, value in environment.items()]
        script = self._script(spec, container, secret)
        known = host.pids()
        command = host.enter(["sh", "-ec", script, "sh", *assigned, *words])
        main = next((word for word in words if word.startswith("horovod")), words[0])
        return Pod(host, self._jobs(harness.Job(command)), main.encode(), known)

    def _script(self, spec: Manifest, container: Manifest, secret: Mapping[str, str] | None) -> str:
        """A shell script that makes the pod's file system and runs its arguments as the pod's user."""
        security = {**spec["securityContext"], **container["securityContext"]}
        assert security["runAsNonRoot"]
        assert security["readOnlyRootFilesystem"]
        assert not security["allowPrivilegeEscalation"]
        assert security["capabilities"] == {"drop": ["ALL"]}
        # The image would have these, below folders that the pod shall not share or its user may not enter.
        views = dict.fromkeys([sys.prefix, sys.base_prefix, os.fspath(self._app)])
        hosts = "".join(f"{host.address} {name}\n" for name, host in self._names.items())
        lines = ["mount -t tmpfs -o mode=755 pod /mnt", "mkdir /mnt/upper /mnt/work"]
        for number, view in enumerate(views):
            lines.append(f"mkdir /mnt/{number} && mount --bind {shlex.quote(view)} /mnt/{number}")
        lines.append(
            "mount -t overlay -o lowerdir=/etc,upperdir=/mnt/upper,workdir=/mnt/work etc /etc"
        )
        lines.append(f"printf '127.0.0.1 localhost\\n%s' {shlex.quote(hosts)} >/etc/hosts")
        lines += ["mount -t tmpfs -o mode=755 root /root", "mount -t tmpfs -o mode=1777 tmp /tmp"]
        for number, view in enumerate(views):
            place = shlex.quote(view)
            lines.append(f"mkdir -p {place} && mount --move /mnt/{number} {place}")
        volumes = {volume["name"]: volume for volume in spec["volumes"]}
        for mount in container["volumeMounts"]:
            volume, at = volumes[mount["name"]], mount["mountPath"]
            if "emptyDir" in volume:
                assert at == "/tmp", "the only folder that the pod may write to"
                continue
            source = volume["secret"]
            text = (secret or self.secret(source["secretName"]))[mount["subPath"]]
            mode, group = source["defaultMode"], security["fsGroup"]
            lines.append(f"mkdir -p {os.path.dirname(at)} && printf %s {shlex.quote(text)} >{at}")
            lines.append(f"chown 0:{group} {at} && chmod {mode:o} {at}")
        lines.append(f"cd {shlex.quote(os.fspath(self._app))}")
        lines.append("mount -o remount,ro /etc && mount -o remount,bind,ro /")
        lines.append(
            f"exec setpriv --reuid {security['runAsUser']} --regid {security['runAsGroup']} "
            f"--groups {security['fsGroup']} --bounding-set=-all --inh-caps=-all --ambient-caps=-all "
            '--no-new-privs -- env -i HVD_TEST_JOB="$HVD_TEST_JOB" "$@"'
        )
        return "\n".join(lines)


def of_compose(service: Manifest) -> Manifest:
    """A pod that has what a service of a compose file asks for."""
    user, group = map(int, service["user"].split(":"))
    [secret] = service["secrets"]
    security = {
        "runAsNonRoot": user > 0,
        "runAsUser": user,
        "runAsGroup": group,
        "fsGroup": group,
        "readOnlyRootFilesystem": service["read_only"],
        "allowPrivilegeEscalation": "no-new-privileges:true" not in service["security_opt"],
        "capabilities": {"drop": service["cap_drop"]},
    }
    mounts = [{"name": at, "mountPath": at} for at in service["tmpfs"]]
    name = secret["target"]
    mounts.append({"name": "secret", "mountPath": f"/etc/horovod/{name}", "subPath": name})
    variables = service["environment"]
    container = {
        "command": service["command"],
        # A folder /run of each container is not played; secrets are mounted as in pods.
        "env": [
            {"name": key, "value": text.replace("/run/secrets/", "/etc/horovod/")}
            for key, text in variables.items()
        ],
        "securityContext": {},
        "volumeMounts": mounts,
    }
    volumes: list[Manifest] = [{"name": at, "emptyDir": {}} for at in service["tmpfs"]]
    volumes.append({"name": "secret", "secret": {"secretName": name, "defaultMode": 0o440}})
    return {"spec": {"securityContext": security, "containers": [container], "volumes": volumes}}
