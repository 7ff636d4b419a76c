"""`python -m horovod.bench`: what the collectives of this job's ranks cost, checked for correctness on the way."""
