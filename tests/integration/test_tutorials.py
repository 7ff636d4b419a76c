"""The tutorials of the pages work step by step: changes that a page shows as a diff fit, and what they make trains."""

from __future__ import annotations

import re
from pathlib import Path

from test_pages import read_blocks

import harness


def apply(script: str, diff: str) -> str:
    """The script after the changes of a diff, whose parts are separated by `@@`."""
    for part in re.split(r"^@@\n", diff, flags=re.MULTILINE):
        lines = part.splitlines()
        assert all(line[:1] in "+- " for line in lines), part
        before = "".join(f"{line[1:]}\n" for line in lines if line[:1] != "+")
        after = "".join(f"{line[1:]}\n" for line in lines if line[:1] != "-")
        assert script.count(before) == 1, f"the script has to have these lines once:\n{before}"
        script = script.replace(before, after)
    return script


def losses(text: str) -> list[float]:
    """The losses of the lines `epoch N...: loss X` in the output."""
    return [float(loss) for loss in re.findall(r"epoch \d.*: loss (\S+)", text)]


def first_script(page: str) -> str:
    """The first Python block of a page."""
    return next(block.text for block in read_blocks(page) if block.language == "python")


def changes(page: str) -> list[str]:
    """The diffs of a page, in their order."""
    return [block.text for block in read_blocks(page) if block.language == "diff"]


def test_six_changes_make_the_script_distributed(jobs, tmp_path: Path) -> None:
    script = first_script("docs/index.md")
    path = tmp_path / "train.py"
    path.write_text(script)
    alone = losses(jobs(harness.Job(["python", path], cwd=tmp_path)).succeed().stdout)
    assert len(alone) == 3
    assert alone[2] < alone[0]

    steps = changes("docs/index.md")
    assert len(steps) == 6
    for step in steps:
        script = apply(script, step)
    path.write_text(script)
    (tmp_path / "model.pt").unlink()
    job = jobs(harness.python(2, path, cwd=tmp_path, forked=True)).succeed()
    together = losses(job.stdout)
    assert len(together) == 3, "rank 0 alone prints"
    assert together[2] < together[0]
    assert (tmp_path / "model.pt").exists()
    # The page shows this output.
    shown = re.findall(r"on 2 ranks: loss (\S+)", (harness.ROOT / "docs/index.md").read_text())
    assert len(shown) == 3


def test_a_killed_rank_is_replaced_as_the_page_says(jobs, tmp_path: Path) -> None:
    page = "docs/elastic.md"
    (change,) = changes(page)
    (tmp_path / "train.py").write_text(apply(first_script(page), change))
    blocks = [block.text for block in read_blocks(page) if block.language == "sh"]
    hosts = tmp_path / "hosts.sh"
    hosts.write_text(next(text for text in blocks if text.startswith("#!")))
    hosts.chmod(0o700)
    (command,) = (text for text in blocks if "--min-np 2" in text)
    job = jobs(harness.Job(["sh", "-c", command], cwd=tmp_path)).succeed()
    assert "killed by signal 9" in job.stderr, job.report()
    assert (tmp_path / "killed").exists()
    # An epoch may be printed again if the other rank had ended it before the failure.
    epochs = re.findall(r"epoch (\d) on 2 ranks: loss", job.stdout)
    assert sorted(set(epochs)) == ["0", "1", "2", "3", "4"], job.report()
