"""Waits for batches of a `DataLoader` count as input without marks, where the job is measured."""

import os
import threading
import time

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

import horovod.torch as hvd

# Each sample takes longer to read than the clock's resolution.
READING_S = 0.002
SAMPLES = 4


class Slow(Dataset):
    def __len__(self):
        return SAMPLES

    def __getitem__(self, index):
        end = time.monotonic() + READING_S
        while time.monotonic() < end:
            pass
        return torch.tensor(index)


def begin(metrics):
    hvd.shutdown()
    os.environ["HOROVOD_METRICS"] = metrics
    hvd.init()


@pytest.fixture
def measured():
    begin("1")
    yield
    begin("0")
    del os.environ["HOROVOD_METRICS"]


def input_seconds():
    rows = {row["rank"]: row for row in hvd.stats()["ranks"]}
    return rows[hvd.rank()]["input_seconds"]


@pytest.mark.parametrize("workers", [0, 1])
def test_waits_in_a_loader_are_input(measured, workers):
    start = time.monotonic()
    batches = [batch.tolist() for batch in DataLoader(Slow(), num_workers=workers)]
    took = time.monotonic() - start
    assert batches == [[0], [1], [2], [3]]
    waited = input_seconds()
    # A worker may have read batches before they were wanted.
    assert waited > 0 if workers else waited >= READING_S * SAMPLES
    assert waited <= took


def test_a_marked_wait_is_counted_once(measured):
    batches = iter(DataLoader(Slow()))
    start = time.monotonic()
    with hvd.phase("data"):
        next(batches)
        with hvd.phase("data"):
            next(batches)
    took = time.monotonic() - start
    assert 2 * READING_S <= input_seconds() <= took


def test_a_thread_that_reads_ahead_is_not_input(measured):
    reader = threading.Thread(target=lambda: list(DataLoader(Slow())))
    reader.start()
    reader.join(60)
    assert not reader.is_alive()
    assert input_seconds() == 0


def test_a_loader_outlives_the_job(measured):
    batches = iter(DataLoader(Slow()))
    next(batches)
    hvd.shutdown()
    assert next(batches).tolist() == [1]
    hvd.init()


def test_an_error_of_the_dataset_passes(measured):
    class Broken(Slow):
        def __getitem__(self, index):
            raise OSError("the disk is gone")

    with pytest.raises(OSError, match="the disk is gone"):
        next(iter(DataLoader(Broken())))
    next(iter(DataLoader(Slow())))
    assert input_seconds() >= READING_S


def test_a_loader_that_yields_from_the_loader_is_counted_once(measured):
    class Shorter(DataLoader):
        def __iter__(self):
            for batch in super().__iter__():
                yield batch * 2

    start = time.monotonic()
    assert [batch.item() for batch in Shorter(Slow())] == [0, 2, 4, 6]
    assert READING_S * SAMPLES <= input_seconds() <= time.monotonic() - start
