"""The Helm chart and the manifests of deploy/: against schemas, and how their parts fit. tests/hosts/test_pods.py runs
them."""

from __future__ import annotations

import itertools
import subprocess
from typing import Any

import pytest
import yaml

import charts

# The chart's kubeVersion, and the newest minor version with schemas.
VERSIONS = ("1.31", "1.37")

ENTRY = {"name": "A", "value": "b"}
VALUES: dict[str, dict[str, Any]] = {
    "defaults": {},
    "several ranks": {"workers": 3, "slotsPerWorker": 4},
    "elastic": {"elastic": {"enabled": True, "minWorkers": 1, "maxWorkers": 8}, "slotsPerWorker": 2},
    "restarts": {"restarts": 2, "workers": 3},
    "restarted elastic": {"restarts": 2, "elastic": {"enabled": True}},
    "GPUs": {"worker": {"resources": {"limits": {"nvidia.com/gpu": 4}}}, "slotsPerWorker": 4},
    "own Secret": {"existingSecret": "mine"},
    "no policy": {"networkPolicy": {"enabled": False}},
    "everything": {
        "image": {"repository": "r/i", "tag": "1", "pullPolicy": "Always", "pullSecrets": [{"name": "p"}]},
        "options": ["--log-level", "debug"],
        "env": [ENTRY],
        "envFrom": [{"configMapRef": {"name": "c"}}],
        "volumes": [{"name": "data", "persistentVolumeClaim": {"claimName": "d"}}],
        "volumeMounts": [{"name": "data", "mountPath": "/data"}],
        "worker": {
            "resources": {"requests": {"cpu": "1"}},
            "nodeSelector": {"a": "b"},
            "tolerations": [{"key": "k", "operator": "Exists"}],
            "affinity": {"podAntiAffinity": {}},
        },
        "launcher": {"resources": {"limits": {"memory": "1Gi"}}},
        "hostNetwork": True,
        "priorityClassName": "low",
        "serviceAccountName": "s",
        "podAnnotations": {"a": "b"},
        "ttlSecondsAfterFinished": 0,
        "nameOverride": "other",
        "fullnameOverride": "a-name-that-is-much-longer-than-the-names-of-pods-may-be",
        "runAsUser": 2000,
    },
}  # fmt: skip


def _validate(documents: list[Any], tmp_path: Any) -> None:
    file = tmp_path / "rendered.yaml"
    file.write_text(yaml.safe_dump_all(documents))
    for version in VERSIONS:
        words = [
            charts.tool("kubernetes-validate"),
            "-k",
            version,
            "--strict",
            "--quiet",
            str(file),
        ]
        done = subprocess.run(
            words, capture_output=True, text=True, check=False, timeout=charts.LIMIT_S
        )
        assert done.returncode == 0, f"{version}: {done.stdout}{done.stderr}"


def test_helm_finds_nothing_to_complain_about() -> None:
    done = charts.helm("lint", "--strict", str(charts.CHART))
    assert done.returncode == 0, done.stdout + done.stderr


def test_all_values_render_objects_of_the_oldest_and_the_newest_version(tmp_path) -> None:
    rendered = [charts.render(values) for values in VALUES.values()]
    _validate(list(itertools.chain.from_iterable(rendered)), tmp_path)


def test_the_schemas_would_find_an_unknown_field(tmp_path) -> None:
    documents = charts.render({})
    charts.named(documents, "Job", "train-horovod-worker")["spec"]["completion"] = 2
    with pytest.raises(AssertionError, match="completion"):
        _validate(documents, tmp_path)


@pytest.mark.parametrize("case", VALUES)
def test_the_parts_fit_together(case: str) -> None:
    values = VALUES[case]
    documents = charts.render(values)
    [service] = [d for d in documents if d["kind"] == "Service"]
    launcher, worker = (d for d in documents if d["kind"] == "Job")
    host = service["metadata"]["name"]
    assert len(f"{worker['metadata']['name']}-100") <= 63
    # The name that workers dial is that of the launcher's pod.
    selector = service["spec"]["selector"].items()
    assert selector <= launcher["spec"]["template"]["metadata"]["labels"].items()
    assert not selector <= worker["spec"]["template"]["metadata"]["labels"].items()
    assert (service["spec"]["clusterIP"], service["spec"]["publishNotReadyAddresses"]) == (
        "None",
        True,
    )
    [waits], [joins] = (job["spec"]["template"]["spec"]["containers"] for job in (launcher, worker))
    port = waits["command"][waits["command"].index("--agents-port") + 1]
    assert joins["command"][3] == f"{host}:{port}"
    workers, slots = values.get("workers", 2), values.get("slotsPerWorker", 1)
    assert waits["command"][1:3] == ["-np", str(workers * slots)]
    assert worker["spec"]["completions"] == worker["spec"]["parallelism"] == workers
    assert waits["command"][waits["command"].index("--") + 1 :] == ["python", "/app/train.py"]
    is_elastic = values.get("elastic", {}).get("enabled", False)
    assert ("--min-np" in waits["command"]) == is_elastic
    # A launcher that comes again needs workers.
    fails = [r for r in worker["spec"]["podFailurePolicy"]["rules"] if r["action"] == "FailJob"]
    assert bool(fails) == (values.get("restarts", 0) == 0)
    # Kubernetes refuses any other value beside a pod failure policy.
    assert worker["spec"].get("podReplacementPolicy", "Failed") == "Failed"
    for job in (launcher, worker):
        _is_closed(job["spec"]["template"]["spec"])
    secret = next((d for d in documents if d["kind"] == "Secret"), None)
    name = launcher["spec"]["template"]["spec"]["volumes"][0]["secret"]["secretName"]
    assert name == (secret["metadata"]["name"] if secret else values["existingSecret"])
    for policy in (d for d in documents if d["kind"] == "NetworkPolicy"):
        for job in (launcher, worker):
            labels = job["spec"]["template"]["metadata"]["labels"].items()
            assert policy["spec"]["podSelector"]["matchLabels"].items() <= labels


