"""The report: a line of text for each case, and all figures as JSON."""

import json
import sys
from dataclasses import dataclass
from statistics import median
from typing import Any

from horovod import _core
from horovod.bench._collectives import Case, Members
from horovod.bench._options import Options
from horovod.common._gpu_libraries import found as found_libraries

_COLUMNS = ("bytes", "elements", "type", "op", "place", "median", "min", "max", "algbw", "busbw")
_WIDTHS = (12, 11, 9, 8, 6, 10, 10, 10, 8, 8)


@dataclass(frozen=True)
class Measured:
    """A case on all members: per member the median, the least and the most seconds of a call, and wrong results."""

    case: Case
    members: int
    medians: tuple[float, ...]
    least: float
    most: float
    wrong: int | None  # results, over all members; None where none was checked

    @property
    def seconds(self) -> float:
        """Of the slowest member."""
        return max(self.medians)

    @property
    def algbw(self) -> float:
        """Bytes of the buffer per second."""
        return self.case.nbytes / self.seconds

    @property
    def busbw(self) -> float:
        """The part of it that each rank's link must carry, comparable with the hardware's speed."""
        return self.algbw * self.case.bus_factor(self.members)


def heading(options: Options, members: Members) -> str:
    """The measured case, its place, and the columns."""
    carried = ", ".join(f"{key} {value}" for key, value in sorted(_core.transports().items()))
    lines = [
        f"# horovod-rs {_core.__version__}; ranks: {members.count}, hosts: {len(set(members.hosts))}; {carried}",
        f"# {options.iterations} calls after {options.warm_up} to warm up; times in us of the slowest "
        "rank, bandwidths in GB/s (10^9)",
    ]
    if options.device == "cuda":
        nccl = found_libraries()["nccl"]
        carried = f"NCCL {nccl[0]}" if isinstance(nccl, tuple) else f"no NCCL ({nccl})"
        lines.append(
            f"# data on GPUs, {carried}; times are means, by events of the GPU, of calls in flight together"
        )
    return "\n".join(lines)


def columns(collective: str) -> str:
    """The heading of one collective's lines."""
    cells = [name.rjust(width) for name, width in zip(_COLUMNS, _WIDTHS, strict=True)]
    return f"\n# {collective}\n#{''.join(cells)[1:]}  wrong"


def line(one: Measured) -> str:
    """One case."""
    case = one.case
    place = {None: "-", True: "in", False: "out"}[case.in_place]
    speeds = [f"{one.algbw / 1e9:.2f}", f"{one.busbw / 1e9:.2f}"] if case.dtype else ["-", "-"]
    cells = [
        str(case.nbytes),
        str(case.elements),
        case.dtype.name if case.dtype else "-",
        case.operator or "-",
        place,
        *(f"{seconds * 1e6:.1f}" for seconds in (one.seconds, one.least, one.most)),
        *speeds,
    ]
    text = "".join(cell.rjust(width) for cell, width in zip(cells, _WIDTHS, strict=True))
    return f"{text}  {'-' if one.wrong is None else one.wrong}"


def verdict(all_measured: list[Measured]) -> str:
    """The last line."""
    checked = [one.wrong for one in all_measured if one.wrong is not None]
    wrong = sum(1 for count in checked if count)
    if wrong:
        return f"\n# WRONG RESULTS in {wrong} of {len(checked)} checked cases"
    text = f"\n# all right: {len(checked)} of {len(all_measured)} cases were checked"
    unchecked = [one.case for one in all_measured if one.wrong is None]
    if checked and unchecked:
        # Each kind once, whatever its sizes.
        kinds = dict.fromkeys(_kind(case) for case in unchecked)
        text += f"; not checked: {', '.join(kinds)}"
    return text


def _kind(case: Case) -> str:
    """A case without its size, and why its result cannot be known if the reader may wonder."""
    if case.dtype is None:
        return f"{case.collective} (has no result)"
    words = [case.collective, case.dtype.name]
    if case.operator:
        words.append(f"{case.operator} (not exact in this type for so many ranks)")
    return " ".join(words)


def write_json(path: str, options: Options, members: Members, found: list[Measured]) -> None:
    """All figures; `-` stands for standard output."""
    record = {
        "version": _core.__version__,
        "device": options.device,
        "ranks": list(members.ranks),
        "hosts": members.hosts,
        "transports": _core.transports(),
        "iterations": options.iterations,
        "warm_up": options.warm_up,
        "results": [_record(one) for one in found],
    }
    text = json.dumps(record, indent=1) + "\n"
    if path == "-":
        sys.stdout.write(text)
    else:
        with open(_core.open_output(path), "w") as file:
            file.write(text)


def _record(one: Measured) -> dict[str, Any]:
    case = one.case
    return {
        "collective": case.collective,
        "dtype": case.dtype.name if case.dtype else None,
        "op": case.operator,
        "in_place": case.in_place,
        "bytes": case.nbytes,
        "elements": case.elements,
        "seconds": {"median": one.seconds, "min": one.least, "max": one.most},
        "seconds_median_of_all_ranks": median(one.medians),
        "seconds_by_rank": list(one.medians),
        "algbw_bytes_per_second": one.algbw if case.dtype else None,
        "busbw_bytes_per_second": one.busbw if case.dtype else None,
        "wrong": one.wrong,
    }
