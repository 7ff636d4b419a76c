"""The estimator of Keras models on real Spark: one small session, ranks started by `horovod.run`."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("pyspark")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
if "tensorflow" not in sys.modules:
    # Triton, a part of PyTorch on Linux, aborts a process that has TensorFlow already. Ranks have it: they import this
    # module to find its functions.
    with contextlib.suppress(ImportError):
        import triton  # type: ignore[import-untyped]  # noqa: F401
tf = pytest.importorskip("tensorflow")

from pyspark.ml import Pipeline, PipelineModel  # noqa: E402
from pyspark.ml.linalg import DenseVector, Vectors  # noqa: E402
from pyspark.sql import SparkSession  # noqa: E402

from horovod.spark import HorovodRunner  # noqa: E402
from horovod.spark.common.backend import LocalBackend  # noqa: E402
from horovod.spark.common.store import Store  # noqa: E402
from horovod.spark.keras import KerasEstimator, KerasModel  # noqa: E402
from horovod.tensorflow.keras import Compression  # noqa: E402
from horovod.tensorflow.keras.callbacks import BestModelCheckpoint  # noqa: E402

keras: Any = tf.keras
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
    rows = []
    for number, a in enumerate(rng.normal(size=(301, 3))):
        kind = int(a.argmax())
        rows.append(
            (
                Vectors.dense(a),
                float(a.sum()),
                Vectors.sparse(3, [kind], [1.0]),
                float(a @ WEIGHTS),
                kind,
                1.0 + number % 2,
                number % 5 == 0,
            )
        )
    names = ["x", "total", "kind", "y", "number", "weight", "held"]
    return spark.createDataFrame(rows, names).repartition(2).cache()


def _linear() -> Any:
    keras.utils.set_random_seed(0)
    return keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])


def _estimator(store: Any, **changes: Any) -> KerasEstimator:
    given: dict[str, Any] = {
        "backend": LocalBackend(2),
        "store": store,
        "model": _linear(),
        "optimizer": keras.optimizers.SGD(0.05, momentum=0.5),
        "loss": "mse",
        "feature_cols": ["x"],
        "label_cols": ["y"],
        "batch_size": 16,
        "epochs": 4,
        "random_seed": 3,
        "verbose": 0,
    }
    return KerasEstimator(**{**given, **changes})


class _Summaries(keras.callbacks.TensorBoard):
    """Writes into its folder without the package tensorboard."""

    def set_model(self, model: Any) -> None:
        self._model = model

    def on_train_begin(self, logs: Any = None) -> None:
        pass

    on_train_end = on_epoch_begin = on_train_batch_begin = on_train_batch_end = on_test_begin = (  # type: ignore[assignment]
        lambda self, *args, **kwargs: None
    )
    on_test_end = on_test_batch_begin = on_test_batch_end = on_train_end  # type: ignore[assignment]

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        Path(self.log_dir).mkdir(exist_ok=True)
        (Path(self.log_dir) / f"events.{epoch}").write_text(str(logs))


def test_fit_transform_save_load_and_resume(frame: Any, tmp_path: Path) -> None:
    store = Store.create(str(tmp_path / "store"))
    estimator = _estimator(
        store,
        validation="held",
        sample_weight_col="weight",
        loss_weights=[1.0],
        metrics=["mae"],
        run_id="first",
        callbacks=[_Summaries("/nowhere")],
    )
    pipeline = Pipeline(stages=[estimator]).fit(frame)
    model = pipeline.stages[0]
    history = model.getHistory()
    assert set(history) >= {"loss", "mae", "val_loss", "val_mae"}
    assert len(history["loss"]) == 4
    assert history["val_loss"][-1] < 0.05 * history["loss"][0]
    run = tmp_path / "store" / "runs" / "first"
    assert (run / "checkpoint").stat().st_size
    assert len(list((run / "logs").glob("events*"))) == 4

    predicted = pipeline.transform(frame).select("y", "y__output").collect()
    assert len(predicted) == 301
    assert max(abs(row["y"] - row["y__output"]) for row in predicted) < 1.0

    # Optimizer and learning rate are as one rank's, also after saving.
    steps = 4 * -(-round(301 * 0.8) // 32)
    pipeline.write().overwrite().save(str(tmp_path / "saved"))
    again = PipelineModel.load(str(tmp_path / "saved")).stages[0]
    assert isinstance(again, KerasModel)
    for one in (model, again):
        optimizer = one.getModel().optimizer
        assert float(optimizer.learning_rate.numpy()) == pytest.approx(0.05)
        assert int(optimizer.iterations.numpy()) == steps
    rows = again.setOutputCols(["p"]).transform(frame).select("p").collect()
    assert [row["p"] for row in rows] == pytest.approx([row["y__output"] for row in predicted])

    estimator.save(str(tmp_path / "estimator"))
    resumed = KerasEstimator.load(str(tmp_path / "estimator"))
    resumed.setStore(store).setBackend(LocalBackend(2)).setEpochs(1)
    more = resumed.fit(frame)
    assert more.getHistory()["loss"][0] < 0.2 * history["loss"][0]
    assert int(more.getModel().optimizer.iterations.numpy()) == steps * 5 // 4


def test_several_columns_and_everything_optional(frame: Any, tmp_path: Path) -> None:
    # Local ones travel by value.
    class Scale(keras.layers.Layer):
        def call(self, inputs: Any) -> Any:
            return inputs * 1.0

    def double(true: Any, predicted: Any) -> Any:
        return 2 * tf.reduce_mean(tf.square(true - predicted), axis=-1)

    first, second = keras.Input((3,)), keras.Input((1,))
    joined = Scale()(keras.layers.Concatenate()([first, second]))
    value = keras.layers.Dense(1, name="value")(joined)
    kind = keras.layers.Dense(3, activation="softmax", name="kind")(joined)
    model = keras.Model([first, second], [value, kind])
    batches: list[int] = []

    class Count(keras.callbacks.Callback):
        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            batches.append(epoch)
            logs["seen"] = float(len(batches))

    def negative(row: dict[str, Any]) -> dict[str, Any]:
        return {**row, "y": -row["y"]}

    estimator = _estimator(
        Store.create(str(tmp_path / "store")),
        model=model,
        optimizer=keras.optimizers.Adam(0.05),
        loss=["double", keras.losses.CategoricalCrossentropy()],
        loss_weights=[0.5, 2.0],
        feature_cols=["x", "total"],
        label_cols=["y", "kind"],
        validation=0.2,
        sample_weight_col="weight",
        custom_objects={"Scale": Scale, "double": double},
        callbacks=[Count()],
        checkpoint_callback=BestModelCheckpoint(),
        gradient_compression=Compression.fp16,
        backward_passes_per_step=2,
        transformation_fn=negative,
        inmemory_cache_all=True,
        train_steps_per_epoch=20,
        validation_steps_per_epoch=1,
        epochs=6,
    )
    trained = estimator.fit(frame).setOutputCols(["value", "kinds"])
    history = trained.getHistory()
    assert history["seen"] == [1, 2, 3, 4, 5, 6]
    assert history["val_loss"][-1] < 0.5 * history["val_loss"][0]
    # 20 batches an epoch are 10 steps, and the best epoch was kept.
    best = int(np.argmin(history["val_loss"])) + 1
    assert int(trained.getModel().optimizer.iterations.numpy()) == 20 * best
    rows = trained.transform(frame).select("y", "number", "value", "kinds").collect()
    assert all(isinstance(row["kinds"], DenseVector) for row in rows)
    right = sum(int(row["kinds"].toArray().argmax()) == row["number"] for row in rows)
    assert right > 0.8 * len(rows)
    # The labels that it has learned are the negative ones.
    assert np.corrcoef([row["y"] for row in rows], [row["value"] for row in rows])[0, 1] < -0.8


def test_whole_labels_are_predicted_as_whole_numbers(frame: Any) -> None:
    model = KerasModel(model=_linear(), feature_columns=["x"], label_columns=["number"])
    assert dict(model.transform(frame).dtypes)["number__output"] == "bigint"


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"model": object()}, r"instance of tensorflow\.keras\.Model"),
        ({"model": keras.Sequential([keras.layers.Dense(1)])}, "no weights yet"),
        ({"optimizer": None}, "optimizer"),
        ({"loss": None}, "Loss parameter is required"),
        ({"loss": "mean_of_everything"}, "no loss 'mean_of_everything'"),
        ({"loss": ["mse", "mse"]}, "1 label columns, got 2"),
        ({"feature_cols": ["x", "total"]}, "the model has 1 inputs"),
        ({"feature_cols": ["total"]}, "column 'total' has 1 values"),
        ({"feature_cols": ["z"]}, "no column 'z'"),
        ({"label_cols": ["kind"]}, "column 'kind' has 3 values"),
        ({"checkpoint_callback": object()}, "checkpoint_callback"),
    ],
    ids=lambda value: None if isinstance(value, str) else next(iter(value)),
)
def test_wrong_parameters_are_named(
    frame: Any, tmp_path: Path, changes: dict[str, Any], text: str
) -> None:
    with pytest.raises((ValueError, TypeError), match=text):
        _estimator(Store.create(str(tmp_path)), **changes).fit(frame)


class _FailsOnRank1(keras.callbacks.Callback):
    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        import horovod.tensorflow.keras as hvd

        if hvd.rank() == 1:
            raise LookupError("of a callback")


def test_an_exception_of_one_rank_is_raised(frame: Any, tmp_path: Path, capsys: Any) -> None:
    estimator = _estimator(
        Store.create(str(tmp_path)),
        backend=LocalBackend(2),
        callbacks=[_FailsOnRank1()],
    )
    with pytest.raises(LookupError, match="of a callback") as raised:
        estimator.fit(frame)
    assert "on rank 1" in raised.value.__notes__[0]
    assert "the script of rank 1 has ended with an exception" in "".join(capsys.readouterr())


def test_attributes_of_losses_travel() -> None:
    estimator = KerasEstimator(loss=keras.losses.Huber(0.25), optimizer=keras.optimizers.Adam(0.3))
    loss = estimator.from_plain("loss", estimator.to_plain("loss", estimator.getLoss()))
    assert float(loss([[0.0]], [[2.0]])) == pytest.approx(0.25 * 2 - 0.25**2 / 2)
    optimizer = estimator.from_plain(
        "optimizer", estimator.to_plain("optimizer", estimator.getOptimizer())
    )
    assert float(optimizer.learning_rate.numpy()) == pytest.approx(0.3)


def test_a_callback_tells_the_driver(spark: Any, capsys: pytest.CaptureFixture[str]) -> None:
    def main() -> int:
        import horovod.tensorflow.keras as hvd
        from horovod.spark.keras import LogCallback

        hvd.init()
        model = _linear()
        model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)), "mse")
        callbacks = [hvd.callbacks.BroadcastGlobalVariablesCallback(0), LogCallback(True)]
        data = np.ones((8, 3)), np.ones((8, 1))
        model.fit(*data, batch_size=4, epochs=2, verbose=2, callbacks=callbacks)
        return int(hvd.size())

    assert HorovodRunner(np=2).run(main) == 2
    lines = capsys.readouterr().out.splitlines()
    shown = [line.split(",")[0].split(" in ")[0] for line in lines]
    batches = ["batch 1/2", "batch 2/2"]
    assert shown == [
        *(f"epoch 1/2 {batch}" for batch in batches),
        "epoch 1/2",
        *(f"epoch 2/2 {batch}" for batch in batches),
        "epoch 2/2",
    ]
    assert all(", loss " in line for line in lines)
