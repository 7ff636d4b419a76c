"""horovod.common: exceptions, helpers, process sets and compression, in one process."""

import copy
import importlib.util
import os
import pickle
import subprocess
import sys
import threading
from pathlib import Path

import cloudpickle
import pytest
import torch

import harness
import horovod.torch as hvd
from horovod import _core
from horovod.common import _mpi, _stacks, api, basics, process_sets, util
from horovod.common.exceptions import (
    HorovodInternalError,
    HorovodVersionMismatchError,
    HostsUpdatedInterrupt,
    get_version_mismatch_message,
)

# -- exceptions


def test_exceptions_are_of_the_types_that_scripts_catch():
    assert issubclass(HorovodInternalError, RuntimeError)
    assert issubclass(HostsUpdatedInterrupt, RuntimeError)
    assert issubclass(HorovodVersionMismatchError, ImportError)
    assert hvd.HorovodInternalError is HorovodInternalError


def test_interrupts_carry_whether_to_skip_the_sync():
    interrupt = HostsUpdatedInterrupt(True)
    assert interrupt.skip_sync is True
    assert interrupt.args == (True,)
    assert pickle.loads(pickle.dumps(interrupt)).skip_sync is True


def test_version_mismatches_carry_their_versions():
    error = HorovodVersionMismatchError("torch", "2.1", "2.0")
    assert (error.name, error.version, error.installed_version) == ("torch", "2.1", "2.0")
    text = "Framework torch installed with version 2.0 but found version 2.1."
    assert str(error).startswith(text)
    assert get_version_mismatch_message("torch", "2.1", "2.0").startswith(text)


# -- util


@pytest.mark.parametrize(
    ("number", "expected"),
    [(0, False), (1, True), (2, True), (3, False), (12, False), (64, True), (-4, False)],
)
def test_powers_of_two(number, expected):
    assert util.num_rank_is_power_2(number) is expected


@pytest.mark.parametrize(
    ("length", "parts", "sizes"),
    [(7, 3, [3, 2, 2]), (6, 3, [2, 2, 2]), (2, 4, [1, 1, 0, 0]), (0, 2, [0, 0])],
)
def test_lists_are_split_with_the_longer_parts_first(length, parts, sizes):
    items = list(range(length))
    split = util.split_list(items, parts)
    assert [len(part) for part in split] == sizes
    assert [item for part in split for item in part] == items


@pytest.mark.parametrize(
    ("thing", "expected"), [([], True), ("a", True), (iter([]), True), (3, False), (None, False)]
)
def test_iterables(thing, expected):
    assert util.is_iterable(thing) is expected


@pytest.mark.parametrize(
    ("version", "target", "expected"),
    [
        ("2.1.0", "2.1.0", True),
        ("2.10.0", "2.9.0", True),
        ("2.15.0+cu132", "2.15.0", True),
        ("2.1", "2.1.0", True),
        ("1.13.1", "2.0.0", False),
        ("2.1.0rc1", "2.1.1", False),
    ],
)
def test_versions_are_compared_by_number(version, target, expected):
    assert util.is_version_greater_equal_than(version, target) is expected


@pytest.mark.parametrize(
    ("version", "target"), [("2.1.0", "2.1"), (2, "2.1.0"), ("2.1.0", None), ("2.1.0", "2.x.0")]
)
def test_versions_that_cannot_be_compared(version, target):
    with pytest.raises(ValueError, match=r"string arguments|form of a\.b\.c"):
        util.is_version_greater_equal_than(version, target)


def test_environment_variables_are_restored(monkeypatch):
    monkeypatch.setenv("HVD_UNIT_OLD", "before")
    monkeypatch.delenv("HVD_UNIT_NEW", raising=False)
    with util.env(HVD_UNIT_OLD="inside", HVD_UNIT_NEW="inside", HVD_UNIT_NONE=None):
        assert os.environ["HVD_UNIT_OLD"] == "inside"
        assert os.environ["HVD_UNIT_NEW"] == "inside"
        assert "HVD_UNIT_NONE" not in os.environ
    assert os.environ["HVD_UNIT_OLD"] == "before"
    assert "HVD_UNIT_NEW" not in os.environ


