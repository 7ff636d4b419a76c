"""Reads the events of a job that `horovodrun` writes for other programs, one line of JSON each (docs/running.md)."""

from __future__ import annotations

import json
import os
from typing import Any

# Variable in the launcher's environment: the descriptor to which the launcher writes events.
FD = "HOROVODRUN_EVENTS_FD"
# Version of the events. The program may be of another version: it is searched outside this package.
_VERSION = 1


class Events:
    """Reads events from a descriptor, and stores the state of the job that follows from them."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._partial = b""
        self._version: int | None = None
        self._end: dict[str, Any] | None = None
        self.addresses: list[str] | None = None
        """Addresses for agents; None until the launcher listens."""
        self.running: set[int] = set()
        """Workers that have been started and have not ended."""
        self.has_started = False
        """Whether any worker has been started."""
        self.has_finished = False
        """Whether any worker has ended with status 0."""
        os.set_blocking(fd, False)

    def fileno(self) -> int:
        """Return the descriptor, for selectors."""
        return self._fd

    def read(self) -> bool:
        """Process the available events without blocking; return False at the end of the stream."""
        while True:
            try:
                chunk = os.read(self._fd, 1 << 16)
            except BlockingIOError:
                return True
            if not chunk:
                return False
            *lines, self._partial = (self._partial + chunk).split(b"\n")
            for line in lines:
                self._take(json.loads(line))

    def _take(self, event: dict[str, Any]) -> None:
        if event["event"] == "begin":
            self._version = event["version"]
        # Events of another version may have other meanings and are ignored.
        elif self._version == _VERSION:
            self._take_known(event)

    def _take_known(self, event: dict[str, Any]) -> None:
        match event["event"]:
            case "end":
                self._end = event
            case "listening":
                self.addresses = event["addresses"]
            case "started":
                self.has_started = True
                self.running.add(event["worker"])
            case "ended":
                self.has_finished |= event.get("code") == 0
                self.running.discard(event["worker"])
            case _:
                pass

    def report(self, exit_status: int) -> str:
        """Return the launcher's text about the end of the job; empty after success."""
        if exit_status == 0:
            return ""
        if self._end is not None:
            return str(self._end["report"])
        other = "" if self._version == _VERSION else "; it is not the one of this version"
        return f"horovodrun ended with exit status {exit_status}{other}"

    def was_wrong_call(self) -> bool:
        """Return whether the launcher has refused its arguments and started nothing."""
        return self._end is not None and self._end["outcome"] == "usage"
