"""One rank of the frameworks benchmark: what scripts write, by ours or by the framework's own collectives.

All reductions are sums: with some operations an average takes more work, and they are compared with each other.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from cases import resnet50_shapes
from launch import Report

SHAPES = resnet50_shapes()
BIG = 64 * 2**20 // 4
WARM_UP = 5
REPEATS_MIN, REPEATS_MAX = 9, 500
NOT_REDUCED, APPLIED = "161 gradients, apply without reducing", "161 gradients, apply"
COMPUTED, REDUCED = "161 gradients, computed", "161 gradients, computed and reduced"
Runs = dict[str, Callable[[], Any]]


def torch_runs(hvd: Any) -> Runs:
    """The baseline of the comparison."""
    import torch

    torch.set_num_threads(1)
    one, big = torch.ones(1), torch.ones(BIG)
    gradients = [torch.ones(shape) for shape in SHAPES]

    def resnet() -> None:
        handles = [
            hvd.allreduce_async_(g, name=f"g.{i}", op=hvd.Sum) for i, g in enumerate(gradients)
        ]
        for handle in handles:
            hvd.synchronize(handle)

    return {
        "4 B": lambda: hvd.allreduce_(one, name="one", op=hvd.Sum),
        "64 MiB": lambda: hvd.allreduce(big, name="big", op=hvd.Sum),
        "64 MiB, in place": lambda: hvd.allreduce_(big, name="big_", op=hvd.Sum),
        "161 gradients": resnet,
    }


def tensorflow_runs(hvd: Any, jit: bool) -> Runs:
    """`tf.function`s, through the kernels or, with `jit`, inside XLA programs."""
    import tensorflow as tf

    one, big = tf.ones([1]), tf.ones([BIG])
    gradients = [tf.ones(shape) for shape in SHAPES]

    def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
        return tf.function(function, jit_compile=jit)

    nothing = compiled(tf.identity)
    reduced = compiled(lambda x: hvd.allreduce(x, op=hvd.Sum, name="one"))
    large = compiled(lambda x: hvd.allreduce(x, op=hvd.Sum, name="big"))
    forwarded = compiled(lambda x: hvd.allreduce(x + 1.0, op=hvd.Sum, name="sum"))
    added = compiled(lambda x: x + 1.0)
    grouped = compiled(lambda *xs: hvd.grouped_allreduce(list(xs), op=hvd.Sum, name="gradients"))
    return {
        "nothing": lambda: nothing(one).numpy(),
        "4 B": lambda: reduced(one).numpy(),
        "64 MiB": lambda: large(big),
        "64 MiB, computed": lambda: forwarded(big),
        "computing it": lambda: added(big),
        "161 gradients": lambda: grouped(*gradients),
    }


def tape_runs(hvd: Any, jit: bool) -> Runs:
    """The gradients of a tape, as scripts reduce them; of squares, as constants would be reduced once for all."""
    import tensorflow as tf

    variables = [tf.Variable(tf.ones(shape)) for shape in SHAPES]

    def gradients(distributed: bool) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.add_n([tf.reduce_sum(v * v) for v in variables])
        chosen = hvd.DistributedGradientTape(tape, op=hvd.Sum) if distributed else tape
        return chosen.gradient(loss, variables)

    def compiled(distributed: bool) -> Any:
        return tf.function(lambda: gradients(distributed), jit_compile=jit)

    return {COMPUTED: compiled(False), REDUCED: compiled(True)}


def apply_runs() -> Runs:
    """`apply` of an optimizer of Keras, with gradients that are computed in the same function."""
    import keras
    import tensorflow as tf

    import horovod.keras as hvd

    def step(wrap: Callable[[Any], Any]) -> Any:
        variables = [keras.Variable(tf.ones(shape)) for shape in SHAPES]
        optimizer = wrap(keras.optimizers.SGD(1e-3))
        optimizer.build(variables)

        def apply() -> None:
            optimizer.apply([v.value * 2.0 for v in variables], variables)

        return tf.function(apply)

    return {
        NOT_REDUCED: step(lambda optimizer: optimizer),
        APPLIED: step(lambda optimizer: hvd.DistributedOptimizer(optimizer, op=hvd.Sum)),
    }


def mirrored_strategy(rank: int, ports: list[int]) -> Any:
    """TensorFlow's own: MultiWorkerMirroredStrategy with its CPU collectives, one process a worker."""
    workers = [f"127.0.0.1:{port}" for port in ports]
    os.environ["TF_CONFIG"] = json.dumps(
        {"cluster": {"worker": workers}, "task": {"type": "worker", "index": rank}}
    )
    import tensorflow as tf

    return tf.distribute.MultiWorkerMirroredStrategy()


