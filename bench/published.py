"""Training of ResNet-50, ResNet-101, Inception V3 and VGG-16 on this machine, and 8 to 512 accelerators by a model.

Usage: python bench/published.py [--quick] [--parts P ...] [--frameworks F ...] [--models M ...] [--no-docs]

`training` runs the synthetic benchmarks of examples/ on 1 to 4 ranks, on one host and on two, and compares their images
per second with those of as many ranks that send no gradients. `links` measures allreduces between 2 to 4 hosts
whose links `tc` limits, and fits the model of data_plane.py to a part of them. `layers` reads from Keras how much work
each layer of the models is. The model then gives the efficiency of 8 to 512 accelerators.

Hosts are network namespaces: they need root, iproute2 and OpenSSH's server. As in run.py, a part can be measured alone,
and a quick run is not recorded: it leaves docs/ alone.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import itertools
import json
import math
import os
import re
import statistics
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import data_plane
import launch
import plots
import report
from processes import output_of, unwind_on_sigterm
from results import FOLDER, ROOT, Results, machine
from tables import row

import hosts
from hosts import network  # which hosts.py makes importable

PARTS = ("training", "links", "layers")
BEGIN = "<!-- measured: begin; `python bench/published.py` writes what follows -->"
# One job; far above what it takes on an idle machine.
LIMIT_S = 1800


@dataclasses.dataclass(frozen=True)
class Net:
    """A published network. `gpu_images_per_s` is the rate of one P100 with batches of 64, without communication."""

    torch: str
    keras: str
    image_size: int
    gpu_images_per_s: float
    published: float | None
    """Efficiency of 512 such accelerators, four to a server, on 25 Gbit/s."""


# The rates of Inception V3, ResNet-50 and VGG-16 are those of TensorFlow's published benchmarks. That of ResNet-101
# lies between those of ResNet-50 and ResNet-152 (91.8), as its work does.
NETS = {
    "ResNet-50": Net("resnet50", "ResNet50", 224, 219, None),
    "ResNet-101": Net("resnet101", "ResNet101", 224, 129, 0.90),
    "Inception V3": Net("inception_v3", "InceptionV3", 299, 142, 0.90),
    "VGG-16": Net("vgg16", "VGG16", 224, 154, 0.68),
}
EXAMPLES = {
    "PyTorch": "pytorch/pytorch_synthetic_benchmark.py",
    "TensorFlow": "tensorflow2/tensorflow2_synthetic_benchmark.py",
    "JAX": "jax/jax_synthetic_benchmark.py",
}
GPU_BATCH = 64
LINE_BITS_PER_S = 25e9
ACCELERATORS = tuple(2**power for power in range(3, 10))

# Ranks on each host, and hosts.
PLACES = ((2, 1), (3, 1), (4, 1), (1, 2), (2, 2))
QUICK_PLACES = ((2, 1), (1, 2))


def script(framework: str, net: Net, quick: bool) -> list[str]:
    """The example and its options; a full image takes a processor seconds."""
    words = [str(ROOT / "examples" / EXAMPLES[framework])]
    words += ["--model", net.torch if framework == "PyTorch" else net.keras]
    words += ["--image-size", "128", "--batch-size", "2"]
    words += ["--num-warmup-batches", "2", "--num-iters", "2" if quick else "5"]
    return [*words, "--num-batches-per-iter", "2"]


def images_per_s(output: str) -> float:
    """The rate that an example reports at its end."""
    found = re.findall(r"Total img/sec on \d+ \w+\(s\): ([\d.]+)", output)
    if len(found) != 1:
        raise SystemExit(f"expected one line `Total img/sec on ...`, got\n{output[-4000:]}")
    return float(found[0])


def environment() -> dict[str, str]:
    """One thread for each rank, and JAX's compiled programs kept from run to run."""
    return {
        **os.environ,
        **launch.ENVIRONMENT,
        "TF_CPP_MIN_LOG_LEVEL": "3",
        "TF_NUM_INTRAOP_THREADS": "1",
        "XLA_FLAGS": "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1",
        "JAX_COMPILATION_CACHE_DIR": str(FOLDER / "jax-programs"),
    }


def together(net: network.Network | None, words: list[str], ranks: int) -> float:
    """Images per second of a job with so many ranks on each host."""
    if net:
        # Not watched: the time of ranks behind ssh is not this process's own.
        command, watch = hosts.python_on(net, ranks, words), contextlib.nullcontext()
    else:
        command = [*launch.command("horovod", ranks), *words]
        watch = launch.undisturbed(
            f"{' '.join([Path(words[0]).name, *words[1:3]])} on {ranks} ranks"
        )
    with watch:
        done = output_of(command, LIMIT_S, env=environment())
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}\n{done.stdout}{done.stderr}")
    return images_per_s(done.stdout)


