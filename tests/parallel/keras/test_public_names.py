"""Public names of both packages are those that scripts of the original use."""

import importlib

import pytest
from keras_support import BACKEND

import documented_names
from horovod.common import api

BASICS = """init shutdown is_initialized start_timeline stop_timeline size local_size cross_size rank local_rank
cross_rank mpi_threads_supported mpi_enabled mpi_built gloo_enabled gloo_built nccl_built ddl_built ccl_built
cuda_built rocm_built global_process_set Average Sum Compression DistributedOptimizer broadcast_global_variables
allreduce allgather broadcast reducescatter load_model callbacks elastic"""
NAMES = {
    "horovod.keras": f"{BASICS} Adasum PartialDistributedOptimizer",
    "horovod.tensorflow.keras": f"{BASICS} ProcessSet add_process_set remove_process_set",
}
CALLBACKS = """BroadcastGlobalVariablesCallback MetricAverageCallback LearningRateScheduleCallback
LearningRateWarmupCallback BestModelCheckpoint"""
ELASTIC = "KerasState CommitStateCallback UpdateBatchStateCallback UpdateEpochStateCallback run"
SHARED = "create_distributed_optimizer CallableList load_model broadcast_global_variables allreduce allgather"

PACKAGES = ["horovod.keras"] + ["horovod.tensorflow.keras"] * (BACKEND == "tensorflow")


@pytest.mark.parametrize("package", PACKAGES)
def test_a_package_has(package):
    hvd = importlib.import_module(package)
    for name in NAMES[package].split():
        assert hasattr(hvd, name), name
    for name in CALLBACKS.split():
        assert hasattr(hvd.callbacks, name), name
    assert set(ELASTIC.split()) == set(hvd.elastic.__all__)
    documented_names.check(package)


@pytest.mark.parametrize("package", PACKAGES)
def test_nccl_has_a_part_where_the_backend_is_pytorch(package):
    hvd = importlib.import_module(package)
    assert hvd.nccl_built() == (api.nccl_built() if BACKEND == "torch" else 0)


def test_what_they_share_has():
    shared = importlib.import_module("horovod._keras")
    for name in SHARED.split():
        assert hasattr(shared, name), name
