"""Every block of README.md and of the pages in docs works when a reader pastes it.

A Python block runs alone if it defines all names that it uses. Any other runs behind the page's first Python block.
Commands run with the page's first Python block as `train.py`, or with a small script where the page has none for
ranks. In commands this machine replaces hosts, two ranks their number, and small tensors those that are measured.
"""

from __future__ import annotations

import ast
import builtins
import contextlib
import dataclasses
import os
import re
import shutil
import sys
from pathlib import Path

import pytest
import yaml

import harness
import horovod
import spark_servers

RUNNER = Path(__file__).with_name("page_scripts.py")
MXNET = Path(os.environ.get("HVD_MXNET_PYTHON", harness.ROOT / ".venv-mxnet" / "bin" / "python"))
RANKS = 2
# The share of blocks of code that have to run here.
LEAST_SHARE = 0.95

LANGUAGES = {
    "python": "runs on two ranks, or alone where it starts ranks itself",
    "sh": "its commands run",
    "console": "its lines behind `$ ` run, the others are output",
    "rust": "runs as a documentation test of the crate `horovod`, `horovod-burn` or `horovod-candle`",
    "yaml": "is a file of the launcher's options, or variables of a pod",
    "c": "is a file, named in its first line",
    "diff": "changes the page's script; tests/integration/test_tutorials.py applies it and runs the result",
    "text": "is output: nothing runs",
}
# Their Python blocks start ranks, so they run in one process.
DRIVERS = ("docs/running.md", "docs/ray.md", "docs/spark.md", "docs/spark-estimators.md")
# The ranks of their commands import the framework themselves, as a reader's do. Others are forked.
STARTED = (
    "README.md",
    *(f"docs/{name}.md" for name in ("elastic", "jax", "keras", "tensorflow", "torch")),
)
# Variables that a page tells readers to set for its Python blocks.
VARIABLES = {"docs/timeline.md": {"HOROVOD_TIMELINE": "DYNAMIC"}}
THOROUGH = {
    "docs/ray.md": "tests/integration/test_ray.py::test_a_function_runs_on_all_ranks",
    "docs/spark.md": "tests/integration/test_spark.py::test_results_come_in_the_order_of_ranks",
    "docs/spark-estimators.md": "tests/integration/test_spark_estimators.py::test_fit_transform_save_and_load",
}
# Packages without which a page's blocks cannot run.
NEEDS = {
    "docs/jax.md": "jax",
    "docs/ray.md": "ray",
    "docs/spark.md": "pyspark",
    "docs/spark-estimators.md": "pyspark",
}

# Commands that do not run here, by a pattern in their text, and why.
COMMANDS_NOT_RUN = {
    r"\bmake \w": "builds, tests or trains the whole project; `make test` and CI do that",
    r"\bpip (un)?install\b|-m venv\b": "installs packages; `make wheel-check` does that in new environments",
    r"\b(srun|mpirun|mpiexec|jsrun|flux|sbatch|salloc|qsub|bsub)\b": (
        "needs another launcher; tests/integration/test_schedulers.py runs those that are installed"
    ),
    r"^horovodrun python ": (
        "needs the allocation of a batch system; tests/integration/test_schedulers.py makes some"
    ),
    r"\b(docker|podman|apptainer|kubectl|helm|conda)\b": "needs containers, a cluster or conda",
    r"--device cuda\b": "needs GPUs",
    r"^horovodrun --(status|top|trace)": "shows jobs that run; test_watching.py, test_top.py and others start some",
    r"tests/chaos/": "takes minutes; the parts `chaos` and `soak` of tests/parts.toml run it",
}
# The same of blocks in Python.
PYTHON_NOT_RUN = {r"torch\.distributed\.all_reduce": "needs two GPUs and NCCL"}
# Blocks in Python that another test runs.
RUN_ELSEWHERE = {
    r"import MPI  # Open MPI 5": "tests/hosts/test_mpi_hosts.py::test_the_first_job_of_the_page",
    r"\bmpi4py\b": "tests/integration/test_mpi.py::test_the_scripts_of_the_documentation",
}
# Where the crate makes documentation tests of the pages with blocks in Rust.
RUST_PAGES = [str(path) for path in harness.ROOT.glob("crates/*/tests/pages/mod.rs")]
# Where a page's server of Spark Connect is.
CONNECT = "sc://spark.example:15002"

# Commands that only prepare others.
PREPARES = r"(export|cd|mkdir)\b"

