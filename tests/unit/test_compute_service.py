"""The register that the two jobs of a tf.data service meet at."""

import threading
from collections.abc import Iterator

import pytest

from horovod.runner.common.service import compute_service
from horovod.runner.common.service.compute_service import ComputeClient, ComputeService
from horovod.runner.common.util.timeout import TimeoutException

KEY = bytes(range(32))
# Only what hangs reaches it.
LIMIT_S = 900


@pytest.fixture
def service() -> Iterator[ComputeService]:
    service = ComputeService(2, 2, KEY)
    yield service
    service.shutdown()


@pytest.fixture
def client(service: ComputeService) -> ComputeClient:
    return ComputeClient(service.addresses(), KEY)


def test_a_dispatcher_is_found_by_who_waits_for_it(client: ComputeClient) -> None:
    found = []

    def wait() -> None:
        found.append(client.wait_for_dispatcher_registration(1, LIMIT_S))

    waiting = threading.Thread(target=wait, daemon=True)
    waiting.start()
    client.register_dispatcher(1, "grpc://10.0.0.1:5000", LIMIT_S)
    waiting.join(LIMIT_S)
    assert found == ["grpc://10.0.0.1:5000"]
    client.register_dispatcher(1, "grpc://10.0.0.1:5000", LIMIT_S)
    with pytest.raises(ValueError, match="already been registered under different address"):
        client.register_dispatcher(1, "grpc://10.0.0.2:5000", LIMIT_S)


@pytest.mark.parametrize("dispatcher", [-1, 2])
def test_a_dispatcher_without_a_place_is_refused(client: ComputeClient, dispatcher: int) -> None:
    with pytest.raises(IndexError, match=r"must be in range \[0\.\.1\]"):
        client.register_dispatcher(dispatcher, "grpc://10.0.0.1:5000", LIMIT_S)
    with pytest.raises(IndexError):
        client.wait_for_dispatcher_worker_registration(dispatcher, LIMIT_S)


def test_each_dispatcher_has_workers_of_its_own(client: ComputeClient) -> None:
    for worker in (0, 1):
        client.register_worker_for_dispatcher(0, worker, LIMIT_S)
    client.register_worker_for_dispatcher(1, 2, LIMIT_S)
    client.wait_for_dispatcher_worker_registration(0, LIMIT_S)
    with pytest.raises(TimeoutException, match="the workers of dispatcher 1"):
        client.wait_for_dispatcher_worker_registration(1, 0)
    client.register_worker_for_dispatcher(1, 3, LIMIT_S)
    client.wait_for_dispatcher_worker_registration(1, LIMIT_S)


def test_the_end_reaches_the_service_and_its_clients(
    service: ComputeService, client: ComputeClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    waiting = [
        threading.Thread(target=who.wait_for_shutdown, daemon=True) for who in (service, client)
    ]
    for thread in waiting:
        thread.start()
    client.shutdown()
    for thread in waiting:
        thread.join(LIMIT_S)
        assert not thread.is_alive()
    service.shutdown()
    # Nobody will answer, however long it is waited.
    monkeypatch.setattr(compute_service, "_ANSWERS_WITHIN_S", 0.01)
    client.wait_for_shutdown()
    client.shutdown()


def test_a_stranger_is_not_answered(service: ComputeService) -> None:
    stranger = ComputeClient(service.addresses(), bytes(32))
    with pytest.raises(ConnectionError, match="No compute service answers"):
        stranger.wait_for_dispatcher_registration(0, LIMIT_S)
