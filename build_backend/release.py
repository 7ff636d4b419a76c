"""Gathers what a release consists of in one folder, with checksums: `python release.py WHEELS FOLDER`.

WHEELS is the folder of `make wheel` and `make wheel-aarch64`. FOLDER gets these wheels, the sources, the licences of
third parties, a bill of materials, the Helm chart where helm is installed, and SHA256SUMS. Nothing is signed: the
project has no key.
"""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
from pathlib import Path

import horovod_build
import metadata_wheel
import third_party

ROOT = Path(__file__).resolve().parent.parent
CHECKSUMS = "SHA256SUMS"


def gather(wheels: Path, folder: Path) -> None:
    """Fill a new folder."""
    # Those for other machines are in folders of their own; the wheel of metadata is the same for all.
    found = {wheel.name: wheel for wheel in sorted(wheels.rglob("horovod*.whl"))}.values()
    version = metadata_wheel.version_of_workspace()
    if len(found) < 2 or any(f"-{version}-" not in wheel.name for wheel in found):
        names = [wheel.name for wheel in found]
        sys.exit(
            f"expected the two wheels of version {version} in {wheels}, found {names}: make wheel"
        )
    folder.mkdir(parents=True)
    for wheel in found:
        shutil.copy(wheel, folder)
    horovod_build.build_sdist(str(folder))
    shutil.copy(horovod_build.LICENCES, folder)
    (folder / "horovod.cyclonedx.json").write_text(third_party.bill_of_materials(version))
    package_chart(folder)
    write_checksums(folder)


def package_chart(folder: Path) -> None:
    """Add the chart as an archive, which only helm makes."""
    own = ROOT / ".stamps" / "chart-tools" / "bin" / "helm"
    helm = str(own) if own.exists() else shutil.which("helm")
    if helm is None:
        print("helm is not installed (make chart-tools): the chart is not in the release")
        return
    chart = ROOT / "deploy" / "helm" / "horovod"
    subprocess.run([helm, "package", str(chart), "--destination", str(folder)], check=True)


def write_checksums(folder: Path) -> None:
    """Write the checksums of all files, as `sha256sum --check` reads them."""
    files = sorted(path for path in folder.iterdir() if path.name != CHECKSUMS)
    lines = [f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}\n" for path in files]
    (folder / CHECKSUMS).write_text("".join(lines))


if __name__ == "__main__":
    wheels, folder = map(Path, sys.argv[1:])
    shutil.rmtree(folder, ignore_errors=True)
    gather(wheels, folder)
    print(f"{folder}: not signed, for there is no key")