# For pages that start a script of the reader's which they do not show.
SMALL_SCRIPT = """\
import numpy as np
import horovod.numpy as hvd

hvd.init()
assert hvd.allreduce(np.ones(1), op=hvd.Sum) == hvd.size()
"""
FILES = {
    "hosts.txt": "localhost slots=8\n",
    ".ssh/job": "",
    "hosts.sh": "#!/bin/sh\necho localhost:4\n",
}


@dataclasses.dataclass(frozen=True)
class Block:
    """A fenced block of a page."""

    page: str
    line: int
    language: str
    text: str

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"

    @property
    def file(self) -> str:
        """The name of the file that holds the block in tests."""
        return f"{Path(self.page).stem.replace('-', '_')}_{self.line}.py"

    def commands(self) -> list[str]:
        """The commands of a block for a shell, without comments at their end."""
        lines = self.text.replace("\\\n", "").splitlines()
        if self.language == "console":
            lines = [line.removeprefix("$ ") for line in lines if line.startswith("$ ")]
        commands = (re.sub(r"(^|\s+)#.*", "", line).strip() for line in lines)
        return [command for command in commands if command]

    def left_out(self) -> dict[str, str]:
        """Commands, or the whole block, that do not run here, each with its reason."""
        if self.language == "python":
            known, parts = PYTHON_NOT_RUN, [self.text]
        else:
            known, parts = COMMANDS_NOT_RUN, self.commands() if self.is_commands() else []
        return {part: why for part in parts if (why := _reason(part, known))}

    def runs_elsewhere(self) -> bool:
        """Whether another test runs it; that test has to exist."""
        if self.language == "diff":
            return True
        if self.language == "rust":
            included = "".join((harness.ROOT / file).read_text() for file in RUST_PAGES)
            assert f'/{self.page}")' in included, (
                f"{self}: none of {', '.join(RUST_PAGES)} includes the page"
            )
            return True
        test = _reason(self.text, RUN_ELSEWHERE) if self.language == "python" else None
        if test:
            file, _, name = test.partition("::")
            assert f"def {name}(" in (harness.ROOT / file).read_text(), (
                f"{self}: there is no {test}"
            )
        return test is not None

    def runs(self) -> bool:
        """Whether something of it runs here."""
        if self.runs_elsewhere():
            return False
        if not self.is_commands() or self.is_file():
            return not self.left_out()
        real = [command for command in self.commands() if not re.match(PREPARES, command)]
        return any(command not in self.left_out() for command in real)

    def is_commands(self) -> bool:
        """Whether it is for a shell."""
        return self.language in ("sh", "console")

    def is_file(self) -> bool:
        """Whether the page shows a file, which its commands use."""
        return self.language == "c" or self.text.startswith("#!")


def _reason(text: str, known: dict[str, str]) -> str | None:
    return next((why for pattern, why in known.items() if re.search(pattern, text)), None)


def read_blocks(page: str) -> list[Block]:
    """All fenced blocks of a page."""
    found, opened, lines = [], None, []
    for number, line in enumerate((harness.ROOT / page).read_text().splitlines(), 1):
        fence = re.match(r"```(.*)$", line)
        if fence and opened is None:
            opened, lines = (number, fence[1].strip()), []
        elif fence and opened:
            found.append(Block(page, *opened, "".join(f"{text}\n" for text in lines)))
            opened = None
        else:
            lines.append(line)
    assert opened is None, f"{page}:{opened}: the block has no end"
    return found


PAGES = ["README.md", *sorted(f"docs/{path.name}" for path in harness.ROOT.glob("docs/*.md"))]
BLOCKS = {page: read_blocks(page) for page in PAGES}


def names_not_defined(text: str) -> set[str]:
    """Names that a script uses and nowhere defines."""
    used, defined = set(), set(dir(builtins)) | {"__file__", "__name__"}
    for node in ast.walk(ast.parse(text)):
        match node:
            case ast.Name(id=name, ctx=ast.Load()):
                used.add(name)
            case ast.Name(id=name):
                defined.add(name)
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name) | ast.arg(arg=name):
                defined.add(name)
            case ast.ExceptHandler(name=str(name)):
                defined.add(name)
            case ast.alias(name=name, asname=asname):
                defined.add(asname or name.partition(".")[0])
    return used - defined


def script_of(block: Block) -> str:
    """Text that a reader pastes into an empty file to run the block."""
    if not names_not_defined(block.text):
        return block.text
    first = next(b for b in BLOCKS[block.page] if b.language == "python")
    script = block.text if block is first else f"{first.text}\n\n{block.text}"
    missing = names_not_defined(script)
    assert not missing, f"{block} uses {sorted(missing)}, which the page does not define before"
    return script


