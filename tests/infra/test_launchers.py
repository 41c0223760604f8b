"""The launchers under infra/, checked by the tools and API models of their systems."""

from __future__ import annotations

import re
import stat
import subprocess
import sys
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
import yaml
from kubeflow_trainer_api import models
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainSerializer,
    StrictInt,
    ValidationError,
)

from mega_schema.app.cli_runner import MISTAKE
from tests.repo_rules.markdown import check_command
from tests.repo_rules.repository import PACKAGES, ROOT, relative_name, tracked_files

INFRA = ROOT / "infra"
MEGA_TORCHRUN = INFRA / "docker/mega-torchrun"
SCRIPTS = sorted([*INFRA.glob("slurm/*.sh"), *INFRA.glob("slurm/*.sbatch"), MEGA_TORCHRUN])
MANIFESTS = sorted(INFRA.glob("kubernetes/*.yaml"))
TRAINING = [file for file in MANIFESTS if "mega-torchrun" in file.read_text("utf-8")]
DOCKERFILE = INFRA / "docker/Dockerfile"


Pod = models.IoK8sApiCoreV1PodTemplateSpec


class RollingUpdate(BaseModel):
    """How many pods a new version may lack, or have too many, meanwhile."""

    model_config = ConfigDict(extra="forbid")

    max_unavailable: StrictInt = Field(alias="maxUnavailable")
    max_surge: StrictInt = Field(alias="maxSurge")


class Strategy(BaseModel):
    """How the pods of a new version replace the old ones."""

    model_config = ConfigDict(extra="forbid")

    type: Literal["RollingUpdate"]
    rolling_update: RollingUpdate = Field(alias="rollingUpdate")


class DeploymentSpec(BaseModel):
    """What serve.yaml says of a Deployment: Kubeflow publishes no model of one, but one of its pods."""

    model_config = ConfigDict(extra="forbid")

    replicas: StrictInt | None = None  # an autoscaler sets them
    selector: models.IoK8sApimachineryPkgApisMetaV1LabelSelector
    strategy: Strategy
    template: Annotated[Pod, BeforeValidator(Pod.from_dict), PlainSerializer(Pod.to_dict)]


class Deployment(BaseModel):
    """A Deployment whose every field is one that the API has, with its type."""

    model_config = ConfigDict(extra="forbid", populate_by_name=True)

    api_version: Literal["apps/v1"] = Field(alias="apiVersion")
    kind: Literal["Deployment"]
    metadata: models.IoK8sApimachineryPkgApisMetaV1ObjectMeta
    spec: DeploymentSpec

    @classmethod
    def from_dict(cls, thing: dict[str, Any]) -> Deployment:
        return cls.model_validate(thing)

    def to_dict(self) -> dict[str, Any]:
        return self.model_dump(by_alias=True, exclude_none=True)


class DisruptionBudgetSpec(BaseModel):
    """How many pods a drained node may take away."""

    model_config = ConfigDict(extra="forbid")

    max_unavailable: StrictInt = Field(alias="maxUnavailable")
    selector: models.IoK8sApimachineryPkgApisMetaV1LabelSelector


class PodDisruptionBudget(BaseModel):
    """A PodDisruptionBudget, of which Kubeflow publishes no model."""

    model_config = ConfigDict(extra="forbid", populate_by_name=True)

    api_version: Literal["policy/v1"] = Field(alias="apiVersion")
    kind: Literal["PodDisruptionBudget"]
    metadata: models.IoK8sApimachineryPkgApisMetaV1ObjectMeta
    spec: DisruptionBudgetSpec

    @classmethod
    def from_dict(cls, thing: dict[str, Any]) -> PodDisruptionBudget:
        return cls.model_validate(thing)

    def to_dict(self) -> dict[str, Any]:
        return self.model_dump(by_alias=True, exclude_none=True)


