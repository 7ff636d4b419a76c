"""Estimators on real Spark: one small session, ranks started by `horovod.run`."""

from __future__ import annotations

import io
import os
import re
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pyspark = pytest.importorskip("pyspark")
torch = pytest.importorskip("torch")

from pyspark.ml import Pipeline, PipelineModel  # noqa: E402
from pyspark.ml.linalg import Vectors  # noqa: E402
from pyspark.sql import SparkSession  # noqa: E402

from horovod.spark.common.backend import LocalBackend, SparkBackend  # noqa: E402
from horovod.spark.common.store import Store  # noqa: E402
from horovod.spark.torch import TorchEstimator, TorchModel  # noqa: E402

LOCK = threading.Lock()
WEIGHTS = np.array([1.0, -2.0, 3.0])


@pytest.fixture(scope="module")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    folder = tmp_path_factory.mktemp("spark")
    os.environ["PYSPARK_PYTHON"] = sys.executable
    session = (
        SparkSession.builder.master("local[2]")
        .config("spark.ui.enabled", "false")
        .config("spark.driver.memory", "1g")
        .config("spark.sql.shuffle.partitions", "2")
        .config("spark.local.dir", str(folder))
        .config("spark.sql.warehouse.dir", str(folder / "warehouse"))
        .getOrCreate()
    )
    yield session
    session.stop()


@pytest.fixture(scope="module")
def frame(spark: Any) -> Any:
    rng = np.random.default_rng(1)
    x = rng.normal(size=(301, 3))
    rows = [
        (Vectors.dense(a), float(a @ WEIGHTS), 1.0, number % 5 == 0) for number, a in enumerate(x)
    ]
    return spark.createDataFrame(rows, ["x", "y", "weight", "held"]).repartition(2).cache()


def _estimator(store: Any, **changes: Any) -> TorchEstimator:
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 1)
    given: dict[str, Any] = {
        "backend": LocalBackend(2),
        "store": store,
        "model": model,
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.05),
        "loss": torch.nn.functional.mse_loss,
        "feature_cols": ["x"],
        "label_cols": ["y"],
        "batch_size": 16,
        "epochs": 4,
        "random_seed": 3,
        "verbose": 0,
    }
    return TorchEstimator(**{**given, **changes})


def test_fit_transform_save_and_load(frame: Any, tmp_path: Path) -> None:
    store = Store.create(str(tmp_path / "store"))
    estimator = _estimator(
        store,
        validation="held",
        sample_weight_col="weight",
        metrics=[[torch.nn.functional.l1_loss]],
        run_id="first",
    )
    pipeline = Pipeline(stages=[estimator]).fit(frame)
    model = pipeline.stages[0]
    history = model.getHistory()
    assert [entry["epoch"] for entry in history] == [0, 1, 2, 3]
    assert history[-1]["validation"]["loss"] < 0.05 * history[0]["train"]["loss"]
    assert set(history[-1]["validation"]["all_metrics"]) == {"group_0_y"}

    predicted = pipeline.transform(frame).select("y", "y__output").collect()
    assert len(predicted) == 301
    errors = [abs(row["y"] - row["y__output"]) for row in predicted]
    assert max(errors) < 1.0

    pipeline.write().overwrite().save(str(tmp_path / "saved"))
    loaded = PipelineModel.load(str(tmp_path / "saved"))
    again = loaded.stages[0]
    assert isinstance(again, TorchModel)
    rows = again.setOutputCols(["p"]).transform(frame).select("p").collect()
    assert [row["p"] for row in rows] == pytest.approx([row["y__output"] for row in predicted])

    # The learning rate is as it was, and training goes on from the checkpoint.
    assert model.getOptimizer()["param_groups"][0]["lr"] == pytest.approx(0.05)
    resumed = _estimator(store, run_id="first", epochs=1, validation="held").fit(frame)
    assert resumed.getHistory()[0]["train"]["loss"] < 0.2 * history[0]["train"]["loss"]


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"feature_cols": ["z"]}, "no column 'z'"),
        ({"label_cols": None}, "label_cols"),
        ({"validation": 1}, "must be of type"),
        ({"validation": 1.5}, "share from 0"),
        ({"model": None}, "Model parameter is required"),
        ({"num_proc": 2}, "At most one"),
        ({"loss": None}, "loss"),
        ({"loss": lambda output, label: LOCK}, "loss cannot be sent"),
        ({"input_shapes": [[-1, 4]]}, "input_shapes"),
        ({"backend": LocalBackend(400)}, "400 ranks"),
    ],
    ids=lambda value: None if isinstance(value, str) else next(iter(value)),
)
def test_wrong_parameters_are_named(
    frame: Any, tmp_path: Path, changes: dict[str, Any], text: str
) -> None:
    with pytest.raises((ValueError, TypeError), match=text):
        _estimator(Store.create(str(tmp_path)), **changes).fit(frame)


