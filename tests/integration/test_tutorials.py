"""The tutorials of the pages work step by step: changes that a page shows as a diff fit, and what they make trains."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

from test_pages import read_blocks

import docs_notebook
import harness
from docs_notebook import apply


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


def test_the_notebook_trains_in_its_process_and_on_two_ranks(jobs, tmp_path: Path) -> None:
    cells = json.loads(docs_notebook.NOTEBOOK.read_text())["cells"]
    code = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    path = tmp_path / "notebook.py"
    path.write_text("\n\n".join(code))
    job = jobs(harness.Job([sys.executable, path], cwd=tmp_path, forked=True)).succeed()
    assert len(losses(job.stdout)) == 6
    assert job.stdout.count("on 2 ranks: loss") == 3


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