def to_this_machine(text: str, folder: Path) -> str:
    """Hosts and files of the reader's become this machine's."""

    def local(match: re.Match[str]) -> str:
        slots = sum(int(slots) for slots in re.findall(r":(\d+)", match[1]))
        return f"-H localhost:{slots}"

    text = re.sub(r"-np \d+", f"-np {RANKS}", re.sub(r"-H (\S+)", local, text))
    # The bytes of the largest tensor that is measured, also where none are given.
    text = re.sub(r" -e \d+[MG]|(?<=-m horovod\.bench)$", " -e 1M", text)
    return re.sub(r"(?<=[\s\"'=])/tmp/", f"{folder}/", text)


class Page:
    """Runs the blocks of one page in a folder, and counts them."""

    def __init__(self, page: str, folder: Path, jobs) -> None:
        self.page = page
        self.folder = folder
        self.jobs = jobs
        self.ran = 0
        # The block that is `train.py`, once a command has run it.
        self.script_that_ran: Block | None = None
        self.connect = CONNECT
        self.blocks = [b for b in BLOCKS[page] if b.language not in ("text", "diff")]
        self.to_run = [b for b in self.blocks if b.runs()]

    def of(self, *languages: str) -> list[Block]:
        """The blocks in these languages that can run here."""
        return [block for block in self.to_run if block.language in languages]

    def script(self) -> Block | None:
        """The block that is `train.py`; none where the page shows no script for ranks."""
        scripts = [b for b in self.of("python") if not names_not_defined(b.text)]
        return scripts[0] if scripts and self.page not in (*DRIVERS, "docs/mxnet.md") else None

    def write_files(self) -> None:
        """Files that commands name: the reader's, and those that the page shows."""
        script = self.script()
        shown = {"train.py": script.text if script else SMALL_SCRIPT}
        for block in self.of("sh"):
            if block.is_file():
                shown["hosts.sh"] = block.text
        for block in self.of("c"):
            name = re.match(r"/\* (\w+\.c)\b", block.text)
            assert name, f"{block}: the first line has to be /* NAME.c */, or begin with that"
            shown[name[1]] = block.text
        self.ran += sum(block.is_file() for block in self.to_run)
        for name, text in {**FILES, **shown}.items():
            path = self.folder / name
            path.parent.mkdir(exist_ok=True)
            path.write_text(to_this_machine(text, self.folder))
            path.chmod(0o700)

    def run_commands(self) -> None:
        """The blocks of commands, each as one script of the shell."""
        for block in self.of("sh", "console"):
            if not block.is_file():
                commands = [c for c in block.commands() if c not in block.left_out()]
                self._run(block, [to_this_machine(command, self.folder) for command in commands])

    def run_yaml(self) -> None:
        """Files for `--config-file` start a job; other blocks set variables that exist."""
        settings = (harness.ROOT / "docs" / "settings.md").read_text()
        for block in self.of("yaml"):
            content = yaml.safe_load(block.text)
            for variable in content.get("env", ()):
                assert f"`{variable['name']}`" in settings, f"{block}: {variable}"
            if "env" in content:
                self.ran += 1
            else:
                (self.folder / "options.yaml").write_text(block.text)
                self._run(block, ["horovodrun -np 2 --config-file options.yaml python train.py"])

    def _run(self, block: Block, commands: list[str]) -> None:
        text = "\n".join(["set -ex", *commands])
        env = {"CUDA_VISIBLE_DEVICES": "", "HOME": str(self.folder)}
        forked = self.page not in STARTED
        job = self.jobs(harness.Job(["sh", "-c", text], cwd=self.folder, env=env, forked=forked))
        if job.wait() != 0:
            self.fail(block, job)
        job.assert_nothing_left()
        self.ran += 1
        if any(re.search(rf"\bhorovodrun -np {RANKS}\b.* python train\.py$", c) for c in commands):
            self.script_that_ran = self.script()

    def run_python(self) -> None:
        """The blocks in Python that no command has run as `train.py`.

        They run in one process where they run alone or on a rank, but none beside TensorFlow 1's.
        """
        self.ran += self.script_that_ran is not None
        blocks = [b for b in self.of("python") if b is not self.script_that_ran]
        for block in blocks:
            script = script_of(block).replace(CONNECT, self.connect)
            (self.folder / block.file).write_text(to_this_machine(script, self.folder))
        if self.page in DRIVERS:
            groups = [[block] for block in blocks]
        else:
            groups = [
                [b for b in blocks if ("compat.v1" in b.text) == old] for old in (False, True)
            ]
        for group in filter(None, groups):
            job = self.jobs(self._start(group))
            code = job.wait()
            ranks = 1 if self.page in DRIVERS else RANKS
            done = [b for b in group if job.stdout.count(f"WORKED {b.file}") == ranks]
            self.ran += len(done)
            if code != 0 or done != group:
                self.fail(next((b for b in group if b not in done), group[-1]), job)
            job.assert_nothing_left()

    def _start(self, blocks: list[Block]) -> harness.Job:
        python, env = (
            sys.executable,
            {
                "KERAS_BACKEND": "tensorflow",
                "CUDA_VISIBLE_DEVICES": "",
                **VARIABLES.get(self.page, {}),
            },
        )
        if self.page == "docs/mxnet.md":
            python = str(MXNET)
            (self.folder / "packages").mkdir()
            (self.folder / "packages" / "horovod").symlink_to(Path(horovod.__file__).parent)
            env["PYTHONPATH"] = f"{harness.RANK_SITE}:{self.folder / 'packages'}"
        command = [python, str(RUNNER), *(block.file for block in blocks)]
        if self.page in DRIVERS:
            return harness.Job(command, cwd=self.folder, env=env)
        return harness.horovodrun(RANKS, command, cwd=self.folder, env=env, forked=True)

    def fail(self, block: Block, job: harness.Job) -> None:
        """The block does not work."""
        pytest.fail(
            f"{block} does not work ({self.ran} of {len(self.to_run)} blocks of this page ran before)\n"
            f"{job.report()}"
        )


