"""Loads what `inference_training.py` has saved, in a Python that has no horovod; prints what it predicts."""

import json
import os
import sys

os.environ.setdefault("KERAS_BACKEND", "tensorflow")
import numpy as np

kind, folder = sys.argv[1:]
INPUT = np.linspace(-1, 1, 8, dtype=np.float32).reshape(2, 4)
sys.modules["horovod"] = None  # what imports it fails as where it is not installed


def torch_models() -> list[np.ndarray]:
    import torch

    model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.ReLU(), torch.nn.Linear(3, 2))
    model.load_state_dict(torch.load(f"{folder}/weights.pt"))
    exported = torch.export.load(f"{folder}/model.pt2").module()
    results = [m(torch.from_numpy(INPUT)).detach().numpy() for m in (model, exported)]

    import onnxruntime

    session = onnxruntime.InferenceSession(
        f"{folder}/model.onnx", providers=["CPUExecutionProvider"]
    )
    return [*results, *session.run(None, {"x": INPUT})]


def keras_models() -> list[np.ndarray]:
    import keras

    models = [keras.models.load_model(f"{folder}/model.{suffix}") for suffix in ("keras", "h5")]
    assert all(type(m.optimizer) is keras.optimizers.Adam for m in models)
    return [m.predict(INPUT, verbose=0) for m in models]


def saved_model() -> list[np.ndarray]:
    import tensorflow as tf

    return [tf.saved_model.load(f"{folder}/saved")(INPUT).numpy()]


def frozen_graph() -> list[np.ndarray]:
    import tensorflow.compat.v1 as tf

    graph = tf.GraphDef()
    with open(f"{folder}/model.pb", "rb") as file:
        graph.ParseFromString(file.read())
    assert not [node.op for node in graph.node if node.op.startswith("Horovod")]
    with tf.Graph().as_default(), tf.Session() as session:
        tf.import_graph_def(graph, name="")
        return [session.run("prediction:0", {"x:0": INPUT})]


MODELS = {
    "torch": torch_models,
    "keras": keras_models,
    "saved_model": saved_model,
    "frozen": frozen_graph,
}
for predicted in MODELS[kind]():
    print("predicted:", json.dumps(predicted.tolist()), flush=True)
