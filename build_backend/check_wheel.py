"""Checks the published wheels as a stranger would get them: tag, size, C library, libraries, and training with them.

Everything runs outside the repository, in a fresh environment whose PATH holds no compiler and no Rust.
"""

from __future__ import annotations

import importlib.util
import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import venv
import zipfile
from pathlib import Path

import metadata_wheel

ROOT = Path(__file__).resolve().parent.parent
MAX_WHEEL_BYTES = 15 * 1000 * 1000
# The system libraries that manylinux allows and that we need; a framework's library here would be a mistake.
ALLOWED_LIBRARIES = re.compile(
    r"^(libc\.so\.6|libm\.so\.6|libpthread\.so\.0|libdl\.so\.2|librt\.so\.1|libutil\.so\.1|libgcc_s\.so\.1"
    r"|ld-linux-.*\.so\.\d+)$"
)
# Programs that the launcher itself may call; a shell, as every Unix has.
TOOLS = ("sh", "env")
# Only a command that hangs reaches it.
LIMIT_S = 1800.0


def main(dist: Path) -> None:
    """Run all checks on a folder's two wheels; the first that fails ends the program with its reason."""
    wheels, names = sorted(dist.glob("horovod-*.whl")), sorted(dist.glob("horovod_rs-*.whl"))
    expect(len(wheels) == 1, f"expected one horovod-*.whl in {dist}, found {wheels}")
    expect(len(names) == 1, f"expected one horovod_rs-*.whl in {dist}, found {names}")
    wheel = wheels[0]
    size = wheel.stat().st_size
    report(f"{wheel.name}: {size / 1e6:.2f} MB")
    expect(size < MAX_WHEEL_BYTES, f"larger than {MAX_WHEEL_BYTES / 1e6:.0f} MB")
    expect("-abi3-" in wheel.name, "not an abi3 wheel")
    with tempfile.TemporaryDirectory(prefix="hvd-wheel-") as folder:
        check_binaries(wheel, Path(folder) / "unpacked")
        if not wheel.stem.endswith(platform.machine()):
            report(f"not installed and not run: this machine is {platform.machine()}")
            return
        check_installed(wheel, Path(folder))
    with tempfile.TemporaryDirectory(prefix="hvd-wheel-") as folder:
        check_both_distributions(dist, Path(folder))
    report("wheel: all checks passed")


def check_binaries(wheel: Path, folder: Path) -> None:
    """Look into the compiled files."""
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
        launcher = next(x for x in archive.infolist() if x.filename.endswith("/scripts/horovodrun"))
        licences = [
            x for x in archive.namelist() if x.endswith("/licenses/THIRD-PARTY-LICENSES.txt")
        ]
        expect(len(licences) == 1, "no licences of third parties in the wheel")
        expect(launcher.external_attr >> 16 & 0o111 == 0o111, "horovodrun is not executable")
    floor = re.search(r"manylinux_(\d+)_(\d+)", wheel.name)
    modules = [*folder.glob("horovod/_core*.so"), *folder.glob("*.data/scripts/horovodrun")]
    adapters = [*folder.glob("horovod/*/lib*.so")]
    expect(len(modules) == 2, f"expected the module and the launcher, found {modules}")
    expect(len(adapters) == 1, f"expected one adapter, TensorFlow's, found {adapters}")
    for path in adapters:
        exported = output(["nm", "--dynamic", "--defined-only", str(path)]).split()
        expect(not exported, f"{path.name} exports {exported}")
    modules += adapters
    for path in modules:
        dynamic = output(["readelf", "--wide", "--dynamic", str(path)])
        needed = re.findall(r"\(NEEDED\).*\[(.+)\]", dynamic)
        foreign = [name for name in needed if not ALLOWED_LIBRARIES.match(name)]
        expect(not foreign, f"{path.name} is linked with {foreign}")
        symbols = output(["objdump", "--dynamic-syms", str(path)])
        versions = {tuple(map(int, v.split("."))) for v in re.findall(r"GLIBC_([\d.]+)", symbols)}
        newest = max(versions, default=(0,))
        report(f"{path.name}: needs {', '.join(needed)}; glibc {'.'.join(map(str, newest))}")
        if floor:
            allowed = (int(floor[1]), int(floor[2]))
            expect(newest <= allowed, f"{path.name} needs glibc {newest}, the tag says {allowed}")