def pages() -> list[object]:
    """The pages with blocks to run."""
    params = []
    for page in PAGES:
        if any(b.language != "text" and b.runs() for b in BLOCKS[page]):
            also = THOROUGH.get(page)
            marks = [pytest.mark.thorough(also=also)] if also else []
            params.append(pytest.param(page, marks=marks, id=Path(page).stem))
    return params


@pytest.mark.parametrize("page", pages())
def test_blocks_work_as_pasted(page: str, jobs, tmp_path: Path, capsys) -> None:
    if page in NEEDS:
        pytest.importorskip(NEEDS[page])
    if "spark" in page and shutil.which("java") is None:
        pytest.skip("there is no Java, which Spark needs")
    if page == "docs/mxnet.md" and not MXNET.exists():
        pytest.skip(f"MXNet's environment is not there: {MXNET}")
    run = Page(page, tmp_path, jobs)
    run.write_files()
    run.run_commands()
    run.run_yaml()
    with contextlib.ExitStack() as servers:
        if any(CONNECT in block.text for block in run.of("python")):
            (tmp_path / "connect").mkdir()
            server = spark_servers.connect_server(tmp_path / "connect")
            run.connect, _ = servers.enter_context(server)
        run.run_python()
    with capsys.disabled():
        print(f"\n{page}: {run.ran} of {len(run.blocks)} blocks ran")


def alone(test: str) -> object:
    """One rank, in the second tier: it runs the same lines as two."""
    mark = pytest.mark.thorough(also=f"tests/integration/test_pages.py::{test}")
    return pytest.param(1, marks=mark)


# Appended to a page's script: its weights are the same on all ranks.
DIGEST = """
import hashlib
import numpy as np
from horovod.numpy import allgather_object
weights = [np.asarray(w) for w in {weights}]
digest = hashlib.sha256(b"".join(w.tobytes() for w in weights)).hexdigest()
assert len(set(allgather_object(digest))) == 1, "the ranks' weights differ"
if hvd.rank() == 0:
    print("weights:", digest, flush=True)
"""
TORCH_WEIGHTS = "(t.cpu().numpy() for t in model.state_dict().values())"
KERAS_WEIGHTS = "model.get_weights()"