def run_training(results: Results, options: argparse.Namespace) -> None:
    """Every chosen framework and model, each stored at once; earlier figures of others stay."""
    found = (results.load("published-training") or {}).get("runs", [])
    reason = network.why_not()
    with contextlib.ExitStack() as stack:
        net = None
        if not reason:
            net = network.Network(2)
            stack.callback(net.down)
        for framework, name in itertools.product(options.frameworks, options.models):
            before = len(launch.disturbances)
            words = script(framework, NETS[name], options.quick)
            run: dict[str, Any] = {"framework": framework, "model": name}
            found = [other for other in found if {k: other[k] for k in run} != run]
            places = QUICK_PLACES if options.quick else PLACES
            rows = efficiencies(net, words, [place for place in places if net or place[1] == 1])
            print(f"{framework}, {name}: {rows}", flush=True)
            noticed = list(dict.fromkeys(launch.disturbances[before:]))
            found.append({**run, "rows": rows, "disturbed": noticed})
            figures = {"runs": found, "machine": machine(), "skipped": reason}
            results.store("published-training", figures)


def efficiencies(
    net: network.Network | None, words: list[str], places: Sequence[tuple[int, int]]
) -> list[dict[str, float]]:
    """Images per second with allreduces and without, on one rank and at each place."""
    apart = [*words, "--no-allreduce"]
    alone = {1: together(None, apart, 1)}
    rows = [{"ranks": 1, "hosts": 1, "together": alone[1], "apart": alone[1]}]
    for ranks, count in places:
        total = ranks * count
        if total not in alone:
            alone[total] = together(None, apart, total)
        speed = together(net if count > 1 else None, words, ranks)
        rows.append({"ranks": total, "hosts": count, "together": speed, "apart": alone[total]})
    return rows


@dataclasses.dataclass(frozen=True)
class Points:
    """Where allreduces are measured. Those of `fitted` make the model; the others show its error."""

    hosts: tuple[int, ...]
    mbit_per_s: tuple[int, ...]
    kibibytes: tuple[int, int]
    """The least and the greatest; each is four times the one before."""
    calls: int

    def fitted(self, count: int, mbit_per_s: int | None) -> bool:
        """Few hosts, and the least rate, the greatest, or none."""
        ends = (self.mbit_per_s[0], self.mbit_per_s[-1], None)
        return count < self.hosts[-1] and mbit_per_s in ends


POINTS = Points((2, 3, 4), (100, 200, 400), (1024, 16384), 5)
QUICK_POINTS = Points((2, 3, 4), (200, 300, 400), (1024, 4096), 2)
# Without a limit the time is that of messages, not of bytes: so many calls, and a small size.
FREE_CALLS, FREE_KIBIBYTES = 30, (256, 256)
RATE_KIBIBYTES = (65536, 65536)


@contextlib.contextmanager
def limited(net: network.Network, mbit_per_s: int) -> Iterator[None]:
    """Each host sends no faster."""
    rate = ("tbf", "rate", f"{mbit_per_s}mbit", "burst", "64kb", "latency", "50ms")
    _, free = hosts.shape(net, dataclasses.replace(hosts.LINKS["1gbit"], qdisc=rate))
    try:
        yield
    finally:
        free()


def allreduces(net: network.Network, kibibytes: tuple[int, int], calls: int) -> dict[int, float]:
    """Seconds of an allreduce of each size between all hosts, each with one rank."""
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        path = Path(folder) / "figures.json"
        words = ["-m", "horovod.bench", "allreduce", "-b", f"{kibibytes[0]}K"]
        words += ["-e", f"{kibibytes[1]}K", "-f", "4", "-n", str(calls), "-w", "1"]
        command = hosts.python_on(net, 1, [*words, "--json", str(path)])
        done = output_of(command, LIMIT_S)
        if done.returncode:
            raise SystemExit(f"{' '.join(command)}\n{done.stdout}{done.stderr}")
        cases = json.loads(path.read_text())["results"]
    return {case["bytes"]: case["seconds"]["median"] for case in cases}


