"""Runs at start-up of every Python process of a test job: makes it print its stacks when asked, and import large
frameworks in less time.

The stacks go to a file of their own, so that they reach the test even when the launcher is what hangs.
"""

import faulthandler
import os
import signal

import lean_imports  # noqa: F401 - it acts when it is imported

if "HVD_TEST_FORKS" in os.environ and "HOROVOD_RANK" in os.environ:
    import forked_ranks

    forked_ranks.run_in_a_fork()

_folder = os.environ.get("HVD_TEST_STACKS")
if _folder:
    _file = open(os.path.join(_folder, f"{os.getpid()}.txt"), "w")  # noqa: SIM115 - lives with the process
    faulthandler.register(signal.SIGUSR1, file=_file, all_threads=True, chain=False)
