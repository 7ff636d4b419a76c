"""Program of a compute job's ranks: `horovodrun -np 4 python -m horovod.tensorflow.data.compute_worker CONFIGFILE`."""

import argparse
import signal
import sys

from horovod.common import api as hvd
from horovod.runner.common.service.compute_service import ComputeService
from horovod.runner.common.util import secret
from horovod.tensorflow.data.compute_service import TfDataServiceConfig, compute_worker_fn

__all__ = ["main"]


def main(dispatchers: int, dispatcher_side: str, configfile: str, timeout: int = 60) -> None:
    """Start the service on rank 0, write its configuration to `configfile`, and be a worker until it is shut down.

    ValueError if the number of ranks is no multiple of `dispatchers`.
    """
    hvd.init()
    rank, size = hvd.rank(), hvd.size()
    if dispatchers < 1 or size % dispatchers:
        raise ValueError(
            f"Number of processes ({size}) must be a multiple of number of dispatchers ({dispatchers})."
        )
    workers_per_dispatcher = size // dispatchers
    config, service = None, None
    if rank == 0:
        key = secret.make_secret_key()
        service = ComputeService(dispatchers, workers_per_dispatcher, key)
        config = TfDataServiceConfig(
            dispatchers=dispatchers,
            workers_per_dispatcher=workers_per_dispatcher,
            dispatcher_side=dispatcher_side,
            addresses=service.addresses(),
            key=key,
            timeout=timeout,
        )
        config.write(configfile)
    try:
        compute_worker_fn(hvd.broadcast_object(config, name="TfDataServiceConfig"))
        # The others have to see the register's last state before it goes.
        hvd.barrier()
    finally:
        if service is not None:
            service.shutdown()


def _parse(words: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m horovod.tensorflow.data.compute_worker", description=__doc__
    )
    parser.add_argument("configfile", metavar="CONFIGFILE", help="written for the training job")
    parser.add_argument(
        "--dispatchers", type=int, default=1, help="1, or one for each training rank (default: 1)"
    )
    parser.add_argument(
        "--dispatcher-side",
        choices=("compute", "training"),
        default="compute",
        help="which job runs the dispatchers (default: compute)",
    )
    parser.add_argument(
        "--timeout",
        type=int,
        default=60,
        help="seconds to wait for dispatchers and workers (default: 60)",
    )
    return parser.parse_args(words)


if __name__ == "__main__":
    # SIGTERM ends the service in order.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    options = _parse(sys.argv[1:])
    main(options.dispatchers, options.dispatcher_side, options.configfile, options.timeout)
