"""Communicators of mpi4py under Open MPI and MPICH: jobs, process sets, and mistakes that are errors on every rank."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys

import pytest

import harness
import mpi_libraries
from mpi_libraries import LIBRARIES, Mpi

# The original's documentation has these two, verbatim but for the framework.
README = """
import horovod.{framework} as hvd

# Initialize Horovod
hvd.init()

# Verify that MPI multi-threading is supported
assert hvd.mpi_threads_supported()

from mpi4py import MPI
assert hvd.size() == MPI.COMM_WORLD.Get_size()
"""
SUBCOMM = """
from mpi4py import MPI
import horovod.{framework} as hvd

# Split COMM_WORLD into subcommunicators
subcomm = MPI.COMM_WORLD.Split(color=MPI.COMM_WORLD.rank % 2,
                               key=MPI.COMM_WORLD.rank)

# Initialize Horovod
hvd.init(comm=subcomm)
"""
# The output of each rank, in one piece.
PRINT = """
import os
def say(*words):
    os.write(1, (" ".join(map(str, words)) + "\\n").encode())
"""
FRAMEWORKS = ("torch", "tensorflow", "keras", "tensorflow.keras", "jax", "numpy")


@pytest.fixture(params=LIBRARIES)
def mpi(request: pytest.FixtureRequest) -> Mpi:
    """Each MPI library that is here."""
    return mpi_libraries.find(request.param)


@pytest.fixture
def one_mpi() -> Mpi:
    """The first MPI library that is here, for what has nothing to do with the library."""
    if importlib.util.find_spec("mpi4py") is None:
        pytest.skip("not installed: mpi4py")
    reasons = []
    for make in LIBRARIES.values():
        found = make()
        if isinstance(found, Mpi):
            return found
        reasons.append(found)
    pytest.skip("; ".join(reasons))


def printed(job: harness.Job) -> list[str]:
    """The lines that the ranks of a job printed, sorted."""
    return sorted(
        line[line.index("says ") + 5 :] for line in job.stdout.splitlines() if "says " in line
    )


FEWER = pytest.mark.thorough(
    also="tests/integration/test_mpi.py::test_the_scripts_of_the_documentation"
)


@pytest.mark.parametrize("np", [*(pytest.param(np, marks=FEWER) for np in (1, 2)), 3, 4])
def test_the_scripts_of_the_documentation(mpi: Mpi, np: int, script, jobs) -> None:
    both = (
        PRINT + README + "say('says', 'readme', hvd.rank(), hvd.size())\nhvd.shutdown()\n" + SUBCOMM
    )
    both += "world = MPI.COMM_WORLD.rank\nsay('says', 'split', world, hvd.rank(), hvd.size())\n"
    job = jobs(mpi.python(np, script(both.format(framework="numpy"))))
    job.succeed()
    halves = [len(range(world % 2, np, 2)) for world in range(np)]
    assert printed(job) == sorted(
        [f"readme {rank} {np}" for rank in range(np)]
        + [f"split {world} {world // 2} {halves[world]}" for world in range(np)]
    ), job.report()


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_the_scripts_with_every_framework(framework: str, one_mpi: Mpi, script, jobs) -> None:
    module = framework.split(".")[0]
    if importlib.util.find_spec(module) is None:
        pytest.skip(f"not installed: {module}")
    text = README + "hvd.shutdown()\n" + SUBCOMM + PRINT + "say('says', hvd.rank(), hvd.size())\n"
    job = jobs(one_mpi.python(2, script(text.format(framework=framework))))
    job.succeed()
    assert printed(job) == ["0 1", "0 1"], job.report()


WORK = (
    PRINT
    + """
import numpy as np
import horovod.numpy as hvd
from mpi4py import MPI
world = MPI.COMM_WORLD
def total():
    return int(hvd.allreduce(np.array([world.rank + 1]), op=hvd.Sum)[0])
"""
)

PERMUTED = (
    WORK
    + """
for again in range(2):
    comm = world.Split(0, -world.rank)
    hvd.init(comm)
    comm.Free()
    # MPI and Horovod are mixed freely.
    assert world.allreduce(1) == world.size
    say("says", world.rank, hvd.rank(), hvd.size(), hvd.local_rank(), hvd.local_size(), hvd.cross_size(), total())
    assert hvd.global_process_set.mpi_comm is comm
    hvd.shutdown()
