"""Runs the benchmark on this rank: `horovodrun -np 4 python -m horovod.bench`."""

import sys
from statistics import median

from horovod import _core
from horovod.bench import _report
from horovod.bench._collectives import Case, Members, Operation, cases, exchange
from horovod.bench._gpu import Device, GpuError
from horovod.bench._options import Options, UsageError, parse
from horovod.common._objects import allgather_object
from horovod.common.process_sets import global_process_set


def main() -> int:
    """Measure what the command line asks for; the exit status."""
    try:
        options = parse(sys.argv[1:])
    except UsageError as failure:
        # Every rank finds the same mistake; one of them says so.
        _core.init()
        return _refused(failure)
    _core.init()
    device, problem = _device(options)
    answers = allgather_object(
        (_core.hostname(), problem), "horovod.bench.hosts", global_process_set
    )
    try:
        members = _members(options, [host for host, _ in answers])
    except UsageError as failure:
        return _refused(failure)
    problems = [f"rank {rank} on {host}: {why}" for rank, (host, why) in enumerate(answers) if why]
    if problems:
        return _refused(UsageError(f"--device cuda cannot be used. {'; '.join(problems)}"))
    wrong = False
    if members is not None:
        wrong = _measure_all(options, members, device)
    _core.barrier(0)
    _core.shutdown()
    return 1 if wrong else 0


def _refused(failure: UsageError) -> int:
    if _core.rank() == 0:
        sys.stderr.write(f"horovod.bench: {failure}\nSee python -m horovod.bench --help.\n")
    _core.barrier(0)
    _core.shutdown()
    return 2


def _device(options: Options) -> tuple[Device | None, str | None]:
    """This rank's GPU if one is asked for, or why it cannot be used."""
    if options.device == "cpu":
        return None, None
    try:
        return Device(_core.local_rank()), None
    except (GpuError, OSError, AttributeError) as failure:
        return None, str(failure)


def _members(options: Options, hosts: list[str]) -> Members | None:
    """The participating ranks; None on ranks that do not take part."""
    size, rank = _core.size(), _core.rank()
    ranks = options.process_set or tuple(range(size))
    if ranks[-1] >= size:
        raise UsageError(f"--process-set names rank {ranks[-1]}, the job has {size} ranks")
    if options.root is not None and options.root not in ranks:
        raise UsageError(f"--root {options.root} does not take part")
    everybody = len(ranks) == size
    process_set = 0 if everybody else _core.add_process_set(ranks)
    if rank not in ranks:
        return None
    return Members(process_set, ranks, ranks.index(rank), tuple(hosts[r] for r in ranks))


def _measure_all(options: Options, members: Members, device: Device | None) -> bool:
    """Measure and report every case; whether a result was wrong on any rank."""
    speaks = members.place == 0
    as_text = speaks and options.json != "-"
    if as_text:
        _print(_report.heading(options, members))
    found: list[_report.Measured] = []
    collective = ""
    for case in cases(options, members):
        one = _measure(case, options, members, device)
        found.append(one)
        if as_text:
            if case.collective != collective:
                _print(_report.columns(case.collective))
            _print(_report.line(one))
        collective = case.collective
    if as_text:
        _print(_report.verdict(found))
    if speaks and options.json:
        _report.write_json(options.json, options, members, found)
    return any(one.wrong for one in found)


def _measure(
    case: Case, options: Options, members: Members, device: Device | None
) -> _report.Measured:
    root = members.ranks[0] if options.root is None else options.root
    operation = Operation(case, members, root, device)
    wrong = checked = 0

    def check() -> None:
        nonlocal wrong, checked
        operation.fill()
        operation.run()
        right = operation.correct()
        checked += right is not None
        wrong += right is False

    if options.check:
        check()
    operation.clear()
    for _ in range(options.warm_up):
        operation.run()
    _core.barrier(members.process_set)
    seconds = operation.timed(options.iterations)
    if options.check:
        # Once more: calls that followed each other closely must not have left anything behind.
        check()
    mine = (median(seconds), min(seconds), max(seconds), float(wrong))
    medians, least, most, wrongs = zip(*exchange(mine, members), strict=True)
    return _report.Measured(
        case,
        members.count,
        medians,
        min(least),
        max(most),
        int(sum(wrongs)) if checked else None,
    )


def _print(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