KINDS: tuple[tuple[str, str, type[BaseModel]], ...] = (
    ("v1", "Service", models.IoK8sApiCoreV1Service),
    ("apps/v1", "Deployment", Deployment),
    (
        "autoscaling/v2",
        "HorizontalPodAutoscaler",
        models.IoK8sApiAutoscalingV2HorizontalPodAutoscaler,
    ),
    ("policy/v1", "PodDisruptionBudget", PodDisruptionBudget),
    ("batch/v1", "Job", models.IoK8sApiBatchV1Job),
    ("jobset.x-k8s.io/v1alpha2", "JobSet", models.JobsetV1alpha2JobSet),
    ("trainer.kubeflow.org/v1alpha1", "TrainJob", models.TrainerV1alpha1TrainJob),
    ("trainer.kubeflow.org/v1alpha1", "TrainingRuntime", models.TrainerV1alpha1TrainingRuntime),
)


def tool(name: str, *words: str, text: str | None = None) -> str:
    """What a program of this environment complains about."""
    process = subprocess.run(
        [str(Path(sys.executable).parent / name), *words], input=text, capture_output=True, text=True
    )
    assert bool(process.returncode) == bool(process.stdout), process
    return process.stdout


def objects(manifest: Path) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all(manifest.read_text("utf-8")))


def mistakes(thing: dict[str, Any]) -> list[str]:
    """Fields of an object that its API does not have, those that it has otherwise, and those it asks for."""
    (model,) = [m for version, kind, m in KINDS if (version, kind) == (thing["apiVersion"], thing["kind"])]
    try:
        return list(_differ(thing, model.from_dict(thing).to_dict(), ""))  # type: ignore[attr-defined]
    except ValidationError as error:
        return [".".join(map(str, wrong["loc"])) + ": " + wrong["msg"] for wrong in error.errors()]


def _differ(left_value: Any, read: Any, where: str) -> list[str]:
    """The models pass over a field that they do not know, and fill in a name that is missing."""
    if isinstance(left_value, dict) and isinstance(read, dict):
        pairs = [(left_value.get(key), read.get(key), f"{where}.{key}") for key in {**left_value, **read}]
    elif isinstance(left_value, list) and isinstance(read, list) and len(left_value) == len(read):
        pairs = [
            (first, second, f"{where}[{i}]")
            for i, (first, second) in enumerate(zip(left_value, read, strict=True))
        ]
    else:
        return [] if left_value == read else [f"{where}: {left_value!r} is read as {read!r}"]
    return [line for first, second, path in pairs for line in _differ(first, second, path)]


def parts(thing: Any, key: str) -> list[Any]:
    """Every value under this key, however deep."""
    if isinstance(thing, list):
        return [part_value for part in thing for part_value in parts(part, key)]
    if not isinstance(thing, dict):
        return []
    own_parts = [thing[key]] if key in thing else []
    return own_parts + [part_value for part in thing.values() for part_value in parts(part, key)]


def launches(manifest: Path) -> list[list[str]]:
    """Command lines of the containers of a manifest that start something."""
    started = [c for thing in objects(manifest) for every in parts(thing, "containers") for c in every]
    started += [trainer for thing in objects(manifest) for trainer in parts(thing, "trainer")]
    return [container["command"] + container["args"] for container in started if "command" in container]


@pytest.mark.parametrize("script", SCRIPTS, ids=relative_name)
def test_a_script_is_one_that_bash_and_shellcheck_accept(script: Path) -> None:
    assert subprocess.run(["bash", "-n", str(script)], capture_output=True).stderr == b""
    assert tool("shellcheck", "--norc", str(script)) == ""


def test_the_dockerfile_is_one_that_hadolint_accepts() -> None:
    assert tool("hadolint", "--no-color", str(DOCKERFILE)) == ""


def test_tools_would_find_a_mistake() -> None:
    assert "SC2086" in tool("shellcheck", "-", text="#!/bin/sh\necho $1\n")
    assert "DL3020" in tool("hadolint", "-", text="FROM a:1\nADD b c\n")


