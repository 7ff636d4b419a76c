"""Whether gradients go together where the script does not say, on all ranks alike."""

import array_adapter as hvd

from horovod.common import _gradient_grouping
from horovod.common._gradient_grouping import fills_its_host

hvd.init()
SIZE = hvd.size()


def test_a_job_fills_its_host_if_its_ranks_leave_no_core_of_it_over(monkeypatch):
    for cores, full in ((SIZE - 1 or 1, True), (SIZE, True), (SIZE + 1, False)):
        monkeypatch.setattr("os.cpu_count", lambda cores=cores: cores)
        assert fills_its_host() is full
    monkeypatch.setattr("os.cpu_count", lambda: 1)
    monkeypatch.setattr(_gradient_grouping.basics, "local_size", lambda: SIZE - 1)
    assert not fills_its_host(), "of a job on several hosts"
    monkeypatch.undo()
    monkeypatch.setattr("os.cpu_count", lambda: 1)
    monkeypatch.setattr(_gradient_grouping._core, "is_elastic", lambda: True)
    assert not fills_its_host(), "of a job whose hosts may change"
