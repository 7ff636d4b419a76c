"""pytest plugin inside a rank: writes down which tests ran in which order, for comparison with the other ranks.

One JSON line per test, at once: a rank that dies leaves what it had done.
"""

import json
import os
from pathlib import Path


class _Recorder:
    def __init__(self, path):
        self.file = path.open("a")

    def pytest_runtest_logreport(self, report):
        if report.when == "call" or report.outcome != "passed":
            self.file.write(json.dumps([report.nodeid, report.outcome]) + "\n")
            self.file.flush()


def pytest_configure(config):
    folder = os.environ.get("HVD_TEST_REPORT")
    if folder:
        path = Path(folder) / f"rank-{os.environ['HOROVOD_RANK']}.jsonl"
        config.pluginmanager.register(_Recorder(path))
