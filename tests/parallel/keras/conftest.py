"""Every rank that runs these tests is one job, with the backend of Keras that environments.json says."""

import keras
import pytest

import horovod.keras as hvd


@pytest.fixture(autouse=True)
def _float32():
    yield
    keras.mixed_precision.set_global_policy("float32")


@pytest.fixture(scope="session", autouse=True)
def _job():
    yield
    hvd.shutdown()