def mirrored_runs(rank: int, ports: list[int]) -> Runs:
    """Reductions in a replica."""
    strategy = mirrored_strategy(rank, ports)
    import tensorflow as tf

    one, big = tf.ones([1]), tf.ones([BIG])
    gradients = [tf.ones(shape) for shape in SHAPES]

    def reducing(tensors: Any) -> Any:
        def in_replica(values: Any) -> Any:
            context = tf.distribute.get_replica_context()
            return context.all_reduce(tf.distribute.ReduceOp.SUM, values)

        return tf.function(lambda: strategy.run(in_replica, args=(tensors,)))

    single, large, many = reducing(one), reducing(big), reducing(gradients)
    return {"4 B": lambda: single().numpy(), "64 MiB": large, "161 gradients": many}


def jax_runs(hvd: Any) -> Runs:
    """Jitted functions."""
    import jax
    import jax.numpy as jnp
    import optax

    one, big = jnp.ones(1), jnp.ones(BIG)
    gradients = [jnp.ones(shape) for shape in SHAPES]
    nothing = jax.jit(lambda x: x + 0)
    reduced = jax.jit(lambda x: hvd.allreduce(x + 0, op=hvd.Sum, name="one"))
    large = jax.jit(lambda x: hvd.allreduce(x, op=hvd.Sum, name="big"))
    donated = jax.jit(lambda x: hvd.allreduce(x, op=hvd.Sum, name="big_"), donate_argnums=0)
    grouped = jax.jit(lambda xs: hvd.grouped_allreduce(xs, op=hvd.Sum, name="gradients"))
    kept = [jnp.ones(BIG)]

    def in_place() -> None:
        kept[0] = jax.block_until_ready(donated(kept[0]))

    computed = jax.jit(lambda parameters: [x * 2.0 for x in parameters])

    def step(optimizer: Any) -> Callable[[], Any]:
        """Gradients of squares, in a program of their own so that both ways have them in memory, and an update."""

        def update(gradients: Any, parameters: Any, state: Any) -> tuple[Any, Any]:
            updates, state = optimizer.update(gradients, state, parameters)
            return optax.apply_updates(parameters, updates), state

        compiled = jax.jit(update, donate_argnums=(0, 1, 2))
        parameters = [jnp.ones(shape) for shape in SHAPES]
        now = [(parameters, optimizer.init(parameters))]

        def run() -> None:
            now[0] = jax.block_until_ready(compiled(computed(now[0][0]), *now[0]))

        return run

    return {
        COMPUTED: step(optax.sgd(1e-3)),
        REDUCED: step(hvd.DistributedOptimizer(optax.sgd(1e-3), op=hvd.Sum)),
        "nothing": lambda: jax.block_until_ready(nothing(one)),
        "4 B": lambda: jax.block_until_ready(reduced(one)),
        "64 MiB": lambda: jax.block_until_ready(large(big)),
        "64 MiB, in place": in_place,
        "161 gradients": lambda: jax.block_until_ready(grouped(gradients)),
    }


def jax_distributed_runs(rank: int, ranks: int, ports: list[int]) -> Runs:
    """JAX's own: a mesh over all processes, with its CPU collectives."""
    import jax

    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"127.0.0.1:{ports[0]}", num_processes=ranks, process_id=rank)
    import numpy as np
    from jax.sharding import NamedSharding
    from jax.sharding import PartitionSpec as Spec

    mesh = jax.make_mesh((ranks,), ("ranks",))
    sharding = NamedSharding(mesh, Spec("ranks"))

    def spread(shape: tuple[int, ...]) -> Any:
        mine = np.ones((1, *shape), np.float32)
        return jax.make_array_from_process_local_data(sharding, mine, (ranks, *shape))

    def total(xs: Any) -> Any:
        return jax.tree.map(lambda x: jax.lax.psum(x, "ranks"), xs)

    reduce = jax.jit(jax.shard_map(total, mesh=mesh, in_specs=Spec("ranks"), out_specs=Spec(None)))
    one, big = spread((1,)), spread((BIG,))
    gradients = [spread(shape) for shape in SHAPES]
    return {
        "4 B": lambda: jax.block_until_ready(reduce(one)),
        "64 MiB": lambda: jax.block_until_ready(reduce(big)),
        "161 gradients": lambda: jax.block_until_ready(reduce(gradients)),
    }


