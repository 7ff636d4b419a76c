"""Every rank that runs these tests is one job: it starts before the first test and is left together after the last."""

import pytest

import horovod.torch as hvd


@pytest.fixture(scope="session", autouse=True)
def _job():
    hvd.init()
    yield
    hvd.shutdown()


@pytest.fixture(autouse=True)
def _job_is_running():
    """Some tests leave the job and start another one; each begins with the usual one."""
    if not hvd.is_initialized():
        hvd.init()
