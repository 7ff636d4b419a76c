"""horovod.data: batches in order, read ahead, with errors and early ends that leave no thread behind."""

import gc
import threading

import pytest

from horovod.data import AsyncDataLoaderMixin, BaseDataLoader
from horovod.data.data_loader_base import AsyncDataLoaderMixin as SameMixin

LIMIT_S = 300.0


class Numbers(BaseDataLoader):
    """Counts how many batches were taken from it, and waits for `gate` before each if there is one."""

    def __init__(self, count, fail_at=None, gate=None):
        self.count = count
        self.fail_at = fail_at
        self.gate = gate
        self.taken = 0

    def __len__(self):
        return self.count

    def _iterate(self):
        for i in range(self.count):
            if self.gate is not None:
                assert self.gate.acquire(timeout=LIMIT_S)
            if i == self.fail_at:
                raise KeyError(f"batch {i}")
            self.taken += 1
            yield i

    def _process_batch(self, batch):
        return batch * 10


class AsyncNumbers(AsyncDataLoaderMixin, Numbers):
    pass


def readers():
    return [t for t in threading.enumerate() if t.name == "horovod-data-reader"]


@pytest.fixture(autouse=True)
def _no_thread_stays():
    assert readers() == []
    yield
    gc.collect()
    for thread in readers():
        thread.join(LIMIT_S)
    assert readers() == []


def test_the_base_class_says_what_is_missing():
    loader = BaseDataLoader()
    with pytest.raises(NotImplementedError, match="__len__"):
        len(loader)
    with pytest.raises(NotImplementedError, match="_iterate"):
        next(iter(loader))


def test_batches_are_processed_by_the_hook():
    loader = Numbers(4)
    assert len(loader) == 4
    assert list(loader) == [0, 10, 20, 30]
    assert list(loader) == [0, 10, 20, 30]


@pytest.mark.parametrize("queue_size", [0, 1, 2, 3, 64])
def test_asynchronous_batches_come_in_order_every_epoch(queue_size):
    loader = AsyncNumbers(queue_size, False, 50)
    assert len(loader) == 50
    for _ in range(3):
        assert list(loader) == [10 * i for i in range(50)]
    loader.close_async_loader()
    assert list(loader) == [10 * i for i in range(50)]


def test_arguments_by_name():
    loader = AsyncNumbers(async_loader_queue_size=4, debug_data_loader=True, count=3)
    assert loader.async_loader_queue_size == 4
    assert loader.debug_data_loader is True
    assert list(loader) == [0, 10, 20]
    assert SameMixin is AsyncDataLoaderMixin


def test_debugging_goes_to_the_log_and_nothing_is_printed(caplog, capsys):
    caplog.set_level("INFO", logger="horovod.data")
    list(AsyncNumbers(4, True, 3))
    assert any("reading ahead" in message for message in caplog.messages)
    caplog.clear()
    list(AsyncNumbers(4, False, 3))
    assert caplog.messages == []
    assert capsys.readouterr() == ("", "")


def test_the_thread_reads_ahead_but_not_further_than_the_queue():
    gate = threading.Semaphore(0)
    loader = AsyncNumbers(3, False, 10, gate=gate)
    batches = iter(loader)
    gate.release()
    assert next(batches) == 0
    for _ in range(9):
        gate.release()
    assert [next(batches) for _ in range(9)] == [10 * i for i in range(1, 10)]
    assert next(batches, "end") == "end"
    assert loader.taken == 10


@pytest.mark.parametrize("queue_size", [0, 1, 2, 64])
@pytest.mark.parametrize("fail_at", [0, 3])
def test_an_error_is_raised_after_the_batches_before_it(queue_size, fail_at):
    loader = AsyncNumbers(queue_size, False, 10, fail_at=fail_at)
    seen = []
    with pytest.raises(KeyError, match=f"batch {fail_at}"):
        for batch in loader:
            seen.append(batch)
    assert seen == [10 * i for i in range(fail_at)]
    # Another iteration does not block, it fails in the same way.
    with pytest.raises(KeyError):
        list(loader)


@pytest.mark.parametrize("queue_size", [1, 2, 3, 64])
def test_closing_in_the_middle_ends_the_iteration(queue_size):
    loader = AsyncNumbers(queue_size, False, 1000)
    batches = iter(loader)
    assert next(batches) == 0
    loader.close_async_loader()
    assert readers() == []
    assert list(batches) == []
    loader.close_async_loader()


def test_closing_before_anything_started():
    AsyncNumbers(4, False, 3).close_async_loader()


@pytest.mark.parametrize("queue_size", [1, 2, 64])
def test_an_abandoned_iteration_ends_its_thread(queue_size):
    for batch in AsyncNumbers(queue_size, False, 1000):
        if batch == 30:
            break


def test_a_new_iteration_starts_from_the_beginning():
    loader = AsyncNumbers(2, False, 5)
    for _ in loader:
        break
    assert list(loader) == [0, 10, 20, 30, 40]


def test_iterations_at_the_same_time_do_not_share_batches():
    loader = AsyncNumbers(2, False, 20)
    pairs = list(zip(loader, loader, strict=True))
    assert pairs == [(10 * i, 10 * i) for i in range(20)]


def test_a_waiting_consumer_is_released_by_closing():
    gate = threading.Semaphore(0)
    loader = AsyncNumbers(2, False, 10, gate=gate)
    waiting = threading.Event()
    result = []

    def consume():
        batches = iter(loader)
        gate.release()
        result.append(next(batches))
        waiting.set()
        result.extend(batches)

    consumer = threading.Thread(target=consume)
    consumer.start()
    assert waiting.wait(LIMIT_S)
    closer = threading.Thread(target=loader.close_async_loader)
    closer.start()
    gate.release()  # the batch that is being read at this moment
    closer.join(LIMIT_S)
    consumer.join(LIMIT_S)
    assert not closer.is_alive()
    assert not consumer.is_alive()
    assert result[0] == 0
    assert len(result) <= 2
