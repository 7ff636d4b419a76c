"""The benchmark's programs in Rust, examples of the crates: that of horovod with the wheel's release profile, that of
horovod-candle with cargo's own."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

from results import ROOT

# Each peer's crate. `horovod-candle` is a workspace of its own.
PACKAGES = {"rust": "horovod", "candle": "horovod-candle"}
EXAMPLE = "speed"


def _target(peer: str) -> Path:
    target = Path(os.environ.get("CARGO_TARGET_DIR", ROOT / "target"))
    return target if peer == "rust" else target / PACKAGES[peer].removeprefix("horovod-")


def program(peer: str) -> Path:
    """The program of a peer."""
    return _target(peer) / "release" / "examples" / EXAMPLE


def build(peer: str) -> str | None:
    """Build the program of a peer; why it could not be built, or None. candle takes minutes."""
    if not shutil.which("cargo"):
        return "cargo is not installed"
    manifest = ROOT / "crates" / PACKAGES[peer] / "Cargo.toml"
    words = ["cargo", "build", "--release", "--locked", "--quiet", "--example", EXAMPLE]
    words += ["--manifest-path", str(manifest), "--target-dir", str(_target(peer))]
    done = subprocess.run(words, stderr=subprocess.PIPE, text=True, check=False)
    return None if done.returncode == 0 else f"cargo could not build it: {done.stderr[-500:]}"
