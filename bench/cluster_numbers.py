"""Cost of jobs on Spark and Ray, and their time to recover, in one table with limits and verdicts."""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from tables import MISSED, REACHED

BENCH = Path(__file__).parent


class Row(NamedTuple):
    """A figure and what it may be at most, or at least."""

    what: str
    figure: float
    relation: str
    limit: float
    unit: str

    def is_reached(self) -> bool:
        """Whether the figure keeps to its limit."""
        if self.relation == "≤":
            return self.figure <= self.limit
        return self.figure >= self.limit

    def markdown(self) -> str:
        """As a row of a table."""
        mark = REACHED if self.is_reached() else MISSED
        limit = f"{self.relation} {self.limit:.2f}"
        return f"| {self.what} | {self.figure:.2f} | {limit} | {self.unit} | {mark} |"


def rows_of_engine(engine: str, name: str, figures: dict[str, Any]) -> Iterator[Row]:
    """Those of `clusters.py`."""
    large = figures["results_of_100_MB_s"][name]
    yield Row(f"{engine}: empty function, more than horovod.run", figures["added_s"], "≤", 2, "s")
    yield Row(f"{engine}: 100 MB of results from each rank", large, "≤", 5, "s")
    yield Row(f"{engine}: step time / horovodrun's", figures["step_ratio"], "≤", 1.03, "")


def rows_of_estimator(rates: dict[str, list[float]]) -> Iterator[Row]:
    """Those of `estimator_rows.py`: the median of each round's quotient."""
    for kind in ("shuffled", "in order"):
        pairs = zip(rates[kind], rates["plain"], strict=True)
        ratio = statistics.median(ours / plain for ours, plain in pairs)
        yield Row(f"Estimator, {kind}: rows per s / plain loop's", ratio, "≥", 1, "")


def rows_of_recovery(figures: dict[str, Any]) -> Iterator[Row]:
    """Those of `recovery.py`."""
    limit = figures["imports_s"] + 10
    for kill in ("python worker", "executor"):
        whole = figures[kill]["whole again"]
        yield Row(f"Elastic: full size after a killed {kill}", whole, "≤", limit, "s")


def last_json(text: str) -> Any:
    """The JSON that a program printed last; engines may print lines before it."""
    lines = text.splitlines()
    starts = [number for number, line in enumerate(lines) if line.startswith("{")]
    if not starts:
        raise SystemExit(f"expected JSON in the output, got {text[-500:]!r}")
    return json.loads("\n".join(lines[starts[-1] :]))


def measure(program: str, *args: str) -> Any:
    """The result of a program of this folder."""
    print(f"running {program} {' '.join(args)}", file=sys.stderr)
    command = [sys.executable, str(BENCH / program), *args]
    return last_json(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout)


def main() -> None:
    """Measure everything, and print the table; the status is 1 if a limit is missed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", default="5", help="of clusters.py and estimator_rows.py")
    rounds = ["--rounds", parser.parse_args().rounds]
    rows = [
        *rows_of_engine("Spark", "horovod.spark.run", measure("clusters.py", "spark", *rounds)),
        *rows_of_engine("Ray", "RayExecutor", measure("clusters.py", "ray", *rounds)),
        *rows_of_estimator(measure("estimator_rows.py", *rounds)),
        *rows_of_recovery(measure("recovery.py")),
    ]
    print("| | measured | limit | unit | kept |\n| --- | ---: | ---: | --- | --- |")
    for row in rows:
        print(row.markdown())
    sys.exit(not all(row.is_reached() for row in rows))


if __name__ == "__main__":
    main()
