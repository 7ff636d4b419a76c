"""Lightning strategy: `Trainer(strategy=HorovodStrategy())` trains on the ranks that a launcher has started."""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch

import horovod.torch as hvd
from horovod.torch.metrics import connect_metrics
from horovod.torch.optimizer import _DistributedOptimizer

if TYPE_CHECKING:
    from lightning.fabric.plugins import ClusterEnvironment as _Environment
    from lightning.pytorch.strategies import ParallelStrategy as _Strategy
else:
    _Environment = _Strategy = object

__all__ = ["HorovodStrategy", "strategy_class"]

# Lightning has two names on PyPI, each with classes of its own, and the package that both are built on.
_PACKAGES = {"lightning.pytorch": "lightning.fabric", "pytorch_lightning": "lightning_fabric"}
_OPERATIONS = {
    "avg": hvd.Average,
    "mean": hvd.Average,
    "sum": hvd.Sum,
    "max": hvd.Max,
    "min": hvd.Min,
    "product": hvd.Product,
}


def HorovodStrategy(**options: Any) -> Any:
    """A strategy for `lightning.pytorch.Trainer` or `pytorch_lightning.Trainer`, whichever the script has imported.

    Each rank runs the script and trains on its own batches; gradients are averaged, so a step equals that of one
    process with all ranks' batches. The learning rate stays as it is.

    Parameters
    ----------
    options
        `compression`, `op`, `groups`, `gradient_predivide_factor` and what else
        `horovod.torch.DistributedOptimizer` takes, except `named_parameters`, `backward_passes_per_step`
        (`Trainer(accumulate_grad_batches=...)` is for that) and `process_set`; `checkpoint_io`, `precision_plugin`,
        `accelerator`, `parallel_devices` as for any strategy of Lightning.

    Examples
    --------
    >>> trainer = Trainer(strategy=HorovodStrategy(), max_epochs=3)
    >>> trainer.fit(module, DataLoader(dataset, batch_size=32))
    """
    return strategy_class()(**options)


def strategy_class(package: str | None = None) -> Any:
    """The class of the strategies, to derive from: for `"lightning.pytorch"` or `"pytorch_lightning"`.

    Without a name the package is the one that is imported, else the one that is installed; if both are,
    `lightning.pytorch`.
    """
    return _build(lightning_package() if package is None else package)


def lightning_package() -> str:
    """The package of Lightning that the process uses, else one that is installed."""
    for name in _PACKAGES:
        if name in sys.modules:
            return name
    for name in _PACKAGES:
        if importlib.util.find_spec(name.partition(".")[0]) is not None:
            return name
    raise ModuleNotFoundError(
        f"horovod.torch.lightning needs Lightning 2, which is not installed for {sys.executable}: "
        "pip install lightning",
        name="lightning",
    )


@functools.cache
def _build(package: str) -> Any:
    if package not in _PACKAGES:
        raise ValueError(f"package: expected one of {', '.join(_PACKAGES)}, got {package!r}")
    version = importlib.import_module(package.partition(".")[0]).__version__
    if int(version.partition(".")[0]) < 2:
        raise ImportError(
            f"horovod.torch.lightning needs Lightning 2, {package} is {version}: pip install -U lightning"
        )
    strategies: Any = importlib.import_module(f"{package}.strategies")
    plugins: Any = importlib.import_module(f"{_PACKAGES[package]}.plugins")
    environment = type("HorovodEnvironment", (_HorovodEnvironment, plugins.ClusterEnvironment), {})
    return type(
        "HorovodStrategy",
        (_HorovodStrategy, strategies.ParallelStrategy),
        {"__module__": __name__, "__doc__": HorovodStrategy.__doc__, "_environment": environment},
    )


class _HorovodEnvironment(_Environment):  # type: ignore[misc]
    """Ranks as Lightning asks for them."""

    @property
    def creates_processes_externally(self) -> bool:
        return True

    @property
    def main_address(self) -> str:
        raise RuntimeError("ranks of Horovod have no main address; torch.distributed is not used")

    @property
    def main_port(self) -> int:
        raise RuntimeError("ranks of Horovod have no main port; torch.distributed is not used")

    @staticmethod
    def detect() -> bool:
        return hvd.is_initialized()

    def world_size(self) -> int:
        return hvd.size()

    def set_world_size(self, size: int) -> None:
        pass

    def global_rank(self) -> int:
        return hvd.rank()

    def set_global_rank(self, rank: int) -> None:
        pass

    def local_rank(self) -> int:
        return hvd.local_rank()

    def node_rank(self) -> int:
        return hvd.cross_rank()


