"""Two hosts and somebody on the network between them: what is recorded, and which ports there are."""

from __future__ import annotations

import contextlib
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import network
import pytest

import harness
import strangers

pytestmark = pytest.mark.hosts

# A tensor and a name that are easy to find in a recording.
MARKED = """
import os, sys
import numpy as np
import horovod.numpy as hvd

hvd.init()
words = np.frombuffer(b"tensorsecret" * 3000, np.uint8)
sent = hvd.broadcast(words if hvd.rank() == 0 else np.zeros_like(words), 0, name="namesecret")
assert sent.tobytes() == b"tensorsecret" * 3000
print("key", os.environ["HOROVOD_JOB_KEY"], flush=True)
stop = False
while not stop:
    stop = bool(hvd.broadcast(np.array(int(os.path.exists(sys.argv[1]))), 0, name="stop"))
"""


@contextlib.contextmanager
def recorded(interface: str) -> Iterator[Callable[[], bytes]]:
    """Records all that passes an interface; the function ends that and gives it."""
    wire = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(3))
    wire.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 64 << 20)
    wire.bind((interface, 0))
    wire.settimeout(0.2)
    packets: list[bytes] = []
    done = threading.Event()

    def listen() -> None:
        while True:
            try:
                packets.append(wire.recv(1 << 17))
            except TimeoutError:
                if done.is_set():
                    return

    thread = threading.Thread(target=listen)
    thread.start()

    def finish() -> bytes:
        done.set()
        thread.join()
        return b"\n".join(packets)

    try:
        yield finish
    finally:
        finish()
        wire.close()


@pytest.mark.parametrize("encrypt", ["0", "1"])
def test_a_recording_of_the_wire_shows_what_is_not_encrypted(
    net, jobs, script, tmp_path: Path, encrypt: str
) -> None:
    stop = tmp_path / "stop"
    words = [harness.HOROVODRUN, "-np", "2", "-H", "host-a:1,host-b:1"]
    words += ["-p", str(network.SSH_PORT), "-i", net.folder / "user", "--network-interface", "eth0"]
    words += [sys.executable, script(MARKED), str(stop)]
    first, second = net.hosts
    with recorded(second.outside) as finish:
        env = {"HOROVOD_ENCRYPT": encrypt}
        job = jobs(harness.Job(first.enter(words), env=env))
        key = job.wait_for("key ", count=2)[0].split()[-1]
        members = set(job.members())
        places = strangers.bound(members & first.pids()) + strangers.bound(members & second.pids())
        stop.touch()
        job.succeed()
        wire = finish()

    assert len(wire) > 36_000, "nothing was recorded"
    seen = {word: word in wire for word in (b"tensorsecret", b"namesecret")}
    assert all(seen.values()) if encrypt == "0" else not any(seen.values()), seen
    assert key.encode() not in wire
    assert bytes.fromhex(key) not in wire
    # Listening sockets are on the configured interface and on no other.
    hosts = {address[0] for family, address in places if family != "unix"}
    assert hosts
    addresses = {address for host in net.hosts for address in (host.address, host.address6)}
    assert hosts <= addresses, places
