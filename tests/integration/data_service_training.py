"""A rank that trains on what the compute job of a tf.data service preprocesses; prints how much it was given."""

import sys

import pytest
import tensorflow as tf

import horovod.numpy as hvd
from horovod.tensorflow.data.compute_service import TfDataServiceConfig, tf_data_service

hvd.init()
file, mode = sys.argv[1:]
config = TfDataServiceConfig.read(file, wait_for_file_creation=True)
dataset = tf.data.Dataset.range(20).map(lambda x: x * 10)


def elements(given: tf.data.Dataset) -> list[int]:
    return [int(element) for element in given]


if mode == "shared":
    # All ranks draw from one iteration of the data.
    mine = elements(
        dataset.send_to_data_service(config, hvd.rank(), hvd.size(), reuse_dataset=True)
    )
    together = sorted(element for part in hvd.allgather_object(mine) for element in part)
    assert together == list(range(0, 200, 10)), together
else:
    if config.dispatcher_side == "training":
        with pytest.raises(RuntimeError, match="use tf_data_service context manager instead"):
            dataset.send_to_data_service(config, hvd.rank())
    with tf_data_service(config, hvd.rank()) as address:
        assert address.startswith("grpc://"), address
        service = tf.data.experimental.service.distribute("distributed_epoch", address)
        mine = elements(dataset.apply(service))
        # Each rank has a job of its own, and so all elements.
        assert sorted(mine) == list(range(0, 200, 10)), mine
        hvd.barrier()
hvd.barrier()
if hvd.rank() == 0:
    config.compute_client().shutdown()
print(f"rank {hvd.rank()} was given {len(mine)} elements", flush=True)
