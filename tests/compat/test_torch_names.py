"""The names of the torch adapter, and the order and defaults of parameters: scripts pass them by position."""

import importlib
import inspect

import pytest

import horovod.torch as hvd
from horovod.torch import mpi_ops

EXPORTED = {
    "lifecycle": "init shutdown is_initialized start_timeline stop_timeline",
    "topology": "size local_size cross_size rank local_rank cross_rank",
    "queries": "mpi_threads_supported mpi_enabled mpi_built gloo_enabled gloo_built nccl_built ddl_built "
    "ccl_built cuda_built rocm_built",
    "process sets": "ProcessSet global_process_set add_process_set remove_process_set",
    "operators": "Average Sum Adasum Min Max Product",
    "allreduce": "allreduce allreduce_ allreduce_async allreduce_async_ grouped_allreduce "
    "grouped_allreduce_ grouped_allreduce_async grouped_allreduce_async_ sparse_allreduce_async",
    "others": "allgather allgather_async grouped_allgather grouped_allgather_async broadcast broadcast_ "
    "broadcast_async broadcast_async_ alltoall alltoall_async reducescatter reducescatter_async "
    "grouped_reducescatter grouped_reducescatter_async join barrier poll synchronize",
    "helpers": "allgather_object broadcast_object broadcast_optimizer_state broadcast_parameters "
    "Compression DistributedOptimizer SyncBatchNorm HorovodInternalError elastic",
    "visible": "check_extension",
}
ONLY_MPI_OPS = (
    "is_homogeneous handle_average_backwards_compatibility gpu_available num_rank_is_power_2 "
    "check_installed_version HorovodAllreduce HorovodGroupedAllreduce HorovodAllgather "
    "HorovodGroupedAllgather HorovodBroadcast HorovodAlltoall HorovodReducescatter "
    "HorovodGroupedReducescatter _basics _handle_map"
)
NOT_IN_MPI_OPS = [
    "allgather_object",
    "broadcast_object",
    "broadcast_optimizer_state",
    "broadcast_parameters",
    "DistributedOptimizer",
    "SyncBatchNorm",
    "elastic",
]
NAMES = " ".join(EXPORTED.values()).split()


@pytest.mark.parametrize("name", NAMES)
def test_name_is_exported(name):
    assert hasattr(hvd, name)
    assert name in hvd.__all__
    if name not in NOT_IN_MPI_OPS:
        assert getattr(mpi_ops, name) is getattr(hvd, name)


@pytest.mark.parametrize("name", ONLY_MPI_OPS.split())
def test_name_is_in_mpi_ops(name):
    assert hasattr(mpi_ops, name)


def test_is_homogeneous_is_only_in_mpi_ops():
    assert not hasattr(hvd, "is_homogeneous")


@pytest.mark.parametrize(
    ("module", "names"),
    [
        ("horovod", "__version__"),
        ("horovod.torch.compression", "Compressor NoneCompressor FP16Compressor Compression"),
        (
            "horovod.torch.functions",
            "broadcast_parameters broadcast_optimizer_state broadcast_object allgather_object",
        ),
        ("horovod.torch.optimizer", "DistributedOptimizer"),
        ("horovod.torch.sync_batch_norm", "SyncBatchNorm"),
        (
            "horovod.torch.elastic",
            "TorchState ElasticSampler run run_fn init shutdown State ObjectState",
        ),
        ("horovod.torch.elastic.sampler", "ElasticSampler"),
        (
            "horovod.torch.elastic.state",
            "TorchState StateHandler ModelStateHandler OptimizerStateHandler SamplerStateHandler "
            "get_handler_registry set_handler_registry",
        ),
        ("horovod.common.elastic", "run_fn State ObjectState"),
        ("horovod.data", "BaseDataLoader AsyncDataLoaderMixin"),
        ("horovod.data.data_loader_base", "BaseDataLoader AsyncDataLoaderMixin"),
        (
            "horovod.common.exceptions",
            "HorovodInternalError HostsUpdatedInterrupt HorovodVersionMismatchError "
            "get_version_mismatch_message",
        ),
        ("horovod.common.basics", "HorovodBasics"),
        (
            "horovod.common.process_sets",
            "ProcessSet global_process_set add_process_set remove_process_set _basics",
        ),
        (
            "horovod.common.util",
            "EXTENSIONS get_ext_suffix get_extension_full_path check_extension extension_available "
            "gpu_available mpi_built gloo_built nccl_built ddl_built ccl_built env num_rank_is_power_2 "
            "split_list is_iterable check_installed_version is_version_greater_equal_than _cache "
            "get_average_backwards_compatibility_fun",
        ),
    ],
)
def test_modules_that_scripts_import(module, names):
    imported = importlib.import_module(module)
    for name in names.split():
        assert hasattr(imported, name), name