def check_installed(wheel: Path, folder: Path) -> None:
    """Install into an empty environment and use it there."""
    home = folder / "venv"
    venv.create(home, with_pip=True)
    pip = [str(home / "bin" / "python"), "-m", "pip", "--disable-pip-version-check", "--quiet"]
    # The original's build variables must not matter.
    build_variables = {"HOROVOD_WITH_PYTORCH": "1", "HOROVOD_GPU_OPERATIONS": "NCCL"}
    run([*pip, "install", str(wheel)], env={**os.environ, **build_variables})

    tools = folder / "tools"
    tools.mkdir()
    for name in TOOLS:
        (tools / name).symlink_to(shutil.which(name) or f"/bin/{name}")
    env = {"PATH": f"{home / 'bin'}:{tools}", "HOME": str(folder), **build_variables}
    expect(shutil.which("cc", path=env["PATH"]) is None, "a compiler is on the PATH")
    run(["horovodrun", "--version"], env=env, cwd=folder)
    run(["horovodrun", "--check-build"], env=env, cwd=folder)
    run(
        ["python", "-c", "import horovod, horovod._core; print(horovod.__version__)"],
        env=env,
        cwd=folder,
    )

    # PyTorch is gigabytes: borrow what this environment has, behind the new one's own packages.
    ours = sysconfig.get_path("purelib")
    theirs = next((home / "lib").glob("python*/site-packages"))
    (theirs / "borrowed.pth").write_text(ours + "\n")
    report("with PyTorch:")
    where = output(["python", "-c", "import horovod; print(horovod.__file__)"], env=env, cwd=folder)
    expect(where.startswith(str(home)), f"horovod was imported from {where}")
    run(["horovodrun", "--check-build"], env=env, cwd=folder)
    example = shutil.copytree(ROOT / "examples" / "demo", folder / "demo")
    report("training the demo outside the repository:")
    run(["python", str(example / "run.py")], env=env, cwd=folder)


def check_both_distributions(dist: Path, folder: Path) -> None:
    """Without a network: a package that requires `horovod` is content, the original is replaced, either can go."""
    # Gigabytes and their needs: stand-ins of metadata alone will do.
    shelf = folder / "shelf"
    metadata_wheel.write_wheel(shelf, "torch", "2.9")
    metadata_wheel.write_wheel(shelf, "cloudpickle", "3.0", files=files_of("cloudpickle"))
    client = [("Requires-Dist", "horovod[pytorch]>=0.27")]
    metadata_wheel.write_wheel(shelf, "client", "1.0", client)
    files = {"horovod/__init__.py": "", "horovod/torch/__init__.py": ""}
    scripts = {"horovod-0.28.1.data/scripts/horovodrun": "#!/bin/sh\n"}
    original = metadata_wheel.write_wheel(
        folder / "original", "horovod", "0.28.1", files={**files, **scripts}
    )
    home = folder / "venv"
    venv.create(home, with_pip=True)
    pip = [str(home / "bin" / "python"), "-m", "pip", "--disable-pip-version-check", "--isolated"]
    offline = ["install", "--quiet", "--no-index", f"--find-links={dist}", f"--find-links={shelf}"]
    launcher, module = home / "bin" / "horovodrun", "lib/python*/site-packages/horovod/torch"
    imports = [str(home / "bin" / "python"), "-c", "import horovod._core"]
    wheels = [str(wheel) for wheel in sorted(dist.glob("horovod*.whl"))]
    run([*pip, *offline, str(original)])
    run([*pip, *offline, *wheels, "client"])
    run([*pip, "check"])
    run([str(launcher), "--version"])
    run(imports, cwd=folder)
    run([*pip, "uninstall", "--quiet", "--yes", "horovod-rs"])
    run([str(launcher), "--version"])
    run(imports, cwd=folder)
    run([*pip, *offline, "horovod-rs"])
    run([*pip, "uninstall", "--quiet", "--yes", "horovod"])
    expect(not launcher.exists() and not any(home.glob(module)), "horovod left files behind")
    expect("horovod-rs" in output([*pip, "list"]).split(), "horovod took horovod-rs away")


def files_of(package: str) -> dict[str, str | bytes]:
    """The files of a package that this interpreter has, by their paths in a wheel."""
    spec = importlib.util.find_spec(package)
    expect(spec is not None and bool(spec.origin), f"{package} is not installed")
    folder = Path(str(spec.origin)).parent  # type: ignore[union-attr]
    return {f"{package}/{file.name}": file.read_bytes() for file in folder.glob("*.py")}


def run(command: list[str], **kwargs: object) -> None:
    """Run a command, its output shown; end with its failure."""
    report(f"$ {' '.join(command)}")
    program = resolve(command, kwargs)
    code = subprocess.run(program, timeout=LIMIT_S, check=False, **kwargs).returncode  # type: ignore[call-overload]
    expect(code == 0, f"exit status {code}")


def output(command: list[str], **kwargs: object) -> str:
    """The output of a command."""
    program = resolve(command, kwargs)
    done = subprocess.run(
        program, check=True, capture_output=True, text=True, timeout=LIMIT_S, **kwargs
    )  # type: ignore[call-overload]
    return str(done.stdout)


def resolve(command: list[str], kwargs: dict[str, object]) -> list[str]:
    """The command with its program looked up on the PATH that it will run with."""
    env = kwargs.get("env")
    path = env["PATH"] if isinstance(env, dict) else None
    return [shutil.which(command[0], path=path) or command[0], *command[1:]]


def report(text: str) -> None:
    """Print at once, in order with what the commands print."""
    print(text, flush=True)


def expect(good: bool, complaint: str) -> None:
    """End the program unless `good`."""
    if not good:
        sys.exit(f"wheel check failed: {complaint}")


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve())
