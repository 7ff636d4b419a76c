"""Files of the original Horovod among this package's: both install into one folder, and a mixture of them breaks.

`horovodrun` runs this file's text in a bare interpreter, so it imports nothing of this package.
"""

import glob
import importlib.metadata
import importlib.util
import os
import warnings

# Every version of the original has the first, most have the second; this package never has either.
MARKERS = ("runner/js_run.py", "metadata.json")
# The original's last version is 0.28.1; from this one on, the distribution `horovod` is this package's.
_FIRST_OF_OURS = (0, 29)


def command(requirement: str) -> str:
    """The command that installs this package, or an extra of it, from a folder of wheels: no index has it."""
    return (
        f"pip install --find-links dist '{requirement}' (dist: the folder of horovod-rs's wheels)"
    )


def warn_if_mixed(folder: str) -> None:
    """Warn if the original's files are in this package's folder; at import, so it looks at names only."""
    for marker in MARKERS:
        if os.path.exists(os.path.join(folder, marker)):
            warnings.warn(
                f"horovod: files of the original Horovod are mixed with those of horovod-rs in {folder} ({marker}, for "
                "one). To repair it: pip uninstall -y horovod horovod-rs; remove what is left of that folder; then "
                f"{command('horovod-rs')}. `horovodrun --check-build` says more.",
                RuntimeWarning,
                stacklevel=3,
            )
            return


def findings() -> list[str]:
    """Faults of the installation that `import horovod` would take; each a sentence without its end."""
    found = []
    ours = []
    for installed in importlib.metadata.distributions(name="horovod"):
        if _numbers(installed.version) < _FIRST_OF_OURS:
            found.append(
                f"the original Horovod {installed.version} is installed, too, in {installed.locate_file('')}"
            )
        else:
            ours.append(installed)
    spec = importlib.util.find_spec("horovod")
    for folder in (spec.submodule_search_locations or []) if spec else []:
        foreign = [name for name in MARKERS if os.path.exists(os.path.join(folder, name))]
        foreign += glob.glob("*/mpi_lib*.so", root_dir=folder)
        if foreign:
            found.append(f"{folder} holds files of the original Horovod: {', '.join(foreign)}")
    for installed in ours:
        changed = [str(file) for file in installed.files or [] if _is_changed(file)]
        if changed:
            found.append(
                f"files of horovod {installed.version} in {installed.locate_file('')} were replaced or removed after "
                f"it was installed: {len(changed)}, such as {changed[0]}"
            )
    return found


def _is_changed(file: importlib.metadata.PackagePath) -> bool:
    # `pip install --target` moves the launcher without noting it in the record.
    if file.size is None or file.parts[0] != "horovod":
        return False
    try:
        return os.stat(file.locate()).st_size != file.size
    except OSError:
        return True


def _numbers(version: str) -> tuple[int, ...]:
    parts = version.split(".")[:2]
    return tuple(int(part) if part.isdigit() else 0 for part in parts)
