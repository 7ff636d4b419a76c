"""Which shard of the second tier CI runs for a commit, and since when the others have not run.

`.ci/landing` holds the number of landings. A shard follows from that number and the commits since it last changed, so
both eight commits in a row and eight landings in a row choose eight shards.
"""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

SHARDS = 8
FILE = ".ci/landing"
# The code that loom explores. After a change here CI runs loom at once, else only in loom's shard.
SEARCHED = re.compile(r"(^|/)(driver_lock|shm|sync)(\.rs$|/)")


@dataclass(frozen=True)
class Landing:
    """A commit that changed the number."""

    commit: str
    date: str
    number: int


@dataclass(frozen=True)
class Choice:
    """A shard, and the newest landing of each that the history knows."""

    shard: int
    reason: str
    last: dict[int, Landing] = field(default_factory=dict)

    def lines(self) -> list[str]:
        """The lines that CI prints."""
        lines = [f"shard {self.shard} of {SHARDS} runs: {self.reason}"]
        for shard in range(1, SHARDS + 1):
            if shard == self.shard:
                continue
            landing = self.last.get(shard)
            since = ": no landing of this history chose it"
            if landing:
                since = f" since {landing.date}, commit {landing.commit[:12]}"
            lines.append(f"  shard {shard} has not run{since}")
        return lines


def choose(root: Path) -> Choice:
    """The shard of the commit that is checked out."""
    number = read_number(root)
    known = history(root)
    # Commits of merged branches do not count: the shards follow the commits that main had.
    count = ["rev-list", "--count", "--first-parent"]
    after = _git(root, *count, f"{known[0].commit}..HEAD") if known else ""
    commits = int(after) if after else 0
    reason = f"landing {number} and {commits} commits since"
    if not known:
        reason += " (there is no history of it)"
    last: dict[int, Landing] = {}
    for landing in known:
        last.setdefault(landing.number % SHARDS + 1, landing)
    return Choice((number + commits) % SHARDS + 1, reason, last)


def loom_is_due(root: Path) -> tuple[bool, str]:
    """Whether the code that loom explores has changed since the landing before this commit, and the reason to print."""
    head = _git(root, "rev-parse", "HEAD")
    before = [landing for landing in history(root) if landing.commit != head]
    if not before or not head:
        return True, "runs, as this history knows no earlier landing"
    base = before[0].commit
    changed = _git(root, "diff", "--name-only", base, "HEAD").splitlines()
    found = [path for path in changed if SEARCHED.search(path)]
    if found:
        return True, f"runs, as {found[0]} has changed since {base[:12]}"
    return False, f"runs in its shard; nothing that it searches has changed since {base[:12]}"


def read_number(root: Path) -> int:
    """The number in the file."""
    text = (root / FILE).read_text().strip()
    if not text.isdigit():
        raise SystemExit(f"{FILE} says {text!r}: expected the number of landings; see CONTRIBUTING")
    return int(text)


def history(root: Path) -> list[Landing]:
    """The commits that changed the number, newest first; in a shallow clone only those that it has."""
    shallow = _git(root, "rev-parse", "--is-shallow-repository") == "true"
    found = []
    for line in _git(root, "log", "--format=%H %cs %P", "--", FILE).splitlines():
        commit, date, *parents = line.split()
        # The oldest commit of a shallow clone seems to have created every file.
        if shallow and not parents:
            continue
        text = _git(root, "show", f"{commit}:{FILE}").strip()
        if text.isdigit():
            found.append(Landing(commit, date, int(text)))
    return found


def next_landing(root: Path) -> None:
    """Add one and commit that alone."""
    number = read_number(root) + 1
    (root / FILE).write_text(f"{number}\n")
    command = ["git", "commit", "--quiet", "--only", FILE, "-m", f"Landing {number}"]
    subprocess.run(command, cwd=root, check=True)
    print(f"landing {number} is committed; CI will run shard {choose(root).shard}")


def _git(root: Path, *words: str) -> str:
    """The output of git; empty if git, the repository or the requested object is missing."""
    try:
        done = subprocess.run(
            ["git", *words], cwd=root, capture_output=True, text=True, timeout=60, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


if __name__ == "__main__":
    if sys.argv[1:] != ["next"]:
        sys.exit(f"usage: landings.py next, not {sys.argv[1:]}")
    next_landing(Path(__file__).resolve().parent.parent)
