"""The rendezvous of drivers that were written for Horovod 0.28."""