class Resuming:
    """Runs the complete script of a page for so many epochs, in a folder that keeps its checkpoints."""

    def __init__(self, page: str, weights: str, np: int, jobs) -> None:
        (block,) = (b for b in BLOCKS[page] if b.language == "python")
        assert "EPOCHS = 4" in block.text or "EPOCHS, ACCUMULATED, CHECKPOINT = 4," in block.text
        self.text = block.text + DIGEST.replace("{weights}", weights)
        self.np = np
        self.jobs = jobs

    def run(self, folder: Path, epochs: int) -> tuple[str, str]:
        """Its output, and a hash of the weights at its end."""
        folder.mkdir(exist_ok=True)
        script = folder / "train.py"
        script.write_text(
            re.sub(r"^(EPOCHS\b.*?= )4", rf"\g<1>{epochs}", self.text, flags=re.MULTILINE)
        )
        job = self.jobs(
            harness.python(
                self.np,
                script,
                cwd=folder,
                env={"KERAS_BACKEND": "torch", "CUDA_VISIBLE_DEVICES": ""},
                forked=True,
            )
        ).succeed()
        (digest,) = re.findall(r"weights: (\w{64})", job.stdout)
        return job.stdout, digest


@pytest.mark.parametrize(
    "np", [alone("test_the_script_from_ddp_resumes_as_if_never_interrupted"), 2]
)
def test_the_script_from_ddp_resumes_as_if_never_interrupted(np: int, jobs, tmp_path: Path) -> None:
    script = Resuming("docs/from-ddp.md", TORCH_WEIGHTS, np, jobs)
    text, weights = script.run(tmp_path / "whole", 4)
    assert re.findall(r"epoch (\d) of 4: loss \S+ of 43 samples", text) == ["1", "2", "3", "4"]
    _, earlier = script.run(tmp_path / "interrupted", 2)
    text, resumed = script.run(tmp_path / "interrupted", 4)
    assert "epochs done before: 2" in text
    assert re.findall(r"epoch (\d) of 4", text) == ["3", "4"]
    assert resumed == weights != earlier
    # Nothing is left to do, and the script says so.
    text, again = script.run(tmp_path / "interrupted", 4)
    assert "epochs done before: 4" in text
    assert again == resumed


@pytest.mark.parametrize("np", [alone("test_the_script_from_horovod_resumes_on_all_ranks"), 2])
def test_the_script_from_horovod_resumes_on_all_ranks(np: int, jobs, tmp_path: Path) -> None:
    script = Resuming("docs/from-horovod.md", KERAS_WEIGHTS, np, jobs)
    _, earlier = script.run(tmp_path, 2)
    text, resumed = script.run(tmp_path, 4)
    assert "epochs done before: 2" in text
    assert re.findall(r"Epoch (\d)/4", text) == ["3", "4"]
    assert resumed != earlier
    # Nothing is left to do.
    assert script.run(tmp_path, 4)[1] == resumed


def test_at_most_one_block_in_twenty_does_not_run_here(capsys) -> None:
    """Of code. Commands that do not run are listed as well: many install something, or need a cluster."""
    blocks = [b for of_page in BLOCKS.values() for b in of_page if b.language != "text"]
    code = [block for block in blocks if not block.is_commands()]
    run = [block for block in code if block.runs() or block.runs_elsewhere()]
    commands = sum(len(b.commands()) for b in blocks if b.is_commands() and not b.is_file())
    left_out = [(b, part, why) for b in blocks for part, why in b.left_out().items()]
    with capsys.disabled():
        print(f"\n{len(run)} of {len(code)} blocks of code run in the tests, and")
        print(f"{commands - sum(b.is_commands() for b, _, _ in left_out)} of {commands} commands:")
        for block, part, why in left_out:
            print(f"  {block} does not run: {part.strip().splitlines()[0]} ({why})")
    assert len(run) >= LEAST_SHARE * len(code)


def test_the_first_scripts_show_that_they_train() -> None:
    frameworks = [
        f"docs/{name}.md" for name in ("torch", "tensorflow", "keras", "jax", "mxnet", "elastic")
    ]
    for page in ("README.md", *frameworks):
        first = next(block for block in read_blocks(page) if block.language == "python")
        assert "loss {" in first.text or "verbose=2" in first.text, page


def test_every_block_names_its_language() -> None:
    wrong = [str(b) for of_page in BLOCKS.values() for b in of_page if b.language not in LANGUAGES]
    assert not wrong, f"the language has to be one of {list(LANGUAGES)}: {', '.join(wrong)}"


def test_names_that_a_script_does_not_define_are_found() -> None:
    assert names_not_defined("import a.b, c as d\nfor e in a.f: print(d, g)") == {"g"}
    assert names_not_defined(
        "def f(x, *, y=z):\n    try: return x\n    except OSError as e: return e"
    ) == {"z"}
    assert names_not_defined("class C:\n    k = [n for n in range(3)]\nC().k") == set()
