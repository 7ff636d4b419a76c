"""Runs scripts one after the other in this process, each in an empty namespace and a job of its own."""

import runpy
import sys

from horovod.common.basics import basics

files = sys.argv[1:]
del sys.argv[1:]
for file in files:
    print(f"BEGINS {file}", flush=True)
    runpy.run_path(file, run_name="__main__")
    basics.shutdown()
    print(f"WORKED {file}", flush=True)
