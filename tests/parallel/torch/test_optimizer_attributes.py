"""Private attributes of the original's optimizer that trainers of others read."""

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
