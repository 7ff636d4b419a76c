"""Runs one cell of the plan: a job that comes to a phase, a fault, and what was promised."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import faults
import ground
import plan
from history import entries_of, faults_in

import harness

HERE = Path(__file__).resolve().parent
NP = 3
# Seconds of silence after which a rank is given up, in jobs in which one falls silent.
HEARTBEAT_S = 2


class Run:
    """A job for one cell, on this host or between others."""

    def __init__(self, cell: plan.Cell, folder: Path, between: ground.Ground | None = None) -> None:
        self.cell, self.folder, self.ground = cell, folder, between
        self.wire = between.wire if between else None
        self.grows = cell.phase.startswith("growth")
        self.hosts = between.hosts if between else f"localhost:{NP}"
        (folder / "disk").mkdir()
        os.mkfifo(folder / "gate")
        # Open for reading too, so that nobody who comes later waits for this end.
        self.gate = os.open(folder / "gate", os.O_RDWR)
        (folder / "cell.json").write_text(
            json.dumps(
                {
                    "phase": cell.phase,
                    "elastic": cell.elastic,
                    "victim": self._victim(),
                    "inject": cell.inject,
                    "torch": cell.torch,
                    "length": 20_000 if between else 1 << 20,
                    "pause_s": 0.002,
                }
            )
        )
        start = between.start if between else harness.Job
        self.job = start(self._command(), env=self._environment())

    def _victim(self) -> int:
        if self.wire:
            return NP - 1  # on the last host
        # The first rank of a host makes the memory that all share.
        return 0 if self.cell.fault == "memory refused" else self.cell.victim

    def _command(self) -> list[str]:
        np = NP - 1 if self.grows else NP
        words = [str(harness.HOROVODRUN), "-np", str(np)]
        if self.cell.elastic:
            words += ["--min-np", "1", "--host-discovery-script", f"cat {self.folder}/hosts"]
            # A host that was cut off is welcome when it is there again.
            words += ["--blacklist-cooldown-range", "1", "2"]
            self.list_hosts(self._before_growth() if self.grows else self.hosts)
        else:
            words += ["-H", self.hosts]
        if self.cell.fault == "full disk":
            words += ["--output-filename", f"{self.folder}/disk/output"]
        words += [sys.executable, str(HERE / "worker.py"), str(self.folder)]
        if self.cell.fault in ("full disk", "/dev/shm full"):
            mounts = (
                f"mount -t tmpfs -o size={faults.DISK_KIB}k tmpfs {self.folder}/disk && "
                f"mount -t tmpfs -o size={faults.SHM_KIB}k tmpfs /dev/shm && "
                'exec "$@"'
            )
            words = ["unshare", "--mount", "sh", "-c", mounts, "sh", *words]
        return words

    def _before_growth(self) -> str:
        *others, last = self.hosts.split(",")
        name, slots = last.rsplit(":", 1)
        fewer = [f"{name}:{int(slots) - 1}"] if int(slots) > 1 else []
        return ",".join([*others, *fewer])

    def _environment(self) -> dict[str, str]:
        env = {
            # Slots that fail often would rest for a minute.
            "HOROVOD_ELASTIC_SLOT_FAILURES": "100",
            "HOROVOD_HEARTBEAT_TIMEOUT_SECONDS": str(HEARTBEAT_S),
            "PYTHONPATH": f"{HERE}:{harness.RANK_SITE}",
        }
        if self.cell.tcp:
            env["HOROVOD_SHM"] = "0"
        if self.cell.fault == "full disk":
            disk = self.folder / "disk"
            env["HOROVOD_TIMELINE"] = f"{disk}/timeline.json"
            env["HOROVOD_STALL_REPORT"] = f"{disk}/report.txt"
        if self.cell.fault == "clock jump":
            env["LD_PRELOAD"] = str(faults.clock_library(self.folder))
            env["HVD_TEST_CLOCK"] = f"{self.folder}/clock"
        return env

    def list_hosts(self, hosts: str) -> None:
        new = self.folder / "hosts.new"
        new.write_text(hosts.replace(",", "\n") + "\n")
        new.rename(self.folder / "hosts")

    # -- the course of it

    def check(self) -> None:
        """Let it happen and see whether the promise is kept; AssertionError if not."""
        if self.cell.inject:
            self._check_inside()
        else:
            self._check_phase()
        self.job.assert_nothing_left()
        if self.ground:
            self.ground.assert_nothing_left()
        wrong = faults_in(entries_of(self.job))
        assert not wrong, "\n".join([*wrong, self.job.report()])

    def _check_inside(self) -> None:
        """Something happens to the victim at some point of its init, or has happened already."""
        if self.cell.elastic:
            self._round_since(0.0)
            self._some_commits_since(0.0)
            self._let_it_end()
            self.job.succeed()
            return
        self._let_it_end()
        code = self.job.wait()
        ends = {s.pid: s.text for s in entries_of(self.job)}
        last = [text for text in ends.values() if text.startswith(("ended with ", "shut down"))]
        is_killed = "signal=" in self.cell.inject
        assert len(last) == NP - is_killed or len(last) == NP, self.job.report()
        errors = [text for text in last if text.startswith("ended with ")]
        assert bool(code) == bool(errors), f"exit status {code}\n{self.job.report()}"
        assert len(errors) in (0, len(last)), self.job.report()
        assert all(self._is_typed(text) for text in errors), self.job.report()
        assert (self.folder / "trace").exists(), "strace has not run"

    @staticmethod
    def _is_typed(text: str) -> bool:
        init = "ended with ValueError: Horovod initialization failed"
        return text.startswith(("ended with HorovodInternalError: ", init))

    def _check_phase(self) -> None:
        fault = faults.FAULTS[self.cell.fault]
        scene = self._scene()
        fault.do(scene)
        struck_at = time.monotonic()
        (self.folder / "released").touch()
        os.write(self.gate, bytes(64))
        {
            plan.UNTOUCHED: self._is_untouched,
            plan.GOES_ON: self._goes_on,
            plan.ERROR: self._ends_with_errors,
            plan.BLAMED: self._is_blamed,
        }[self.cell.promise](scene, fault, struck_at)

    def close(self) -> None:
        self.job.close()
        os.close(self.gate)
        if self.wire:
            self.wire.last_host()

    def _scene(self) -> faults.Scene:
        """Wait until the victim stands where it shall be struck."""
        if self.grows:
            self.job.wait_for("may grow")
            self.list_hosts(self.hosts)
        if self.cell.phase == "shutdown":
            self._round_since(0.0)
            self._let_it_end()
        self.job.wait_for(f"at {self.cell.phase} |")
        if self.cell.phase == "init":
            self.job.wait_for("begins |", count=NP - 1)
        (victim,) = [s.pid for s in entries_of(self.job) if s.text == f"at {self.cell.phase}"]
        others = [pid for pid in self.workers() if pid != victim]
        launcher = self.job.process.pid
        return faults.Scene(self.folder, victim, others, launcher, self.wire)

    def workers(self) -> list[int]:
        """The processes that run worker.py now."""
        found = []
        for pid in self.job.members():
            if harness.command_line(pid)[:1] == [os.fsencode(sys.executable)]:
                found.append(pid)
        return found

    def _let_it_end(self) -> None:
        (self.folder / "stop").touch()

    def _round_since(self, at: float) -> None:
        """Wait until a round of all ranks has begun after this time."""
        text = f"round of {NP - 1 if self.grows and not at else NP}: "
        count = 1
        while True:
            count = max(count, len(self.job.wait_for(text, count=count)))
            ranks = {
                s.text.split(",")[0] for s in entries_of(self.job) if s.at > at and text in s.text
            }
            if len(ranks) == int(text.split()[2].rstrip(":")):
                return
            count += 1

    def _is_untouched(self, scene: faults.Scene, fault: faults.Fault, struck_at: float) -> None:
        if fault.undo:
            time.sleep(1.5 * HEARTBEAT_S)
            fault.undo(scene)
        if self.cell.phase == "reset" or self.grows:
            self._round_since(struck_at)
        if self.cell.phase != "shutdown":
            self._some_commits_since(struck_at)
        self._let_it_end()
        self.job.succeed()
        ends = [s.pid for s in entries_of(self.job) if s.text == "shut down"]
        assert scene.pid in ends, f"the struck rank has not come to its end\n{self.job.report()}"
        assert len(ends) == NP, self.job.report()

    def _goes_on(self, scene: faults.Scene, fault: faults.Fault, struck_at: float) -> None:
        if fault.undo:
            self._goes_on_without(scene, struck_at)
            fault.undo(scene)
        self._round_since(struck_at)
        self._let_it_end()
        self.job.succeed()

    def _some_commits_since(self, at: float) -> None:
        count = NP
        while True:
            count = max(count, len(self.job.wait_for("committed ", count=count)))
            since = [
                s for s in entries_of(self.job) if s.at > at and s.text.startswith("committed ")
            ]
            if len(since) >= NP:
                return
            count += NP - len(since)

    def _goes_on_without(self, scene: faults.Scene, struck_at: float) -> None:
        """Wait for commits of others after the fault."""
        count = 1
        while True:
            count = max(count, len(self.job.wait_for("committed ", count=count)))
            rounds = [
                s.at for s in entries_of(self.job) if s.at > struck_at and "round of" in s.text
            ]
            if rounds and any(
                s.at > rounds[0] and s.pid != scene.pid and s.text.startswith("committed")
                for s in entries_of(self.job)
            ):
                return
            count += 1

    def _ends_with_errors(self, scene: faults.Scene, fault: faults.Fault, struck_at: float) -> None:
        del struck_at
        who = [*scene.bystanders, scene.pid]
        if self.cell.fault == "SIGKILL" or fault.between_hosts:
            # Output of a rank on a host that is cut off does not arrive.
            who.remove(scene.pid)
        if fault.undo:
            self.job.wait_for("ended with ", count=NP - 1)
            fault.undo(scene)
        self.job.fail()
        ended = {s.pid: s.text for s in entries_of(self.job) if s.text.startswith("ended with ")}
        for pid in who:
            text = ended.get(pid, "")
            wanted = (
                "ended with ValueError: Horovod initialization failed"
                if self.cell.phase == "init"
                else "ended with HorovodInternalError: "
            )
            assert text.startswith(wanted), f"process {pid}: {text!r}\n{self.job.report()}"

    def _is_blamed(self, scene: faults.Scene, fault: faults.Fault, struck_at: float) -> None:
        del fault, struck_at
        assert self.job.fail() == 137, self.job.report()
        ends = {s.pid for s in entries_of(self.job) if s.text.startswith("done at step")}
        assert ends >= {scene.pid}, self.job.report()
        assert len(ends) == NP, self.job.report()