def mxnet_runs(hvd: Any) -> Runs:
    """Asynchronous operations of MXNet's engine, awaited; gradients as Gluon's trainer reduces them."""
    import mxnet as mx

    big = mx.nd.ones(BIG)
    parameters = [
        mx.gluon.Parameter(f"p{i:03}", shape=shape, init="ones") for i, shape in enumerate(SHAPES)
    ]
    for parameter in parameters:
        parameter.initialize()
    gradients = [parameter.grad() for parameter in parameters]
    for gradient in gradients:
        gradient[:] = 1
    trainer = hvd.DistributedTrainer(parameters, "sgd")

    def large() -> None:
        hvd.allreduce(big, average=False, name="big").wait_to_read()

    def in_place() -> None:
        hvd.allreduce_(big, average=False, name="big_").wait_to_read()

    def resnet() -> None:
        trainer.allreduce_grads()
        for gradient in gradients:
            gradient.wait_to_read()

    return {"64 MiB": large, "64 MiB, in place": in_place, "161 gradients": resnet}


def free_ports(count: int) -> list[int]:
    """Ports that nobody has now."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports


def measure(
    run: Callable[[], Any],
    barrier: Callable[[], object],
    agreed: Callable[[Any], Any],
    budget_s: float,
) -> list[float]:
    """Seconds of each call, from when all ranks are ready; as many as fit, by rank 0's count."""

    def timed() -> float:
        barrier()
        start = time.perf_counter()
        run()
        return time.perf_counter() - start

    for _ in range(WARM_UP):
        run()
    typical = statistics.median(timed() for _ in range(5))
    count = agreed(min(REPEATS_MAX, max(REPEATS_MIN, int(budget_s / typical))))
    return [timed() for _ in range(count)]


def main() -> None:
    """Run one peer's cases and report them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", required=True)
    parser.add_argument("--peer", required=True)
    parser.add_argument("--budget", type=float, default=1.0)
    options = parser.parse_args()
    rank, ranks = int(os.environ["HOROVOD_RANK"]), int(os.environ["HOROVOD_SIZE"])
    report = Report(options.out, rank)

    import horovod.numpy as numbers

    numbers.init()
    ports = numbers.broadcast_object(free_ports(ranks) if rank == 0 else None)
    match options.peer:
        case "torch":
            import horovod.torch as hvd_torch

            runs = torch_runs(hvd_torch)
        case "tensorflow" | "tensorflow-jit":
            import horovod.tensorflow as hvd_tensorflow

            runs = tensorflow_runs(hvd_tensorflow, options.peer == "tensorflow-jit")
            runs |= tape_runs(hvd_tensorflow, options.peer == "tensorflow-jit")
        case "keras":
            runs = apply_runs()
        case "mirrored":
            runs = mirrored_runs(rank, ports)
        case "mxnet":
            import horovod.mxnet as hvd_mxnet

            runs = mxnet_runs(hvd_mxnet)
        case "jax":
            import horovod.jax as hvd_jax

            runs = jax_runs(hvd_jax)
        case "jax-distributed":
            runs = jax_distributed_runs(rank, ranks, ports)
        case other:
            raise SystemExit(f"no such peer: {other}")
    for name, run in runs.items():
        seconds = measure(run, numbers.barrier, numbers.broadcast_object, options.budget)
        # Nobody's reduction ends before the last rank has come, so also what reduces nothing counts as the last one's.
        slowest = numbers.allgather(np.asarray([seconds])).max(axis=0)
        report.add(case=name, seconds=slowest.tolist())
    report.done()
    numbers.barrier()


if __name__ == "__main__":
    main()
