"""Drives the installed Chromium, without a window, by its DevTools protocol over two pipes."""

from __future__ import annotations

import base64
import contextlib
import itertools
import json
import os
import select
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

PROGRAM = (
    shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
)
# Only a hang lasts so long.
LIMIT_S = 300.0
# The descriptors on which Chromium reads commands and writes answers.
COMMANDS, ANSWERS = 3, 4


class Page:
    """One page of the browser. `requests` are the URLs that it loaded, `errors` those of its console."""

    def __init__(self, commands: int, answers: int) -> None:
        self._commands, self._answers, self._received = commands, answers, b""
        self._numbers, self._session = itertools.count(1), None
        self._is_loaded = False
        self.requests: list[str] = []
        self.errors: list[str] = []
        target = self.ask("Target.createTarget", url="about:blank")["targetId"]
        attached = self.ask("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Network", "Runtime", "Log", "Page"):
            self.ask(f"{domain}.enable")

    def ask(self, method: str, **params: Any) -> dict[str, Any]:
        """Send a command and return its result; what happens meanwhile is noted."""
        number = next(self._numbers)
        command: dict[str, Any] = {"id": number, "method": method, "params": params}
        if self._session:
            command["sessionId"] = self._session
        text = json.dumps(command).encode() + b"\0"
        while text:
            text = text[os.write(self._commands, text) :]
        while True:
            message = self._next()
            if message.get("id") == number:
                assert "error" not in message, (method, message)
                return message["result"]
            self._note(message)

    def open(self, url: str) -> None:
        """Load a page, and wait until it is there."""
        self._is_loaded = False
        self.ask("Page.navigate", url=url)
        while not self._is_loaded:
            self._note(self._next())

    def value(self, expression: str) -> Any:
        """The value of an expression of JavaScript."""
        found = self.ask(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def wait_for(self, expression: str) -> Any:
        """Wait until the expression is true, and return its value; the page looks ten times a second."""
        return self.value(
            f"""new Promise((resolve, reject) => {{
                const begin = performance.now();
                const look = () => {{
                    const found = {expression};
                    if (found) resolve(found);
                    else if (performance.now() - begin > {LIMIT_S * 1000}) reject("never true");
                    else setTimeout(look, 100);
                }};
                look();
            }})"""
        )

    def key(self, key: str) -> None:
        """Press a key."""
        more = {"text": "\r"} if key == "Enter" else {}
        code = {"Enter": 13, "Tab": 9}[key]
        for kind in ("keyDown", "keyUp"):
            self.ask(
                "Input.dispatchKeyEvent", type=kind, key=key, windowsVirtualKeyCode=code, **more
            )

    def picture(self, width: int, height: int, scheme: str) -> bytes:
        """The page as PNG, in the `light` or `dark` scheme of colours."""
        self.ask(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=False,
        )
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self.ask("Emulation.setEmulatedMedia", features=features)
        return base64.b64decode(self.ask("Page.captureScreenshot", format="png")["data"])

    def _next(self) -> dict[str, Any]:
        deadline = time.monotonic() + 2 * LIMIT_S
        while b"\0" not in self._received:
            left = max(0.0, deadline - time.monotonic())
            ready, _, _ = select.select([self._answers], [], [], left)
            chunk = os.read(self._answers, 1 << 16) if ready else b""
            assert chunk, "the browser has ended, or does not answer"
            self._received += chunk
        message, _, self._received = self._received.partition(b"\0")
        return json.loads(message)

    def _note(self, message: dict[str, Any]) -> None:
        params = message.get("params", {})
        match message.get("method"):
            case "Network.requestWillBeSent":
                self.requests.append(params["request"]["url"])
            case "Page.loadEventFired":
                self._is_loaded = True
            case "Runtime.exceptionThrown":
                self.errors.append(json.dumps(params["exceptionDetails"]))
            case "Runtime.consoleAPICalled" if params["type"] in ("error", "warning"):
                self.errors.append(json.dumps(params["args"]))
            case "Log.entryAdded" if params["entry"]["level"] == "error":
                self.errors.append(json.dumps(params["entry"]))


@contextlib.contextmanager
def page() -> Iterator[Page]:
    """A browser with an empty profile, until the end of the block."""
    assert PROGRAM
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(ignore_cleanup_errors=True))
        their_commands, commands = os.pipe()
        answers, their_answers = os.pipe()
        for end in (commands, answers):
            stack.callback(os.close, end)
        sandbox = ["--no-sandbox"] if os.geteuid() == 0 else []
        words = [
            *(PROGRAM, "--headless=new", "--remote-debugging-pipe", "--disable-gpu"),
            *("--disable-dev-shm-usage", "--no-first-run", f"--user-data-dir={folder}"),
            *("--disable-background-networking", "--disable-component-update", *sandbox),
        ]
        # The shell puts both pipes where Chromium expects them.
        move = f'exec "$@" {COMMANDS}<&{their_commands} {ANSWERS}>&{their_answers}'
        process = subprocess.Popen(
            ["/bin/bash", "-c", move, "chromium", *words],
            pass_fds=(their_commands, their_answers),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            env={**os.environ, "HOME": folder, "TMPDIR": folder},
        )
        os.close(their_commands)
        os.close(their_answers)
        stack.callback(process.wait, LIMIT_S)
        stack.callback(_kill, process)
        yield Page(commands, answers)


def _kill(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def save(name: str, picture: bytes) -> None:
    """Keep a picture for the documentation, where `HVD_TEST_PICTURES` names a folder."""
    if folder := os.environ.get("HVD_TEST_PICTURES"):
        (Path(folder) / name).write_bytes(picture)
