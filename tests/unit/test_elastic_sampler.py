"""`ElasticSampler` for any number of ranks: what each gets, and what is left after a change of their number."""

from __future__ import annotations

import random

import pytest

from horovod.common import _sampler as module
from horovod.torch.elastic.sampler import ElasticSampler


@pytest.fixture
def among(monkeypatch):
    """Puts the process among so many ranks; what a sampler asks is only this."""

    def place(rank, size):
        monkeypatch.setattr(module, "rank", lambda: rank)
        monkeypatch.setattr(module, "size", lambda: size)

    return place


def deal(among, size, count, processed, shuffle=True):
    """The part of each of `size` ranks of the rest of an epoch."""
    dealt = []
    for rank in range(size):
        among(rank, size)
        sampler = ElasticSampler(range(count), shuffle, seed=7)
        sampler.load_state_dict({"epoch": 2, "processed_num": processed})
        dealt.append(list(sampler))
        assert len(sampler) == len(dealt[-1])
        assert list(sampler) == dealt[-1]
    return dealt


@pytest.mark.parametrize("count", [1, 2, 7, 40])
@pytest.mark.parametrize("size", [1, 2, 3, 4, 64])
def test_every_sample_is_dealt_out_and_ranks_get_equally_many(count, size, among):
    dealt = deal(among, size, count, 0)
    assert {len(share) for share in dealt} == {-(-count // size)}
    assert {sample for share in dealt for sample in share} == set(range(count))


@pytest.mark.parametrize("size", [1, 2, 3, 5, 8, 64])
@pytest.mark.parametrize("left", [0, 1, 2, 3, 7])
def test_few_samples_for_many_ranks(left, size, among):
    """The original asserts when there are fewer samples than there is to fill up."""
    dealt = deal(among, size, 40, 40 - left)
    assert {len(share) for share in dealt} == {-(-left // size)}
    assert len({sample for share in dealt for sample in share}) == left


def test_progress_beyond_the_end_leaves_nothing(among):
    assert deal(among, 3, 10, 12) == [[], [], []]


def test_the_order_is_that_of_pythons_generator(among):
    order = list(range(20))
    random.Random(7 + 2).shuffle(order)
    assert deal(among, 1, 20, 0) == [order]
    assert deal(among, 2, 20, 4) == [order[4::2], order[5::2]]
    assert deal(among, 2, 20, 4, shuffle=False) == [list(range(4, 20, 2)), list(range(5, 20, 2))]


@pytest.mark.parametrize("sizes", [(4, 3, 2), (1, 5), (3, 3, 3), (2, 64)])
def test_nothing_is_lost_or_repeated_when_the_number_of_ranks_changes(sizes, among):
    seen, progress = [], {"epoch": 0, "processed_num": 0}
    for phase, size in enumerate(sizes):
        last = phase == len(sizes) - 1
        shares, after = [], None
        for rank in range(size):
            among(rank, size)
            sampler = ElasticSampler(range(60), seed=1)
            sampler.load_state_dict(progress)
            share = list(sampler)
            if not last:
                share = share[:4]
                for batch in range(2):
                    sampler.record_batch(batch, 2)
            shares.append(share)
            after = sampler.state_dict()
        progress = after
        left = 60 - len(seen)
        seen += [sample for share in shares for sample in share]
        if last:
            assert len(seen) - 60 == -left % size  # what fills up the last batch, and no more
            seen = seen[: 60 - left] + list(dict.fromkeys(seen[60 - left :]))
    assert sorted(seen) == list(range(60))


def test_an_epoch_begins_with_all_samples_in_a_new_order(among):
    among(0, 2)
    sampler = ElasticSampler(range(30))
    first = list(sampler)
    sampler.record_batch(0, 5)
    assert sampler.state_dict() == {"epoch": 0, "processed_num": 10}
    assert list(sampler) == first  # until the next reset
    sampler.set_epoch(1)
    assert sampler.state_dict() == {"epoch": 1, "processed_num": 0}
    assert len(list(sampler)) == 15
    assert list(sampler) != first
    assert sampler.processed_indices == set()
