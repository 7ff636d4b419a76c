"""A wheel of metadata alone: the distribution `horovod-rs`, which requires `horovod` and brings no file of its own.

The distribution `horovod` owns the files, as the original's does. pip uninstalls the installed distribution of a name
before it installs another of that name, so it replaces an installed original file by file. Under any other name pip
would write our files over the original's, and then remove the original's files, which by then are ours.
"""

from __future__ import annotations

import base64
import hashlib
import tomllib
import zipfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
NAME = "horovod-rs"
# The oldest date that a zip file can hold: equal sources make equal wheels.
_DATE = (1980, 1, 1, 0, 0, 0)
_FILE_MODE, _PROGRAM_MODE = 0o100644, 0o100755

_ABOUT = """\
# horovod-rs

The project's own name. It holds no files: `horovod`, which it requires, has them.
"""


def build(directory: Path) -> Path:
    """Write it into a directory; its path."""
    project = read_project()
    owner, version = project["name"], version_of_workspace()
    headers = [
        ("Summary", "Requires horovod of the same version, which is Horovod written in Rust"),
        ("License-Expression", project["license"]),
        ("Requires-Python", project["requires-python"]),
        *project_urls(project),
        ("Requires-Dist", f"{owner}=={version}"),
    ]
    for extra in project["optional-dependencies"]:
        headers.append(("Provides-Extra", extra))
        headers.append(("Requires-Dist", f'{owner}[{extra}]=={version} ; extra == "{extra}"'))
    return write_wheel(directory, NAME, version, headers, text=_ABOUT)


def read_project() -> dict[str, Any]:
    """The table `[project]` of pyproject.toml."""
    project: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return project


def project_urls(project: Mapping[str, Any]) -> list[tuple[str, str]]:
    """The addresses of the project, as lines of METADATA."""
    return [("Project-URL", f"{label}, {address}") for label, address in project["urls"].items()]


def version_of_workspace() -> str:
    """The version, which is stated in the Cargo workspace only."""
    workspace = tomllib.loads((ROOT / "Cargo.toml").read_text())["workspace"]
    return str(workspace["package"]["version"])


def write_wheel(
    directory: Path,
    name: str,
    version: str,
    headers: Iterable[tuple[str, str]] = (),
    files: Mapping[str, str | bytes] | None = None,
    text: str = "",
) -> Path:
    """Write a wheel for any Python and machine.

    Parameters
    ----------
    headers
        Lines of its METADATA beyond name and version.
    files
        The files that it installs: path and content. Files under `NAME-VERSION.data/scripts` become programs.
    text
        Its description, in Markdown.
    """
    folder = f"{name.replace('-', '_')}-{version}.dist-info"
    lines = [("Metadata-Version", "2.4"), ("Name", name), ("Version", version), *headers]
    lines += [("Description-Content-Type", "text/markdown")]
    metadata = "".join(f"{key}: {value}\n" for key, value in lines) + "\n" + text
    tags = (
        "Wheel-Version: 1.0\nGenerator: horovod_build\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    )
    texts = {**(files or {}), f"{folder}/METADATA": metadata, f"{folder}/WHEEL": tags}
    content = {
        path: text.encode() if isinstance(text, str) else text for path, text in texts.items()
    }
    record = "".join(f"{path},{_digest(data)},{len(data)}\n" for path, data in content.items())
    content[f"{folder}/RECORD"] = (record + f"{folder}/RECORD,,\n").encode()
    directory.mkdir(parents=True, exist_ok=True)
    wheel = directory / f"{folder.removesuffix('.dist-info')}-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for path, data in content.items():
            entry = zipfile.ZipInfo(path, _DATE)
            entry.compress_type = zipfile.ZIP_DEFLATED
            entry.external_attr = (_PROGRAM_MODE if "/scripts/" in path else _FILE_MODE) << 16
            archive.writestr(entry, data)
    return wheel


def _digest(data: bytes) -> str:
    digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest())
    return f"sha256={digest.rstrip(b'=').decode()}"