def test_wrong_data_is_found_before_training(spark: Any, tmp_path: Path) -> None:
    store = Store.create(str(tmp_path))
    nulls = spark.createDataFrame(
        [([1.0] * 3, 1.0), ([1.0] * 3, None)], "x array<double>, y double"
    )
    with pytest.raises(ValueError, match="null values in column 'y'"):
        _estimator(store).fit(nulls)
    ragged = spark.createDataFrame(
        [([1.0] * 3, 1.0), ([1.0] * 2, 2.0)], "x array<double>, y double"
    )
    with pytest.raises(
        ValueError, match="'x' does not have uniform shape: its rows have from 2 to 3"
    ):
        _estimator(store).fit(ragged)


def test_columns_without_numbers_are_named(spark: Any, tmp_path: Path) -> None:
    columns = "'text' AS text, binary('b') AS binary, 1.5BD AS decimal, date'2020-01-01' AS date"
    frame = spark.sql(f"SELECT {columns}, array('a') AS texts, 1.0D AS y")
    estimator = _estimator(Store.create(str(tmp_path)))
    for name, kind in frame.dtypes[:-1]:
        text = rf"column '{name}' has the type {re.escape(kind)}; expected numbers"
        with pytest.raises(TypeError, match=text):
            estimator.copy().setFeatureCols([name]).fit(frame)
    assert not list(tmp_path.iterdir())


def test_a_column_of_numbers_and_a_broadcast_variable(spark: Any, tmp_path: Path) -> None:
    frame = spark.createDataFrame([(float(x), 2.0 * x) for x in range(-4, 4)], ["x", "y"])
    model = torch.nn.Linear(1, 1)
    factor = spark.sparkContext.broadcast(2.0)
    trained = _estimator(
        Store.create(str(tmp_path)),
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.01),
        loss=[lambda output, label: factor.value * torch.nn.functional.mse_loss(output, label)],
        batch_size=4,
        epochs=20,
    ).fit(frame)
    history = trained.getHistory()
    assert history[-1]["train"]["loss"] < 0.5 * history[0]["train"]["loss"]
    assert trained.transform(frame).count() == 8


def test_unwritable_store_is_an_error() -> None:
    with pytest.raises(OSError, match="cannot be written"):
        _estimator(Store.create("/proc/none")).fit(None)


def test_ranks_in_spark_tasks(frame: Any, tmp_path: Path) -> None:
    store = Store.create(str(tmp_path / "store"))
    backend = SparkBackend(2, start_timeout=900, stdout=io.StringIO())
    model = _estimator(store, backend=backend, epochs=2).fit(frame)
    history = model.getHistory()
    assert len(history) == 2
    assert history[1]["train"]["loss"] < history[0]["train"]["loss"]


@pytest.mark.parametrize("backend", [SparkBackend, LocalBackend])
def test_an_exception_of_one_rank_is_raised(
    backend: Any, frame: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def loss(output: Any, label: Any) -> Any:
        import horovod.torch as hvd

        if hvd.rank() == 1:
            raise LookupError("no such label")
        return torch.nn.functional.mse_loss(output, label)

    estimator = _estimator(Store.create(str(tmp_path)), backend=backend(2), loss=loss)
    with pytest.raises(LookupError, match="no such label") as raised:
        estimator.fit(frame)
    assert "on rank 1" in raised.value.__notes__[0]
    printed = "".join(capsys.readouterr())
    assert "the script of rank 1 has ended with an exception" in printed
    assert "hvd.join()" not in printed


def test_transformed_rows_and_a_share_for_validation(frame: Any, tmp_path: Path) -> None:
    def half(row: dict[str, Any]) -> dict[str, Any]:
        return {**row, "y": row["y"] / 2}

    store = Store.create(str(tmp_path / "store"))
    estimator = _estimator(
        store, validation=0.2, transformation_fn=half, backward_passes_per_step=2, epochs=8
    )
    model = estimator.fit(frame)
    history = model.getHistory()
    assert history[-1]["validation"]["loss"] < 0.5 * history[0]["train"]["loss"]
    # The labels it has learned are the halves.
    rows = model.transform(frame).select("y", "y__output").collect()
    halves = sum(abs(row["y"] / 2 - row["y__output"]) for row in rows)
    assert halves < sum(abs(row["y"] - row["y__output"]) for row in rows)