def test_what_this_build_supports(capsys):
    assert util.EXTENSIONS == ["tensorflow", "torch", "mxnet"]
    assert util.extension_available("torch") is True
    assert util.extension_available("mxnet", verbose=True) is False
    assert "mxnet is not available" in capsys.readouterr().out
    assert util.gloo_built(verbose=True) is True
    assert util.nccl_built() == hvd.nccl_built()
    assert util.mpi_built() is (importlib.util.find_spec("mpi4py") is not None)
    for query in (util.ddl_built, util.ccl_built):
        assert query() is False


NCCL = """
import torch
import horovod.torch as hvd
print(hvd.nccl_built(), end=" ")
hvd.init()
print(hvd.nccl_built())
"""


@pytest.mark.skipif(torch.version.cuda is None, reason="this PyTorch brings no NCCL")
@pytest.mark.parametrize("operations", [None, "AUTO", "NCCL", "HOST", "MPI", "nonsense"])
def test_nccl_counts_unless_operations_go_through_host_memory(operations):
    done = run(NCCL, HOROVOD_GPU_OPERATIONS=operations)
    if operations == "nonsense":
        assert "HOROVOD_GPU_OPERATIONS" in done.stderr
        return
    major, minor, patch = torch.cuda.nccl.version()
    code = major * 10000 + minor * 100 + patch
    assert done.stdout.split() == [str(0 if operations in ("HOST", "MPI") else code)] * 2, done


def test_the_gpu_is_asked_for_in_another_process():
    assert util.gpu_available("torch") == torch.cuda.is_available()
    assert util.gpu_available("mxnet") is False


def test_extensions_are_checked_by_adapter():
    util.check_extension("horovod.torch", "HOROVOD_WITH_PYTORCH", __file__, "mpi_lib_v2")
    with pytest.raises(ImportError, match=r"Extension horovod\.nothing has not been built"):
        util.check_extension("horovod.nothing", "HOROVOD_WITH_NOTHING", __file__, "mpi_lib")
    path = util.get_extension_full_path("/a/b/c.py", "d", "lib")
    assert path == "/a/b/d/lib" + util.get_ext_suffix()


def test_any_version_of_a_framework_is_fine():
    util.check_installed_version("torch", "99.0")
    cause = ImportError("broken")
    with pytest.raises(HorovodVersionMismatchError) as error:
        util.check_installed_version("torch", "99.0", cause)
    assert error.value.__cause__ is cause


def test_average_and_op():
    resolve = util.get_average_backwards_compatibility_fun(hvd)
    assert resolve(None, None) == hvd.Average
    assert resolve(hvd.Max, None) == hvd.Max
    for average, op in ((True, hvd.Average), (False, hvd.Sum)):
        with pytest.warns(DeprecationWarning, match="average"):
            assert resolve(None, average) == op
    with pytest.raises(ValueError, match="op parameter supersedes average"):
        resolve(hvd.Sum, False)


# -- the shared runtime


def test_basics_of_every_framework_are_the_same_runtime():
    assert hvd.mpi_ops._basics is basics.basics is process_sets._basics
    other = basics.HorovodBasics(__file__, "mpi_lib_v2")
    assert other.is_initialized() is basics.basics.is_initialized()
    codes = [getattr(other, name) for name in ("Average", "Sum", "Adasum", "Min", "Max", "Product")]
    assert codes == [0, 1, 2, 3, 4, 5]
    assert other.HOROVOD_PROCESS_SET_ERROR_INIT == -1
    assert other.HOROVOD_PROCESS_SET_ERROR_EXISTING_SET == -6
    assert "horovod" in other.MPI_LIB_CTYPES._name