def run_links(results: Results, options: argparse.Namespace) -> None:
    """The points of the fit, those of its error, and the rate without a limit."""
    if reason := network.why_not():
        print(f"NOT RUN, links: {reason}")
        return
    chosen = QUICK_POINTS if options.quick else POINTS
    found: list[dict[str, Any]] = []
    free_bits_per_s = 0.0
    for count in chosen.hosts:
        net = network.Network(count)
        try:
            if not free_bits_per_s:
                (size, seconds), *_ = allreduces(net, RATE_KIBIBYTES, chosen.calls).items()
                free_bits_per_s = 8 * hosts.WIRE_OVER_PAYLOAD * size / seconds
            for rate in (*chosen.mbit_per_s, None):
                if rate:
                    with limited(net, rate):
                        times = allreduces(net, chosen.kibibytes, chosen.calls)
                else:
                    times = allreduces(net, FREE_KIBIBYTES, FREE_CALLS)
                for size, seconds in times.items():
                    bits_per_s = rate * 1e6 if rate else free_bits_per_s
                    point = data_plane.Point(count, bits_per_s, size, seconds)
                    fitted = chosen.fitted(count, rate)
                    found.append({**dataclasses.asdict(point), "fitted": fitted})
                print(f"{count} hosts, {rate or 'unlimited'} Mbit/s: {times}", flush=True)
        finally:
            net.down()
    figures = {"points": found, "free_bits_per_s": free_bits_per_s, "machine": machine()}
    results.store("published-links", figures)


def run_layers(results: Results, options: argparse.Namespace) -> None:
    """The layers of each model: multiplications of one image, and bytes of the gradients."""
    os.environ.setdefault("KERAS_BACKEND", "tensorflow")
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    import keras

    found = {}
    for name, net in NETS.items():
        shape = (net.image_size, net.image_size, 3)
        model = getattr(keras.applications, net.keras)(weights=None, input_shape=shape)
        found[name] = [
            {"work": _multiplications(layer), "nbytes": _gradient_bytes(layer)}
            for layer in model.layers
        ]
    results.store("published-layers", found)


def _multiplications(layer: Any) -> float:
    """Of a convolution: those of its kernel at each place of the output."""
    kernel = getattr(layer, "kernel", None)
    return (
        math.prod(kernel.shape) * math.prod(layer.output.shape[1:-1]) if kernel is not None else 0
    )


def _gradient_bytes(layer: Any) -> int:
    return sum(4 * math.prod(variable.shape) for variable in layer.trainable_weights)


def modelled(links: dict, layers: dict) -> dict[str, Any]:
    """The fit, its errors, and the efficiencies of each model at both rates."""
    points = [
        data_plane.Point(p["hosts"], p["bits_per_s"], p["nbytes"], p["seconds"])
        for p in links["points"]
    ]
    used = [p["fitted"] for p in links["points"]]
    plane = data_plane.fit([p for p, fitted in zip(points, used, strict=True) if fitted])
    curves = {}
    for name, net in NETS.items():
        parts = [data_plane.Layer(**layer) for layer in layers[name]]
        compute_s = GPU_BATCH / net.gpu_images_per_s
        curves[name] = {
            label: [data_plane.efficiency(parts, compute_s, n, rate, plane) for n in ACCELERATORS]
            for label, rate in rates(links).items()
        }
    return {
        "plane": plane,
        "points": points,
        "fitted": used,
        "errors": plane.errors(points),
        "curves": curves,
    }


def rates(links: dict) -> dict[str, float]:
    """The line of the published figures, and at most what two hosts on this machine's processors sent."""
    return {"line": LINE_BITS_PER_S, "here": min(LINE_BITS_PER_S, links["free_bits_per_s"])}


def sections(results: Results, pictures: Path) -> list[str]:
    """Everything that was measured and modelled, as Markdown; the chart is drawn beside the page."""
    training = undisturbed(results.load("published-training"))
    links, layers = results.load("published-links"), results.load("published-layers")
    model = modelled(links, layers) if links and layers else None
    lines: list[str] = []
    if training:
        lines += ["### Efficiency measured on this machine", "", training["machine"] + ".", ""]
        lines += [
            "Runs on one host were watched for other work; those on two were not watched.",
            "",
        ]
        lines += [*training_table(training), ""]
    if model:
        lines += ["### Allreduce between limited links", "", links["machine"] + ".", ""]
        lines += [*links_table(model), ""]
        lines += ["### Modelled efficiency", "", *model_table(model, links), ""]
        picture = pictures / "scaling-published.png"
        published = {name: net.published for name, net in NETS.items()}
        plots.published(model["curves"], ACCELERATORS, published, training, picture)
        lines += [f"![Modelled and published efficiency]({picture.name})", ""]
    return lines


def undisturbed(training: dict | None) -> dict | None:
    """Without the runs that other work has disturbed, which are only printed; None if no others are left."""
    if not training:
        return None
    for run in training["runs"]:
        if run["disturbed"]:
            print(f"left out, {run['framework']}, {run['model']}: {'; '.join(run['disturbed'])}")
    runs = [run for run in training["runs"] if not run["disturbed"]]
    return {**training, "runs": runs} if runs else None


