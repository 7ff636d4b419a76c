"""PEP 517 backend: puts the compiled `horovodrun` and adapters where maturin packs them, then lets it build the wheel.

maturin packs one library; the launcher and the library that TensorFlow loads are of other crates. So every build first
compiles `horovodrun` into `wheel-data/scripts`, which maturin copies into the wheel as an executable script, and the
adapter into the package that uses it.

As a program, `python build_backend/horovod_build.py published DIR` makes the wheel that is published: on Linux linked
by zig (from PyPI) against an old glibc, so that it runs on every distribution of the last ten years. With `quick`
instead it makes one for tests and the demo: linked by this machine's linker, with less optimisation. Both put the
wheel of the name `horovod-rs` beside it.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import stat
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import metadata_wheel
import third_party

ROOT = Path(__file__).resolve().parent.parent
SCRIPTS = ROOT / "wheel-data" / "scripts"
# The description that pyproject.toml names: README.md, with links that work from a package index.
PACKAGE_PAGE = ROOT / "package-page.md"
# The licences of the crates that the binaries contain, which pyproject.toml names as well.
LICENCES = ROOT / "THIRD-PARTY-LICENSES.txt"
_RELATIVE_LINK = re.compile(
    r"(?P<picture>!?)\[(?P<text>[^]]*)\]\((?![a-z]+:|#)(?P<target>[^)\s]+)\)"
)
TENSORFLOW_ADAPTER = ROOT / "python" / "horovod" / "tensorflow" / "libhorovod_tensorflow.so"
# The oldest C library that Rust itself supports on the platform; also the manylinux tag of the wheel.
GLIBC_FLOOR = {"x86_64": "2.17", "aarch64": "2.17"}

# Profiles of Cargo.toml: what is published, and what tests and the demo use.
RELEASE, QUICK = "release", "wheel-quick"

Settings = Mapping[str, Any] | None


def build_wheel(directory: str, settings: Settings = None, metadata: str | None = None) -> str:
    """PEP 517: a wheel for this machine, linked by its own linker."""
    stage_texts()
    stage_binaries(os.environ.copy(), RELEASE)
    return _maturin().build_wheel(directory, settings, metadata)


def build_editable(directory: str, settings: Settings = None, metadata: str | None = None) -> str:
    """PEP 660: as `build_wheel`, with the Python files used in place."""
    stage_texts()
    stage_binaries(os.environ.copy(), RELEASE)
    return _maturin().build_editable(directory, settings, metadata)


def build_sdist(directory: str, settings: Settings = None) -> str:
    """PEP 517: the sources."""
    stage_texts()
    SCRIPTS.mkdir(parents=True, exist_ok=True)
    return _maturin().build_sdist(directory, settings)


def prepare_metadata_for_build_wheel(directory: str, settings: Settings = None) -> str:
    """PEP 517: metadata without a build; maturin wants the data folder to exist."""
    stage_texts()
    SCRIPTS.mkdir(parents=True, exist_ok=True)
    return _maturin().prepare_metadata_for_build_wheel(directory, settings)


prepare_metadata_for_build_editable = prepare_metadata_for_build_wheel


def get_requires_for_build_wheel(settings: Settings = None) -> list[str]:
    """Nothing beyond `[build-system]`: rustc and cargo come from the machine."""
    return []


get_requires_for_build_editable = get_requires_for_build_wheel
get_requires_for_build_sdist = get_requires_for_build_wheel


def build_portable_wheel(directory: str, target: str | None = None) -> None:
    """Build the published wheel into `directory`, for this kind of machine or another one that Rust calls `target`."""
    target = target or _rustc_host()
    env = os.environ.copy()
    tag = ["--compatibility", "linux"]
    arch = target.split("-")[0]
    if target.endswith("-linux-gnu") and arch in GLIBC_FLOOR:
        floor = GLIBC_FLOOR[arch]
        if importlib.util.find_spec("ziglang"):
            name = f"CARGO_TARGET_{target.upper().replace('-', '_')}_LINKER"
            env[name] = str(_write_zig_linker(arch, floor))
            tag = ["--compatibility", f"manylinux_{floor.replace('.', '_')}"]
        else:
            print("ziglang is not installed: the wheel is for this machine only", file=sys.stderr)
    elif not target.endswith("-linux-gnu"):
        tag = []
    stage_binaries(env, RELEASE, target=target)
    _run_maturin(env, directory, "--profile", RELEASE, *tag, "--target", target)


def build_quick_wheel(directory: str) -> None:
    """Build the wheel of the tests and the demo into `directory`: for this machine, in little time."""
    env = os.environ.copy()
    tag = ["--compatibility", "linux"] if sys.platform == "linux" else []
    stage_binaries(env, QUICK)
    _run_maturin(env, directory, "--profile", QUICK, *tag)


def _run_maturin(env: dict[str, str], directory: str, *options: str) -> None:
    stage_texts()
    command = [sys.executable, "-m", "maturin", "build", "--locked", *options]
    command += ["--out", directory, "--interpreter", sys.executable]
    subprocess.run(command, cwd=ROOT, env=env, check=True)


def stage_binaries(env: dict[str, str], profile: str, target: str | None = None) -> None:
    """Compile `horovodrun` and the adapters, and copy them to where maturin takes them from."""
    options = ["--profile", profile, "--locked", *(["--target", target] if target else [])]
    # The library's package is named for its features alone: with the same ones maturin compiles nothing twice. With
    # `--lib` it would be, without link-time optimisation, which cargo does for no library that is an rlib as well.
    launcher = ["--package", "horovod-python", "--package", "horovod-launch", "--bin", "horovodrun"]
    adapter = ["--package", "horovod-tensorflow", "--lib", "--crate-type", "cdylib"]
    for command in (["build", *options, *launcher], ["rustc", *options, *adapter]):
        subprocess.run(["cargo", *command], cwd=ROOT, env=env, check=True)
    built = _target_directory().joinpath(*([target] if target else []), profile)
    staged = SCRIPTS / "horovodrun"
    _replace(built / "horovodrun", staged)
    staged.chmod(staged.stat().st_mode | stat.S_IXUSR | stat.S_IXGRP | stat.S_IXOTH)
    suffix = "dylib" if sys.platform == "darwin" else "so"
    _replace(built / f"libhorovod_tensorflow.{suffix}", TENSORFLOW_ADAPTER)


def stage_texts() -> None:
    """Write the licences of third parties, and README.md with the repository's addresses in place of relative links."""
    LICENCES.write_text(third_party.licences())
    repository = metadata_wheel.read_project()["urls"]["Repository"]

    def absolute(link: re.Match[str]) -> str:
        place = "raw" if link["picture"] else "blob"
        return f"{link['picture']}[{link['text']}]({repository}/{place}/main/{link['target']})"

    PACKAGE_PAGE.write_text(_RELATIVE_LINK.sub(absolute, (ROOT / "README.md").read_text()))


