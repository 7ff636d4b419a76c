"""Which shard CI runs for a commit, in real repositories: whole, cut off, and none."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

import harness
import landings


class Repository:
    """A repository in which tests make commits and landings."""

    def __init__(self, root: Path) -> None:
        self.root = root
        (root / ".ci").mkdir(parents=True)
        self.git("init", "--quiet", "--initial-branch=main")
        self.git("config", "user.name", "a")
        self.git("config", "user.email", "a@b.example")
        self.land(1)

    def git(self, *words: str) -> str:
        done = subprocess.run(
            ["git", *words],
            cwd=self.root,
            capture_output=True,
            text=True,
            timeout=harness.LIMIT_S,
            check=True,
        )
        return done.stdout.strip()

    def commit(self, path: str = "file") -> str:
        place = self.root / path
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(place.read_text() + "x" if place.exists() else "x")
        self.git("add", ".")
        self.git("commit", "--quiet", "-m", path)
        return self.git("rev-parse", "HEAD")

    def land(self, number: int) -> str:
        (self.root / landings.FILE).write_text(f"{number}\n")
        self.git("add", ".")
        self.git("commit", "--quiet", "-m", f"Landing {number}")
        return self.git("rev-parse", "HEAD")

    def shard(self) -> int:
        return landings.choose(self.root).shard


@pytest.fixture
def repository(tmp_path: Path) -> Repository:
    return Repository(tmp_path / "repository")


def test_eight_commits_choose_eight_shards(repository: Repository) -> None:
    found = [repository.shard()]
    for _ in range(landings.SHARDS - 1):
        repository.commit()
        found.append(repository.shard())
    assert sorted(found) == [1, 2, 3, 4, 5, 6, 7, 8]


def test_eight_landings_choose_eight_shards_whatever_lies_between(
    repository: Repository, capsys: pytest.CaptureFixture[str]
) -> None:
    found = []
    for commits in (0, 3, 1, 0, 7, 2, 1, 4):
        for _ in range(commits):
            repository.commit()
        landings.next_landing(repository.root)
        found.append(repository.shard())
    assert sorted(found) == [1, 2, 3, 4, 5, 6, 7, 8]
    assert capsys.readouterr().out.splitlines()[-1].endswith(f"CI will run shard {found[-1]}")
    assert repository.git("status", "--porcelain") == ""


def test_next_landing_commits_nothing_else(repository: Repository) -> None:
    (repository.root / "other").write_text("not yet")
    repository.git("add", "other")
    landings.next_landing(repository.root)
    assert repository.git("show", "--format=", "--name-only", "HEAD") == landings.FILE


def test_it_tells_since_when_the_others_have_not_run(repository: Repository) -> None:
    first = repository.git("rev-parse", "HEAD")
    second = repository.land(2)
    lines = landings.choose(repository.root).lines()
    date = repository.git("show", "--no-patch", "--format=%cs", "HEAD")
    assert lines[0] == "shard 3 of 8 runs: landing 2 and 0 commits since"
    assert f"  shard 2 has not run since {date}, commit {first[:12]}" in lines
    assert "  shard 1 has not run: no landing of this history chose it" in lines
    assert len(lines) == landings.SHARDS
    # After nine more landings it names the newest that chose the shard.
    for number in range(3, 12):
        repository.land(number)
    newest = {n: landing.commit for n, landing in landings.choose(repository.root).last.items()}
    assert second not in newest.values()
    assert sorted(newest) == [1, 2, 3, 4, 5, 6, 7, 8]


def test_a_clone_that_is_cut_off(repository: Repository, tmp_path: Path) -> None:
    for _ in range(3):
        repository.commit()
    cut = tmp_path / "cut"
    repository.git("clone", "--quiet", "--depth=2", f"file://{repository.root}", str(cut))
    choice = landings.choose(cut)
    assert choice.shard == 2
    assert "no history" in choice.lines()[0]
    assert landings.loom_is_due(cut)[0]


def test_without_a_repository(repository: Repository, tmp_path: Path) -> None:
    place = tmp_path / "archive"
    (place / ".ci").mkdir(parents=True)
    (place / landings.FILE).write_text("11\n")
    assert landings.choose(place).shard == 4
    assert landings.loom_is_due(place)[0]


def test_what_is_no_number(repository: Repository) -> None:
    (repository.root / landings.FILE).write_text("many\n")
    with pytest.raises(SystemExit, match="says 'many': expected the number of landings"):
        landings.choose(repository.root)


@pytest.mark.parametrize(
    ("path", "is_searched"),
    [
        ("crates/horovod-engine/src/engine/driver_lock.rs", True),
        ("crates/horovod-engine/src/engine/driver_lock/model.rs", True),
        ("crates/horovod-transport/src/shm/ring.rs", True),
        ("crates/horovod-transport/src/sync.rs", True),
        ("python/horovod/tensorflow/sync_batch_norm.py", False),
        ("tests/private_shm.py", False),
    ],
)
def test_loom_runs_where_what_it_searches_has_changed(
    path: str, is_searched: bool, repository: Repository
) -> None:
    repository.commit(path)
    # The landing itself is not what was landed before.
    repository.land(2)
    is_due, why = landings.loom_is_due(repository.root)
    assert is_due == is_searched
    assert (path in why) == is_searched
    repository.commit()
    repository.land(3)
    assert not landings.loom_is_due(repository.root)[0]


def test_the_searched_files_are_in_this_repository() -> None:
    paths = [p.relative_to(harness.ROOT).as_posix() for p in harness.ROOT.glob("crates/**/*.rs")]
    found = [path for path in paths if landings.SEARCHED.search(path)]
    for name in ("driver_lock.rs", "shm/", "sync.rs"):
        assert any(name in path for path in found), found
