"""Puts faults into a copy of the product, one by one, and prints which test notices each (`table.py` lists them).

    python tests/seeded_faults/run.py                    # all, with the tests that are expected to fail
    python tests/seeded_faults/run.py --only wrong-root  # one
    python tests/seeded_faults/run.py --all              # where those pass: all tests of `make test`
    python tests/seeded_faults/run.py --list

The copy is a git worktree of what is checked out, with changes to tracked files. It and what is built in it stay in
`target/seeded-faults`, so a second run builds little. Exit status 1: some fault was not noticed.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import importlib.metadata
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from table import FAULTS, Fault, Python, Ranks, Rust, Tests

ROOT = Path(__file__).resolve().parents[2]
PLACE = Path(os.environ.get("CARGO_TARGET_DIR", ROOT / "target")) / "seeded-faults"
TREE = PLACE / "tree"
VENV = PLACE / "venv"
PYTHON = VENV / "bin" / "python"
SITE = VENV / Path(sysconfig.get_path("purelib")).relative_to(sys.prefix)

# Environments beside this one are not in the copy.
MXNET = {"HVD_MXNET_PYTHON": os.environ.get("HVD_MXNET_PYTHON", f"{ROOT}/.venv-mxnet/bin/python")}

# Only a fault that makes tests hang reaches these; tests have limits of their own.
TESTS_LIMIT_S = 900.0
BUILD_LIMIT_S = 3600.0
ALL_LIMIT_S = 7200.0
TAIL_LINES = 25
# Each fault is built anew, and its tests are short.
OPTIMISED = ("kernels", "collectives", "gpu", "protocol", "sim", "transport")
UNOPTIMISED = [
    word
    for crate in OPTIMISED
    for word in ("--config", f"profile.dev.package.horovod-{crate}.opt-level=0")
]
MISSED, NOT_RUN = "NOT NOTICED", "NOT RUN"
# How pytest, in a rank and outside, and nextest name a test that fails.
FAILED = re.compile(r"(\[\d+\]<stdout>:)?FAILED |\s+(FAIL|TIMEOUT|SIG\w+) \[")


class Unusable(Exception):
    """A fault without a verdict: the copy does not build, or its tests cannot be run."""


@dataclass(frozen=True)
class Outcome:
    """The outcome of one fault."""

    fault: Fault
    caught_by: str
    """Tests, MISSED or NOT_RUN."""
    seconds: float


def main() -> int:
    """Run the faults that were asked for; the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--list", action="store_true", help="print the table and end")
    parser.add_argument(
        "--only", action="append", metavar="NAME", help="this fault; may be repeated"
    )
    parser.add_argument(
        "--all", action="store_true", help="where expected tests pass, run all tests"
    )
    parser.add_argument(
        "--sound", action="store_true", help="run the expected tests without any fault"
    )
    given = parser.parse_args()
    chosen = [fault for fault in FAULTS if not given.only or fault.name in given.only]
    if unknown := set(given.only or ()) - {fault.name for fault in FAULTS}:
        parser.error(f"no fault is named {', '.join(sorted(unknown))}; --list prints their names")
    if given.list:
        for fault in chosen:
            print(f"{fault.name}: {fault.does} ({fault.file}); noticed by {describe(fault.tests)}")
        return 0
    # As Ctrl-C: the fault is taken back, and what runs is ended.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    make_tree()
    # Those that need no build first, those that need a wheel last.
    chosen.sort(key=lambda fault: (fault.needs_wheel, fault.file.startswith("crates/")))
    if given.sound:
        return sound(chosen)
    outcomes = []
    for fault in chosen:
        print(f"--- {fault.name}: {fault.does}", flush=True)
        begin = time.monotonic()
        try:
            with applied(fault):
                caught_by = catch(fault, given.all)
        except Unusable as error:
            print(f"    {error}")
            caught_by = NOT_RUN
        outcomes.append(Outcome(fault, caught_by or MISSED, time.monotonic() - begin))
        print(f"    {outcomes[-1].caught_by}", flush=True)
    return report(outcomes)


def report(outcomes: Sequence[Outcome]) -> int:
    """Print the table; the exit status."""
    width = max(len(outcome.fault.name) for outcome in outcomes)
    print()
    for outcome in outcomes:
        print(f"{outcome.fault.name:{width}}  {outcome.seconds:6.0f} s  {outcome.caught_by}")
    missed = sum(outcome.caught_by in (MISSED, NOT_RUN) for outcome in outcomes)
    print(f"{len(outcomes) - missed} of {len(outcomes)} faults were noticed")
    return 1 if missed else 0


