"""The demo behind `make demo`: trains the digits on one and on two processes and compares the two runs.

Fails if the two loss curves differ at any step by more than 1e-4, or if the test accuracy is below 97 %.
"""

import argparse
import json
import math
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
LOSS_LIMIT = 1e-4
ACCURACY_LIMIT = 0.97
PROGRESS = re.compile(r"step (\d+) of (\d+) loss (\S+)")
BAR_WIDTH = 24


def main():
    """Run the demo from the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--processes", type=int, default=2, help="compared with one process")
    parser.add_argument("--out", type=Path, default=Path("demo-output"), help="folder for results")
    parser.add_argument("--epochs", type=int, help="passes over the data")
    args = parser.parse_args()
    if args.processes < 2:
        parser.error("--processes: at least 2, to have something to compare with")
    args.out.mkdir(parents=True, exist_ok=True)

    counts = [1, args.processes]
    runs = [train(count, args, part) for part, count in enumerate(counts)]
    finish_line(f"trained the digits with {counts[0]} and {counts[1]} processes")
    picture = args.out / "loss.png"
    draw(runs, picture)
    sys.exit(report(runs, picture))


def train(processes, args, part):
    """Run the training script under the launcher, showing its progress; return what it measured."""
    result = args.out / f"np{processes}.json"
    result.unlink(missing_ok=True)
    command = [launcher(), "-np", str(processes), sys.executable, HERE / "train_digits.py"]
    command += ["--result", result]
    if args.epochs:
        command += ["--epochs", str(args.epochs)]
    # One thread per process, or one process alone would already use all cores.
    env = {"OMP_NUM_THREADS": "1"} | os.environ
    lines = []
    with subprocess.Popen(
        [str(word) for word in command],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=env,
    ) as process:
        show(part, processes, 0, 1, "starting")
        for line in process.stdout or ():
            lines.append(line)
            if found := PROGRESS.search(line):
                step, steps, loss = found.groups()
                show(part, processes, int(step), int(steps), f"loss {loss}")
    if process.returncode or not result.exists():
        finish_line("")
        sys.stdout.writelines(lines)
        sys.exit(f"the run with {processes} process(es) failed with status {process.returncode}")
    return json.loads(result.read_text())


def launcher():
    """`horovodrun` beside this interpreter, else the one on the PATH."""
    beside = Path(sysconfig.get_path("scripts")) / "horovodrun"
    found = str(beside) if beside.exists() else shutil.which("horovodrun")
    return found or sys.exit("horovodrun was not found; install the package first")


def show(part, processes, step, steps, text):
    """Draw the one progress line again; both runs share it."""
    done = (part + step / steps) / 2
    if step not in (0, steps) and step % max(1, steps // 50):
        return
    bar = "#" * round(done * BAR_WIDTH)
    noun = "process" if processes == 1 else "processes"
    sys.stdout.write(
        f"\r[{bar:<{BAR_WIDTH}}] {done:4.0%}  {processes} {noun}, step {step} of {steps}, {text}   "
    )
    sys.stdout.flush()


def finish_line(text):
    """Replace the progress line by `text` and go to the next line."""
    sys.stdout.write(f"\r{text:<90}\n")
    sys.stdout.flush()


def draw(runs, path):
    """Save a picture of the loss curves of both runs."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 4.5), layout="constrained")
    styles: list[dict[str, Any]] = [{"linewidth": 4, "alpha": 0.4}, {"linewidth": 1.2}]
    for run, style in zip(runs, styles, strict=True):
        axes.plot(range(1, len(run["losses"]) + 1), run["losses"], label=name(run), **style)
    axes.set(
        xlabel="step", ylabel="loss", yscale="log", title="Digits: same seed, same global batch"
    )
    axes.legend()
    figure.savefig(path, dpi=120)


def name(run):
    """The name of a run in the report."""
    return "1 process" if run["processes"] == 1 else f"{run['processes']} processes"


def report(runs, picture):
    """Print the outcome; return the exit status."""
    problems = []
    for run in runs:
        accuracy, speed = run["accuracy"], run["samples_per_second"]
        pace = f"{speed:,.0f} samples per second" if speed else "too few steps to measure the speed"
        print(f"{name(run):<12}  test accuracy {accuracy:.2%}   {pace}")
        if accuracy < ACCURACY_LIMIT:
            problems.append(
                f"{name(run)}: test accuracy {accuracy:.2%} is below {ACCURACY_LIMIT:.0%}"
            )
    one, many = (run["losses"] for run in runs)
    if len(one) != len(many):
        problems.append(f"the runs took {len(one)} and {len(many)} steps")
    else:
        gaps = [abs(a - b) for a, b in zip(one, many, strict=True)]
        # A loss that is no number (gap != gap) is as far off as it gets.
        gap, step = max((math.inf if g != g else g, i) for i, g in enumerate(gaps, 1))
        if gap <= LOSS_LIMIT:
            print(
                f"loss curves   equal within {LOSS_LIMIT:g} at each of {len(one)} steps "
                f"(largest difference {gap:.1e})"
            )
        else:
            problems.append(
                f"the losses differ by {gap:.1e} at step {step}; {LOSS_LIMIT:g} is allowed"
            )
    print(f"picture       {picture}")
    for problem in problems:
        print(f"FAILED: {problem}", file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    main()
