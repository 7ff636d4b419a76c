"""The estimator of Lightning modules on real Spark: one small session, ranks started by `horovod.run`."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

cloudpickle = pytest.importorskip("cloudpickle")
pytest.importorskip("pyspark")
torch = pytest.importorskip("torch")
pl = pytest.importorskip("lightning.pytorch")

from pyspark import cloudpickle as spark_cloudpickle  # noqa: E402
from pyspark.ml.linalg import Vectors  # noqa: E402
from pyspark.sql import SparkSession  # noqa: E402

from horovod.spark.common.backend import LocalBackend  # noqa: E402
from horovod.spark.common.store import Store  # noqa: E402
from horovod.spark.lightning import TorchEstimator, TorchModel  # noqa: E402
from horovod.spark.lightning.remote import even_batch_size  # noqa: E402

WEIGHTS = np.array([1.0, -2.0, 3.0])


@pytest.fixture(scope="module")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    folder = tmp_path_factory.mktemp("spark")
    # Executors cannot import this file.
    for pickler in (cloudpickle, spark_cloudpickle):
        pickler.register_pickle_by_value(sys.modules[__name__])
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


class Line(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Linear(3, 1)

    def forward(self, x: Any) -> Any:
        return self.net(x.float())

    def training_step(self, batch: Any, index: int) -> Any:
        assert set(batch) == {"x", "y"}
        loss = torch.nn.functional.mse_loss(self(batch["x"]).reshape(-1), batch["y"].float())
        self.log("loss", loss, on_step=False, on_epoch=True, sync_dist=True)
        return loss

    def validation_step(self, batch: Any, index: int) -> None:
        loss = torch.nn.functional.mse_loss(self(batch["x"]).reshape(-1), batch["y"].float())
        self.log("val_loss", loss, sync_dist=True)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class FailsOnRank1(Line):
    def training_step(self, batch: Any, index: int) -> Any:
        if self.global_rank == 1:
            raise LookupError("of a step")
        return super().training_step(batch, index)


class Epochs(pl.Callback):
    """Writes down which epochs it saw."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        if trainer.is_global_zero:
            with self.path.open("a") as file:
                file.write(f"{trainer.current_epoch}\n")


class Twice(TorchModel):
    """Predicts the double."""

    def get_prediction_fn(self) -> Any:
        def predict(model: Any, row: Any) -> Any:
            return 2 * model(torch.as_tensor(row["x"])[None])

        return predict


def _estimator(store: Any, **changes: Any) -> TorchEstimator:
    torch.manual_seed(0)
    given: dict[str, Any] = {
        "backend": LocalBackend(2),
        "store": store,
        "feature_cols": ["x"],
        "label_cols": ["y"],
        "batch_size": 16,
        "epochs": 4,
        "random_seed": 3,
        "verbose": 0,
    }
    return TorchEstimator(**{**given, **changes})


def _mean_error(frame: Any, column: str, factor: float = 1.0) -> float:
    rows = frame.select("y", column).collect()
    return float(np.mean([abs(factor * row["y"] - row[column]) for row in rows]))


def test_fit_transform_save_load_and_resume(frame: Any, tmp_path: Path) -> None:
    store = Store.create(str(tmp_path / "store"))
    seen = tmp_path / "epochs"
    given: dict[str, Any] = {
        "model": Line(),
        "validation": "held",
        "run_id": "first",
        "callbacks": [Epochs(seen)],
        "log_every_n_steps": 1,
    }
    model = _estimator(store, **given, trainer_args={"gradient_clip_val": 100.0}).fit(frame)
    assert seen.read_text().split() == ["0", "1", "2", "3"]
    history = model.getHistory()
    assert set(history) == {"loss", "val_loss"}
    assert history["val_loss"] < 0.1
    assert _mean_error(model.transform(frame), "y__output") < 0.3
    run = tmp_path / "store" / "runs" / "first"
    assert (run / "checkpoint").is_file()
    assert list((run / "logs").iterdir()), "nothing was logged"

    model.write().overwrite().save(str(tmp_path / "saved"))
    loaded = TorchModel.load(str(tmp_path / "saved")).setOutputCols(["p"])
    assert _mean_error(loaded.transform(frame), "p") == pytest.approx(
        _mean_error(model.transform(frame), "y__output")
    )
    twice = Twice(model=model.getModel(), feature_columns=["x"], label_columns=["y"])
    assert _mean_error(twice.transform(frame), "y__output", 2.0) < 0.6

    # Epochs go on counting, and so does the training.
    resumed = _estimator(store, **given).setEpochs(1).fit(frame)
    assert seen.read_text().split()[4:] == ["4"]
    assert resumed.getHistory()["val_loss"] < history["val_loss"]


def test_a_plain_module_and_the_best_checkpoint(frame: Any, tmp_path: Path) -> None:
    net = torch.nn.Linear(3, 1)
    estimator = _estimator(
        Store.create(str(tmp_path / "store")),
        model=net,
        optimizer=torch.optim.SGD(net.parameters(), lr=0.1),
        loss=torch.nn.functional.mse_loss,
        sample_weight_col="weight",
        verbose=1,
        validation=0.2,
        run_id="plain",
        callbacks=[pl.callbacks.ModelCheckpoint(monitor="val_loss")],
    )
    model = estimator.fit(frame)
    assert isinstance(model.getModel(), torch.nn.Linear)
    assert model.getHistory()["val_loss"] < 0.1
    assert _mean_error(model.transform(frame), "y__output") < 0.3
    run = tmp_path / "store" / "runs" / "plain"
    assert [path.name for path in (run / "checkpoints").iterdir()]


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"loss": torch.nn.functional.mse_loss}, "loss is not for a LightningModule"),
        ({"model": torch.nn.Linear(3, 1)}, "expected a LightningModule"),
        ({"trainer_args": {"strategy": "ddp"}}, "strategy is the estimator's"),
        ({"train_async_data_loader_queue_size": "many"}, "number of batches"),
    ],
    ids=lambda value: None if isinstance(value, str) else next(iter(value)),
)
def test_wrong_parameters_are_named(
    frame: Any, tmp_path: Path, changes: dict[str, Any], text: str
) -> None:
    with pytest.raises((ValueError, RuntimeError), match=text):
        _estimator(Store.create(str(tmp_path)), **{"model": Line(), **changes}).fit(frame)


def test_an_exception_of_one_rank_is_raised(frame: Any, tmp_path: Path, capsys: Any) -> None:
    backend = LocalBackend(2)
    with pytest.raises(LookupError, match="of a step") as raised:
        _estimator(Store.create(str(tmp_path)), model=FailsOnRank1(), backend=backend).fit(frame)
    assert "on rank 1" in raised.value.__notes__[0]
    assert "the script of rank 1 has ended with an exception" in "".join(capsys.readouterr())


def test_validation_batches_are_as_many_on_each_rank() -> None:
    for rows in range(2, 70):
        for size in (1, 2, 3):
            if rows < size:
                continue
            batch = even_batch_size(rows, size, 8)
            shares = {rows * (r + 1) // size - rows * r // size for r in range(size)}
            assert len({-(-share // batch) for share in shares}) == 1
            assert batch >= 8