def _is_closed(spec: Any, *, is_read_only: bool = True) -> None:
    pod = spec["securityContext"]
    assert pod["runAsNonRoot"]
    assert pod["runAsUser"] > 0
    assert pod["seccompProfile"] == {"type": "RuntimeDefault"}
    assert spec["automountServiceAccountToken"] is False
    for container in spec["containers"]:
        security = container["securityContext"]
        assert security["allowPrivilegeEscalation"] is False
        assert security["capabilities"] == {"drop": ["ALL"]}
        assert security.get("readOnlyRootFilesystem", False) == is_read_only


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"workers": 0}, "workers"),
        ({"worker": {"replicas": 3}}, "replicas"),
        ({"command": []}, "command"),
        ({"portRange": 29600}, "portRange"),
        ({"runAsUser": 0}, "runAsUser"),
        ({"elastic": {"enabled": True, "minWorkers": 3}}, "elastic.minWorkers is 3, more than workers: 2"),
    ],
)  # fmt: skip
def test_wrong_values_are_refused_by_their_name(values: dict[str, Any], words: str) -> None:
    done = charts.helm(
        "template", "train", str(charts.CHART), "--values", "-", text=yaml.safe_dump(values)
    )
    assert done.returncode != 0
    assert words in done.stderr


CHECK_MODELS = """
import sys, yaml, kubeflow_trainer_api.models as models
classes = {
    "JobSet": models.JobsetV1alpha2JobSet,
    "TrainJob": models.TrainerV1alpha1TrainJob,
    "ClusterTrainingRuntime": models.TrainerV1alpha1ClusterTrainingRuntime,
}

def compare(given, known, path):
    if isinstance(given, dict):
        for key, value in given.items():
            if not isinstance(known, dict) or key not in known:
                sys.exit(f"unknown field {path}.{key}")
            compare(value, known[key], f"{path}.{key}")
    elif isinstance(given, list):
        for index, pair in enumerate(zip(given, known, strict=True)):
            compare(*pair, f"{path}[{index}]")

for document in yaml.safe_load_all(sys.stdin):
    model = classes[document["kind"]].from_dict(document)
    compare(document, model.to_dict(), document["kind"])
"""


@pytest.mark.parametrize("name", ["jobset", "trainjob"])
def test_manifests_have_only_fields_that_their_operators_know(name: str) -> None:
    charts.tool("kubernetes-validate")
    done = _models((charts.MANIFESTS / f"{name}.yaml").read_text())
    assert done.returncode == 0, done.stderr


def test_the_models_would_find_an_unknown_field() -> None:
    charts.tool("kubernetes-validate")
    done = _models(
        (charts.MANIFESTS / "jobset.yaml").read_text().replace("parallelism", "parallel")
    )
    assert "unknown field JobSet.spec.replicatedJobs[1].template.spec.parallel" in done.stderr


def _models(text: str) -> subprocess.CompletedProcess[str]:
    python = charts.TOOLS / "bin" / "python"
    if not python.exists():
        pytest.skip(
            "NOT RUN: the models of Kubeflow's Trainer are not installed (make chart-tools)"
        )
    return subprocess.run(
        [str(python), "-c", CHECK_MODELS],
        input=text, capture_output=True, text=True, check=False, timeout=charts.LIMIT_S,
    )  # fmt: skip


def _templates(name: str) -> list[Any]:
    def find(node: Any) -> Any:
        if isinstance(node, dict):
            if "containers" in node.get("spec", {}):
                yield node
            node = list(node.values())
        if isinstance(node, list):
            for item in node:
                yield from find(item)

    return list(find(list(yaml.safe_load_all((charts.MANIFESTS / f"{name}.yaml").read_text()))))


@pytest.mark.parametrize("name", ["jobset", "trainjob", "mpijob"])
def test_pods_of_manifests_are_closed_and_valid(name: str, tmp_path) -> None:
    templates = _templates(name)
    assert templates
    for template in templates:
        # sshd writes below /run.
        _is_closed(template["spec"], is_read_only=name != "mpijob")
    pods = [{"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "a"}, **t} for t in templates]
    for pod in pods:
        pod["metadata"] = {"name": "a"}
    _validate(pods, tmp_path)
