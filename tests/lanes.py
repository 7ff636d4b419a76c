"""Which tests may run at the same time.

Those in the lane `waits` mostly wait for their processes: any number of them may run. Those in `computes` keep the
processors busy: another one starts while a processor is idle. Each folder or file is in a lane by `LANES`, a
single test by a mark of that name. `pytest -m waits` and `pytest -m computes` select a lane.
"""

from __future__ import annotations

import contextlib
import enum
import os
import resource
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parent


class Lane(enum.Enum):
    """The two kinds of tests."""

    WAITS = "waits"
    COMPUTES = "computes"


# Many short tests, most of them without any process: a file of them runs as a whole.
QUICK = ("compat", "unit")
_WAITING = """
chaos compat hosts seeded_faults unit absent_ranks checkpoint altered_data bad_input callback_circles
charts dialed_agents doctor elastic elastic_launcher elastic_repeated_failures executor failures
images gpu_bad_input gpu_doctor gpu_failures gpu_interrupt gpu_other_users gpu_stall
gpu_xla_failures jax_failures launcher launcher_events liveness loopback mpi mpi_launchers
native_wait_signals out_of_memory page_in_browser ports ray ray_autoscaler resources run_elastic run_failures
run_function schedulers security soft_wait spark spark_cluster spark_connect spark_estimators
spark_keras_estimator spark_lightning_estimator stall_report strangers tf_data_service
tf_elastic threads timeline end_of_job termination top trace_running_job tree watching
"""
_COMPUTING = """
mxnet oldest_tensorflow parallel algorithms autotune bench_command bench_ends burn candle examples
gpu_adasum gpu_examples gpu_rocm inference keras lightning_strategy pages real_gpus rust
spark_examples tensorflow_ops removed_names tf_examples tf_v1_behavior tutorials
"""
LANES = dict.fromkeys(_WAITING.split(), Lane.WAITS) | dict.fromkeys(
    _COMPUTING.split(), Lane.COMPUTES
)

# The share of a processor that a rank of a computing test uses: it also waits for its peers. Measured over all of them.
OF_A_RANK = 0.6

# A test in `waits` fails if it exceeds both: this processor time, and this number of processors on average. On a loaded
# machine a test gets fewer processors, never more, so load fails no test.
COMPUTES_S = 240.0
COMPUTES_PROCESSORS = 1.2

_of_forked_ranks_s: list[float] = []


def assign(items: Iterable[pytest.Item]) -> None:
    """Mark each test with its lane; a test without a lane is an error."""
    without = set()
    for item in items:
        if any(item.get_closest_marker(lane.value) for lane in Lane):
            continue
        lane = next((LANES[name] for name in _names(item) if name in LANES), None)
        if lane is None:
            without.add(str(item.path))
        else:
            item.add_marker(lane.value)
    if without:
        raise pytest.UsageError(
            f"in no lane: {', '.join(sorted(without))}; say in {Path(__file__).name} whether these tests mostly wait "
            "or compute"
        )


def of(item: pytest.Item) -> Lane:
    """The lane of a test."""
    return next(lane for lane in Lane if item.get_closest_marker(lane.value))


def processors(item: pytest.Item) -> float:
    """How many processors a test keeps busy on average: none where it waits, else some of each rank, if known."""
    if of(item) is Lane.WAITS:
        return 0.0
    params = item.callspec.params if hasattr(item, "callspec") else {}
    ranks = getattr(params.get("ran"), "np", params.get("np", 2))
    return min(ranks * OF_A_RANK, float(os.cpu_count() or 1))


def may_start(wanted: float, busy: float) -> bool:
    """Whether a test that keeps so many processors busy may start where so many are busy."""
    return wanted == 0 or busy < (os.cpu_count() or 1)


def is_quick(item: pytest.Item) -> bool:
    """Whether the test is in a file of many short ones."""
    return any(name in QUICK for name in _names(item))


def check_that_it_waits() -> Iterator[None]:
    """While a test of the lane `waits` runs: its processes must not compute all the time."""
    begun, used = time.monotonic(), processor_s()
    yield
    lasted_s, used_s = time.monotonic() - begun, processor_s() - used
    processors = used_s / lasted_s
    if (os.cpu_count() or 1) > 1 and used_s > COMPUTES_S and processors > COMPUTES_PROCESSORS:
        pytest.fail(
            f"its processes have computed {used_s:.0f} s in {lasted_s:.0f} s: it belongs into the lane `computes`"
        )


def processor_s() -> float:
    """Processor time of this process, of those that it has started and whose ends it knows, and of forked ranks."""
    used = [resource.getrusage(whose) for whose in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in used) + sum(_of_forked_ranks_s)


def note_processor_s(file: Path) -> None:
    """Add what forked ranks of a job have used: one number a line. Another process has waited for their ends."""
    with contextlib.suppress(FileNotFoundError):
        _of_forked_ranks_s.extend(map(float, file.read_text().split()))


def _names(item: pytest.Item) -> Iterator[str]:
    """The names under which `LANES` may list the test's file: its own, and those of the folders around it."""
    yield item.path.stem.removeprefix("test_")
    if item.path.is_relative_to(TESTS):
        yield from item.path.relative_to(TESTS).parts[:-1]
