"""A rank's training of a PyTorch model for an estimator."""

from __future__ import annotations

import inspect
import io
import itertools
from typing import Any

from horovod import progress
from horovod.spark.common.job import READ_AHEAD, Job, gpu_of_rank, require_numbers
from horovod.spark.common.row_reader import AsyncRowBatches


def adopt(optimizer: Any, model: Any) -> None:
    """Make an optimizer work on the parameters of this model, in their order, if it was made for a copy of it."""
    own = list(model.parameters())
    known = {id(parameter) for parameter in own}
    groups = optimizer.param_groups
    parameters = [parameter for group in groups for parameter in group["params"]]
    if all(id(parameter) in known for parameter in parameters):
        return
    if [p.shape for p in parameters] != [p.shape for p in own]:
        raise ValueError(
            "optimizer: its parameters are not the model's; make it from model.parameters()"
        )
    state = optimizer.state_dict()
    fresh = iter(own)
    for group in groups:
        group["params"] = [next(fresh) for _ in group["params"]]
    optimizer.state.clear()
    optimizer.load_state_dict(state)


def train(job: Job) -> Any:
    """Train; rank 0 returns the history and the states of model and optimizer, the others None."""
    import horovod.torch as hvd

    with job.begun(hvd):
        return _Training(job).run()