def sound(chosen: Sequence[Fault]) -> int:
    """Run the expected tests on the product as it is: each has to pass."""
    if any(not isinstance(fault.tests, Rust) for fault in chosen):
        make_environment()
    bad = 0
    for tests in dict.fromkeys(fault.tests for fault in chosen):
        failed = run_tests(tests)
        bad += failed
        print(f"{'FAILS' if failed else 'passes'}  {describe(tests)}", flush=True)
    return 1 if bad else 0


# ---- the copy


def make_tree() -> None:
    """Bring the copy to what is checked out here. Nobody else may use it until this process ends."""
    PLACE.mkdir(parents=True, exist_ok=True)
    # Held open until then.
    lock = os.open(PLACE / "lock", os.O_CREAT | os.O_RDWR, 0o644)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise SystemExit(f"{PLACE} is in use by another run; wait for its end") from None
    commit = commit_of(ROOT)
    output("git", "worktree", "prune")
    if TREE.exists():
        output("git", "reset", "--quiet", "--hard", commit, cwd=TREE)
    else:
        output("git", "worktree", "add", "--quiet", "--detach", os.fspath(TREE), commit)
    if untracked := output("git", "ls-files", "--others", "--exclude-standard"):
        print(f"not in the copy, as git does not know them: {' '.join(untracked.split())}")
    for stamps in (ROOT / ".stamps").glob("gpu-double"):
        shutil.copytree(stamps, TREE / ".stamps" / stamps.name, dirs_exist_ok=True)


def commit_of(root: Path) -> str:
    """A commit of what is checked out there, with changes to tracked files."""
    # `git stash create` fails where files have another date and the same text as before.
    output("git", "status", "--porcelain", "--untracked-files=no", cwd=root)
    return output("git", "stash", "create", cwd=root) or output(
        "git", "rev-parse", "HEAD", cwd=root
    )


def make_environment() -> None:
    """An environment that takes everything from this one but the package, of which it has a copy."""
    if not PYTHON.exists():
        run([sys.executable, "-m", "venv", "--without-pip", VENV], BUILD_LIMIT_S)
        (SITE / "everything-else.pth").write_text(sysconfig.get_path("purelib") + "\n")
    shutil.rmtree(SITE / "horovod", ignore_errors=True)
    for path in importlib.metadata.files("horovod") or ():
        source = Path(path.locate())
        if source.suffix != ".pyc":
            target = SITE / path
            target.parent.mkdir(parents=True, exist_ok=True)
            target.unlink(missing_ok=True)
            shutil.copy2(source, target)
    # The sources may be newer than what is installed here.
    shutil.copytree(TREE / "python" / "horovod", SITE / "horovod", dirs_exist_ok=True)


@contextlib.contextmanager
def applied(fault: Fault):
    """The copy with this fault in it; the fault is taken back at the end."""
    file = TREE / fault.file
    before = file.read_text()
    if before.count(fault.old) != 1:
        raise SystemExit(
            f"{fault.name}: expected the text once in {fault.file}, found it {before.count(fault.old)} times:\n"
            f"{fault.old}"
        )
    file.write_text(before.replace(fault.old, fault.new))
    try:
        yield
    finally:
        file.write_text(before)


def catch(fault: Fault, with_all: bool) -> str:
    """Which tests notice the fault that is in the copy; empty: none."""
    if not isinstance(fault.tests, Rust):
        make_environment()
    if fault.needs_wheel:
        install_wheel()
    if run_tests(fault.tests):
        return describe(fault.tests)
    return run_all(fault) if with_all else ""


def install_wheel() -> None:
    """Build the copy's wheel and install it in its environment."""
    build = [sys.executable, "build_backend/horovod_build.py", "quick", "dist"]
    run(build, BUILD_LIMIT_S, check=True)
    [wheel] = (TREE / "dist").glob("horovod-*.whl")
    words = [sys.executable, "-m", "pip", "--python", PYTHON, "install", "--quiet", "--no-deps"]
    run([*words, "--ignore-installed", wheel], BUILD_LIMIT_S, check=True)


# ---- tests


def describe(tests: Tests) -> str:
    """The tests as somebody would run them."""
    if isinstance(tests, Rust):
        return f"cargo nextest run -p {tests.crate} {' '.join(tests.names)}"
    if isinstance(tests, Python):
        return " ".join(f"tests/{node}" for node in tests.nodes)
    where = f" [{tests.environment}]" if tests.environment else ""
    return f"{' '.join(f'tests/{node}' for node in tests.nodes)} on {tests.np} ranks{where}"