def training_table(training: dict) -> list[str]:
    """A row for each framework and model, a column for each place."""
    places = [(1, 1), *((ranks * count, count) for ranks, count in PLACES)]
    titles = [f"{n} on {h} host{'s' if h > 1 else ''}" for n, h in places]
    lines = [row("framework", "model", *titles), row(*["---"] * 2, *["--:"] * len(places))]
    for run in training["runs"]:
        cells = {(r["ranks"], r["hosts"]): r for r in run["rows"]}
        lines.append(
            row(
                run["framework"],
                run["model"],
                *(
                    f"{r['together']:.1f} ({r['together'] / r['apart']:.0%})"
                    if (r := cells.get(place))
                    else ""
                    for place in places
                ),
            )
        )
    if training["skipped"]:
        lines += ["", f"Not measured, two hosts: {training['skipped']}."]
    return lines


def links_table(model: dict) -> list[str]:
    """The constants, the errors, and each point. No link is limited to the greatest rate."""
    plane: data_plane.DataPlane = model["plane"]
    free = max(point.bits_per_s for point in model["points"])
    pairs = list(zip(model["fitted"], model["errors"], strict=True))
    outside = [error for fitted, error in pairs if not fitted]
    inside = [error for fitted, error in pairs if fitted]
    lines = [
        f"Fit: {plane.start_s * 1e3:.2f} ms to agree, {plane.host_s * 1e3:.2f} ms for each other host, "
        f"{plane.wire:.3f} bytes on the wire for each byte, and {plane.fill_bytes / 1024:.0f} KiB for each "
        f"other host before results follow. Error on the {len(outside)} points that "
        f"were not used: {statistics.mean(outside):.1%} on average, {max(outside):.1%} at most; on the "
        f"{len(inside)} that were: {statistics.mean(inside):.1%} and {max(inside):.1%}.",
        "",
        row(
            "hosts",
            "limit, Mbit/s",
            "KiB",
            "measured, ms",
            "model, ms",
            "error",
            "used for the fit",
        ),
        row(*["--:"] * 6, "---"),
    ]
    for point, fitted, error in zip(model["points"], model["fitted"], model["errors"], strict=True):
        predicted = plane.seconds(point.hosts, point.bits_per_s, point.nbytes)
        lines.append(
            row(
                str(point.hosts),
                f"{point.bits_per_s / 1e6:.0f}"
                if point.bits_per_s < free
                else f"none ({free / 1e9:.1f} Gbit/s reached)",
                f"{point.nbytes // 1024}",
                f"{point.seconds * 1e3:.1f}",
                f"{predicted * 1e3:.1f}",
                f"{error:.1%}",
                "yes" if fitted else "no",
            )
        )
    return lines


def model_table(model: dict, links: dict) -> list[str]:
    """Efficiency of each model by the number of accelerators."""
    lines = [
        row("model", "link, Gbit/s", *map(str, ACCELERATORS), "published at 512"),
        row("---", *["--:"] * (len(ACCELERATORS) + 2)),
    ]
    for name, curves in model["curves"].items():
        for label, rate in rates(links).items():
            known = NETS[name].published if label == "line" else None
            lines.append(
                row(
                    name,
                    f"{rate / 1e9:.1f}",
                    *(f"{value:.0%}" for value in curves[label]),
                    f"{known:.0%}" if known else "",
                )
            )
    return lines


def main() -> None:
    """Measure, print, record."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="few and small runs; not recorded")
    parser.add_argument("--parts", nargs="*", choices=PARTS, default=PARTS)
    parser.add_argument("--frameworks", nargs="+", choices=EXAMPLES, help="default: all")
    parser.add_argument("--models", nargs="+", choices=NETS, help="default: all")
    parser.add_argument("--no-docs", action="store_true", help="leave docs/ alone")
    options = parser.parse_args()
    options.frameworks = options.frameworks or (["PyTorch"] if options.quick else list(EXAMPLES))
    options.models = options.models or (["ResNet-50"] if options.quick else list(NETS))
    unwind_on_sigterm()
    results = Results(FOLDER / "quick" if options.quick else FOLDER)
    for part in options.parts:
        globals()[f"run_{part}"](results, options)
    recorded = not (options.quick or options.no_docs)
    lines = sections(results, ROOT / "docs" if recorded else results.folder)
    print("\n" + "\n".join(lines))
    if recorded:
        report.write(ROOT / "docs" / "scaling.md", lines, BEGIN)


if __name__ == "__main__":
    main()
