"""No module of the Python package imports itself by way of others, not even inside a function or for types alone."""

import ast
from collections.abc import Iterator, Mapping
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

PYTHON = Path(__file__).resolve().parent.parent.parent / "python"


def imported(module: str, is_package: bool, text: str) -> Iterator[str]:
    """Names of what a module imports; of `from a import b` that is `a.b`."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = module.split(".")[: None if is_package else -1]
            above = above[: len(above) + 1 - node.level] if node.level else []
            base = ".".join([*above, *filter(None, [node.module])])
            yield from (f"{base}.{alias.name}" for alias in node.names)


def circle(sources: Mapping[str, tuple[bool, str]]) -> list[str]:
    """The modules of a circle, or none. A package above a module is loaded before it anyway, so it does not count."""
    graph: dict[str, set[str]] = {}
    for module, (is_package, text) in sources.items():
        graph[module] = set()
        for name in imported(module, is_package, text):
            while name and name not in sources:
                name = name.rpartition(".")[0]
            if name and not f"{module}.".startswith(f"{name}."):
                graph[module].add(name)
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        found: list[str] = error.args[1]
        return found
    return []


def test_the_package_has_no_circles():
    sources = {}
    for path in PYTHON.glob("horovod/**/*.py"):
        is_package = path.name == "__init__.py"
        place = path.parent if is_package else path.with_suffix("")
        module = ".".join(place.relative_to(PYTHON).parts)
        sources[module] = (is_package, path.read_text(encoding="utf-8"))
    assert len(sources) > 100
    assert circle(sources) == []


@pytest.mark.parametrize(
    "text", ["import p.a", "from p import a", "from . import a", "def f():\n  from .a import x"]
)
def test_a_circle_is_found(text):
    sources = {"p": (True, ""), "p.a": (False, "import p.b"), "p.b": (False, text)}
    assert set(circle(sources)) == {"p.a", "p.b"}
    assert circle(sources | {"p.a": (False, "from p import x")}) == []
