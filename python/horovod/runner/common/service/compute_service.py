"""Register of a tf.data service's dispatchers and workers, which the processes of two jobs read and write.

One process runs the `ComputeService`; all others reach it by a `ComputeClient`, over authenticated and encrypted
connections. A client fetches the whole register and looks for what it waits for.
"""

import json
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from horovod import _core
from horovod.runner.common.util.timeout import TimeoutException

__all__ = ["ComputeClient", "ComputeService"]

_POLL_EVERY_S = 0.1
_END_POLL_EVERY_S = 0.5
# A service that runs answers by then, however short a caller wants to wait for others.
_ANSWERS_WITHIN_S = 5.0

Addresses = Mapping[str, Sequence[tuple[str, int]]]


def _split(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)


def _joined(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


class ComputeService:
    """Serves the register of `dispatchers` dispatchers with `workers_per_dispatcher` workers each until `shutdown`.

    `key` are the 32 secret bytes that its clients have; `nics` the network interfaces to listen on, None for all.
    """

    def __init__(
        self,
        dispatchers: int,
        workers_per_dispatcher: int,
        key: bytes,
        nics: Sequence[str] | None = None,
    ) -> None:
        self._lock = threading.Lock()
        self._dispatchers: list[str | None] = [None] * dispatchers
        self._workers: list[set[int]] = [set() for _ in range(dispatchers)]
        self._per_dispatcher = workers_per_dispatcher
        self._shut_down = False
        self._closed = threading.Event()
        self._server = _core.PayloadServer(self._register(), False, list(nics or ()), key.hex())
        self._thread = threading.Thread(target=self._serve, name="hvd-compute-service", daemon=True)
        self._thread.start()

    def addresses(self) -> dict[str, list[tuple[str, int]]]:
        """Where it can be reached, as IP address and port, under this host's name."""
        return {socket.gethostname(): [_split(address) for address in self._server.addresses()]}

    def get_port(self) -> int:
        """The port of its first address."""
        return _split(self._server.addresses()[0])[1]

    def wait_for_shutdown(self) -> None:
        """Return when a client has asked for the end, or `shutdown` was called."""
        while not self._closed.wait(_POLL_EVERY_S):
            with self._lock:
                if self._shut_down:
                    return

    def shutdown(self) -> None:
        """End the service; who waits for its end returns."""
        self._closed.set()
        self._thread.join()
        self._server.close()

    def _register(self) -> bytes:
        register = {
            "dispatchers": self._dispatchers,
            "workers": [sorted(ids) for ids in self._workers],
            "workers_per_dispatcher": self._per_dispatcher,
            "shut_down": self._shut_down,
        }
        return json.dumps(register).encode()

    def _serve(self) -> None:
        while not self._closed.wait(_POLL_EVERY_S):
            while (delivery := self._server.take()) is not None:
                with self._lock:
                    self._enter(json.loads(delivery[1]))
                    self._server.publish(self._register())

    def _enter(self, message: dict[str, Any]) -> None:
        """Write into the register; who was first stays, and the other sees that in the register."""
        dispatcher = message.get("dispatcher")
        if message["kind"] == "shutdown":
            self._shut_down = True
        elif not isinstance(dispatcher, int) or not 0 <= dispatcher < len(self._dispatchers):
            return
        elif message["kind"] == "dispatcher":
            self._dispatchers[dispatcher] = self._dispatchers[dispatcher] or str(message["address"])
        elif message["kind"] == "worker":
            self._workers[dispatcher].add(int(message["worker"]))


class ComputeClient:
    """Reads and writes the register of a `ComputeService` at these addresses."""

    def __init__(self, addresses: Addresses, key: bytes, verbose: int = 1) -> None:
        del verbose
        self._addresses = [
            _joined(host, port) for all_ in addresses.values() for host, port in all_
        ]
        if not self._addresses:
            raise ValueError("A ComputeClient needs at least one address of the service.")
        self._key = key.hex()

    @property
    def service_addresses(self) -> list[tuple[str, int]]:
        """Where the service may be reached."""
        return [_split(address) for address in self._addresses]

    def register_dispatcher(
        self, dispatcher_id: int, dispatcher_address: str, timeout: float = 60
    ) -> None:
        """Tell all where dispatcher `dispatcher_id` listens.

        IndexError for an id that the service has no place for, ValueError if it is registered with another address,
        ConnectionError if the service cannot be reached within `timeout` seconds.
        """
        self._check(dispatcher_id, timeout)
        self._deliver(
            {"kind": "dispatcher", "dispatcher": dispatcher_id, "address": dispatcher_address},
            timeout,
        )
        registered = self.wait_for_dispatcher_registration(dispatcher_id, timeout)
        if registered != dispatcher_address:
            raise ValueError(
                f"Dispatcher with id {dispatcher_id} has already been registered under different address "
                f"{registered}: {dispatcher_address}"
            )

    def wait_for_dispatcher_registration(self, dispatcher_id: int, timeout: float = 60) -> str:
        """Return the address of dispatcher `dispatcher_id` once it is registered.

        `TimeoutException` if it is not within `timeout` seconds.
        """
        self._check(dispatcher_id, timeout)
        address: str = self._wait(
            lambda register: register["dispatchers"][dispatcher_id],
            timeout,
            f"dispatcher {dispatcher_id} to be registered",
        )
        return address

    def register_worker_for_dispatcher(
        self, dispatcher_id: int, worker_id: int, timeout: float = 60
    ) -> None:
        """Tell all that worker `worker_id` of dispatcher `dispatcher_id` runs. IndexError for an unknown dispatcher."""
        self._check(dispatcher_id, timeout)
        self._deliver({"kind": "worker", "dispatcher": dispatcher_id, "worker": worker_id}, timeout)

    def wait_for_dispatcher_worker_registration(
        self, dispatcher_id: int, timeout: float = 60
    ) -> None:
        """Return when all workers of dispatcher `dispatcher_id` are registered.

        `TimeoutException` if they are not within `timeout` seconds.
        """
        self._check(dispatcher_id, timeout)

        def complete(register: dict[str, Any]) -> bool:
            found = len(register["workers"][dispatcher_id])
            return found >= int(register["workers_per_dispatcher"])

        self._wait(complete, timeout, f"the workers of dispatcher {dispatcher_id} to be registered")

    def wait_for_shutdown(self) -> None:
        """Return when the service has been shut down, by whomever."""
        while True:
            try:
                if self._fetch(0)["shut_down"]:
                    return
            except ConnectionError:
                return
            time.sleep(_END_POLL_EVERY_S)

    def shutdown(self) -> None:
        """Shut the service down; if it is gone already, do nothing."""
        try:
            self._deliver({"kind": "shutdown"}, 0)
        except ConnectionError:
            return

    def _fetch(self, timeout: float) -> dict[str, Any]:
        try:
            content = _core.fetch_payload(
                self._addresses, self._key, 0, max(timeout, _ANSWERS_WITHIN_S)
            )
        except RuntimeError as error:
            raise self._unreachable() from error
        register: dict[str, Any] = json.loads(content)
        return register

    def _deliver(self, message: dict[str, Any], timeout: float) -> None:
        content = json.dumps(message).encode()
        try:
            _core.deliver_payload(
                self._addresses, self._key, 0, content, max(timeout, _ANSWERS_WITHIN_S)
            )
        except RuntimeError as error:
            raise self._unreachable() from error

    def _unreachable(self) -> ConnectionError:
        return ConnectionError(
            f"No compute service answers at {', '.join(self._addresses)}: either it has ended, or this configuration "
            "(addresses, key) is not its own."
        )

    def _check(self, dispatcher_id: int, timeout: float) -> None:
        dispatchers = len(self._fetch(timeout)["dispatchers"])
        if not 0 <= dispatcher_id < dispatchers:
            raise IndexError(
                f"Dispatcher id must be in range [0..{dispatchers - 1}], not {dispatcher_id}"
            )

    def _wait(self, found: Callable[[dict[str, Any]], Any], timeout: float, what: str) -> Any:
        deadline = time.monotonic() + timeout
        while True:
            result = found(self._fetch(deadline - time.monotonic()))
            if result:
                return result
            if time.monotonic() >= deadline:
                raise TimeoutException(f"Timeout waiting for {what} ({timeout} s).")
            time.sleep(_POLL_EVERY_S)
