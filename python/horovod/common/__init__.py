"""Common to every framework's module: names, operations, objects, elastic training, agreement of optimizers."""