@pytest.mark.parametrize("manifest", MANIFESTS, ids=relative_name)
def test_a_manifest_says_what_its_api_knows(manifest: Path) -> None:
    assert [mistakes(thing) for thing in objects(manifest)] == [[] for _ in objects(manifest)]


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("maxRestarts: 3", "maxRestart: 3", ".spec.failurePolicy.maxRestart: 3 is read as None"),
        ("replicas: 1", 'replicas: "1"', "replicas: Input should be a valid integer"),
        ("- name: host", "- names: host", ".name: None is read as ''"),
        ("mountPath: /dev/shm", "path: /dev/shm", ".mountPath: None is read as ''"),
    ],
)
def test_a_mistake_in_a_manifest_would_be_found(old: str, new: str, message: str) -> None:
    text = (INFRA / "kubernetes/jobset.yaml").read_text("utf-8")
    assert text.count(old) == 1
    messages = mistakes(yaml.safe_load(text.replace(old, new)))
    assert [line for line in messages if message in line] != []


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("maxSurge: 0", "maxSurge: none", "spec.strategy"),
        ("  strategy:\n", '  replicas: "2"\n  strategy:\n', "spec.replicas: Input should be a valid integer"),
        ("  strategy:", "  strategies:", "spec.strategies: Extra inputs are not permitted"),
        ("failureThreshold: 120", "failureThresholds: 120", ".failureThresholds: 120 is read as None"),
        ("      containers:", "      container:", "containers"),
    ],
)
def test_a_mistake_in_the_deployment_would_be_found(old: str, new: str, message: str) -> None:
    text = (INFRA / "kubernetes/serve.yaml").read_text("utf-8")
    assert text.count(old) == 1
    _, deployment, *_ = yaml.safe_load_all(text.replace(old, new))
    assert [line for line in mistakes(deployment) if message in line] != []


@pytest.mark.usefixtures("paths_need_not_exist")
@pytest.mark.parametrize("manifest", MANIFESTS, ids=relative_name)
def test_a_manifest_starts_a_command_that_exists(manifest: Path) -> None:
    (words,) = launches(manifest)
    if words[0] == MEGA_TORCHRUN.name:
        words = ["torchrun", *words[1:]]
    check_command([re.sub(r"\$\(\w+\)", "0", word) for word in words])


@pytest.mark.parametrize("name", ["train-job", "jobset"])
def test_pods_are_as_many_as_torchrun_waits_for_and_meet_at_one_that_there_is(name: str) -> None:
    *_, job = objects(INFRA / f"kubernetes/{name}.yaml")
    (words,) = launches(INFRA / f"kubernetes/{name}.yaml")
    says = dict(word[2:].split("=", 1) for word in words if word.startswith("--") and "=" in word)
    assert {str(n) for key in ("completions", "parallelism") for n in parts(job, key)} == {says["nnodes"]}
    assert [str(n) for n in parts(job, "nvidia.com/gpu")] == [says["nproc-per-node"]]
    whole = job["metadata"]["name"]
    first, service = (
        (f"{whole}-{job['spec']['replicatedJobs'][0]['name']}-0-0", whole)
        if job["kind"] == "JobSet"
        else (f"{whole}-0", objects(INFRA / f"kubernetes/{name}.yaml")[0]["metadata"]["name"])
    )
    assert says["master-addr"] == f"{first}.{service}"
    assert says["load"] == says["save"]  # a start after the first goes on


def test_a_train_job_names_the_runtime_beside_it_and_the_container_the_trainer_fills() -> None:
    runtime, job = objects(INFRA / "kubernetes/kubeflow-trainjob.yaml")
    reference = job["spec"]["runtimeRef"]
    assert (reference["kind"], reference["name"]) == (runtime["kind"], runtime["metadata"]["name"])
    (replicated,) = runtime["spec"]["template"]["spec"]["replicatedJobs"]
    (container,) = parts(replicated, "containers")[0]
    assert (replicated["name"], container["name"]) == ("node", "node")  # pkg/constants of the trainer
    assert parts(replicated, "labels")[0] == {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}


def test_the_image_holds_every_package() -> None:
    installed = re.findall(r"\./packages/([\w-]+)", DOCKERFILE.read_text("utf-8"))
    assert sorted(installed) == [package.name for package in PACKAGES]
    ignored = DOCKERFILE.with_name("Dockerfile.dockerignore").read_text("utf-8").splitlines()
    assert ignored[1:4] == ["*", "!packages", f"!{relative_name(MEGA_TORCHRUN)}"]


def test_the_image_holds_the_program_that_the_pods_of_a_run_start() -> None:
    copied = re.search(r"^COPY (\S+) /usr/local/bin/$", DOCKERFILE.read_text("utf-8"), re.MULTILINE)
    assert copied
    assert copied[1] == relative_name(MEGA_TORCHRUN)
    assert MEGA_TORCHRUN.stat().st_mode & stat.S_IXOTH, "COPY keeps the mode"
    assert len(TRAINING) == 3
    assert {launches(manifest)[0][0] for manifest in TRAINING} == {MEGA_TORCHRUN.name}


