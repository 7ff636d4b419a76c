"""Trains a small model of a kind for a step and saves it as `docs/inference.md` says; prints what it predicts."""

import json
import os
import sys

os.environ.setdefault("KERAS_BACKEND", "tensorflow")
import numpy as np

kind, folder = sys.argv[1:]
INPUT = np.linspace(-1, 1, 8, dtype=np.float32).reshape(2, 4)


def torch_model() -> np.ndarray:
    import torch

    import horovod.torch as hvd

    hvd.init()
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.ReLU(), torch.nn.Linear(3, 2))
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), 0.1), named_parameters=model.named_parameters()
    )
    given = torch.from_numpy(INPUT)
    model(given).square().mean().backward()
    optimizer.step()
    torch.save(model.state_dict(), f"{folder}/weights.pt")
    torch.export.save(torch.export.export(model.eval(), (given,)), f"{folder}/model.pt2")
    torch.onnx.export(model, (given,), f"{folder}/model.onnx", input_names=["x"], verbose=False)
    return model(given).detach().numpy()


def keras_model() -> np.ndarray:
    import keras

    import horovod.keras as hvd

    hvd.init()
    keras.utils.set_random_seed(0)
    model = keras.Sequential(
        [keras.Input((4,)), keras.layers.Dense(3, "relu"), keras.layers.Dense(2)]
    )
    # Keras itself finds no loss again in a .h5 file that was given by its short name.
    loss = keras.losses.MeanSquaredError()
    model.compile(hvd.DistributedOptimizer(keras.optimizers.Adam(0.1)), loss)
    broadcast = hvd.callbacks.BroadcastGlobalVariablesCallback(0)
    model.fit(INPUT, np.zeros((2, 2)), batch_size=2, verbose=0, callbacks=[broadcast])
    model.save(f"{folder}/model.keras")
    model.save(f"{folder}/model.h5")
    return model.predict(INPUT, verbose=0)


def saved_model() -> np.ndarray:
    import tensorflow as tf

    import horovod.tensorflow as hvd

    hvd.init()

    class Model(tf.Module):
        def __init__(self) -> None:
            self.weights = tf.Variable(tf.ones([4, 2]))

        @tf.function(input_signature=[tf.TensorSpec([None, 4])])
        def __call__(self, x):
            return x @ self.weights

    model = Model()
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean(model(INPUT) ** 2)
    (gradient,) = hvd.DistributedGradientTape(tape).gradient(loss, [model.weights])
    model.weights.assign_sub(0.1 * gradient)
    tf.saved_model.save(model, f"{folder}/saved")
    return model(INPUT).numpy()


def frozen_graph() -> np.ndarray:
    import tensorflow.compat.v1 as tf

    import horovod.tensorflow as hvd

    hvd.init()
    tf.disable_eager_execution()
    x = tf.placeholder(tf.float32, [None, 4], name="x")
    weights = tf.get_variable("weights", initializer=tf.ones([4, 2]), use_resource=False)
    prediction = tf.identity(x @ weights, name="prediction")
    optimizer = hvd.DistributedOptimizer(tf.train.GradientDescentOptimizer(0.1))
    train = optimizer.minimize(tf.reduce_mean(prediction**2))
    with tf.Session() as session:
        session.run(tf.global_variables_initializer())
        session.run(hvd.broadcast_global_variables(0))
        session.run(train, {x: INPUT})
        frozen = tf.graph_util.convert_variables_to_constants(
            session, session.graph_def, ["prediction"]
        )
        with open(f"{folder}/model.pb", "wb") as file:
            file.write(frozen.SerializeToString())
        return session.run(prediction, {x: INPUT})


MODELS = {
    "torch": torch_model,
    "keras": keras_model,
    "saved_model": saved_model,
    "frozen": frozen_graph,
}
predicted = MODELS[kind]().tolist()
print("predicted:", json.dumps(predicted), flush=True)
