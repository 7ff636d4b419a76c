"""Parameters of estimators, without a Spark session."""

from __future__ import annotations

import warnings
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("pyspark")
torch = pytest.importorskip("torch")

import pyarrow as pa  # noqa: E402
import pyarrow.parquet as pq  # noqa: E402

from horovod.runner.common.util.host_hash import host_hash  # noqa: E402
from horovod.spark.common import util  # noqa: E402
from horovod.spark.common.job import require_numbers  # noqa: E402
from horovod.spark.common.store import Store  # noqa: E402
from horovod.spark.torch import TorchEstimator  # noqa: E402
from horovod.spark.torch.estimator import shapes_of_inputs  # noqa: E402


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


def test_containers_of_yarn_are_hosts_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CONTAINER_ID", raising=False)
    assert util.host_hash() == host_hash()
    assert util.host_hash("salt") == host_hash("salt")
    monkeypatch.setenv("CONTAINER_ID", "container_1")
    one = util.host_hash()
    assert one == util.host_hash() != host_hash()
    assert util.host_hash("salt") not in (one, host_hash("salt"))
    monkeypatch.setenv("CONTAINER_ID", "container_2")
    assert util.host_hash() != one


@pytest.mark.parametrize(
    ("value", "kind"), [("text", "str"), (b"bytes", "bytes"), (Decimal("1.5"), "Decimal")]
)
def test_a_column_without_numbers_is_named_with_its_type(value: Any, kind: str) -> None:
    with pytest.raises(
        TypeError, match=rf"column 'x' has the type {kind}; expected .*StringIndexer"
    ):
        require_numbers("x", np.array([value], dtype=object))
    for number in (1, 1.5, True):
        require_numbers("x", np.array([number]))


def test_what_rows_hold_is_known_of_columns_without_numbers(tmp_path: Path) -> None:
    row = {"text": ["a"], "bytes": [b"b"], "decimal": [Decimal("1.5")], "number": [1.5]}
    store = Store.create(str(tmp_path))
    Path(tmp_path, "intermediate_train_data").mkdir()
    pq.write_table(pa.table(row), f"{store.get_train_data_path()}/one.parquet")
    _, _, metadata, _ = util.get_simple_meta_from_parquet(store, ["number"], list(row)[:3])
    found = {name: metadata[name]["spark_data_type"] for name in row}
    assert found == {"text": str, "bytes": bytes, "decimal": Decimal, "number": np.float64}


def test_one_loss_is_for_all_label_columns() -> None:
    loss = torch.nn.functional.mse_loss
    assert util.to_list([loss], 2) == util.to_list(loss, 2) == [loss, loss]
    for name in ("loss", "loss_constructors"):
        TorchEstimator(label_cols=["a", "b"], **{name: [loss]})._check_lengths(name)
    with pytest.raises(
        ValueError, match="loss: expected one for each of the 3 label columns, got 2"
    ):
        TorchEstimator(label_cols=["a", "b", "c"], loss=[loss, loss])._check_lengths("loss")
    with pytest.raises(ValueError, match="loss_weights: expected one"):
        TorchEstimator(label_cols=["a", "b"], loss_weights=[1.0])._check_lengths("loss_weights")


def test_columns_of_numbers_feed_a_linear_layer_of_one_input() -> None:
    metadata = {"a": {"shape": None}, "b": {"shape": (3,)}}

    def shapes(model: Any, **given: Any) -> Any:
        return shapes_of_inputs(
            TorchEstimator(model=model, feature_cols=["a", "b"], **given), metadata
        )

    linear, embedding = torch.nn.Linear(1, 1), torch.nn.Embedding(3, 1)
    assert shapes(linear) == shapes(torch.nn.Sequential(linear, embedding)) == [[-1, 1], None]
    # The order of its layers does not tell which of them gets a column.
    own = torch.nn.Module()
    own.linear = linear
    for other in (embedding, torch.nn.Linear(2, 1), torch.nn.Sequential(embedding, linear), own):
        assert shapes(other) is None
    assert shapes(linear, input_shapes=[[-1], [-1, 3]]) == [[-1], [-1, 3]]
    assert shapes(linear, transformation_fn=dict) is None
