"""The training of elastic_worker.py with PyTorch: a model, an optimizer with momentum, a sampler and `TorchState`."""

import os

import numpy as np
import torch

import horovod.torch as hvd


def _model() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Linear(3, 2)).double()


def _optimizer(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.125, momentum=0.5)


def _loss(model: torch.nn.Module, step: int) -> torch.Tensor:
    return sum(((step * 7 + i) % 5 - 2) * p.sum() for i, p in enumerate(model.parameters()))


def _weights(model: torch.nn.Module) -> list[np.ndarray]:
    return [param.detach().clone().numpy() for param in model.parameters()]


class Training:
    """Model and data."""

    def __init__(self, samples: int) -> None:
        torch.manual_seed(os.getpid())  # nobody begins alike
        self.model = self.on_device(_model())
        self.optimizer = hvd.DistributedOptimizer(
            _optimizer(self.model), named_parameters=self.model.named_parameters(), op=hvd.Max
        )
        self.sampler = hvd.elastic.ElasticSampler(range(samples), seed=1)
        self.batches = torch.utils.data.DataLoader(
            range(samples), batch_size=2, sampler=self.sampler
        )

    def on_device(self, model: torch.nn.Module) -> torch.nn.Module:
        """The model where it is trained."""
        return model

    def begin_step(self, step: int) -> None:
        self.optimizer.zero_grad()
        _loss(self.model, step).backward()

    def end_step(self) -> None:
        self.optimizer.step()

    def weights(self) -> list[np.ndarray]:
        return _weights(self.model)

    @staticmethod
    def undisturbed(start: list[np.ndarray], steps: int) -> list[np.ndarray]:
        """The weights after so many steps in one process."""
        model = _model()
        for param, value in zip(model.parameters(), start, strict=True):
            param.data.copy_(torch.from_numpy(value))
        optimizer = _optimizer(model)
        for step in range(steps):
            optimizer.zero_grad()
            _loss(model, step).backward()
            optimizer.step()
        return _weights(model)


class State(hvd.elastic.TorchState):
    def __init__(self, training: Training, **kwargs: object) -> None:
        super().__init__(training.model, training.optimizer, sampler=training.sampler, **kwargs)
