"""What every framework's module shares: names, operations, objects, elastic training, what optimizers agree on."""
