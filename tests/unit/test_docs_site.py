"""The site of the documentation: its navigation has every page, and generated pages are up to date."""

from __future__ import annotations

import ast
import re
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import docs_check
import docs_notebook
import docs_pictures
import docs_site
import harness

DOCS = harness.ROOT / "docs"
PROJECT = tomllib.loads((harness.ROOT / "zensical.toml").read_text())["project"]
PAGES_MAX = 25
# Titles that users look for.
TITLES = {
    *("Migrating from Horovod", "Coming from DDP", "Troubleshooting", "Performance tuning"),
    *("FAQ", "Glossary"),
}


def entries(part: Any) -> dict[str, str]:
    """The titles of a part of the navigation, with their pages."""
    found: dict[str, str] = {}
    for entry in part:
        for title, content in entry.items():
            pages = {title: content} if isinstance(content, str) else entries(content)
            assert not found.keys() & pages.keys(), f"a title is there twice: {sorted(pages)}"
            found |= pages
    return found


def test_the_navigation_has_every_page_once_and_few_for_users() -> None:
    pages = list(entries(PROJECT["nav"]).values())
    expected = sorted(str(path.relative_to(DOCS)) for path in DOCS.rglob("*.md"))
    assert sorted(pages) == expected
    assert [next(iter(section)) for section in PROJECT["nav"]] == [
        "Start",
        "Guides",
        "Frameworks",
        "Clusters",
        "Reference",
        "Internals",
    ]
    user_pages = entries(PROJECT["nav"][:-1])
    assert len(user_pages) <= PAGES_MAX
    assert user_pages.keys() >= TITLES


def test_the_page_of_the_command_line_is_up_to_date() -> None:
    command = [harness.HOROVODRUN, "--help"]
    printed = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout
    page = docs_site.COMMAND_LINE.read_text()
    hint = "out of date; run `python build_backend/docs_site.py command-line`"
    assert page == docs_site.command_line(printed), hint
    options = [line.split()[0] for line in printed.splitlines() if line.startswith("  -")]
    assert len(options) > 50
    assert page.count("\n| `-") == len(options)


def test_the_page_of_the_metrics_is_up_to_date() -> None:
    text = docs_site.metrics_of_a_job(harness.HOROVODRUN)
    hint = "out of date; run `python build_backend/docs_site.py metrics`"
    page = docs_site.METRICS.read_text()
    assert page == docs_site.metrics(text), hint
    assert page.count("\n| `horovod_") == text.count("# HELP ") > 20


def test_links_out_of_the_pages_become_addresses(tmp_path: Path) -> None:
    docs = tmp_path / "docs"
    (docs / "internals").mkdir(parents=True)
    (tmp_path / "examples").mkdir()
    page = docs / "internals" / "a.md"
    page.write_text("[a](../b.md#c) [b](../../MAP.md#d) [c](../../examples) [d](https://e.org)\n")
    assert docs_site.staged(page, docs, "https://x.org") == (
        "[a](../b.md#c) [b](https://x.org/blob/main/MAP.md#d) [c](https://x.org/tree/main/examples) "
        "[d](https://e.org)\n"
    )


# The package itself is for `horovod.run`, which horovod.runner has; the core's names are for C; constants have no text.
NOT_IN_THE_REFERENCE = {"horovod", "horovod._core", "horovod.spark.conf"}


def test_the_reference_has_every_module_that_a_page_imports() -> None:
    imported: dict[str, str] = {}
    for page in [harness.ROOT / "README.md", *DOCS.rglob("*.md")]:
        for block in re.findall(r"^```python\n(.*?)^```$", page.read_text(), re.M | re.S):
            for node in ast.walk(ast.parse(block)):
                if isinstance(node, ast.Import):
                    imported |= dict.fromkeys((alias.name for alias in node.names), page.name)
                elif isinstance(node, ast.ImportFrom) and node.module:
                    imported[node.module] = page.name
    ours = {name for name in imported if re.match(r"horovod\b", name)}
    assert len(ours) > 15
    shown = {match["module"] for match in docs_site.API.finditer((DOCS / "api.md").read_text())}
    missing = ours - shown - NOT_IN_THE_REFERENCE
    assert not missing, {name: imported[name] for name in missing}


def test_every_module_of_the_reference_is_in_its_sources() -> None:
    text = (DOCS / "api.md").read_text()
    modules = [match["module"] for match in docs_site.API.finditer(text)]
    assert len(modules) > 20
    for module in modules:
        path = harness.ROOT / "python" / module.replace(".", "/")
        assert path.with_suffix(".py").exists() or (path / "__init__.py").exists(), module


def test_pictures_are_up_to_date() -> None:
    found = {path.name: path.read_text() for path in docs_pictures.PICTURES.iterdir()}
    assert found == docs_pictures.pictures(), "run `python build_backend/docs_pictures.py`"
    steps = docs_pictures.training_steps(docs_pictures.PERFORMANCE.read_text())
    assert len(steps) == 2
    assert all(len(values) == 3 for values in steps.values())


def test_the_notebook_has_the_steps_of_the_page() -> None:
    made = docs_notebook.notebook(docs_notebook.PAGE.read_text())
    assert docs_notebook.NOTEBOOK.read_text() == docs_notebook.text_of(made), (
        "run `python build_backend/docs_notebook.py`"
    )
    texts = ["".join(cell["source"]) for cell in made["cells"] if cell["cell_type"] == "markdown"]
    assert sum("```diff" in text for text in texts) == 6


def test_a_signature_that_the_reference_shows_wrongly_is_found() -> None:
    assert docs_check.differences("shlex", {"join": ["split_command"], "quote": ["s"]}) == []
    (wrong,) = docs_check.differences("shlex", {"join": ["words"], "quote": ["s"]})
    assert wrong == "shlex.join: the reference shows ['words'], Python has ['split_command']"