class _Training:
    """Model, optimizer, data and loss of one rank."""

    def __init__(self, job: Job) -> None:
        import torch

        import horovod.torch as hvd

        self.job = job
        self.values = values = job.values
        seed = values["random_seed"]
        if seed is not None:
            torch.manual_seed(seed)
        self.device = own_device(values["use_gpu"])
        devices = hvd.allgather_object(self.device.type)
        if len(set(devices)) > 1:
            raise RuntimeError(
                f"All ranks don't have same device type! By rank: {devices}; use_gpu=False trains on CPUs"
            )
        model = values["model"]
        if isinstance(model, tuple):
            model = torch.jit.load(io.BytesIO(model[1]))  # type: ignore[no-untyped-call]
        optimizer = values["optimizer"]
        adopt(optimizer, model)
        resumed = None
        if job.checkpoint is not None:
            resumed = torch.load(io.BytesIO(job.checkpoint), weights_only=False)
            model.load_state_dict(resumed["model"])
        self.model = model.to(self.device)
        adopt(optimizer, self.model)
        if resumed is not None:
            optimizer.load_state_dict(resumed["optimizer"])
        self._scale_rates(optimizer, hvd.size())
        hvd.broadcast_parameters(self.model.state_dict(), root_rank=0)
        hvd.broadcast_optimizer_state(optimizer, root_rank=0)
        self.passes = values["backward_passes_per_step"]
        options = {"named_parameters": self.model.named_parameters()}
        if values["gradient_compression"] is not None:
            options["compression"] = values["gradient_compression"]
        self.optimizer: Any = hvd.DistributedOptimizer(
            optimizer, backward_passes_per_step=self.passes, **options
        )
        self.losses = values["loss"]
        if self.losses is None:
            self.losses = [make(**self._names()) for make in values["loss_constructors"]]
        count = len(values["label_cols"])
        self.loss_weights = values["loss_weights"] or [1.0 / count] * count
        per_rank = values["batch_size"] * hvd.size()
        self.steps = values["train_steps_per_epoch"] or max(1, job.train_rows // per_rank)

    def _names(self) -> dict[str, Any]:
        """Keywords for a constructor of a loss."""
        return {"model": self.model, "optimizer": self.optimizer, **self.values}

    @staticmethod
    def _scale_rates(optimizer: Any, factor: float) -> None:
        for group in optimizer.param_groups:
            group["lr"] = group["lr"] * factor

    def run(self) -> Any:
        """All epochs."""
        import horovod.torch as hvd

        loader = self._loader(training=True)
        stream = iter(loader)
        history = []
        content = b""
        try:
            for epoch in range(self.values["epochs"]):
                entry = {"epoch": epoch, "train": self._train_epoch(stream, epoch)}
                if self.job.val_rows:
                    entry["validation"] = self._validate()
                history.append(entry)
                if hvd.rank() == 0:
                    content = self._save()
                    if self.values["verbose"]:
                        print(f"epoch {epoch}: {entry}", flush=True)  # noqa: T201
        finally:
            loader.close_async_loader()
        return (history, content) if hvd.rank() == 0 else None

    def _loader(self, *, training: bool) -> AsyncRowBatches:
        import horovod.torch as hvd

        return self.job.rows(hvd.rank(), hvd.size(), training=training, ahead=READ_AHEAD)

    def _tensors(self, batch: dict[str, Any]) -> tuple[list[Any], list[Any], Any]:
        import torch

        def tensor(name: str, shape: Any) -> Any:
            require_numbers(name, batch[name])
            value = torch.as_tensor(batch[name]).to(self.device).float()
            return value if shape is None else value.reshape(shape)

        values = self.values
        features, labels = values["feature_cols"], values["label_cols"]
        shapes = values["input_shapes"] or [None] * len(features)
        label_shapes = values["label_shapes"] or [None] * len(labels)
        weight = values["sample_weight_col"]
        return (
            [tensor(name, shape) for name, shape in zip(features, shapes, strict=True)],
            [tensor(name, shape) for name, shape in zip(labels, label_shapes, strict=True)],
            tensor(weight, None) if weight else None,
        )

    def _outputs(self, outputs: Any, labels: list[Any]) -> tuple[list[Any], list[Any]]:
        several = list(outputs) if isinstance(outputs, list | tuple) else [outputs]
        if self.values["label_shapes"] is None:
            labels = [
                label.reshape(output.shape) if label.numel() == output.numel() else label
                for output, label in zip(several, labels, strict=True)
            ]
        return several, labels

    def _loss(self, outputs: list[Any], labels: list[Any], weights: Any) -> Any:
        total: Any = 0
        parts = zip(self.losses, outputs, labels, self.loss_weights, strict=True)
        for function, output, label, factor in parts:
            if weights is None:
                loss = function(output, label)
            else:
                rows = rowwise(function, output, label)
                if rows.shape[:1] != weights.shape[:1]:
                    raise ValueError(
                        f"loss: with sample_weight_col it has to give one value per row; it gave {tuple(rows.shape)}"
                    )
                loss = (rows.reshape(len(weights), -1).mean(dim=1) * weights.reshape(-1)).mean()
            total = total + factor * loss
        return total

    def _train_epoch(self, stream: Any, epoch: int) -> dict[str, Any]:
        self.model.train()
        sums = _Sums(self.values)
        step_fn = self.values["train_minibatch_fn"]
        self.optimizer.zero_grad()
        for number, batch in enumerate(itertools.islice(stream, self.steps)):
            inputs, labels, weights = self._tensors(batch)
            if step_fn is not None:
                outputs, loss = step_fn(
                    self.model,
                    self.optimizer,
                    self._outputs,
                    lambda outputs, labels, weights=None: self._loss(outputs, labels, weights),
                    inputs,
                    labels,
                    weights,
                    self.passes,
                    number,
                )
                several, labels = self._outputs(outputs, labels)
            else:
                several, labels = self._outputs(self.model(*inputs), labels)
                loss = self._loss(several, labels, weights)
                (loss / self.passes).backward()
                # The remaining batches at the end of an epoch make a step, too.
                if (number + 1) % self.passes == 0 or number + 1 == self.steps:
                    self.optimizer.step()
                    self.optimizer.zero_grad()
            sums.add(loss, several, labels, len(inputs[0]))
            progress.report(
                number + 1, self.steps, epoch=epoch, epochs=self.values["epochs"], loss=sums.loss()
            )
        return sums.averages("train")

    def _validate(self) -> dict[str, Any]:
        """Every row once, so ranks may make different numbers of steps; only the sums are reduced."""
        import torch

        self.model.eval()
        sums = _Sums(self.values)
        with torch.no_grad():
            steps = self.values["validation_steps_per_epoch"]
            for batch in itertools.islice(self._loader(training=False), steps):
                inputs, labels, weights = self._tensors(batch)
                several, labels = self._outputs(self.model(*inputs), labels)
                sums.add(self._loss(several, labels, weights), several, labels, len(inputs[0]))
        return sums.averages("validation")

    def _save(self) -> bytes:
        import torch

        import horovod.torch as hvd

        state = self.optimizer.state_dict()
        for group in state["param_groups"]:
            group["lr"] = group["lr"] / hvd.size()
        buffer = io.BytesIO()
        torch.save({"model": self.model.state_dict(), "optimizer": state}, buffer)
        store = self.job.store
        if store.saving_runs():
            folder = store.get_checkpoint_path(self.job.run_id)
            store.write_bytes(f"{folder}/{store.get_checkpoint_filename()}", buffer.getvalue())
        return buffer.getvalue()


class _Sums:
    """Loss and metrics of a phase, weighted by rows, over all ranks in the end."""

    def __init__(self, values: dict[str, Any]) -> None:
        self.labels = values["label_cols"]
        self.groups = []
        for group in values["metrics"] or []:
            functions = list(group) if isinstance(group, list | tuple) else [group]
            self.groups.append(functions * len(self.labels) if len(functions) == 1 else functions)
        self.names = [
            f"group_{i}_{label}" for i in range(len(self.groups)) for label in self.labels
        ]
        self.sums = [0.0] * (len(self.names) + 2)

    def add(self, loss: Any, outputs: list[Any], labels: list[Any], rows: int) -> None:
        """One batch."""
        import torch

        with torch.no_grad():
            found = [loss.detach()]
            for group in self.groups:
                found += [
                    function(output, label)
                    for function, output, label in zip(group, outputs, labels, strict=True)
                ]
        for number, value in enumerate(found):
            self.sums[number] += float(value) * rows
        self.sums[-1] += rows

    def loss(self) -> float:
        """Over the rows of this rank so far."""
        return self.sums[0] / max(self.sums[-1], 1.0)

    def averages(self, phase: str) -> dict[str, Any]:
        """Over all rows of all ranks."""
        import torch

        import horovod.torch as hvd

        total = hvd.allreduce(
            torch.tensor(self.sums, dtype=torch.float64), name=f"estimator.{phase}", op=hvd.Sum
        ).tolist()
        rows = max(total[-1], 1.0)
        loss, *metrics = (value / rows for value in total[:-1])
        return {"loss": loss, "all_metrics": dict(zip(self.names, metrics, strict=True))}


def own_device(use_gpu: bool) -> Any:
    """The GPU of this rank, or the CPU."""
    import torch

    import horovod.torch as hvd

    if not (use_gpu and torch.cuda.is_available()):
        return torch.device("cpu")
    return torch.device("cuda", gpu_of_rank(hvd.local_rank()) % torch.cuda.device_count())


def rowwise(function: Any, output: Any, label: Any) -> Any:
    """The loss of each row: by `reduction='none'`, which modules have as an attribute and functions as a keyword."""
    import torch

    if isinstance(function, torch.nn.Module) and hasattr(function, "reduction"):
        module: Any = function
        before = module.reduction
        module.reduction = "none"
        try:
            return module(output, label)
        finally:
            module.reduction = before
    try:
        inspect.signature(function).bind(output, label, reduction="none")
    except TypeError:
        raise TypeError(
            f"loss: with sample_weight_col it is called as loss(output, label, reduction='none'); {function!r} "
            "does not take that"
        ) from None
    except ValueError:
        pass
    return function(output, label, reduction="none")
