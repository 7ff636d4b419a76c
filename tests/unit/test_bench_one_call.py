"""The counts of `bench/one_call.py` from a profile of callgrind."""

from __future__ import annotations

from types import ModuleType

import pytest

import harness


@pytest.fixture
def one_call(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(harness.ROOT / "bench"))
    import one_call

    return one_call


PROFILE = """
events: Ir
fl=(1) /home/me/crates/horovod-engine/src/engine/submit.rs
fn=(1) submit
10 5
+2 7
fi=(2) /rustc/0123/library/core/src/ptr.rs
12 3
fe=(1)
* 1
cfi=(3) /home/me/crates/horovod-protocol/src/worker.rs
cfn=(2) hits
calls=1 40
13 900

fl=(3)
fn=(2)
40 800
"""


def test_each_file_has_its_own_instructions(one_call: ModuleType) -> None:
    counts = one_call.by_file(PROFILE.splitlines())
    assert {one_call.place_of(file): count for file, count in counts.items()} == {
        "horovod-engine/src/engine/submit.rs": 13,
        "(Rust's library)": 3,
        "horovod-protocol/src/worker.rs": 800,
    }


def test_a_file_is_entered_from_others_during_the_measured_call(one_call: ModuleType) -> None:
    worker, submit = "horovod-protocol/src/worker.rs", "horovod-engine/src/engine/submit.rs"
    assert one_call.entries(PROFILE.splitlines()) == {worker: {submit}}
    # A call that cost nothing was made before.
    before = PROFILE.replace("13 900", "13 0")
    assert one_call.entries(before.splitlines()) == {}


def test_other_files_have_their_package(one_call: ModuleType) -> None:
    assert (
        one_call.place_of("/root/.cargo/registry/src/index/half-2.7.1/src/lib.rs") == "(half-2.7.1)"
    )
    assert one_call.place_of("./string/memmove.S") == "(C library)"
