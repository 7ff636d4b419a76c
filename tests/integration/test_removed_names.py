"""The table of docs/from-horovod.md: what newer frameworks have removed is gone, and what it says still works does."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

import harness

TITLE = "## What newer frameworks have removed"

# For each framework: what its calls need, calls that fail, calls that still work in Horovod's objects.
Calls = dict[str, str]
FRAMEWORKS: dict[str, tuple[str, Calls, list[str]]] = {
    "Keras 3 (TensorFlow 2.16 and newer)": (
        """
import keras
import horovod.keras as hvd
hvd.init()
opt = keras.optimizers.SGD(0.1)
distributed = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1))
model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
file, x, batches = "model.keras", 0.2, []
""",
        {
            "opt.variables()": "TypeError",
            "opt.lr": "AttributeError",
            "keras.backend.get_value(opt.lr)": "AttributeError",
            "keras.backend.set_value(opt.lr, x)": "AttributeError",
            "model.fit_generator(...)": "AttributeError",
            "keras.optimizers.legacy.SGD(0.1)": "ImportError",
            "hvd.load_model(file, legacy_opts=True)": "ValueError",
            'model.save("folder")': "ValueError",
            'model.save_weights("name")': "ValueError",
            "keras.backend.get_session()": "AttributeError",
        },
        [
            "distributed.variables()",
            "distributed.lr",
            "keras.optimizers.Adam(lr=0.1)",
            "model.compile('sgd', 'mse', experimental_run_tf_function=False)",
            'model.save("name.keras")',
            'model.save_weights("name.weights.h5")',
        ],
    ),
    "TensorFlow 2": (
        "import tensorflow as tf",
        {
            "tf.Session()": "AttributeError",
            "tf.placeholder(...)": "AttributeError",
            "tf.layers.dense(...)": "AttributeError",
            "tf.contrib": "AttributeError",
            "tf.estimator": "AttributeError",
        },
        ["tf.compat.v1.Session()", "tf.compat.v1.placeholder"],
    ),
    "PyTorch 2.6": (
        """
import fractions
import torch
file = "object.pt"
torch.save(fractions.Fraction(1, 2), file)
""",
        {"torch.load(file)": "UnpicklingError"},
        ["torch.load(file, weights_only=False)"],
    ),
    "Lightning 2": (
        "from lightning.pytorch import Trainer\nfrom horovod.torch.lightning import HorovodStrategy",
        {'Trainer(accelerator="horovod")': "ValueError"},
        ["Trainer(strategy=HorovodStrategy())"],
    ),
    "Ray Train V2": (
        "import ray\nfrom horovod.ray.train import HorovodTrainer",
        {"ray.train.horovod.HorovodTrainer": "AttributeError"},
        ["HorovodTrainer"],
    ),
    "NumPy 1.24": (
        "import numpy as np",
        dict.fromkeys(("np.float", "np.int", "np.object"), "AttributeError"),
        [],
    ),
}

PROGRAM = """
import json, sys
first, calls = json.loads(sys.argv[1])
names = {"__name__": "__main__"}
exec(first, names)
for call in calls:
    try:
        exec(call, names)
        said = ""
    except Exception as error:
        said = type(error).__name__
    print("CALL", json.dumps([call, said]), flush=True)
"""


def rows() -> dict[str, set[str]]:
    """For each framework of the page's table, the calls in its second column."""
    text = (harness.ROOT / "docs" / "from-horovod.md").read_text().split(TITLE)[1]
    found: dict[str, set[str]] = {}
    framework = ""
    for line in re.findall(r"^\| (.*) \|$", text.split("\n## ")[0], re.MULTILINE)[2:]:
        first, call, _ = re.split(r" ?\| ", f"{line} ", maxsplit=2)
        framework = first.strip() or framework
        found.setdefault(framework, set()).update(re.findall(r"`([^`]+)`", call))
    return found


def test_the_table_has_these_frameworks() -> None:
    assert list(rows()) == list(FRAMEWORKS)


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_what_the_table_says(framework: str, jobs, tmp_path: Path) -> None:
    first, gone, work = FRAMEWORKS[framework]
    if "import ray" in first:
        pytest.importorskip("ray")
    # Calls that work are in the table as well where Horovod, and not the framework, keeps them.
    accepted = {c for c in rows()[framework] if "lr=0.1" in c or "experimental_run" in c}
    assert rows()[framework] - accepted == set(gone)
    words = json.dumps([first, [*gone, *work]])
    env = {"KERAS_BACKEND": "tensorflow"}
    job = jobs(harness.Job([sys.executable, "-c", PROGRAM, words], cwd=tmp_path, env=env)).succeed()
    outcome = dict(json.loads(line) for line in re.findall(r"CALL (.*)", job.stdout))
    assert outcome == {**gone, **dict.fromkeys(work, "")}
