"""Private attributes of the original's optimizer that trainers of others read."""

import pytest
import torch

import horovod.torch as hvd

hvd.init()


def trained(**options):
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 1))
    model[0].bias.requires_grad_(False)
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    return model, hvd.DistributedOptimizer(inner, model.named_parameters(), **options)


def test_names_and_what_is_reduced():
    model, optimizer = trained()
    names = {param: name for name, param in model.named_parameters()}
    assert optimizer._parameter_names == names
    reduced = {param for param in model.parameters() if param.requires_grad}
    assert optimizer._requires_update == (reduced if hvd.size() > 1 else set())


def test_handles_are_there_between_backward_and_step():
    model, optimizer = trained()
    assert optimizer._handles == {}
    assert not optimizer._synchronized
    assert optimizer._should_synchronize
    for synchronize in (True, False):
        model(torch.ones(1, 2)).sum().backward()
        busy = {param for param in model.parameters() if param.grad is not None}
        assert set(optimizer._handles) == (busy if hvd.size() > 1 else set())
        if synchronize:
            optimizer.synchronize()
            assert optimizer._synchronized
            assert optimizer._handles == {}
            with optimizer.skip_synchronize():
                assert not optimizer._should_synchronize
                optimizer.step()
        else:
            optimizer.step()
        assert not optimizer._synchronized
        assert optimizer._handles == {}
        optimizer.zero_grad()


def test_the_adasum_optimizer_has_them_too():
    model, optimizer = trained(op=hvd.Adasum)
    assert set(optimizer._parameter_names) == set(model.parameters())
    assert optimizer._handles == {}
    assert not optimizer._synchronized


def imitated(optimizer):
    """A wrapper whose class is a subclass of the optimizer's, and which has no attributes, as Lightning makes it."""

    class Imitator:
        def __getattr__(self, name):
            return getattr(optimizer, name)

    wrapper = Imitator()
    wrapper.__class__ = type("Imitator", (Imitator, type(optimizer)), {})
    return wrapper


@pytest.mark.parametrize("op", [hvd.Average, hvd.Adasum])
def test_a_wrapper_that_imitates_the_class_acts_on_the_optimizer(op):
    model, optimizer = trained(op=op)
    wrapper = imitated(optimizer)
    for _ in range(3):
        model(torch.ones(1, 2)).sum().backward()
        wrapper.zero_grad()  # skips the batch
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        wrapper.add_param_group({"params": [torch.nn.Parameter(torch.ones(2))]})
    wrapper.set_backward_passes_per_step(2)
    assert optimizer.backward_passes_per_step == 2
    if op == hvd.Average:
        wrapper.wait_in_backward = False
        assert optimizer.wait_in_backward == (hvd.size() == 1)
        wrapper.synchronize()
        assert optimizer._synchronized