def test_copies_of_a_process_set_are_the_set_itself():
    subset = hvd.ProcessSet([0, 1])
    for process_set in (hvd.global_process_set, subset):
        assert copy.deepcopy(process_set) is process_set
        assert copy.copy(process_set) is process_set
    layer = copy.deepcopy(hvd.SyncBatchNorm(3))
    assert layer.process_set is hvd.global_process_set


def test_functions_of_the_runtime_are_pickled_by_name():
    for function in (api.init, api.rank, api.shutdown):
        for dumps in (pickle.dumps, cloudpickle.dumps):
            assert pickle.loads(dumps(function)).__self__ is basics.basics


def test_process_sets_are_pickled_without_their_registration():
    assert pickle.loads(pickle.dumps(hvd.global_process_set)) is hvd.global_process_set
    subset = hvd.ProcessSet([0, 1])
    subset.process_set_id = 3
    arrived = pickle.loads(pickle.dumps(subset))
    assert arrived.ranks == [0, 1]
    assert arrived.process_set_id is None


BEFORE_INIT = """
import torch
import horovod.torch as hvd
from horovod.common.exceptions import HorovodNotInitializedError
from horovod.torch import mpi_ops

# One type that both catch: who asks for the rank, and who wants a result.
assert issubclass(HorovodNotInitializedError, hvd.HorovodInternalError)
assert issubclass(HorovodNotInitializedError, ValueError)

def raises(kind, text, call):
    try:
        call()
    except kind as error:
        assert type(error) is kind and text in str(error), repr(error)
    else:
        raise AssertionError(f"{call} did not fail")

NIE = "Horovod has not been initialized; use hvd.init()."
one = torch.ones(2)
for query in (hvd.rank, hvd.size, hvd.local_rank, hvd.local_size, hvd.cross_rank, hvd.cross_size,
              mpi_ops.is_homogeneous, hvd.stop_timeline, lambda: hvd.start_timeline("x"),
              lambda: hvd.add_process_set([0]), lambda: hvd.remove_process_set(hvd.ProcessSet([0])),
              lambda: hvd.ProcessSet([0]).included()):
    raises(HorovodNotInitializedError, NIE, query)
for operation in (
    lambda: hvd.allreduce(one), lambda: hvd.allreduce_(one), lambda: hvd.allreduce_async(one),
    lambda: hvd.allreduce_async_(one), lambda: hvd.grouped_allreduce([one]), lambda: hvd.allgather(one),
    lambda: hvd.grouped_allgather([one]), lambda: hvd.broadcast(one, 0), lambda: hvd.broadcast_(one, 0),
    lambda: hvd.alltoall(one), lambda: hvd.reducescatter(one), lambda: hvd.grouped_reducescatter([one]),
    lambda: hvd.sparse_allreduce_async(one.to_sparse(), "s", hvd.Sum), hvd.join, hvd.barrier,
    lambda: hvd.broadcast_object(1), lambda: hvd.allgather_object(1),
    lambda: hvd.broadcast_parameters([one], 0),
    lambda: hvd.broadcast_optimizer_state(torch.optim.SGD([one], lr=1.0), 0)):
    raises(HorovodNotInitializedError, "initialized", operation)
assert hvd.is_initialized() is False
assert hvd.gloo_enabled() is True
hvd.shutdown()
raises(HorovodNotInitializedError, "Handle 1 is of no running job", lambda: hvd.poll(1))
assert hvd.synchronize(1) is None

hvd.init()
assert (hvd.rank(), hvd.size(), hvd.local_rank(), hvd.local_size()) == (0, 1, 0, 1)
assert (hvd.cross_rank(), hvd.cross_size(), mpi_ops.is_homogeneous()) == (0, 1, True)
assert hvd.allreduce(one).tolist() == [1.0, 1.0]
handle = hvd.allreduce_async(one)
assert handle >= 1
print("done")
# No shutdown and a handle that nobody waited for: exit must be clean all the same.
"""


def run(program, **settings):
    env = {key: value for key, value in os.environ.items() if not key.startswith("HOROVOD_")}
    env |= {key: value for key, value in settings.items() if value is not None}
    return subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        timeout=harness.LIMIT_S,
        check=False,
        env=env,
    )


