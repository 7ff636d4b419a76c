"""Lines of DistributedDataParallel that are left in a script raise the errors of docs/from-ddp.md."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

PAGE = Path(__file__).resolve().parents[2] / "docs" / "from-ddp.md"
VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


def model() -> Any:
    return torch.nn.Linear(2, 1)


NO_GROUP = "Default process group has not been initialized"
NO_RANK = "environment variable RANK expected, but not set"
LEFT: list[tuple[str, str, Callable[[], Any]]] = [
    (NO_GROUP, NO_GROUP, lambda: torch.nn.parallel.DistributedDataParallel(model())),
    (NO_GROUP, NO_GROUP, lambda: dist.all_reduce(torch.ones(2))),
    (NO_GROUP, NO_GROUP, lambda: torch.utils.data.DistributedSampler(torch.ones(4))),
    (NO_RANK, NO_RANK, lambda: dist.init_process_group("gloo")),
    (
        "object has no attribute 'module'",
        "object has no attribute 'module'",
        lambda: model().module,
    ),
    ("'no_sync'", "object has no attribute 'no_sync'", lambda: model().no_sync()),
    ("KeyError: 'LOCAL_RANK'", "KeyError: 'LOCAL_RANK'", lambda: os.environ["LOCAL_RANK"]),
    ("'RANK'", "KeyError: 'RANK'", lambda: os.environ["RANK"]),
    ("'WORLD_SIZE'", "KeyError: 'WORLD_SIZE'", lambda: os.environ["WORLD_SIZE"]),
]


def texts_of_the_page() -> set[str]:
    table = PAGE.read_text().partition("| error | left over |\n")[2].partition("\n\n")[0]
    cells = [line.split(" | ")[0] for line in table.splitlines()[1:]]
    return {text for cell in cells for text in re.findall(r"`([^`]+)`", cell)}


def test_each_error_of_the_page_is_tried() -> None:
    assert texts_of_the_page() == {shown for shown, _, _ in LEFT}


@pytest.mark.parametrize(("text", "use"), [(text, use) for _, text, use in LEFT])
def test_what_is_left_raises_the_error(text: str, use: Callable[[], Any], monkeypatch) -> None:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(Exception) as caught:  # noqa: PT011
        use()
    assert text in f"{type(caught.value).__name__}: {caught.value}"
