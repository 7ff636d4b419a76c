"""The tf.data service of a job of compute workers, and the training ranks' way to it.

A compute job runs a dispatcher or several, with workers that preprocess; training ranks hand their data sets over to
them. Both jobs meet at a `ComputeService`, whose addresses and key stand in a configuration file. Importing this
module gives `tf.data.Dataset` the method `send_to_data_service`.
"""

import dataclasses
import ipaddress
import json
import os
import socket
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import tensorflow as tf

from horovod.common import api as hvd
from horovod.runner.common.service.compute_service import ComputeClient

__all__ = ["TfDataServiceConfig", "compute_worker_fn", "send_to_data_service", "tf_data_service"]

_POLL_EVERY_S = 1.0
_HEARTBEAT_MS = 1000


@dataclasses.dataclass(frozen=True)
class TfDataServiceConfig:
    """A training job's description of a compute job."""

    dispatchers: int
    """How many dispatchers there are: 1, or one for each training rank."""
    workers_per_dispatcher: int
    """How many workers each dispatcher has."""
    dispatcher_side: str
    """Which job runs the dispatchers: `compute` or `training`."""
    addresses: Mapping[str, Sequence[tuple[str, int]]]
    """Where the `ComputeService` can be reached: IP addresses and ports, by any name."""
    key: bytes
    """The secret of the service, 32 bytes."""
    timeout: int = 60
    """Seconds to wait for what the other job has to start."""

    def __post_init__(self) -> None:
        if self.dispatcher_side not in ("compute", "training"):
            raise ValueError(
                f"dispatcher_side={self.dispatcher_side!r}: expected 'compute' or 'training'."
            )

    def compute_client(self, verbose: int = 1) -> ComputeClient:
        """A client of the service."""
        return ComputeClient(self.addresses, self.key, verbose=verbose)

    def to_dict(self) -> dict[str, Any]:
        """As JSON can hold it."""
        values = dataclasses.asdict(self)
        values["key"] = self.key.hex()
        return values

    @staticmethod
    def from_dict(config: Mapping[str, Any]) -> "TfDataServiceConfig":
        """The inverse of `to_dict`."""
        values = dict(config)
        values["key"] = bytes.fromhex(values["key"])
        values["addresses"] = {
            name: [(ip, int(port)) for ip, port in addresses]
            for name, addresses in values["addresses"].items()
        }
        return TfDataServiceConfig(**values)

    def write(self, filename: str) -> None:
        """Write the file, readable for this user only, at once or not at all."""
        place = Path(filename).absolute()
        descriptor, temporary = tempfile.mkstemp(prefix=place.name, dir=place.parent)
        try:
            with os.fdopen(descriptor, "w") as file:
                json.dump(self.to_dict(), file)
            os.rename(temporary, place)
        except BaseException:
            os.unlink(temporary)
            raise

    @staticmethod
    def read(filename: str, wait_for_file_creation: bool = False) -> "TfDataServiceConfig":
        """Read a file that `write` has written, if asked to once it is there."""
        while wait_for_file_creation and not os.path.exists(filename):
            time.sleep(_POLL_EVERY_S)
        with open(filename) as file:
            return TfDataServiceConfig.from_dict(json.load(file))


def _own_address(client: ComputeClient) -> str:
    """This host's IP address on the way to the service, where the other hosts reach it as well."""

    def is_loopback(address: tuple[str, int]) -> bool:
        return ipaddress.ip_address(address[0]).is_loopback

    for host, port in sorted(client.service_addresses, key=is_loopback):
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            try:
                probe.connect((host, port))  # sends nothing
                own = str(probe.getsockname()[0])
            except OSError:
                continue
            return f"[{own}]" if ":" in own else own
    return "localhost"


