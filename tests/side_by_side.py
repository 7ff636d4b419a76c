"""Runs tests side by side: `pytest tests --side-by-side 5`.

The tests are collected once. Then each group of them runs in a process forked from this one, which sends its reports
here; frameworks that test files import are imported once. A group is one test, or all tests that share a fixture of a
module or of the session, with the same parameter. `lanes.py` says which groups may run at the same time.

Warnings of tests are not in the summary then; run the test alone to see them.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import os
import pickle
import selectors
import signal
import struct
import sys
import tempfile
import traceback
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import pytest

import lanes

# The length that precedes each message of a group's process.
LENGTH = struct.Struct("<Q")


@dataclass
class Group:
    """Tests that run one after the other in one process."""

    name: str
    processors: float
    items: list[pytest.Item] = field(default_factory=list)


@dataclass
class Running:
    """A group's process, and which of its tests have not ended."""

    group: Group
    pid: int
    reports: int
    left: list[pytest.Item]
    begun: pytest.Item | None = None
    received: bytes = b""

    def add(self, chunk: bytes) -> Iterator[dict[str, Any]]:
        """The messages that this chunk completes."""
        self.received += chunk
        while len(self.received) >= LENGTH.size:
            end = LENGTH.size + LENGTH.unpack_from(self.received)[0]
            if len(self.received) < end:
                return
            message, self.received = self.received[LENGTH.size : end], self.received[end:]
            yield pickle.loads(message)


def groups(items: list[pytest.Item]) -> list[Group]:
    """The tests, grouped by what they share. Groups that compute come first, then large ones before small ones."""
    shared = [[*_shared(item)] or [item.nodeid] for item in items]
    leaders = {name: name for names in shared for name in names}

    def leader(name: str) -> str:
        while leaders[name] != name:
            name = leaders[name]
        return name

    for first, *others in shared:
        for other in others:
            leaders[leader(other)] = leader(first)
    found: dict[str, Group] = {}
    for item, names in zip(items, shared, strict=True):
        name = leader(names[0])
        group = found.setdefault(name, Group(name, 0.0))
        group.items.append(item)
        group.processors = max(group.processors, lanes.processors(item))
    return sorted(found.values(), key=lambda group: (group.processors == 0, -len(group.items)))


def _shared(item: pytest.Item) -> Iterator[str]:
    """Names of what this test shares with others: each fixture of ours whose scope is wider than one test."""
    if lanes.is_quick(item):
        yield str(item.path)
    params = item.callspec.params if hasattr(item, "callspec") else {}
    for name, definitions in sorted(item._fixtureinfo.name2fixturedefs.items()):  # type: ignore[attr-defined]
        definition = definitions[-1]
        if definition.baseid and definition.scope != "function":
            where = "" if definition.scope == "session" else item.path
            yield f"{where}:{name}:{params.get(name, '')}"


