"""Parameters of estimators, without a Spark session."""

from __future__ import annotations

import warnings
from typing import Any

import pytest

pytest.importorskip("pyspark")
pytest.importorskip("torch")

from horovod.spark.torch import TorchEstimator


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("data_module", object),
        ("train_reader_num_workers", 4),
        ("val_reader_num_workers", 4),
        ("continuous_cols", ["a"]),
        ("categorical_cols", ["a"]),
        ("callbacks", [print]),
        ("transformation_edit_fields", [("a", float, (), False)]),
        ("transformation_removed_fields", ["a"]),
    ],
)
def test_what_has_no_effect_warns(name: str, value: Any) -> None:
    with pytest.warns(UserWarning, match=f"^{name} is accepted, with no effect"):
        estimator = TorchEstimator(**{name: value})
    assert estimator.value_of(name) == value


def test_defaults_do_not_warn() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        estimator = TorchEstimator()
        estimator.setParams(callbacks=[], train_reader_num_workers=2, data_module=None)