"""
)


def test_keys_that_permute_the_order(mpi: Mpi, script, jobs) -> None:
    job = jobs(mpi.python(3, script(PERMUTED)))
    job.succeed()
    lines = [f"{world} {2 - world} 3 {2 - world} 3 1 6" for world in range(3)]
    assert printed(job) == sorted(lines * 2), job.report()


def test_processes_that_share_no_memory_need_no_setting(mpi: Mpi, script, jobs) -> None:
    """A mount namespace of its own makes each process a host, as far as Horovod knows: it listens on all interfaces."""
    probe = subprocess.run(["unshare", "-m", "true"], check=False, capture_output=True)
    if probe.returncode:
        pytest.skip("may not make mount namespaces")
    job = jobs(mpi.start(3, "unshare", "-m", sys.executable, script(PERMUTED)))
    job.succeed()
    lines = [f"{world} {2 - world} 3 0 1 3 6" for world in range(3)]
    assert printed(job) == sorted(lines * 2), job.report()


LISTS = (
    WORK
    + """
import sys
for ranks in ([2, 0], [1, 0, 2], [1, 2]):
    try:
        hvd.init(comm=ranks)
    except ValueError as error:
        assert "not in the list" in str(error), error
        say("says", world.rank, "outside", ranks)
    else:
        say("says", world.rank, "is", hvd.rank(), "of", ranks, total())
        hvd.shutdown()
    world.Barrier()
"""
)


def test_lists_of_ranks(mpi: Mpi, script, jobs) -> None:
    job = jobs(mpi.python(3, script(LISTS)))
    job.succeed()
    expected = []
    for ranks in ([2, 0], [1, 0, 2], [1, 2]):
        total = sum(rank + 1 for rank in ranks)
        expected += [f"{world} is {at} of {ranks} {total}" for at, world in enumerate(ranks)]
        expected += [f"{world} outside {ranks}" for world in range(3) if world not in ranks]
    assert printed(job) == sorted(expected), job.report()


SETS = (
    WORK
    + """
sub = world.Split(world.rank % 2, -world.rank)
halves, first = hvd.ProcessSet(sub), hvd.ProcessSet([0])
sub.Free()  # the set knows its processes
hvd.init(comm=world, process_sets=[first, halves])
value = int(hvd.allreduce(np.array([world.rank + 1]), op=hvd.Sum, process_set=halves)[0])
own = halves.process_set_id, halves.ranks, halves.rank(), value
say("says", world.rank, *own, first.process_set_id, first.included())
world.barrier()
hvd.shutdown()
only = hvd.ProcessSet(world.Create(world.group.Incl([0, 2])))
try:
    hvd.init(process_sets=[only])
except NotImplementedError as error:
    assert str(error).startswith("At this time process sets defined via MPI communicators"), error
hvd.init(comm=world, process_sets=[only])
say("says", world.rank, only.process_set_id, only.ranks, only.included())
try:
    hvd.add_process_set(hvd.ProcessSet(world))
except NotImplementedError as error:
    assert str(error).startswith("Dynamically adding process sets"), error
else:
    raise SystemExit("no error")
"""
)


def test_process_sets_of_communicators(mpi: Mpi, script, jobs) -> None:
    job = jobs(mpi.python(3, script(SETS)))
    job.succeed()
    assert printed(job) == sorted(
        [
            "0 1 [0, 2] 0 4 3 True",
            "1 2 [1] 0 2 3 False",
            "2 1 [0, 2] 1 4 3 False",
            "0 1 [0, 2] True",
            "1 1 [0, 2] False",
            "2 1 [0, 2] True",
        ]
    ), job.report()


def test_a_duplicate_of_the_global_set_is_refused(one_mpi: Mpi, script, jobs) -> None:
    text = (
        WORK
        + """
try:
    hvd.init(world, process_sets=[hvd.ProcessSet(world.Dup())])
except ValueError as error:
    say("says", "entry number 0 is a duplicate" in str(error))
"""
    )
    job = jobs(one_mpi.python(2, script(text)))
    job.succeed()
    assert printed(job) == ["True", "True"], job.report()


LEVELS = (
    """
import mpi4py
mpi4py.rc.thread_level = "{level}"
"""
    + WORK
    + """
hvd.init(world)
say("says", hvd.size(), hvd.mpi_threads_supported(), total())
"""
)


@pytest.mark.parametrize("level", ["multiple", "serialized", "funneled"])
def test_any_thread_level_at_which_a_process_may_have_threads(
    level: str, mpi: Mpi, script, jobs
) -> None:
    job = jobs(mpi.python(2, script(LEVELS.format(level=level))))
    job.succeed()
    assert printed(job) == [f"2 {level == 'multiple'} 3"] * 2, job.report()


def refused(job: harness.Job, np: int, *texts: str) -> None:
    """Every rank got an error with these texts, in time."""
    job.succeed()
    lines = printed(job)
    assert len(lines) == np, job.report()
    for text in texts:
        assert all(re.search(text, line) for line in lines), job.report()


TRIES = """
try:
    {call}
except ValueError as error:
    say("says", str(error).replace("\\n", " "))
else:
    say("says", "no error")
