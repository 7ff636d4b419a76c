"""A Lightning training whose batches together are the same with any number of ranks; rank 0 prints what came out."""

from __future__ import annotations

import importlib
import json
import sys
import tempfile

import torch
import torchmetrics

import horovod.torch as hvd
from horovod.torch.lightning import HorovodStrategy

pl = importlib.import_module(sys.argv[1])
ROWS, BATCH = 48, 12
RNG = torch.Generator().manual_seed(5)
X = torch.randn(ROWS, 4, generator=RNG)
Y = X @ torch.tensor([1.0, -2.0, 3.0, 0.5]) + 0.1 * torch.randn(ROWS, generator=RNG)


def loader() -> torch.utils.data.DataLoader:
    """All rows: Lightning gives each rank every np-th of them, so the ranks' batches together are 12 rows in order."""
    hvd.init()
    data = torch.utils.data.TensorDataset(X, Y)
    return torch.utils.data.DataLoader(data, batch_size=BATCH // hvd.size())


class Module(pl.LightningModule):
    """Two layers, with other weights on each rank at first, and a parameter without a gradient."""

    def __init__(self, manual: bool = False) -> None:
        super().__init__()
        self.automatic_optimization = not manual
        torch.manual_seed(hvd.rank())
        self.net = torch.nn.Sequential(
            torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1)
        )
        self.error = torchmetrics.MeanAbsoluteError()
        self.unused = torch.nn.Parameter(torch.ones(3))

    def training_step(self, batch, index):
        x, y = batch
        loss = torch.nn.functional.mse_loss(self.net(x)[:, 0], y)
        self.log("train_loss", loss, on_epoch=True, on_step=False, sync_dist=True)
        if not self.automatic_optimization:
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
        return loss

    def validation_step(self, batch, index):
        x, y = batch
        self.error(self.net(x)[:, 0], y)
        self.log("val_error", self.error, on_epoch=True)

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.02, weight_decay=0.1)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)]


def train(manual: bool = False, **options) -> dict:
    """Weights and logged values."""
    with tempfile.TemporaryDirectory() as folder:
        trainer = pl.Trainer(
            strategy=HorovodStrategy(),
            accelerator="cpu",
            max_epochs=3,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            num_sanity_val_steps=0,
            default_root_dir=folder,
            **options,
        )
        data = loader()
        module = Module(manual)
        trainer.fit(module, data, data)
        assert trainer.world_size == hvd.size()
        assert trainer.global_rank == hvd.rank()
        seen = trainer.strategy.all_gather(torch.tensor([hvd.rank()])).reshape(-1).tolist()
        assert seen == list(range(hvd.size())) or hvd.size() == 1
    metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
    weights = {name: value.tolist() for name, value in module.state_dict().items()}
    assert hvd.broadcast_object(weights, root_rank=0) == weights
    return {"metrics": metrics, "weights": weights, "steps": trainer.global_step}


results = {
    "clipped": train(gradient_clip_val=0.5),
    "accumulated": train(accumulate_grad_batches=2),
    "manual": train(manual=True),
}
if hvd.rank() == 0:
    print("RESULT " + json.dumps(results), flush=True)
hvd.shutdown()
