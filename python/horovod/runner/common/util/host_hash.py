"""A name for this host that tells containers on one machine apart."""

import contextlib
import hashlib
import os
import socket

__all__ = ["host_hash"]


def _namespaces() -> str:
    """The Linux namespaces of this process: containers on one machine differ in some."""
    folder = "/proc/self/ns"
    links = []
    with contextlib.suppress(OSError):
        for name in sorted(os.listdir(folder)):
            with contextlib.suppress(OSError):
                links.append(os.readlink(os.path.join(folder, name)))
    return " ".join(links)


def host_hash(salt: str | None = None) -> str:
    """`<short host name>-<md5>`: equal for processes of one host (or container), else different."""
    name = socket.gethostname()
    text = f"{name}-{_namespaces()}" if salt is None else f"{name}-{_namespaces()}-{salt}"
    digest = hashlib.md5(text.encode(), usedforsecurity=False).hexdigest()
    return f"{name.split('.')[0]}-{digest}"
