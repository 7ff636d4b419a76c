"""Training that survives ranks that die, hosts that leave and hosts that come: `hvd.elastic`."""

from horovod.common.api import init, shutdown
from horovod.common.elastic import ObjectState, State, run, run_fn
from horovod.torch.elastic.sampler import ElasticSampler
from horovod.torch.elastic.state import TorchState

__all__ = [
    "ElasticSampler",
    "ObjectState",
    "State",
    "TorchState",
    "init",
    "run",
    "run_fn",
    "shutdown",
]
