"""A wheel of `sparkdl`'s names for HorovodRunner: the distribution `horovod-rs-sparkdl`, which needs `horovod[spark]`.

It is built on request only, since it brings PySpark: `python build_backend/sparkdl_wheel.py DIR`.

Its files lie in a folder of their own that a `.pth` file puts at the end of the module search path. So an installed
`sparkdl` is neither overwritten nor hidden: it is found first.
"""

from __future__ import annotations

import sys
from pathlib import Path

import metadata_wheel

NAME = "horovod-rs-sparkdl"
_FOLDER = "horovod_rs_sparkdl"

_ABOUT = """\
# horovod-rs-sparkdl

`from sparkdl import HorovodRunner` for notebooks that were written for it, by `horovod-rs`. Where another `sparkdl` is
installed that one is imported.
"""


def build(directory: Path) -> Path:
    """Write it into a directory; its path."""
    project, version = metadata_wheel.read_project(), metadata_wheel.version_of_workspace()
    headers = [
        ("Summary", "HorovodRunner of horovod-rs under the name sparkdl"),
        ("License-Expression", project["license"]),
        ("Requires-Python", project["requires-python"]),
        *metadata_wheel.project_urls(project),
        ("Requires-Dist", f"{project['name']}[spark]=={version}"),
    ]
    source = Path(__file__).with_name("sparkdl")
    files = {f"{_FOLDER}.pth": f"{_FOLDER}\n"}
    for file in sorted(source.rglob("*.py")):
        place = file.relative_to(source.parent).as_posix()
        files[f"{_FOLDER}/{place}"] = file.read_text()
    return metadata_wheel.write_wheel(directory, NAME, version, headers, files, _ABOUT)


if __name__ == "__main__":
    print(build(Path(sys.argv[1])))
