"""Places and environments of ranks that an executor starts itself."""

from __future__ import annotations

import pickle

import pytest

from horovod.runner import executor
from horovod.runner.common.util import hosts

KEY = "ab" * 32
ADDRESS = executor.RendezvousAddress(("10.0.0.1:5", "[::1]:6"), KEY)


def on(names: str) -> list[tuple[str, str]]:
    return [(name, f"{name}.example") for name in names]


@pytest.mark.parametrize("names", ["a", "aaaa", "abbbcc", "aaabbb", "abc", "aabcccc"])
def test_places_are_those_of_hosts_with_as_many_slots(names: str) -> None:
    slots = [hosts.HostInfo(name, names.count(name)) for name in dict.fromkeys(names)]
    expected = hosts.get_host_assignments(slots, len(names))
    for rank, slot in zip(executor.assign(on(names), ADDRESS), expected, strict=True):
        numbers = (rank.rank, rank.size, rank.local_rank, rank.local_size)
        numbers += (rank.cross_rank, rank.cross_size)
        assert ",".join(map(str, numbers)) == slot.to_response_string()
        assert rank.host == slot.hostname == rank.variables["HOROVOD_HOSTNAME"]


def test_the_first_process_is_rank_0_and_ranks_of_a_host_are_consecutive() -> None:
    ranks = executor.assign(on("babcab"), ADDRESS)
    assert [rank.rank for rank in ranks] == [0, 3, 1, 5, 4, 2]
    assert [rank.local_rank for rank in ranks] == [0, 0, 1, 0, 1, 2]
    assert [rank.cross_size for rank in ranks] == [3, 3, 2, 3, 2, 1]


def test_an_environment_keeps_nothing_of_another_job() -> None:
    (rank,) = executor.assign(on("a"), executor.RankZero(29600, KEY))
    assert rank.variables["HOROVOD_RANK0_ADDRESS"] == "a.example:29600"
    stale = {"HOROVOD_RENDEZVOUS": "x", "HOROVOD_ELASTIC": "1", "HOROVOD_RANK": "7"}
    mine = {"PATH": "/bin", "HOROVOD_CYCLE_TIME": "3"}
    environment = rank.environment({**stale, **mine})
    assert environment == {**mine, **rank.variables}
    (rank,) = executor.assign(on("a"), ADDRESS)
    # Variables of one kind of rendezvous do not decide where the ranks of the other meet.
    assert "HOROVOD_RANK0_ADDRESS" not in rank.environment({"HOROVOD_RANK0_ADDRESS": "y:1"})


def test_interfaces_reach_the_ranks() -> None:
    (rank,) = executor.assign(on("a"), ADDRESS, interfaces=["eth0", "ib0"])
    assert rank.variables["HOROVOD_GLOO_IFACE"] == "eth0,ib0"


def test_the_key_is_not_printed_and_everything_can_be_sent() -> None:
    for thing in (ADDRESS, executor.RankZero(1, KEY), executor.assign(on("a"), ADDRESS)[0]):
        assert KEY not in repr(thing)
        assert pickle.loads(pickle.dumps(thing)) == thing
    assert executor.RankZero(1).key != executor.RankZero(1).key


@pytest.mark.parametrize(
    ("processes", "rendezvous", "text"),
    [
        ([], ADDRESS, "there is no process"),
        ([("a", "a"), ("", "b")], ADDRESS, "process 1 has no host"),
        ([("a", "")], ADDRESS, "process 0 has no address"),
        ([("a", "a")], executor.RankZero(0, KEY), "cannot be 0"),
        ([("a", "a")], executor.RankZero(1, "key"), "64 hex digits"),
        ([("a", "a")], executor.RendezvousAddress((), KEY), "no address"),
        (
            [("a", "a")],
            executor.RendezvousAddress(("a:1",), KEY),
            "'a:1' is not ip:port|\"a:1\" is not ip:port",
        ),
    ],
)
def test_mistakes_are_named(processes, rendezvous, text) -> None:
    with pytest.raises(ValueError, match=text):
        executor.assign(processes, rendezvous)


def test_an_interface_that_is_not_there_is_named() -> None:
    with pytest.raises(ValueError, match="no-such-0"):
        executor.Rendezvous(2, interfaces=["no-such-0"])
