"""One limit for several waits."""

import time

__all__ = ["Timeout", "TimeoutException"]


class TimeoutException(TimeoutError):
    """The limit has passed."""


class Timeout:
    """A limit that begins now; `message` may contain `{activity}` and `{timeout}`."""

    def __init__(self, timeout: float, message: str) -> None:
        self._timeout = timeout
        self._timeout_at = time.monotonic() + timeout
        self._message = message

    def remaining(self) -> float:
        """Seconds that are left, at least 0."""
        return max(0.0, self._timeout_at - time.monotonic())

    def timed_out(self) -> bool:
        """Whether the limit has passed."""
        return time.monotonic() > self._timeout_at

    def check_time_out_for(self, activity: str) -> None:
        """Raise `TimeoutException` if the limit has passed."""
        if self.timed_out():
            raise TimeoutException(self._message.format(activity=activity, timeout=self._timeout))
