"""The usual script of MXNet's Module API: handwritten digits on any number of processes and hosts.

    horovodrun -np 2 python mxnet_module_mnist.py

The digits are those inside scikit-learn, so nothing is downloaded.
"""

import argparse
import logging
from typing import Any

import mxnet as mx
import numpy as np
from sklearn.datasets import load_digits

import horovod.mxnet as hvd

parser = argparse.ArgumentParser(description="MXNet Module digits with Horovod")
parser.add_argument("--batch-size", type=int, default=64, help="batch size of each process")
parser.add_argument("--epochs", type=int, default=5)
parser.add_argument("--lr", type=float, default=0.05, help="learning rate of one process")
parser.add_argument("--momentum", type=float, default=0.9)
parser.add_argument("--no-cuda", action="store_true", help="do not use GPUs")
parser.add_argument(
    "--gradient-predivide-factor",
    type=float,
    default=1.0,
    help="divide gradients by this before the sum instead of all after it",
)
args = parser.parse_args()
args.no_cuda = args.no_cuda or mx.context.num_gpus() == 0

hvd.init()
logging.basicConfig(level=logging.INFO)
mx.random.seed(42 + hvd.rank())
context = mx.cpu(hvd.local_rank()) if args.no_cuda else mx.gpu(hvd.local_rank())

digits: Any = load_digits()
images = (digits.images / 16.0).astype("float32").reshape(-1, 64)
labels = digits.target.astype("float32")
order = np.random.RandomState(42).permutation(len(labels))
train, test = order[: len(order) * 4 // 5], order[len(order) * 4 // 5 :]
rows = len(train) // hvd.size()  # as many for each, so that all take the same number of steps
train = train[hvd.rank() * rows : (hvd.rank() + 1) * rows]
train_iter = mx.io.NDArrayIter(
    images[train], labels[train], args.batch_size, shuffle=True, last_batch_handle="discard"
)
val_iter = mx.io.NDArrayIter(images[test], labels[test], args.batch_size)

net = mx.sym.Variable("data")
net = mx.sym.FullyConnected(net, num_hidden=128, name="fc1")
net = mx.sym.Activation(net, act_type="relu")
net = mx.sym.FullyConnected(net, num_hidden=10, name="fc2")
net = mx.sym.SoftmaxOutput(net, name="softmax")

# Gradients are sums over a batch; the optimizer makes the average over all processes of them.
opt = mx.optimizer.create(
    "sgd",
    momentum=args.momentum,
    learning_rate=args.lr * hvd.size(),
    rescale_grad=1.0 / args.batch_size,
)
opt = hvd.DistributedOptimizer(opt, gradient_predivide_factor=args.gradient_predivide_factor)

# Everybody begins with rank 0's weights.
mod = mx.mod.Module(symbol=net, context=context)
mod.bind(data_shapes=train_iter.provide_data, label_shapes=train_iter.provide_label)
mod.init_params(mx.init.Xavier())
(arg_params, aux_params) = mod.get_params()
hvd.broadcast_parameters(arg_params, root_rank=0)
hvd.broadcast_parameters(aux_params, root_rank=0, prefix="aux.")
mod.set_params(arg_params=arg_params, aux_params=aux_params)

mod.fit(
    train_iter,
    kvstore=None,
    eval_data=val_iter if hvd.rank() == 0 else None,
    optimizer=opt,
    num_epoch=args.epochs,
)

if hvd.rank() == 0:
    accuracy = mod.score(val_iter, mx.metric.Accuracy())[0][1]
    print(f"validation accuracy: {accuracy:.4f}", flush=True)
