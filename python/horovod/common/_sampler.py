"""The samples of an epoch, dealt out to the ranks; what is left of them anew whenever the number of ranks changes."""

import itertools
import random
from collections.abc import Iterator, Sized
from typing import Any

from horovod.common.basics import basics

rank = basics.rank
size = basics.size


class SampleDealer:
    """Deals the positions of a dataset's samples out; the base of each framework's `ElasticSampler`."""

    def __init__(self, dataset: Sized, shuffle: bool = True, seed: int = 0) -> None:
        self.dataset = dataset
        self.shuffle = shuffle
        self.seed = seed
        self.epoch = 0
        self.processed_num = 0
        self.processed_indices: set[int] = set()  # of earlier versions; always empty
        self.reset()

    def set_epoch(self, epoch: int) -> None:
        """Begin an epoch: nothing of it is processed. To be called at the end of the one before."""
        self.epoch = epoch
        self.processed_num = 0
        self.reset()

    def record_batch(self, batch_idx: int, batch_size: int) -> None:
        """Note that every rank has processed a batch of this size; it counts when members change.

        The index is not used: batches have to be recorded in order, each once.
        """
        del batch_idx
        self.processed_num += batch_size * self.num_replicas

    def state_dict(self) -> dict[str, Any]:
        """Epoch and progress within it."""
        return {"epoch": self.epoch, "processed_num": self.processed_num}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go to an epoch and progress, and deal out the rest."""
        self.epoch = state_dict["epoch"]
        self.processed_num = state_dict["processed_num"]
        self.reset()

    def reset(self) -> None:
        """Deal what is not processed out to the ranks that are there now."""
        self.num_replicas = size()
        self.rank = rank()
        order = list(range(len(self.dataset)))
        if self.shuffle:
            random.Random(self.seed + self.epoch).shuffle(order)
        self.remaining_indices = order[self.processed_num :]
        self.num_samples = -(-len(self.remaining_indices) // self.num_replicas)
        self.total_size = self.num_samples * self.num_replicas

    def __iter__(self) -> Iterator[int]:
        """This rank's samples."""
        # Repeated from the front as often as it takes: few samples may be left for many ranks.
        filled = itertools.cycle(self.remaining_indices)
        self.indices = list(itertools.islice(filled, self.rank, self.total_size, self.num_replicas))
        return iter(self.indices)

    def __len__(self) -> int:
        """How many samples this rank gets."""
        return self.num_samples
