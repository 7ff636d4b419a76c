"""Events of `horovodrun`: what happens to a job, as it tells programs, a line of JSON each (docs/running.md)."""

from __future__ import annotations

import json
import os
from typing import Any

# In the launcher's environment: the descriptor on which this process wants to hear of them.
FD = "HOROVODRUN_EVENTS_FD"
# The launcher's program is found apart from this package, so it may be another version's.
_VERSION = 1


class Events:
    """Takes them from a descriptor, and keeps how the job ended."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._partial = b""
        self._version: int | None = None
        self._end: dict[str, Any] | None = None
        self.addresses: list[str] | None = None
        """Where agents can dial, once the launcher listens for them."""
        self.running: set[int] = set()
        """Workers that have been started and have not ended."""
        self.has_started = False
        """Some worker has been started."""
        self.has_finished = False
        """Some worker has ended with 0."""
        os.set_blocking(fd, False)

    def fileno(self) -> int:
        """For selectors."""
        return self._fd

    def read(self) -> bool:
        """Take what has come; False when there will be no more."""
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
        # The meaning of another version's events is unknown.
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
        """The launcher's text on the end of the job; empty after success."""
        if exit_status == 0:
            return ""
        if self._end is not None:
            return str(self._end["report"])
        other = "" if self._version == _VERSION else "; it is not the one of this version"
        return f"horovodrun ended with exit status {exit_status}{other}"

    def was_wrong_call(self) -> bool:
        """Whether the launcher has refused its arguments, and started nothing."""
        return self._end is not None and self._end["outcome"] == "usage"