def test_the_image_has_a_c_compiler_for_triton_and_every_extra_that_monitoring_needs() -> None:
    text = DOCKERFILE.read_text("utf-8")
    assert re.search(r"apt-get install [^&]*\bgcc libc6-dev\b", text)
    installed = {
        (package, extra)
        for package, extras in re.findall(r"\./packages/([\w-]+)\[([\w,]+)\]", text)
        for extra in extras.split(",")
    }
    pages = ("watch.md", "cluster.md", "web-crawl.md", "train-a-tokenizer.md")
    named_extras = {
        (package, extra)
        for page in (ROOT / "docs/howto" / name for name in pages)
        if page.exists()
        for package, extras in re.findall(r"packages/([\w-]+)\[([\w,]+)\]", page.read_text("utf-8"))
        for extra in extras.split(",")
    }
    assert ("mega-train", "prometheus") in named_extras
    assert ("mega-data", "all") in installed
    assert ("mega-schema", "sentencepiece") in installed
    optional = {("mega-train", "opentelemetry"), ("mega-train", "wandb"), ("mega-train", "codecarbon")}
    assert {entry for entry in named_extras if entry[0] != "mega-data"} - optional <= installed


@pytest.mark.parametrize("manifest", TRAINING, ids=relative_name)
def test_a_save_has_time_before_a_pod_is_killed_and_its_metrics_have_a_port(manifest: Path) -> None:
    things = objects(manifest)
    (grace,) = parts(things, "terminationGracePeriodSeconds")
    (words,) = launches(manifest)
    says = dict(word[2:].split("=", 1) for word in words if word.startswith("--") and "=" in word)
    # torchrun kills its processes after its own timeout, which must end before the pod's
    assert 600 <= int(says["shutdown-timeout"]) < grace
    (port,) = (port for every in parts(things, "ports") for port in every)
    assert str(port["containerPort"]) == says["prometheus-port"]
    monitors = objects(INFRA / "monitoring/pod-monitor.yaml")
    (monitor,) = [thing["spec"] for thing in monitors if thing["metadata"]["name"] == "mega-train"]
    assert [entry["port"] for entry in monitor["podMetricsEndpoints"]] == [port["name"]]
    assert monitor["selector"]["matchLabels"] in parts(things, "labels")
    assert {"cpu", "memory"} <= parts(things, "requests")[0].keys()


@pytest.mark.parametrize("manifest", [*TRAINING, INFRA / "kubernetes/data-job.yaml"], ids=relative_name)
def test_a_mistake_of_the_run_fails_its_job_and_is_not_started_again(manifest: Path) -> None:
    things = objects(manifest)
    (policy,) = parts(things, "podFailurePolicy")
    fail, *others = policy["rules"]
    ((container,),) = parts(things, "containers")
    assert fail == {
        "action": "FailJob",
        "onExitCodes": {"containerName": container["name"], "operator": "In", "values": [MISTAKE]},
    }
    assert [rule["action"] for rule in others] == ["Ignore"] * len(others)
    assert parts(things, "restartPolicy") == ["Never"], "the API refuses the policy with any other"
    # a JobSet makes all pods anew unless a rule of its own says otherwise
    for set_policy in parts(things, "failurePolicy"):
        (rule,) = set_policy["rules"]
        assert (rule["action"], rule["onJobFailureReasons"]) == ("FailJobSet", ["PodFailurePolicy"])
        assert re.fullmatch("[A-Za-z]([A-Za-z0-9_,:]*[A-Za-z0-9_])?", rule["name"])
    assert bool(parts(things, "failurePolicy")) == bool(parts(things, "replicatedJobs"))


def test_the_how_to_tells_of_every_launcher() -> None:
    page = (ROOT / "docs/howto/cluster.md").read_text("utf-8")
    below = [file for file in tracked_files() if file.is_relative_to(INFRA) and file.name != "README.md"]
    # what watches a run has a how-to of its own
    files = [file for file in below if not file.is_relative_to(INFRA / "monitoring")]
    assert len(files) >= 8
    assert [relative_name(file) for file in files if f"../../{relative_name(file)}" not in page] == []
