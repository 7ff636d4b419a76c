"""The crates that the wheel's binaries contain: their licences in one text, and a bill of materials (CycloneDX).

`python third_party.py licences` and `python third_party.py bom` print one each. Both follow from Cargo.lock alone.
"""

from __future__ import annotations

import dataclasses
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
# The packages that the wheel's module, launcher and adapter are built from.
BINARIES = ("horovod-python", "horovod-launch", "horovod-tensorflow")
_LICENCE_FILE = re.compile(r"(?i)^(un)?(licen[cs]e|copying|notice|copyright)")
_RULE = "=" * 100


@dataclasses.dataclass(frozen=True, order=True)
class Crate:
    """A crate of the registry."""

    name: str
    version: str
    licence: str
    repository: str
    folder: Path

    def texts(self) -> list[str]:
        """Its licence files."""
        files = sorted(path for path in self.folder.iterdir() if _LICENCE_FILE.match(path.name))
        return [path.read_text(errors="replace").strip() for path in files if path.is_file()]


def crates() -> list[Crate]:
    """The crates of others in the binaries for this machine, in the order of their names."""
    command = ["cargo", "metadata", "--locked", "--format-version", "1"]
    command += ["--filter-platform", _host()]
    done = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
    metadata = json.loads(done.stdout)
    packages = {package["id"]: package for package in metadata["packages"]}
    nodes = {node["id"]: node for node in metadata["resolve"]["nodes"]}
    waiting = [key for key, package in packages.items() if package["name"] in BINARIES]
    found = set()
    while waiting:
        key = waiting.pop()
        if key in found:
            continue
        found.add(key)
        for dependency in nodes[key]["deps"]:
            # The wheel has nothing of crates that only build or test.
            if any(kind["kind"] is None for kind in dependency["dep_kinds"]):
                waiting.append(dependency["pkg"])
    return sorted(_crate(packages[key]) for key in found if packages[key]["source"] is not None)


def _crate(package: dict[str, Any]) -> Crate:
    return Crate(
        package["name"],
        package["version"],
        package["license"] or "",
        package["repository"] or "",
        Path(package["manifest_path"]).parent,
    )


def _host() -> str:
    done = subprocess.run(["rustc", "-vV"], check=True, capture_output=True, text=True)
    return next(x.split()[1] for x in done.stdout.splitlines() if x.startswith("host:"))


def licences() -> str:
    """All licence texts; equal texts stand once, below the names of all crates that have them."""
    of_text: dict[str, list[Crate]] = {}
    for crate in crates():
        for text in crate.texts() or [f"No licence file in the crate. See {crate.repository}"]:
            of_text.setdefault(text, []).append(crate)
    parts = [
        "Licences of the crates that horovod's compiled files contain. Each heading names the crates of the text.\n"
    ]
    for text, users in of_text.items():
        names = "\n".join(f"{user.name} {user.version} ({user.licence})" for user in users)
        parts.append(f"{_RULE}\n{names}\n{_RULE}\n\n{text}\n")
    return "\n".join(parts)


def bill_of_materials(version: str) -> str:
    """CycloneDX 1.5, without times and random numbers: equal sources give equal bytes."""
    components = [
        {
            "type": "library",
            "bom-ref": f"pkg:cargo/{crate.name}@{crate.version}",
            "name": crate.name,
            "version": crate.version,
            "purl": f"pkg:cargo/{crate.name}@{crate.version}",
            "licenses": [{"expression": crate.licence.replace("/", " OR ")}],
        }
        for crate in crates()
    ]
    own = {"type": "library", "bom-ref": "horovod", "name": "horovod", "version": version}
    document = {
        "bomFormat": "CycloneDX",
        "specVersion": "1.5",
        "version": 1,
        "metadata": {"component": {**own, "purl": f"pkg:pypi/horovod@{version}"}},
        "components": components,
        "dependencies": [{"ref": "horovod", "dependsOn": [c["bom-ref"] for c in components]}],
    }
    return json.dumps(document, indent=1) + "\n"


if __name__ == "__main__":
    import metadata_wheel

    if sys.argv[1:] == ["licences"]:
        print(licences(), end="")
    elif sys.argv[1:] == ["bom"]:
        print(bill_of_materials(metadata_wheel.version_of_workspace()), end="")
    else:
        sys.exit(f"usage: third_party.py licences|bom, not {sys.argv[1:]}")
