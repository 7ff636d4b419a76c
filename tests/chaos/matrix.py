"""Runs the whole plan, or part of it, and prints what became of each cell: `make chaos`.

python tests/chaos/matrix.py [--fault TEXT] [--phase TEXT] [--kind elastic|static] [--torch] [--part K/N]
    [--json FILE]
"""

from __future__ import annotations

import argparse
import atexit
import functools
import json
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import cells
import faults
import ground
import plan


@functools.cache
def made_ground() -> ground.Ground:
    made = ground.Ground()
    atexit.register(made.close)
    return made


def attempt(cell: plan.Cell) -> dict[str, object]:
    """Run one cell; what became of it."""
    row = {"cell": cell.name, "fault": cell.fault, "phase": cell.phase, "promise": cell.promise}
    row["kind"] = "elastic" if cell.elastic else "static"
    fault = faults.of(cell)
    if reason := faults.why_not(fault):
        return {**row, "result": "not run", "text": reason, "seconds": 0.0}
    begin = time.monotonic()
    result, text = "kept", ""
    between = made_ground() if fault.between_hosts else None
    with tempfile.TemporaryDirectory(prefix="hvd-chaos-") as folder:
        run = cells.Run(cell, Path(folder), between)
        try:
            run.check()
        except AssertionError as error:
            result, text = "BROKEN", str(error)
        finally:
            run.close()
    return {**row, "result": result, "text": text, "seconds": round(time.monotonic() - begin, 2)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--fault", default="", help="only faults whose name contains this")
    parser.add_argument("--phase", default="", help="only phases whose name contains this")
    parser.add_argument("--kind", choices=("elastic", "static"))
    parser.add_argument("--torch", action="store_true", help="only cells with PyTorch")
    parser.add_argument("--part", default="1/1", metavar="K/N", help="the Kth of N parts of these")
    parser.add_argument("--json", type=Path, help="file for the results")
    args = parser.parse_args()
    wanted = [
        cell
        for cell in (*plan.cells(), *plan.inside_init(), *plan.with_torch())
        if args.fault in cell.fault
        and args.phase in cell.phase
        and args.torch <= cell.torch
        and args.kind in (None, "elastic" if cell.elastic else "static")
    ]
    part, parts = map(int, args.part.split("/"))
    rows = []
    for cell in wanted[part - 1 :: parts]:
        row = attempt(cell)
        rows.append(row)
        print(f"{row['result']:8} {row['seconds']:6.2f} s  {row['cell']}: {row['promise']}")
        if row["text"]:
            print("    " + str(row["text"]).replace("\n", "\n    "))
        sys.stdout.flush()
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1) + "\n")
    broken = [row for row in rows if row["result"] == "BROKEN"]
    print(f"{len(rows)} cells, {len(broken)} broken: {[row['cell'] for row in broken]}")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