def _replace(source: Path, place: Path) -> None:
    """Copy a file; processes that have the old one open keep it."""
    place.parent.mkdir(parents=True, exist_ok=True)
    temporary = place.with_name(place.name + ".new")
    shutil.copyfile(source, temporary)
    temporary.replace(place)


def _write_zig_linker(arch: str, floor: str) -> Path:
    """A linker for cargo: zig, through maturin's filter of the arguments that zig does not know."""
    import ziglang

    zig = Path(ziglang.__file__).parent / "zig"
    wrapper = _target_directory() / "zig-linker" / f"{arch}-glibc-{floor}.sh"
    wrapper.parent.mkdir(parents=True, exist_ok=True)
    text = (
        "#!/bin/sh\n"
        f"CARGO_ZIGBUILD_ZIG_PATH='{zig}' exec '{sys.executable}' -m maturin zig cc -- "
        f'-target {arch}-linux-gnu.{floor} "$@"\n'
    )
    # Rewriting an equal file would make cargo link everything again.
    if not wrapper.exists() or wrapper.read_text() != text:
        wrapper.write_text(text)
        wrapper.chmod(0o755)
    return wrapper


def _target_directory() -> Path:
    command = ["cargo", "metadata", "--no-deps", "--format-version", "1"]
    found = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
    return Path(json.loads(found.stdout)["target_directory"])


def _rustc_host() -> str:
    found = subprocess.run(["rustc", "-vV"], check=True, capture_output=True, text=True)
    return next(x.split()[1] for x in found.stdout.splitlines() if x.startswith("host:"))


def _maturin() -> Any:
    import maturin

    return maturin


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["published", directory, *target] if len(target) < 2:
            build_portable_wheel(directory, *target)
        case ["quick", directory]:
            build_quick_wheel(directory)
        case other:
            sys.exit(f"usage: horovod_build.py published DIR [TARGET] | quick DIR, not {other}")
    print(metadata_wheel.build(Path(sys.argv[2])))