"""


def tries(call: str) -> str:
    """A script that reports the error of a call."""
    return WORK + TRIES.format(call=call)


def test_mpi_that_allows_one_thread_only(mpi: Mpi, script, jobs) -> None:
    single = "import mpi4py\nmpi4py.rc.threads = False\n"
    job = jobs(mpi.python(2, script(single + tries("hvd.init(world)"))))
    refused(job, 2, "MPI_THREAD_SINGLE", r"mpi4py\.rc\.thread_level", "MPI4PY_RC_THREAD_LEVEL")


def test_a_rank_with_one_thread_is_an_error_on_all(mpi: Mpi, script, jobs) -> None:
    single = "import os, mpi4py\nmpi4py.rc.threads = (os.environ.get('PMI_RANK') or "
    single += "os.environ.get('OMPI_COMM_WORLD_RANK')) != '1'\n"
    job = jobs(mpi.python(2, script(single + tries("hvd.init(world)"))))
    refused(job, 2, "rank 1 of the communicator", "MPI_THREAD_SINGLE")


def test_no_member_of_the_communicator(mpi: Mpi, script, jobs) -> None:
    text = (
        WORK
        + """
comm = world.Split(0 if world.rank < 2 else MPI.UNDEFINED, 0)
try:
    hvd.init(comm)
except ValueError as error:
    say("says", world.rank, "no member" in str(error))
else:
    say("says", world.rank, hvd.rank(), hvd.size(), total())
    hvd.shutdown()
"""
    )
    job = jobs(mpi.python(3, script(text)))
    job.succeed()
    assert printed(job) == ["0 0 2 3", "1 1 2 3", "2 True"], job.report()


def test_a_freed_communicator(one_mpi: Mpi, script, jobs) -> None:
    free = "comm = world.Dup(); comm.Free()\n"
    job = jobs(one_mpi.python(2, script(WORK + free + TRIES.format(call="hvd.init(comm)"))))
    refused(job, 2, "the communicator was freed")
    of_set = "hvd.init(world, process_sets=[hvd.ProcessSet(comm)])"
    job = jobs(one_mpi.python(2, script(WORK + free + TRIES.format(call=of_set))))
    refused(
        job,
        2,
        "number 0 of those made of communicators was made of the null communicator on every rank: it was freed",
    )


def test_a_member_that_never_comes(mpi: Mpi, script, jobs) -> None:
    text = (
        WORK
        + """
if world.rank == 0:
    errors = []
    for _ in range(2):
        try:
            hvd.init(world)
        except ValueError as error:
            errors.append(str(error))
    say("says", *errors)
    world.Abort(0)
else:
    world.recv(source=0)
"""
    )
    job = jobs(mpi.python(2, script(text), HOROVOD_GLOO_TIMEOUT_SECONDS="1"))
    job.wait_for("says ")
    (line,) = printed(job)
    assert "not all 2 processes of the communicator" in line, job.report()
    assert "an earlier call with this communicator was given up" in line, job.report()
    assert "HOROVOD_GLOO_TIMEOUT_SECONDS" in line


def test_communicators_that_do_not_fit_together(one_mpi: Mpi, script, jobs) -> None:
    sets = "[hvd.ProcessSet(MPI.COMM_SELF if world.rank else world)]"
    job = jobs(one_mpi.python(2, script(tries(f"hvd.init(world, process_sets={sets})"))))
    refused(job, 2, "all members have to")
    # A set of processes that are not in the job.
    call = "hvd.init(MPI.COMM_SELF, process_sets=[hvd.ProcessSet(world)])"
    job = jobs(one_mpi.python(2, script(tries(call))))
    refused(job, 2, "has processes that are not in comm")
    one_key = WORK + "if world.rank: os.environ['HOROVOD_JOB_KEY'] = 'ab' * 32\n"
    job = jobs(one_mpi.python(2, script(one_key + TRIES.format(call="hvd.init(world)"))))
    refused(job, 2, "HOROVOD_JOB_KEY .* is not set on rank 0")


def test_different_keys_are_an_error_on_all(one_mpi: Mpi, script, jobs) -> None:
    own_key = WORK + "import os\nos.environ['HOROVOD_JOB_KEY'] = f'{world.rank:02x}' * 32\n"
    job = jobs(one_mpi.python(2, script(own_key + TRIES.format(call="hvd.init(world)"))))
    refused(job, 2, "HOROVOD_JOB_KEY .* differs between ranks 0 and 1")


def test_a_job_of_a_communicator_does_not_begin_again(one_mpi: Mpi, script, jobs) -> None:
    """The launcher's ranks would be another job."""
    text = WORK + "hvd.init(world)\nfrom horovod.common.basics import basics\n"
    job = jobs(one_mpi.python(2, script(text + TRIES.format(call="basics.begin_again()"))))
    refused(job, 2, "cannot begin again after a failure")


