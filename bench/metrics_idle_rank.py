"""One of many idle ranks of metrics.py: how much of a processor rank 0 uses with and without measuring."""

from __future__ import annotations

import argparse
import os
import time

import numpy as np
from launch import Report

import horovod.numpy as hvd


def main() -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", required=True)
    parser.add_argument("--pairs", type=int, required=True)
    parser.add_argument("--seconds", type=float, required=True)
    options = parser.parse_args()
    hvd.init()
    report = Report(options.out, hvd.rank())
    report.add(ranks=hvd.size())
    for pair in range(options.pairs):
        for variant in ("off", "on") if pair % 2 else ("on", "off"):
            hvd.shutdown()
            os.environ["HOROVOD_METRICS"] = "1" if variant == "on" else "0"
            hvd.init()
            hvd.allreduce(np.ones(1000, np.float32))
            hvd.barrier()
            before, begin = time.process_time(), time.monotonic()
            time.sleep(options.seconds)
            share = (time.process_time() - before) / (time.monotonic() - begin)
            report.add(variant=variant, share=share)
            # Nobody leaves the job while another rank measures.
            hvd.barrier()
    report.done()
    hvd.barrier()
    hvd.shutdown()


if __name__ == "__main__":
    main()
