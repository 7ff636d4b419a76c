"""The page of a job in a browser. `HVD_TEST_PICTURES=docs` renews the picture of the documentation."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

import browser
import harness

pytestmark = pytest.mark.skipif(
    browser.PROGRAM is None, reason="NOT RUN: no Chromium is installed (Debian: chromium)"
)

PAGE = harness.ROOT / "crates/horovod-metrics/src/page.html"
SLOW = "document.getElementById('slow').textContent"
PNG = b"\x89PNG\r\n"

# Steps with marks, until the test has seen enough.
TRAINS = """
import sys
from pathlib import Path
import numpy as np
import horovod.numpy as hvd

hvd.init()
end = np.zeros(1, np.float32)
while not end[0]:
    with hvd.phase("data"):
        end[0] = hvd.rank() == 0 and Path(sys.argv[1]).exists()
    hvd.allreduce(np.ones(1000, np.float32), name="gradient")
    hvd.allreduce_(end, name="end", op=hvd.Sum)
    hvd.step()
"""


def cells(column: str) -> str:
    """An expression for the texts of a column of the ranks."""
    return (
        "(() => { const at = [...document.querySelectorAll('#heads th')]"
        f".findIndex(th => th.dataset.key === {column!r});"
        " return [...document.querySelectorAll('#ranks tr')].map(tr => tr.cells[at].textContent); })()"
    )


def fact(name: str) -> str:
    """An expression for a fact about the job, such as `steps/s`."""
    return (
        "([...document.querySelectorAll('#job div')]"
        f".find(div => div.firstChild.textContent === {name!r}) || {{lastChild: {{}}}}).lastChild.textContent"
    )


def test_the_page_of_a_running_job(script, jobs, tmp_path: Path) -> None:
    end = tmp_path / "end"
    job = jobs(harness.python(2, script(TRAINS), str(end), options=["--metrics-port", "0"]))
    job.wait_for("figures are at")
    found = re.search(r"figures are at (http://\S+)", f"{job.stderr}\n{job.stdout}")
    assert found, job.report()
    with browser.page() as page:
        page.open(found[1])
        page.wait_for(f"{cells('rank')}.join() === '0,1' && parseFloat({fact('steps/s')}) > 0")
        assert page.value(fact("ranks")) == "2"
        # Values change while the job runs.
        before = page.value("last[0].now.steps")
        page.wait_for(f"last[0].now.steps > {before}")
        # The keyboard is enough to sort: Tab reaches a title, Enter sorts by it.
        page.value("document.querySelector('[data-key=rank] button').focus()")
        page.key("Enter")
        page.wait_for(f"{cells('rank')}.join() === '1,0'")
        heading = page.value("document.querySelector('[data-key=rank]').getAttribute('aria-sort')")
        assert heading == "descending"
        page.key("Tab")
        focused = "document.activeElement.parentElement.dataset.key"
        assert page.value(focused) == "host"
        assert page.errors == []
        assert page.requests
        assert [url for url in page.requests if not url.startswith(found[1])] == []
        # Without the secret there is no page.
        without = re.sub(r"/[0-9a-f]{32}/$", "/", found[1])
        page.open(without)
        assert page.value("document.getElementById('ranks')") is None
        end.touch()
    job.succeed()


def figures(ranks: int, slow: int, second: int) -> dict:
    """The document of a job of which one rank is slow, after so many seconds."""
    hosts = [f"node-{1 + rank * 4 // ranks}" for rank in range(ranks)]

    def row(rank: int) -> dict:
        is_slow = rank == slow
        waiting = 0.02 if is_slow else 0.24
        counts = {
            "steps": 17 * second,
            "collectives": 120 * second,
            "cache_hits": 2700 * second,
            "queued_operations": 0,
            "stalls": 0,
            "operations": {"allreduce": {"network": 2700 * second}},
            "bytes": {"allreduce": {"network": second << 30}},
            "memory_bytes": (rank % 7 + 20) << 26,
        }
        times = {
            "elapsed_seconds": second,
            "waiting_seconds": waiting * second,
            "communicating_seconds": 0.1 * second,
            "awaited_seconds": 0.21 * second if is_slow else 0,
            "input_seconds": (0.22 if is_slow else 0.01) * second,
            "cpu_seconds": 1.3 * second,
        }
        return {"rank": rank, "host": hosts[rank], "age_seconds": 0.4, **times, **counts}

    host = {
        "processors": 64,
        "busy_seconds": 30 * second,
        "steal_seconds": 0,
        "memory_bytes": 512 << 30,
        "available_memory_bytes": 300 << 30,
        "swapped_bytes": 0,
        "received_bytes": second << 31,
        "sent_bytes": second << 31,
    }
    text = (
        f"rank {slow} on {hosts[slow]} is slow: the others lose 24 % of their time by waiting, over the last 170 "
        "steps. Likely cause: input. Waiting for data takes 22 % of the time there, 1 % elsewhere."
    )
    return {
        "rank": 0,
        "size": ranks,
        "restarts": 1,
        "ranks": [row(rank) for rank in range(ranks)],
        "hosts": [{"host": name, **host} for name in dict.fromkeys(hosts)],
        "waiting_for": [],
        "slow": {"ranks": [slow], "host": hosts[slow], "cause": "input", "text": text},
    }


@pytest.fixture
def served(request: pytest.FixtureRequest) -> Iterator[str]:
    """The page beside made figures of so many ranks, of which one is slow. Each request is a second later."""
    asked = iter(range(700, 10_000))

    class Answers(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            is_page = self.path == "/"
            body = PAGE.read_bytes()
            if not is_page:
                body = json.dumps(figures(*request.param, next(asked))).encode()
            self.send_response(200)
            self.send_header("Content-Type", "text/html" if is_page else "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), Answers) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()


@pytest.mark.parametrize("served", [(8, 7)], indirect=True)
def test_a_picture_of_a_job_with_a_slow_rank(served: str) -> None:
    with browser.page() as page:
        page.open(served)
        page.wait_for(f"{cells('waiting')}.join().startsWith('24 %,')")
        assert page.value(SLOW).startswith("rank 7 on node-4 is slow")
        assert "input 22 %, computing " in page.value(cells("split"))[7]
        colours = []
        for scheme in ("dark", "light"):
            picture = page.picture(1280, 720, scheme)
            assert picture.startswith(PNG)
            colours.append(page.value("getComputedStyle(document.body).backgroundColor"))
        assert colours == ["rgb(20, 23, 26)", "rgb(255, 255, 255)"]
        browser.save("watching-page.png", picture)


@pytest.mark.parametrize("served", [(256, 100)], indirect=True)
def test_256_ranks_are_shown_and_sorted(served: str) -> None:
    with browser.page() as page:
        page.open(served)
        page.wait_for(f"{cells('awaited')}.length === 256 && {cells('awaited')}[100] === '21 %'")
        page.value("document.querySelector('[data-key=awaited] button').click()")
        assert page.value(cells("rank"))[0] == "100"
        # The table is wider than a small window; only the table scrolls.
        page.picture(400, 700, "light")
        assert page.value("document.documentElement.scrollWidth <= window.innerWidth")
        assert page.errors == []