def test_a_key_of_the_user_does_not_travel(one_mpi: Mpi, script, jobs) -> None:
    text = (
        WORK
        + """
from horovod.common import _mpi
told = []
whole = _mpi._Exchange.allgather
_mpi._Exchange.allgather = lambda self, content: told.append(content) or whole(self, content)
hvd.init(world)
say("says", total(), "ab" * 32 in repr(told))
"""
    )
    job = jobs(one_mpi.python(2, script(text), HOROVOD_JOB_KEY="ab" * 32))
    job.succeed()
    assert printed(job) == ["3 False", "3 False"], job.report()


def test_under_horovodrun_mpi_explains_itself(one_mpi: Mpi, script, jobs) -> None:
    text = (
        WORK
        + """
hvd.init()
say("says", hvd.mpi_threads_supported())
hvd.shutdown()
"""
        + TRIES.format(call="hvd.init(comm=MPI.COMM_WORLD)")
    )
    job = jobs(harness.python(2, script(text), env=one_mpi.env))
    job.succeed()
    lines = printed(job)
    assert lines.count("False") == 2, job.report()
    refused = [line for line in lines if line != "False"]
    assert len(refused) == 2, job.report()
    for text in (
        "MPI.COMM_WORLD has 1 process",
        "horovodrun started 2",
        "HOROVOD_SIZE=2",
        "mpirun",
    ):
        assert all(text in line for line in refused), job.report()


def test_another_mpi_than_the_launchers(script, jobs) -> None:
    """Each process is alone in its world, which Open MPI under Hydra does not notice."""
    launcher, library = LIBRARIES["mpich"](), LIBRARIES["open-mpi-wheel"]()
    for found in (launcher, library):
        if isinstance(found, str):
            pytest.skip(found)
    env = {name: library.env[name] for name in ("MPI4PY_LIBMPI", "OPAL_PREFIX")}
    env["OMPI_MCA_btl"] = (
        "self"  # its shared memory leaves files behind that a launcher would remove
    )
    texts = ("COMM_WORLD has 1 process", "PMI_SIZE=2", "MPI4PY_LIBMPI", "Open MPI v")
    refused(jobs(launcher.python(2, script(tries("hvd.init(world)")), **env)), 2, *texts)
    asks = PRINT + "import horovod.numpy as hvd\nhvd.init()\n"
    asks += TRIES.format(call="hvd.mpi_threads_supported()")
    refused(jobs(launcher.python(2, script(asks), **env)), 2, *texts)


def test_mpi_that_is_not_running(one_mpi: Mpi, script, jobs) -> None:
    off = "import mpi4py\nmpi4py.rc.initialize = False\nfrom mpi4py import MPI\nimport horovod.numpy as hvd\n"
    job = jobs(
        one_mpi.python(1, script(PRINT + off + TRIES.format(call="hvd.init(MPI.COMM_WORLD)")))
    )
    refused(job, 1, r"MPI is not initialized", "MPI4PY_RC_INITIALIZE")


def test_without_a_launcher_the_world_is_one_process(mpi: Mpi, script, jobs) -> None:
    """Open MPI sets `PMIX_RANK` in a process that is alone, which says nothing of others."""
    allowed = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    # Its shared memory would leave files behind that a launcher removes.
    env = {**mpi.env, **allowed, "OMPI_MCA_btl": "self"}
    text = WORK + "for comm in (world, None):\n    hvd.init(comm)\n"
    text += (
        "    say('says', hvd.size(), hvd.mpi_threads_supported(), total())\n    hvd.shutdown()\n"
    )
    job = jobs(harness.Job([sys.executable, script(text)], env=env))
    job.succeed()
    assert printed(job) == ["1 True 1"] * 2, job.report()


def test_mpi4py_is_imported_after_init(mpi: Mpi, script, jobs) -> None:
    text = (
        PRINT
        + """
import horovod.numpy as hvd
hvd.init()
from mpi4py import MPI
say("says", MPI.COMM_WORLD.allreduce(hvd.rank()), hvd.size() == MPI.COMM_WORLD.size)
"""
    )
    job = jobs(mpi.python(3, script(text)))
    job.succeed()
    assert printed(job) == ["3 True"] * 3, job.report()


def test_no_communicator_is_named_for_what_it_is(one_mpi: Mpi, script, jobs) -> None:
    job = jobs(one_mpi.python(1, script(tries("hvd.init(comm=object())"))))
    refused(job, 1, "Invalid type of argument comm", "object")


def test_without_mpi_nothing_is_imported() -> None:
    code = "import sys, horovod.numpy as hvd; hvd.init(); hvd.init(comm=[0]); print('mpi4py' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.strip() == "False"
