"""Whether the gradients of a step travel as one operation where the script does not say."""

import os

from horovod import _core
from horovod.common.basics import basics


def fills_its_host() -> bool:
    """Whether the job's ranks leave no core of their only host over: sending early then only takes from computing.

    All ranks have to group alike, so it rests on what is equal on all of them. Elastic jobs, whose hosts change,
    never do.
    """
    if _core.is_elastic():
        return False
    return basics.local_size() == basics.size() >= (os.cpu_count() or 1)