def _start_dispatcher(client: ComputeClient) -> tuple[Any, str]:
    """A dispatcher, and where others reach it; its own idea of that is `localhost`."""
    server = tf.data.experimental.service.DispatchServer()
    protocol, rest = str(server.target).split("://", 1)
    port = rest.rpartition(":")[2]
    return server, f"{protocol}://{_own_address(client)}:{port}"


def _without_protocol(address: str) -> str:
    return address.split("://", 1)[1]


@contextmanager
def tf_data_service(compute_config: TfDataServiceConfig, rank: int) -> Iterator[str]:
    """Give the address (`grpc://host:port`) of the dispatcher that training rank `rank` uses.

    With dispatchers on the training side this starts them: on rank 0, or on every rank if there are several.
    TimeoutException if the other side's are not there within the configuration's timeout.
    """
    client = compute_config.compute_client(verbose=2)
    timeout = compute_config.timeout
    several = compute_config.dispatchers > 1
    dispatcher_id = rank if several else 0
    server = None
    if compute_config.dispatcher_side == "training" and (rank == 0 or several):
        server, address = _start_dispatcher(client)
        client.register_dispatcher(dispatcher_id, address, timeout=timeout)
    try:
        address = client.wait_for_dispatcher_registration(dispatcher_id, timeout)
        client.wait_for_dispatcher_worker_registration(dispatcher_id, timeout)
        yield address
    finally:
        if server is not None:
            server._stop()


def send_to_data_service(
    dataset: Any,
    compute_config: TfDataServiceConfig,
    rank: int,
    size: int | None = None,
    processing_mode: str = "distributed_epoch",
    reuse_dataset: bool = False,
    round_robin: bool = False,
) -> Any:
    """Return the data set as the compute job's workers preprocess it, for training rank `rank` of `size`.

    `processing_mode` as in `tf.data.experimental.service.distribute`. With `reuse_dataset` all ranks draw from one
    iteration of the data; with `round_robin` besides, each gets its turn.

    Raises
    ------
    RuntimeError
        The dispatchers run on the training side.
    """
    if compute_config.dispatcher_side == "training":
        raise RuntimeError(
            "training side dispatcher not supported, use tf_data_service context manager instead"
        )
    if reuse_dataset and round_robin and size is None:
        raise ValueError(
            "send_to_data_service: round_robin needs `size`, the number of training ranks."
        )
    with tf_data_service(compute_config, rank) as dispatcher_address:
        return dataset.apply(
            tf.data.experimental.service.distribute(
                processing_mode=processing_mode,
                service=dispatcher_address,
                job_name="job" if reuse_dataset else None,
                consumer_index=rank if reuse_dataset and round_robin else None,
                num_consumers=size if reuse_dataset and round_robin else None,
            )
        )


tf.data.Dataset.send_to_data_service = send_to_data_service


def compute_worker_fn(compute_config: TfDataServiceConfig) -> None:
    """Be a compute worker until the service is shut down; the function that every rank of a compute job runs."""
    hvd.init()
    client = compute_config.compute_client(verbose=2)
    timeout = compute_config.timeout
    dispatcher_id, place = divmod(hvd.rank(), compute_config.workers_per_dispatcher)
    server = None
    if compute_config.dispatcher_side == "compute" and place == 0:
        server, address = _start_dispatcher(client)
        client.register_dispatcher(dispatcher_id, address, timeout=timeout)
    worker = None
    try:
        address = client.wait_for_dispatcher_registration(dispatcher_id, timeout)
        worker = tf.data.experimental.service.WorkerServer(
            tf.data.experimental.service.WorkerConfig(
                dispatcher_address=_without_protocol(address),
                worker_address=f"{_own_address(client)}:%port%",
                heartbeat_interval_ms=_HEARTBEAT_MS,
                dispatcher_timeout_ms=timeout * 1000,
            )
        )
        client.register_worker_for_dispatcher(dispatcher_id, hvd.rank(), timeout=timeout)
        client.wait_for_shutdown()
    finally:
        for running in (worker, server):
            if running is not None:
                running._stop()
