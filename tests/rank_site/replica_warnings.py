"""Warnings of rank 0 about replicas that differ: a fixture for the tests of every adapter."""

import pytest

import horovod.numpy as hvd


def begin_again(**options):
    """A new generation; every message of the one before has arrived then."""
    hvd.barrier()
    hvd.shutdown()
    hvd.init(**options)


def end_failed():
    """A new generation after one that has ended with an error."""
    hvd.shutdown()
    hvd.init()


@pytest.fixture
def found(capfd):
    """Returns the warnings since the test began; on other ranks than rank 0 there are none."""
    if hvd.size() < 2:
        pytest.skip("one rank has nobody to differ from")
    begin_again()
    capfd.readouterr()

    def found():
        begin_again()
        lines = capfd.readouterr().err.splitlines()
        lines = [line for line in lines if "as they begin to train" in line]
        assert not lines or hvd.rank() == 0
        return lines

    return found


def check_named(lines, *parts):
    """There is one warning, of rank 0, which has these parts."""
    if hvd.rank() != 0:
        return
    [line] = lines
    for part in parts:
        assert part in line, f"{part}\nis not in\n{line}"