class SideBySide:
    """The plugin of the process that collects."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.running: dict[int, Running] = {}
        self.selector = selectors.DefaultSelector()

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool | None:
        if session.config.option.collectonly or session.testsfailed:
            return None
        if reporter := session.config.pluginmanager.getplugin("terminalreporter"):
            # Else it begins a new line at each result of another file.
            reporter.showfspath = False
        session.config._tmp_path_factory.getbasetemp()  # type: ignore[attr-defined]
        # Forked processes share these objects. A garbage collection would write to them and so copy their pages.
        gc.collect()
        gc.freeze()
        waiting = groups(session.items)
        try:
            while waiting or self.running:
                self._start_what_may(waiting, session)
                self._read(session)
                if session.shouldfail:
                    raise session.Failed(session.shouldfail)
                if session.shouldstop:
                    raise session.Interrupted(session.shouldstop)
        finally:
            self._stop()
        return True

    def _start_what_may(self, waiting: list[Group], session: pytest.Session) -> None:
        for group in list(waiting):
            busy = [running.group.processors for running in self.running.values()]
            if len(busy) == self.limit:
                return
            if lanes.may_start(group.processors, sum(busy)):
                waiting.remove(group)
                self._start(group, session)

    def _start(self, group: Group, session: pytest.Session) -> None:
        receiving, sending = os.pipe()
        sys.stdout.flush()
        sys.stderr.flush()
        pid = os.fork()
        if pid == 0:
            os.close(receiving)
            for running in self.running.values():
                os.close(running.reports)
            _run_and_exit(group, session, sending)
        os.close(sending)
        running = Running(group, pid, receiving, list(group.items))
        self.running[pid] = running
        self.selector.register(running.reports, selectors.EVENT_READ, running)

    def _read(self, session: pytest.Session) -> None:
        """Wait until processes have sent something, and pass it on."""
        for key, _ in self.selector.select():
            running: Running = key.data
            chunk = os.read(running.reports, 1 << 16)
            for message in running.add(chunk):
                self._pass_on(running, message, session)
            if not chunk:
                self._ended(running, session)

    def _pass_on(self, running: Running, message: dict[str, Any], session: pytest.Session) -> None:
        hook = session.config.hook
        match message["what"]:
            case "begins":
                running.begun = running.left.pop(0)
                hook.pytest_runtest_logstart(
                    nodeid=running.begun.nodeid, location=running.begun.location
                )
            case "report":
                report = hook.pytest_report_from_serializable(
                    config=session.config, data=message["report"]
                )
                hook.pytest_runtest_logreport(report=report)
            case "ends":
                ended, running.begun = running.begun, None
                assert ended is not None
                hook.pytest_runtest_logfinish(nodeid=ended.nodeid, location=ended.location)
            case "wrong":
                raise RuntimeError(f"{running.group.name}:\n{message['text']}")

    def _ended(self, running: Running, session: pytest.Session) -> None:
        self.selector.unregister(running.reports)
        os.close(running.reports)
        del self.running[running.pid]
        _, status = os.waitpid(running.pid, 0)
        code = os.waitstatus_to_exitcode(status)
        left = [running.begun] if running.begun else []
        for item in left + running.left:
            how = "while this test ran" if item is running.begun else "before this test"
            text = f"the process of the group {running.group.name} ended {how}, with {code}"
            report = pytest.TestReport(
                item.nodeid, item.location, {}, "failed", text, "call", duration=0.0
            )
            session.config.hook.pytest_runtest_logreport(report=report)

    def _stop(self) -> None:
        """Interrupt the tests that still run, as Ctrl-C does, and wait for their ends."""
        for running in self.running.values():
            with contextlib.suppress(ProcessLookupError):
                os.kill(running.pid, signal.SIGINT)
        for running in self.running.values():
            while os.read(running.reports, 1 << 16):
                pass
            os.waitpid(running.pid, 0)
        self.running.clear()


class Sender:
    """The plugin of a group's process: sends what happens."""

    def __init__(self, config: pytest.Config, pipe: BinaryIO) -> None:
        self.config = config
        self.pipe = pipe

    def send(self, what: str, **more: Any) -> None:
        message = pickle.dumps({"what": what, **more})
        self.pipe.write(LENGTH.pack(len(message)) + message)
        self.pipe.flush()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        data = self.config.hook.pytest_report_to_serializable(config=self.config, report=report)
        self.send("report", report=data)


def _run_and_exit(group: Group, session: pytest.Session, pipe: int) -> None:
    """In the forked process: run the tests of the group, and end."""
    code = 1
    sender = Sender(session.config, os.fdopen(pipe, "wb"))
    try:
        _become_a_process_of_its_own(group, session, sender)
        _run(group.items, session, sender)
        code = 0
    except KeyboardInterrupt:
        code = 128 + signal.SIGINT
    except BaseException:
        with contextlib.suppress(BrokenPipeError):
            sender.send("wrong", text=traceback.format_exc())
    finally:
        with contextlib.suppress(BaseException):
            session._setupstate.teardown_exact(None)
        # Some frameworks clean up at the end of the interpreter: Ray ends its cluster.
        with contextlib.suppress(BaseException):
            atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _become_a_process_of_its_own(group: Group, session: pytest.Session, sender: Sender) -> None:
    plugins = session.config.pluginmanager
    plugins.unregister(name="terminalreporter")
    # Forked processes share the positions of the capture files, so this one opens new files.
    capture = plugins.getplugin("capturemanager")
    capture.stop_global_capturing()
    capture.start_global_capturing()
    capture.suspend_global_capture()
    plugins.register(sender)
    factory = session.config._tmp_path_factory  # type: ignore[attr-defined]
    factory._basetemp = Path(tempfile.mkdtemp(dir=factory.getbasetemp(), prefix=""))


def _run(items: list[pytest.Item], session: pytest.Session, sender: Sender) -> None:
    for item, following in zip(items, [*items[1:], None], strict=True):
        sender.send("begins")
        session.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
        sender.send("ends")
        if session.shouldfail or session.shouldstop:
            return
