"""The training of elastic_worker.py without a framework, which starts in a tenth of a second: arrays in an
`ObjectState`."""

import copy
import itertools
import os
from collections.abc import Iterator

import numpy as np

import horovod.numpy as hvd
from horovod.common._sampler import SampleDealer
from horovod.common.elastic import ObjectState

_SHAPES = [(3, 4), (3,), (2, 3), (2,)]
_RATE, _MOMENTUM = 0.125, 0.5


def _gradients(step: int) -> list[np.ndarray]:
    return [np.full(shape, (step * 7 + i) % 5 - 2.0) for i, shape in enumerate(_SHAPES)]


def _advance(weights: list[np.ndarray], momenta: list[np.ndarray], gradients: list[np.ndarray]):
    momenta = [_MOMENTUM * m + g for m, g in zip(momenta, gradients, strict=True)]
    return [w - _RATE * m for w, m in zip(weights, momenta, strict=True)], momenta


class Training:
    """Model and data."""

    def __init__(self, samples: int) -> None:
        dice = np.random.default_rng(os.getpid())  # nobody begins alike
        self._weights = [dice.random(shape) for shape in _SHAPES]
        self._momenta = [np.zeros(shape) for shape in _SHAPES]
        self.sampler = SampleDealer(range(samples), seed=1)

    @property
    def batches(self) -> Iterator[np.ndarray]:
        ids = iter(self.sampler)
        while batch := list(itertools.islice(ids, 2)):
            yield np.array(batch)

    def begin_step(self, step: int) -> None:
        self._handles = [
            hvd.allreduce_async(gradient, op=hvd.Max, name=f"gradient.{i}")
            for i, gradient in enumerate(_gradients(step))
        ]

    def end_step(self) -> None:
        gradients = [hvd.synchronize(handle) for handle in self._handles]
        self._weights, self._momenta = _advance(self._weights, self._momenta, gradients)

    def weights(self) -> list[np.ndarray]:
        return copy.deepcopy(self._weights)

    @staticmethod
    def undisturbed(start: list[np.ndarray], steps: int) -> list[np.ndarray]:
        """The weights after so many steps in one process."""
        weights, momenta = start, [np.zeros(shape) for shape in _SHAPES]
        for step in range(steps):
            weights, momenta = _advance(weights, momenta, _gradients(step))
        return weights

    @property
    def contents(self) -> tuple[object, ...]:
        """All that a step changes."""
        return self._weights, self._momenta, self.sampler.state_dict()

    @contents.setter
    def contents(self, contents: tuple[object, ...]) -> None:
        self._weights, self._momenta, progress = contents
        self.sampler.load_state_dict(progress)


class State(ObjectState):
    def __init__(self, training: Training, **kwargs: object) -> None:
        self._training = training
        super().__init__(hvd.broadcast_object, hvd.rank, contents=training.contents, **kwargs)

    def save(self) -> None:
        self.contents = self._training.contents
        super().save()

    def restore(self) -> None:
        super().restore()
        self._training.contents = self.contents

    def sync(self) -> None:
        self.contents = self._training.contents
        super().sync()
        self._training.contents = self.contents

    def reset(self) -> None:
        super().reset()
        self._training.sampler.reset()