class _HorovodStrategy(_Strategy):  # type: ignore[misc]
    strategy_name = "horovod"
    is_distributed = True  # each rank gets its share of a DataLoader's samples
    _environment: Any
    optimizers: Any

    def __init__(
        self,
        accelerator: Any = None,
        parallel_devices: list[torch.device] | None = None,
        checkpoint_io: Any = None,
        precision_plugin: Any = None,
        **options: Any,
    ) -> None:
        for name in ("named_parameters", "backward_passes_per_step", "process_set"):
            if name in options:
                raise ValueError(
                    f"HorovodStrategy does not take {name}; Trainer(accumulate_grad_batches=...) makes several "
                    "backward passes per step"
                )
        hvd.init()
        super().__init__(
            accelerator=accelerator,
            parallel_devices=parallel_devices,
            cluster_environment=self._environment(),
            checkpoint_io=checkpoint_io,
            precision_plugin=precision_plugin,
        )
        self._options = {"zero_missing_gradients": False, **options}

    def set_world_ranks(self) -> None:
        """Let only the first rank print and log."""
        from lightning_utilities.core.rank_zero import rank_zero_only

        only: Any = rank_zero_only
        only.rank = hvd.rank()

    @property
    def root_device(self) -> torch.device:
        """The device of this rank: that of its local rank, unless the Trainer was given one for each."""
        devices = self.parallel_devices or [torch.device("cpu")]
        if len(devices) >= hvd.local_size():
            found: torch.device = devices[hvd.local_rank()]
        elif devices[0].type == "cuda":
            found = torch.device("cuda", hvd.local_rank() % torch.cuda.device_count())
        else:
            found = devices[hvd.local_rank() % len(devices)]
        return found

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """Which share of the samples this rank gets."""
        return {"num_replicas": hvd.size(), "rank": hvd.rank()}

    def setup_environment(self) -> None:
        """Prepare the device, before the module's `setup`."""
        self.set_world_ranks()
        super().setup_environment()

    def model_to_device(self) -> None:
        """Move the module to this rank's device."""
        self.model.to(self.root_device)

    def setup(self, trainer: Any) -> None:
        """Begin with the first rank's weights; make the optimizers distributed."""
        super().setup(trainer)
        hvd.broadcast_parameters(self.lightning_module.state_dict(), root_rank=0)
        if hvd.size() > 1:
            connect_metrics(self.lightning_module)

    def setup_optimizers(self, trainer: Any) -> None:
        """Make the module's optimizers work on the gradients of all ranks."""
        super().setup_optimizers(trainer)
        names = {param: name for name, param in self.lightning_module.named_parameters()}
        wrapped = []
        for optimizer in self.optimizers:
            params = [param for group in optimizer.param_groups for param in group["params"]]
            named = [(names[param], param) for param in params if param in names]
            wrapped.append(
                hvd.DistributedOptimizer(
                    optimizer, named if len(named) == len(params) else None, **self._options
                )
            )
        self.optimizers = wrapped

    @contextlib.contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Add up gradients in the block, without the other ranks'."""
        with contextlib.ExitStack() as stack:
            for optimizer in self.optimizers:
                stack.enter_context(optimizer.no_sync())
            yield

    def optimizer_step(
        self, optimizer: Any, closure: Callable[[], Any], model: Any = None, **kwargs: Any
    ) -> Any:
        """Take a step with averaged gradients; clipping and hooks before it see these."""
        automatic = self.lightning_module.automatic_optimization
        if not automatic and getattr(closure, "__name__", "") == "do_nothing_closure":
            optimizer.synchronize()
            reduced = closure
        else:

            def reduced() -> Any:
                result = closure()
                optimizer.synchronize()
                if isinstance(optimizer, torch.optim.LBFGS) and result is not None:
                    # It decides by the loss how often to evaluate, and ranks have to decide alike.
                    result = self.reduce(torch.as_tensor(result).detach())
                return result

        with optimizer.skip_synchronize():
            return super().optimizer_step(optimizer, reduced, model, **kwargs)

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """A tensor reduced over all ranks; anything else as it is."""
        if not isinstance(tensor, torch.Tensor) or hvd.size() == 1:
            return tensor
        name = (
            str(reduce_op or "mean").lower().rpartition(".")[2]
        )  # also of torch.distributed.ReduceOp
        if name not in _OPERATIONS:
            raise ValueError(
                f"reduce_op: expected one of {', '.join(_OPERATIONS)}, got {reduce_op!r}"
            )
        op = _OPERATIONS[name]
        if op == hvd.Average and not (tensor.is_floating_point() or tensor.is_complex()):
            tensor = tensor.float()
        return hvd.allreduce(tensor, op=op)

    def barrier(self, name: str | None = None) -> None:
        """Wait for all ranks."""
        hvd.barrier()

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """An object of one rank, on all ranks."""
        return hvd.broadcast_object(obj, root_rank=src)

    def all_gather(self, tensor: Any, group: Any = None, sync_grads: bool = False) -> Any:
        """The tensors of all ranks, which have one shape, stacked along a new first axis."""
        if not isinstance(tensor, torch.Tensor):
            return tensor
        with contextlib.nullcontext() if sync_grads else torch.no_grad():
            return hvd.allgather(tensor.unsqueeze(0))

    def teardown(self) -> None:
        """Give the parameters back: another Trainer may reduce their gradients next."""
        for optimizer in self.optimizers:
            if isinstance(optimizer, _DistributedOptimizer) and optimizer._hvd_reducer is not None:
                optimizer._hvd_reducer.detach()
        super().teardown()
