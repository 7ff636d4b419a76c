"""Writes the notebook of docs/index.md's six steps: `python build_backend/docs_notebook.py`.

Each step of the page is a cell of text. The script before and after all steps is a cell of code: a function, which the
notebook calls in its own process, then on two ranks.
"""

from __future__ import annotations

import json
import re
import textwrap
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "index.md"
NOTEBOOK = ROOT / "examples" / "notebooks" / "six_steps.ipynb"
_STEP = re.compile(r"^\*\*\d\. .*?^```diff\n(?P<diff>.*?)^```\n", re.MULTILINE | re.DOTALL)
_SCRIPT = re.compile(r"^```python\n(.*?)^```\n", re.MULTILINE | re.DOTALL)

_HEAD = """\
# From one process to many in six steps

This function trains on one process:"""


def apply(script: str, diff: str) -> str:
    """The script after the changes of a diff, whose parts are separated by `@@`."""
    for part in re.split(r"^@@\n", diff, flags=re.MULTILINE):
        lines = part.splitlines()
        if not all(line[:1] in "+- " for line in lines):
            raise ValueError(f"lines of a diff begin with +, - or a space:\n{part}")
        before = "".join(f"{line[1:]}\n" for line in lines if line[:1] != "+")
        after = "".join(f"{line[1:]}\n" for line in lines if line[:1] != "-")
        if script.count(before) != 1:
            raise ValueError(f"the script has to have these lines once:\n{before}")
        script = script.replace(before, after)
    return script


def notebook(page: str) -> dict[str, Any]:
    """The notebook of a page with a script and steps."""
    scripts = _SCRIPT.findall(page)
    script = scripts[0]
    cells = [_text(_HEAD), _code(_function(script)), _code("train()")]
    for step in _STEP.finditer(page):
        script = apply(script, step["diff"])
        cells.append(_text(step[0]))
    cells += [
        _text("After these changes the function is:"),
        _code(_function(script)),
        _text("`horovod.run` starts two ranks, which call `train`. Rank 0 prints the losses."),
        _code("import horovod\n\nhorovod.run(train, num_proc=2)"),
    ]
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    metadata = {
        "kernelspec": kernel,
        "written_by": "build_backend/docs_notebook.py from docs/index.md",
    }
    return {"cells": cells, "metadata": metadata, "nbformat": 4, "nbformat_minor": 4}


def text_of(made: dict[str, Any]) -> str:
    """The file."""
    return json.dumps(made, indent=1, ensure_ascii=False) + "\n"


def _function(script: str) -> str:
    return "def train():\n" + textwrap.indent(script, "    ")


def _text(text: str) -> dict[str, Any]:
    return {"cell_type": "markdown", "metadata": {}, "source": _lines(text)}


def _code(text: str) -> dict[str, Any]:
    cell = {"cell_type": "code", "execution_count": None, "metadata": {}, "outputs": []}
    return {**cell, "source": _lines(text)}


def _lines(text: str) -> list[str]:
    return text.strip().splitlines(keepends=True)


if __name__ == "__main__":
    NOTEBOOK.parent.mkdir(exist_ok=True)
    NOTEBOOK.write_text(text_of(notebook(PAGE.read_text())))
