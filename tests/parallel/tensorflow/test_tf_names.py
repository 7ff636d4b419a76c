"""Public names and signatures are those that scripts of the original use."""

import importlib
import inspect
import subprocess
import sys

import pytest
import tensorflow as tf

import documented_names
import horovod.tensorflow as hvd

BASICS = """init shutdown is_initialized start_timeline stop_timeline size local_size cross_size rank
local_rank cross_rank
is_homogeneous mpi_threads_supported mpi_enabled mpi_built gloo_enabled gloo_built nccl_built ddl_built
ccl_built cuda_built
rocm_built ProcessSet global_process_set add_process_set remove_process_set Average Sum Adasum Min Max Product"""
OPERATIONS = """allreduce grouped_allreduce allgather grouped_allgather broadcast broadcast_ alltoall reducescatter
grouped_reducescatter join size_op local_size_op rank_op local_rank_op process_set_included_op"""
HIGH = """broadcast_variables broadcast_global_variables BroadcastGlobalVariablesHook broadcast_object
broadcast_object_fn
allgather_object DistributedOptimizer DistributedGradientTape PartialDistributedGradientTape Compression
SyncBatchNormalization LocalGradientAggregationHelper elastic"""
HELPERS = """handle_average_backwards_compatibility check_num_rank_power_of_2 vars_to_refs refs_to_vars
gpu_available split_list
check_extension _allreduce _grouped_allreduce _reducescatter _grouped_reducescatter _make_allreduce_grads_fn
_executing_eagerly _make_subgraph _cache _DistributedOptimizer _DistributedAdasumOptimizer _DistributedGradientTape
_LegacyOptimizer"""
MODULES = {
    "mpi_ops": "_allreduce _grouped_allreduce _reducescatter _grouped_reducescatter allgather broadcast join size_op "
    "_check_has_gpu _normalize_name MPI_LIB",
    "compression": "Compressor NoneCompressor FP16Compressor Compression",
    "functions": "broadcast_variables broadcast_object broadcast_object_fn allgather_object",
    "util": "_executing_eagerly _make_subgraph _cache vars_to_refs refs_to_vars",
    "gradient_aggregation": "LocalGradientAggregationHelper",
    "gradient_aggregation_eager": "LocalGradientAggregationHelperEager",
    "sync_batch_norm": "SyncBatchNormalization",
    "elastic": "TensorFlowKerasState TensorFlowState run",
}


@pytest.mark.parametrize("name", f"{BASICS} {OPERATIONS} {HIGH} {HELPERS}".split())
def test_the_package_has(name):
    assert hasattr(hvd, name)
    if not name.startswith("_") and name not in ("elastic",):
        assert name in hvd.__all__


@pytest.mark.parametrize("module", MODULES)
def test_submodules_have(module):
    imported = importlib.import_module(f"horovod.tensorflow.{module}")
    for name in MODULES[module].split():
        assert hasattr(imported, name), name


def test_the_documentation_has_them():
    documented_names.check("horovod.tensorflow")


def test_helpers_that_scripts_import():
    variables = [tf.Variable(0.0), [tf.Variable(1.0)]]
    refs = hvd.vars_to_refs(variables)
    assert isinstance(hash(refs), int)
    assert hvd.refs_to_vars(refs)[1][0] is variables[1][0]
    assert [hvd.check_num_rank_power_of_2(n) for n in (1, 2, 3, 4)] == [True, True, False, True]


def test_nccl_has_no_part_in_tensors_that_go_through_host_memory():
    assert hvd.nccl_built() == hvd.mpi_ops.nccl_built() == 0


