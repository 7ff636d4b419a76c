"""The usual Gluon script: handwritten digits on any number of processes and hosts.

    horovodrun -np 2 python mxnet_mnist.py
    python mxnet_mnist.py --num-proc 2

The digits are those inside scikit-learn, so nothing is downloaded.
"""

import argparse
import logging
import time
from typing import Any

import mxnet as mx
import numpy as np
from mxnet import autograd, gluon
from sklearn.datasets import load_digits

import horovod
import horovod.mxnet as hvd


def parse_args():
    """Read the command line."""
    parser = argparse.ArgumentParser(description="MXNet digits with Horovod")
    parser.add_argument("--batch-size", type=int, default=64, help="batch size of each process")
    parser.add_argument("--dtype", default="float32", help="type of the weights")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--lr", type=float, default=0.01, help="learning rate of one process")
    parser.add_argument("--momentum", type=float, default=0.9)
    parser.add_argument("--no-cuda", action="store_true", help="do not use GPUs")
    parser.add_argument("--fp16-allreduce", action="store_true", help="send gradients as float16")
    parser.add_argument(
        "--gradient-predivide-factor",
        type=float,
        default=1.0,
        help="divide gradients by this before the sum instead of all after it",
    )
    # For a start without `horovodrun`.
    parser.add_argument("--num-proc", type=int, help="start this many processes from here")
    parser.add_argument("--hosts", help="where to start them: host1:slots,host2:slots")
    parser.add_argument("--communication", choices=["gloo", "mpi"], help="how they are started")
    args = parser.parse_args()
    args.no_cuda = args.no_cuda or mx.context.num_gpus() == 0
    return args


def get_mnist_iterator(args):
    """Iterators over this process's part of the training digits, and over all digits for validation."""
    digits: Any = load_digits()
    images = (digits.images / 16.0).astype("float32")[:, np.newaxis]
    labels = digits.target.astype("float32")
    order = np.random.RandomState(42).permutation(len(labels))
    train, test = order[: len(order) * 4 // 5], order[len(order) * 4 // 5 :]
    rows = len(train) // hvd.size()  # as many for each, so that all take the same number of steps
    train = train[hvd.rank() * rows : (hvd.rank() + 1) * rows]
    # Every training image also moved by one pixel to each side.
    moved = [
        images[train],
        *(np.roll(images[train], by, axis) for axis in (2, 3) for by in (-1, 1)),
    ]
    return (
        mx.io.NDArrayIter(
            np.concatenate(moved), np.tile(labels[train], 5), args.batch_size, shuffle=True
        ),
        mx.io.NDArrayIter(images[test], labels[test], args.batch_size),
    )


def conv_nets():
    """Two convolutions and two dense layers for images of 8 x 8 pixels."""
    net = gluon.nn.HybridSequential()
    with net.name_scope():
        net.add(gluon.nn.Conv2D(channels=20, kernel_size=3, padding=1, activation="relu"))
        net.add(gluon.nn.MaxPool2D(pool_size=2, strides=2))
        net.add(gluon.nn.Conv2D(channels=50, kernel_size=3, padding=1, activation="relu"))
        net.add(gluon.nn.MaxPool2D(pool_size=2, strides=2))
        net.add(gluon.nn.Flatten())
        net.add(gluon.nn.Dense(128, activation="relu"))
        net.add(gluon.nn.Dense(10))
    return net


def evaluate(model, data_iter, context):
    """The part of the digits that the model recognises."""
    data_iter.reset()
    metric = mx.metric.Accuracy()
    for batch in data_iter:
        used = batch.data[0].shape[0] - batch.pad
        output = model(batch.data[0].as_in_context(context))
        metric.update([batch.label[0][:used]], [output[:used]])
    return metric.get()[1]


def main(args):
    """Train on one of the processes."""
    hvd.init()
    logging.basicConfig(level=logging.INFO)
    logging.info(args)

    context = mx.cpu(hvd.local_rank()) if args.no_cuda else mx.gpu(hvd.local_rank())
    mx.random.seed(42 + hvd.rank())
    train_data, val_data = get_mnist_iterator(args)

    model = conv_nets()
    model.cast(args.dtype)
    model.hybridize()

    optimizer_params = {"momentum": args.momentum, "learning_rate": args.lr * hvd.size()}
    opt = mx.optimizer.create("sgd", **optimizer_params)

    initializer = mx.init.Xavier(rnd_type="gaussian", factor_type="in", magnitude=2)
    model.initialize(initializer, ctx=context)

    # Everybody begins with rank 0's weights.
    params = model.collect_params()
    if params is not None:
        hvd.broadcast_parameters(params, root_rank=0)

    compression = hvd.Compression.fp16 if args.fp16_allreduce else hvd.Compression.none
    trainer = hvd.DistributedTrainer(
        params,
        opt,
        compression=compression,
        gradient_predivide_factor=args.gradient_predivide_factor,
    )

    loss_fn = gluon.loss.SoftmaxCrossEntropyLoss()
    metric = mx.metric.Accuracy()
    for epoch in range(args.epochs):
        tic = time.time()
        train_data.reset()
        metric.reset()
        nbatch = 0
        for nbatch, batch in enumerate(train_data, start=1):
            data = batch.data[0].as_in_context(context)
            label = batch.label[0].as_in_context(context)
            with autograd.record():
                output = model(data.astype(args.dtype, copy=False))
                loss = loss_fn(output, label)
            loss.backward()
            trainer.step(args.batch_size)
            metric.update([label], [output])
            if nbatch % 100 == 0:
                logging.info("[Epoch %d Batch %d] training %s: %f", epoch, nbatch, *metric.get())
        if hvd.rank() == 0:
            speed = nbatch * args.batch_size * hvd.size() / (time.time() - tic)
            logging.info("Epoch[%d] Speed=%.2f samples/s", epoch, speed)
            accuracy = evaluate(model, val_data, context)
            print(f"Epoch[{epoch}] validation accuracy: {accuracy:.4f}", flush=True)


if __name__ == "__main__":
    arguments = parse_args()
    if arguments.num_proc:
        horovod.run(
            main,
            args=(arguments,),
            np=arguments.num_proc,
            hosts=arguments.hosts,
            use_gloo=arguments.communication == "gloo",
            use_mpi=arguments.communication == "mpi",
        )
    else:
        main(arguments)
