"""A state's own methods without `elastic.run`: a sync renews the snapshot."""

import jax.numpy as jnp

import horovod.jax as hvd

hvd.init()
RANK = hvd.rank()


def test_a_sync_renews_the_snapshot():
    state = hvd.elastic.JaxState(params={"w": jnp.full(2, RANK + 1.0)}, batch=RANK)
    state.sync()
    state.params = {"w": jnp.full(2, 9.0)}
    state.batch = 9
    state.restore()
    assert state.params["w"].tolist() == [1.0, 1.0]
    assert state.batch == 0
