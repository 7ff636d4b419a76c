"""Metrics of torchmetrics in plain loops."""

import pytest
import torch

import horovod.torch as hvd

torchmetrics = pytest.importorskip("torchmetrics")
from horovod.torch.metrics import connect_metrics  # noqa: E402

hvd.init()


def test_metrics_count_the_samples_of_all_ranks():
    mean = connect_metrics(torchmetrics.MeanMetric())
    # Shards of different sizes: the mean over samples is not that of the ranks' means.
    for value in range(hvd.rank() + 1):
        mean.update(float(value))
    values = [float(v) for rank in range(hvd.size()) for v in range(rank + 1)]
    assert mean.compute().item() == pytest.approx(sum(values) / len(values))
    mean.reset()
    mean.update(float(hvd.rank()))
    assert mean.compute().item() == pytest.approx((hvd.size() - 1) / 2)


def test_lists_of_any_length_are_gathered_inside_of_a_collection():
    both = connect_metrics(
        torchmetrics.MetricCollection([torchmetrics.CatMetric(), torchmetrics.SumMetric()])
    )
    for value in range(hvd.rank() + 1):
        both.update(float(value))
    values = [float(v) for rank in range(hvd.size()) for v in range(rank + 1)]
    result = both.compute()
    # One value alone has no dimension.
    assert torch.atleast_1d(result["CatMetric"]).tolist() == values
    assert result["SumMetric"].item() == sum(values)


def test_a_metric_that_is_told_how_keeps_it():
    def gather(tensor, group=None):
        return [tensor]

    metric = torchmetrics.SumMetric(dist_sync_fn=gather, distributed_available_fn=lambda: True)
    connect_metrics(torch.nn.Sequential(metric))
    metric.update(float(hvd.rank() + 1))
    assert metric.compute().item() == hvd.rank() + 1
