"""Runs a slow command of a build and shows that something goes on: one line at first, every 10 seconds, and at the end.

    python build_backend/stage.py NAME LOG COMMAND...

Lines say how long it runs and the last line of its own output, so they read well without a terminal, and beside the
lines of another stage. All output goes to the file LOG; the end of it is shown if the command fails.
"""

from __future__ import annotations

import re
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import IO

EVERY_S = 10.0
WIDTH = 100
TAIL_LINES = 60
NOISE = re.compile(r"\x1b\[[0-9;]*m")
# A wheel's tags, which would hide its size.
TAGS = re.compile(r"(?<=\d)-\S+\.whl")


def main(name: str, log: Path, command: list[str]) -> int:
    """Run the command; its exit status."""
    begin = time.monotonic()
    log.parent.mkdir(parents=True, exist_ok=True)
    print(f"{name}: begins", flush=True)
    with log.open("wb") as file:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
        last = [""]
        reader = threading.Thread(target=_copy, args=(process.stdout, file, last))
        reader.start()
        while True:
            try:
                code = process.wait(EVERY_S)
                break
            except subprocess.TimeoutExpired:
                line = f"{name}: {time.monotonic() - begin:.0f} s, {last[0]}"
                print(line if len(line) <= WIDTH else line[: WIDTH - 3] + "...", flush=True)
        reader.join()
    print(f"{name}: {'done' if code == 0 else 'FAILED'} after {time.monotonic() - begin:.0f} s")
    if code:
        lines = log.read_text(errors="replace").splitlines()[-TAIL_LINES:]
        print("\n".join([f"the end of {log}:", *lines]))
    sys.stdout.flush()
    return code if code >= 0 else 128 - code


def _copy(stream: IO[bytes], file: IO[bytes], last: list[str]) -> None:
    for line in stream:
        file.write(line)
        if text := NOISE.sub("", line.decode(errors="replace")).strip():
            last[0] = TAGS.sub("", text)


if __name__ == "__main__":
    if len(sys.argv) < 4:
        sys.exit(f"usage: stage.py NAME LOG COMMAND..., not {sys.argv[1:]}")
    try:
        sys.exit(main(sys.argv[1], Path(sys.argv[2]), sys.argv[3:]))
    except KeyboardInterrupt:
        sys.exit(130)