def run_tests(tests: Tests) -> bool:
    """Whether any of these tests fails."""
    if isinstance(tests, Rust):
        words = ["cargo", "nextest", "run", "--locked", *UNOPTIMISED, *package_of(tests)]
        if are_unit_tests(tests):
            words.append("--lib")
        run([*words, "--no-run"], BUILD_LIMIT_S, check=True)
        # 100: tests failed. Others: none was found, or it could not be run.
        return failed([*words, *tests.names], (100,))
    pytest = [PYTHON, "-m", "pytest", "-x", "-q", "--tb=short", "-p", "no:cacheprovider"]
    nodes = [f"tests/{node}" for node in tests.nodes]
    if isinstance(tests, Python):
        return failed([*pytest, *nodes], (1,), MXNET)
    variables = variables_of(tests)
    launcher = [VENV / "bin" / "horovodrun", "-np", str(tests.np)]
    # A rank may also be killed by a fault, or by the launcher because another one was.
    return failed([*launcher, *pytest, *nodes], (1, *range(128, 160)), variables)


def package_of(tests: Rust) -> list[str]:
    """Arguments of cargo for the crate, which may be a workspace of its own."""
    crate = f"crates/{tests.crate}"
    if (TREE / crate / "Cargo.lock").exists():
        return ["--manifest-path", f"{crate}/Cargo.toml"]
    return ["-p", tests.crate]


def are_unit_tests(tests: Rust) -> bool:
    """Whether they lie beside the code: then nothing else of the crate need be built."""
    sources = [file.read_text() for file in (TREE / "crates" / tests.crate / "src").rglob("*.rs")]
    return all(any(f"fn {name}" in source for source in sources) for name in tests.names)


def variables_of(tests: Ranks) -> Mapping[str, str]:
    """The variables of the folder's environment."""
    if not tests.environment:
        return {}
    described = (TREE / "tests" / tests.nodes[0]).parent / "environments.json"
    found: dict[str, str] = json.loads(described.read_text())[tests.environment]["variables"]
    return found


def run_all(fault: Fault) -> str:
    """Run what `make test` runs; which half fails, or nothing."""
    make_environment()
    if fault.file.startswith("crates/"):
        install_wheel()
        rust = ["cargo", "nextest", "run", "--locked", "--workspace"]
        if failed(rust, (100,), limit_s=ALL_LIMIT_S):
            return "make test-rust"
    if failed([PYTHON, "-m", "pytest", "-x", "tests"], (1,), MXNET, limit_s=ALL_LIMIT_S):
        return "make test-python"
    return ""


def failed(
    command: Sequence[str | Path],
    codes: Sequence[int],
    variables: Mapping[str, str] | None = None,
    limit_s: float = TESTS_LIMIT_S,
) -> bool:
    """Whether tests failed, which ends with one of `codes`, or hung; Unusable if none ran."""
    code, lines = run(command, limit_s, variables)
    if code is None:
        print(f"    hung for {limit_s:.0f} s")
        return True
    if code in codes:
        printed = [line.strip() for line in lines if FAILED.match(line)]
        print(f"    {(printed or lines)[-1][:150]}")
        return True
    if code != 0 or not any("passed" in line for line in lines):
        raise Unusable(f"{' '.join(map(str, command))} ended with {code}:\n{tail_of(lines)}")
    return False


# ---- processes


def run(
    command: Sequence[str | Path],
    limit_s: float,
    variables: Mapping[str, str] | None = None,
    check: bool = False,
) -> tuple[int | None, list[str]]:
    """Run in the copy; the exit status, None when the limit was reached, and what was printed."""
    env = {
        **os.environ,
        "PATH": f"{VENV / 'bin'}:{os.environ.get('PATH', '')}",
        "PYTHONPATH": os.fspath(TREE / "tests" / "rank_site"),
        # Python compares .pyc files by size and second of the source, which a fault may leave as they are.
        "PYTHONDONTWRITEBYTECODE": "1",
        "CARGO_TARGET_DIR": os.fspath(PLACE / "cargo"),
        **(variables or {}),
    }
    with subprocess.Popen(
        [os.fspath(word) for word in command],
        cwd=TREE,
        env=env,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    ) as process:
        try:
            printed, _ = process.communicate(timeout=limit_s)
        except subprocess.TimeoutExpired:
            return None, []
        finally:
            # Also what a launcher that crashed has left.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    lines = printed.decode(errors="replace").splitlines() or [""]
    if check and process.returncode != 0:
        raise Unusable(f"{' '.join(map(str, command))} failed:\n{tail_of(lines)}")
    return process.returncode, lines


def tail_of(lines: Sequence[str]) -> str:
    """The end of an output, for a message."""
    return "\n".join(lines[-TAIL_LINES:])


def output(*command: str, cwd: Path = ROOT) -> str:
    """The output of a short command."""
    done = subprocess.run(command, cwd=cwd, check=True, stdout=subprocess.PIPE, text=True)
    return done.stdout.strip()


if __name__ == "__main__":
    sys.exit(main())
