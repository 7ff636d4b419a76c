"""`docs/names.md` tells the truth: its names exist, its tests exist, and no public name is missing.

Those of other frameworks than PyTorch are imported by the tests of these, in ranks: `rank_site/documented_names.py`.
"""

from __future__ import annotations

import ast
import importlib
import re
from pathlib import Path

import pytest

import horovod.torch as hvd

ROOT = Path(__file__).resolve().parents[2]
ROWS = re.findall(r"^\| `([^`]+)` \| (.+) \|$", (ROOT / "docs/names.md").read_text(), re.MULTILINE)
ELSEWHERE = ("horovod.tensorflow.", "horovod.keras.", "horovod.jax.", "horovod.mxnet.")


def find(name: str) -> object:
    """Import what a row names: an attribute of horovod.torch, or a full path."""
    words = name.split(".")
    if words[0] == "DistributedOptimizer":
        from horovod.torch.optimizer import _DistributedOptimizer

        return _attribute_or_annotation(_DistributedOptimizer, words[1:])
    if words[0] != "horovod":
        words = ["horovod", "torch", *words]
    for length in range(len(words), 0, -1):
        try:
            found: object = importlib.import_module(".".join(words[:length]))
        except ModuleNotFoundError:
            continue
        for word in words[length:]:
            found = getattr(found, word)
        return found
    raise AssertionError(name)


def _attribute_or_annotation(cls: type, words: list[str]) -> object:
    if not words:
        return cls
    assert any(
        words[0] in vars(base) or words[0] in getattr(base, "__annotations__", {})
        for base in cls.__mro__
    ), f"{cls.__name__} has no {words[0]}"
    return cls


@pytest.mark.parametrize(("name", "where"), ROWS, ids=[name for name, _ in ROWS])
def test_name_exists_and_so_does_its_test(name: str, where: str) -> None:
    if where.startswith("absent: "):
        with pytest.raises((AttributeError, ImportError)):
            find(name)
        return
    if not name.startswith(ELSEWHERE):
        find(name)
    path, test = where.strip("`").split("::")
    assert re.search(rf"^ *def {test}\(", (ROOT / path).read_text(), re.MULTILINE), where


def test_no_public_name_is_missing() -> None:
    listed = {name for name, _ in ROWS}
    assert set(hvd.__all__) <= listed
    assert len(listed) == len(ROWS), "a name is listed twice"


# Frequent names: no adapter may give one of them to something else.
MARKS = {"step", "phase", "stats"}


@pytest.mark.parametrize(
    "adapter", ["torch", "tensorflow", "tensorflow/keras", "keras", "jax", "mxnet", "numpy"]
)
def test_the_marks_of_a_script_are_the_same_functions_in_every_adapter(adapter: str) -> None:
    body = ast.parse((ROOT / "python/horovod" / adapter / "__init__.py").read_text()).body
    shared, others = set(), set()
    for node in body:
        match node:
            case ast.ImportFrom(module="horovod.common.api"):
                shared |= {alias.asname or alias.name for alias in node.names}
            case ast.ImportFrom() | ast.Import():
                others |= {alias.asname or alias.name for alias in node.names}
            case ast.FunctionDef() | ast.ClassDef():
                others.add(node.name)
            case ast.Assign():
                others |= {name.id for name in node.targets if isinstance(name, ast.Name)}
    assert not MARKS & others
    helpers = {"Checkpoint", "average_metrics", "check_finite", "global_gradient_norm"}
    everywhere = MARKS | helpers | {"on_rank_zero", "rank_logger"}
    assert "*" in shared or shared >= everywhere, sorted(everywhere - shared)