def test_codes_of_operators():
    codes = [hvd.Average, hvd.Sum, hvd.Adasum, hvd.Min, hvd.Max, hvd.Product]
    assert codes == [0, 1, 2, 3, 4, 5]
    assert all(type(code) is int for code in codes)


PRE_POST = "prescale_factor=1.0, postscale_factor=1.0"
IN_FLIGHT = f"average=None, name=None, op=None, {PRE_POST}, process_set"
WHOLE = f"average=None, name=None, compression, op=None, {PRE_POST}, process_set"
SHARES = f"op=0, process_set, {PRE_POST}"

SIGNATURES = {
    "allreduce": f"tensor, {WHOLE}",
    "allreduce_async": f"tensor, {IN_FLIGHT}",
    "allreduce_": f"tensor, {IN_FLIGHT}",
    "allreduce_async_": f"tensor, {IN_FLIGHT}",
    "grouped_allreduce": f"tensors, {WHOLE}",
    "grouped_allreduce_async": f"tensors, {IN_FLIGHT}",
    "grouped_allreduce_": f"tensors, {IN_FLIGHT}",
    "grouped_allreduce_async_": f"tensors, {IN_FLIGHT}",
    "sparse_allreduce_async": "tensor, name, op, process_set",
    "allgather": "tensor, name=None, process_set",
    "allgather_async": "tensor, name=None, process_set",
    "grouped_allgather": "tensors, name=None, process_set",
    "grouped_allgather_async": "tensors, name=None, process_set",
    "broadcast": "tensor, root_rank, name=None, process_set",
    "broadcast_async": "tensor, root_rank, name=None, process_set",
    "broadcast_": "tensor, root_rank, name=None, process_set",
    "broadcast_async_": "tensor, root_rank, name=None, process_set",
    "alltoall": "tensor, splits=None, name=None, process_set",
    "alltoall_async": "tensor, splits=None, name=None, process_set",
    "reducescatter": f"tensor, name=None, compression, {SHARES}",
    "reducescatter_async": f"tensor, name=None, {SHARES}",
    "grouped_reducescatter": f"tensors, name=None, compression, {SHARES}",
    "grouped_reducescatter_async": f"tensors, name=None, {SHARES}",
    "join": "device=-1",
    "barrier": "process_set",
    "poll": "handle",
    "synchronize": "handle",
    "broadcast_object": "obj, root_rank=0, name=None, process_set",
    "allgather_object": "obj, name=None, process_set",
    "broadcast_parameters": "params, root_rank, process_set",
    "broadcast_optimizer_state": "optimizer, root_rank, model=None, process_set",
    "start_timeline": "file_path, mark_cycles=False",
    "stop_timeline": "",
    "add_process_set": "process_set",
    "remove_process_set": "process_set",
    "ProcessSet": "ranks_or_comm",
    "handle_average_backwards_compatibility": "op, average",
}


def written(parameter):
    """A parameter as the table above writes it."""
    default = parameter.default
    if default is hvd.global_process_set:
        assert parameter.name == "process_set"
        return "process_set"
    if default is hvd.Compression.none:
        return "compression"
    if default is inspect.Parameter.empty:
        return parameter.name
    return f"{parameter.name}={default!r}"


@pytest.mark.parametrize("name", SIGNATURES)
def test_parameters_keep_their_order_and_defaults(name):
    function = getattr(hvd, name, None) or getattr(mpi_ops, name)
    parameters = inspect.signature(function).parameters.values()
    assert all(p.kind is p.POSITIONAL_OR_KEYWORD for p in parameters)
    assert ", ".join(written(p) for p in parameters) == SIGNATURES[name]


def test_parameters_of_sync_batch_norm():
    parameters = list(inspect.signature(hvd.SyncBatchNorm).parameters.values())
    positional = [written(p) for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
    assert positional == [
        "num_features",
        "eps=1e-05",
        "momentum=0.1",
        "affine=True",
        "track_running_stats=True",
    ]


@pytest.mark.parametrize("name", [n for n in NAMES if callable(getattr(hvd, n))])
def test_every_public_callable_is_documented(name):
    thing = getattr(hvd, name)
    assert inspect.getdoc(thing), f"{name} has no docstring"