def test_everything_before_init_says_what_is_missing():
    done = run(BEFORE_INIT)
    assert (done.returncode, done.stdout, done.stderr) == (0, "done\n", "")


IMPORT = """
import sys
import torch
before = set(sys.modules)
import horovod.torch
loaded = {name.split(".")[0] for name in set(sys.modules) - before}
unwanted = loaded & {"tensorflow", "keras", "jax", "mxnet", "numpy", "pandas", "pyspark", "ray"}
assert not unwanted, unwanted
assert "torch._dynamo" not in sys.modules, "the compiler takes a second to import"
import horovod
print(horovod.__version__)
"""


def test_importing_the_torch_adapter_imports_no_other_framework():
    done = run(IMPORT)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.strip()[0].isdigit()


OTHER_GPUS = """
import torch
from horovod import _core
_core.prefer_gpus(False)
try:
    _core.Streams(torch.Tensor, lambda ordinal: 0, True)
except RuntimeError as error:
    print(error)
"""


def test_a_process_uses_gpus_of_one_kind():
    done = run(OTHER_GPUS)
    assert (done.returncode, done.stderr) == (0, "")
    assert "GPU of ROCm, but this process has begun to use those of CUDA" in done.stdout


# -- compression


def test_none_passes_tensors_through():
    tensor = torch.ones(3)
    compressed, ctx = hvd.Compression.none.compress(tensor)
    assert compressed is tensor
    assert ctx is None
    assert hvd.Compression.none.decompress(tensor, ctx) is tensor


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_fp16_casts_floating_tensors_there_and_back(dtype):
    tensor = torch.ones(3, dtype=dtype)
    compressed, ctx = hvd.Compression.fp16.compress(tensor)
    assert compressed.dtype == torch.float16
    assert ctx == dtype
    restored = hvd.Compression.fp16.decompress(compressed, ctx)
    assert restored.dtype == dtype


@pytest.mark.parametrize("dtype", [torch.int32, torch.bool, torch.complex64])
def test_fp16_leaves_other_tensors_alone(dtype):
    tensor = torch.ones(3, dtype=dtype)
    compressed, ctx = hvd.Compression.fp16.compress(tensor)
    assert compressed is tensor
    assert hvd.Compression.fp16.decompress(compressed, ctx) is tensor
    assert hvd.Compression.fp16.decompress(tensor, None) is tensor


def test_compressors_are_classes():
    from horovod.torch import compression

    assert compression.Compression.none is compression.NoneCompressor
    assert compression.Compression.fp16 is compression.FP16Compressor
    for kind in (compression.NoneCompressor, compression.FP16Compressor):
        assert issubclass(kind, compression.Compressor)


def test_stacks_keep_the_users_frames_below_many_of_a_framework() -> None:
    framework = {}
    text = "def call(depth, then):\n    return then() if depth == 0 else call(depth - 1, then)\n"
    exec(compile(text, "/somewhere/site-packages/framework.py", "exec"), framework)
    waits, done = threading.Event(), threading.Event()

    def fit() -> None:
        framework["call"](40, lambda: (waits.set(), done.wait()))

    thread = threading.Thread(target=fit, name="deep")
    thread.start()
    waits.wait()
    stacks = dict(_stacks.thread_stacks())
    done.set()
    thread.join()
    files = [(Path(file).name, function.rpartition(".")[2]) for file, _, function in stacks["deep"]]
    assert len(files) == _core.FRAMES_MAX
    assert files[0] == ("threading.py", "wait"), "the innermost comes first"
    assert files[-1] == ("test_common.py", "fit")
    assert ("framework.py", "call") in files


def test_the_variables_of_half_a_job_do_not_make_mpi_enabled(monkeypatch) -> None:
    monkeypatch.setenv("HOROVOD_RANK", "0")
    monkeypatch.delenv("HOROVOD_SIZE", raising=False)
    assert _mpi.is_enabled() is False
