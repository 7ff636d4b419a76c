"""pytest plugin inside a rank: writes down which tests ran in which order, for comparison with the other ranks.

One JSON line per test, at once: a rank that dies leaves what it had done. A second file has the processor time of each
test, in which ranks differ.
"""

import json
import os
from pathlib import Path


class _Recorder:
    def __init__(self, path):
        self.outcomes = path.open("a")
        self.seconds = path.with_suffix(".seconds").open("a")

    def pytest_runtest_logreport(self, report):
        if report.when == "call" or report.outcome != "passed":
            self._add(self.outcomes, [report.nodeid, report.outcome])
        if report.when == "teardown":
            used = dict(report.user_properties).get("processor_s", 0)
            self._add(self.seconds, [report.nodeid, float(used)])

    @staticmethod
    def _add(file, entry):
        file.write(json.dumps(entry) + "\n")
        file.flush()


def pytest_configure(config):
    folder = os.environ.get("HVD_TEST_REPORT")
    if folder:
        path = Path(folder) / f"rank-{os.environ['HOROVOD_RANK']}.jsonl"
        config.pluginmanager.register(_Recorder(path))