NONE, PS = "Compression.none", "global_process_set"
SIGNATURES = {
    "allreduce": "tensor, average=None, device_dense='', device_sparse='', compression=C, op=None, "
    "prescale_factor=1.0, postscale_factor=1.0, name=None, process_set=P, ignore_name_scope=False",
    "grouped_allreduce": "tensors, average=None, device_dense='', device_sparse='', compression=C, op=None, "
    "prescale_factor=1.0, postscale_factor=1.0, process_set=P, ignore_name_scope=False, name=None",
    "reducescatter": "tensor, device_dense='', compression=C, op=0, name=None, process_set=P, ignore_name_scope=False, "
    "prescale_factor=1.0, postscale_factor=1.0",
    "grouped_reducescatter": "tensors, device_dense='', compression=C, op=0, process_set=P, prescale_factor=1.0, "
    "postscale_factor=1.0, name=None",
    "allgather": "tensor, name=None, ignore_name_scope=False, process_set=P",
    "grouped_allgather": "tensors, name=None, ignore_name_scope=False, process_set=P",
    "broadcast": "tensor, root_rank, name=None, ignore_name_scope=False, process_set=P",
    "broadcast_": "variables, root_rank, name=None, process_set=P",
    "alltoall": "tensor, splits=None, name=None, ignore_name_scope=False, process_set=P",
    "join": "",
    "size_op": "process_set_id=0, name=None",
    "process_set_included_op": "process_set_id=0, name=None",
    "rank_op": "name=None",
    "broadcast_variables": "variables, root_rank, process_set=P, inplace=False",
    "broadcast_global_variables": "root_rank",
    "BroadcastGlobalVariablesHook": "root_rank, device=''",
    "broadcast_object": "obj, root_rank=0, session=None, name=None, process_set=P",
    "broadcast_object_fn": "root_rank=0, session=None, name=None, process_set=P",
    "allgather_object": "obj, session=None, name=None, process_set=P",
    "DistributedOptimizer": "optimizer, name=None, use_locking=False, device_dense='', device_sparse='', "
    "compression=C, sparse_as_dense=False, backward_passes_per_step=1, op=0, gradient_predivide_factor=1.0, "
    "average_aggregated_gradients=False, num_groups=0, groups=None, process_set=P, scale_local_gradients=True",
    "DistributedGradientTape": "gradtape, device_dense='', device_sparse='', compression=C, "
    "sparse_as_dense=False, op=0, gradient_predivide_factor=1.0, num_groups=0, "
    "groups=None, process_set=P, scale_local_gradients=True",
    "PartialDistributedGradientTape": "gradtape, device_dense='', device_sparse='', compression=C, "
    "sparse_as_dense=False, op=0, gradient_predivide_factor=1.0, num_groups=0, "
    "groups=None, process_set=P, local_layers=None, scale_local_gradients=True",
}


@pytest.mark.parametrize("name", SIGNATURES)
def test_parameters_are_in_the_usual_order_with_the_usual_defaults(name):
    parameters = []
    for parameter in inspect.signature(getattr(hvd, name)).parameters.values():
        default = parameter.default
        shown = {id(hvd.Compression.none): "C", id(hvd.global_process_set): "P"}.get(
            id(default), repr(default)
        )
        parameters.append(
            parameter.name if default is parameter.empty else f"{parameter.name}={shown}"
        )
    assert ", ".join(parameters) == SIGNATURES[name]


def test_importing_it_imports_no_keras_beyond_tensorflows_own():
    """And no other framework; asked in a process of its own, by one rank."""
    if hvd.rank() == 0:
        text = (
            "import sys, tensorflow; before = set(sys.modules); import horovod.tensorflow; "
            "new = {name.split('.')[0] for name in set(sys.modules) - before}; "
            "assert not new & {'keras', 'tf_keras', 'torch', 'jax'}, new"
        )
        subprocess.run([sys.executable, "-c", text], check=True)
    hvd.allgather_object(0)


def test_without_tensorflow_the_error_says_what_to_install():
    text = (
        "import sys, importlib.util as u; find = u.find_spec\n"
        "u.find_spec = lambda name, *a: None if name == 'tensorflow' else find(name, *a)\n"
        "try: import horovod.tensorflow\n"
        "except ImportError as error: assert 'pip install tensorflow' in str(error), error\n"
        "else: raise AssertionError('imported')"
    )
    if hvd.rank() == 0:
        subprocess.run([sys.executable, "-c", text], check=True)
    hvd.allgather_object(0)
