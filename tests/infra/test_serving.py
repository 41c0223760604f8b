"""The objects of infra/kubernetes/serve.yaml agree with each other and with the server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
import yaml

from mega_serve.engine.interfaces import ModelInfo
from mega_serve.engine.requests import EngineRequest, EngineStats, SequenceOutput
from mega_serve.http.app import Application
from mega_serve.http.auth import ENVIRONMENT, load_keys
from mega_serve.http.config import ServerConfig
from mega_serve.http.limits import Limits
from mega_serve.http.server import Server
from tests.repo_rules.markdown import program, subcommands_of
from tests.repo_rules.repository import ROOT
from tests.serving.echo_engine import MODEL
from tests.serving.echo_server import create_echo_app
from tests.serving.metrics_page import served_samples

SERVICE, DEPLOYMENT, AUTOSCALER, BUDGET = yaml.safe_load_all(
    (ROOT / "infra/kubernetes/serve.yaml").read_text("utf-8")
)
SPEC: dict[str, Any] = DEPLOYMENT["spec"]
POD: dict[str, Any] = SPEC["template"]["spec"]
LABELS: dict[str, str] = SPEC["template"]["metadata"]["labels"]
(CONTAINER,) = POD["containers"]
PROBES = ("startupProbe", "readinessProbe", "livenessProbe")
PROGRAM, *WORDS = [*CONTAINER["command"], *CONTAINER["args"]]
KEY = "k" * 32


class IdleEngineClient:
    """An EngineClient that fails the test if a probe calls the engine."""

    def __init__(self, status: str = "ready") -> None:
        self.status = status
        self.stats = EngineStats()

    @property
    def model(self) -> ModelInfo:
        return MODEL

    @property
    def is_alive(self) -> bool:
        return self.status == "ready"

    def generate(self, request: EngineRequest) -> AsyncIterator[SequenceOutput]:
        raise AssertionError(request)


def options() -> dict[str, Any]:
    """The arguments of the container as the command reads them."""
    command = subcommands_of(program(PROGRAM))[WORDS[0]]
    return command.make_context(WORDS[0], WORDS[1:], resilient_parsing=True).params


def create_application(status: str = "ready") -> Application:
    """The server as the pod configures it, with a key."""
    config = ServerConfig(
        keys=load_keys(None, {ENVIRONMENT: f"alice:{KEY}"}),
        allowed_hosts=options()["allowed_host"],
        public_metrics=options()["public_metrics"],
    )
    return create_echo_app(IdleEngineClient(status), config)


def get_status(application: Application, path: str, host: str = "localhost") -> int:
    async def exchange() -> int:
        transport = httpx.ASGITransport(application.asgi)
        async with httpx.AsyncClient(transport=transport, base_url=f"http://{host}") as client:
            return (await client.get(path)).status_code

    return asyncio.run(exchange())


def test_all_objects_select_the_pods_and_no_others() -> None:
    for selector in (SPEC["selector"], BUDGET["spec"]["selector"]):
        assert selector["matchLabels"].items() <= LABELS.items()
    assert SERVICE["spec"]["selector"].items() <= LABELS.items()
    target = AUTOSCALER["spec"]["scaleTargetRef"]
    assert (target["kind"], target["name"]) == (DEPLOYMENT["kind"], DEPLOYMENT["metadata"]["name"])
    assert target["apiVersion"] == DEPLOYMENT["apiVersion"]
    job_labels = [
        document["spec"]["template"]["metadata"]["labels"]
        for name in ("train-job", "data-job")
        for document in yaml.safe_load_all((ROOT / f"infra/kubernetes/{name}.yaml").read_text("utf-8"))
        if document["kind"] == "Job"
    ]
    assert len(job_labels) == 2
    selector = SERVICE["spec"]["selector"]
    assert [labels for labels in job_labels if selector.items() <= labels.items()] == []


def test_the_service_and_the_probes_reach_the_port_that_the_server_listens_on() -> None:
    (port,) = CONTAINER["ports"]
    assert port["containerPort"] == options()["port"]
    assert options()["host"] == "0.0.0.0", "127.0.0.1 is reachable only inside the pod"
    (service_port,) = SERVICE["spec"]["ports"]
    assert service_port["targetPort"] == port["name"]
    assert {CONTAINER[probe]["httpGet"]["port"] for probe in PROBES} == {port["name"]}


@pytest.mark.parametrize("probe", PROBES)
def test_a_probe_needs_no_key_and_does_not_use_the_engine(probe: str) -> None:
    path = CONTAINER[probe]["httpGet"]["path"]
    assert get_status(create_application(), path) == 200
    assert get_status(create_application(), "/load") == 401, "the application has keys"


@pytest.mark.parametrize("status", ["loading", "dead"])
def test_no_probe_succeeds_without_an_engine(status: str) -> None:
    application = create_application(status)
    assert {get_status(application, CONTAINER[probe]["httpGet"]["path"]) for probe in PROBES} == {503}


def test_a_pod_that_drains_is_alive_and_not_ready() -> None:
    application = create_application()
    application.lifecycle.is_draining = True
    assert get_status(application, CONTAINER["readinessProbe"]["httpGet"]["path"]) == 503
    assert get_status(application, CONTAINER["livenessProbe"]["httpGet"]["path"]) == 200


def test_requests_in_progress_have_time_before_a_pod_is_killed() -> None:
    pre_stop = int(CONTAINER["lifecycle"]["preStop"]["exec"]["command"][1])
    server = Server(create_application(), Limits(), on_ready=lambda: None)
    cut = server.config.timeout_graceful_shutdown
    assert cut is not None
    assert pre_stop + options()["drain_timeout"] + cut < POD["terminationGracePeriodSeconds"]


def test_the_startup_probe_allows_10_minutes_and_a_restart_of_the_engine_has_as_long() -> None:
    seconds = {
        name: CONTAINER[name]["periodSeconds"] * CONTAINER[name]["failureThreshold"]
        for name in ("startupProbe", "livenessProbe")
    }
    assert seconds["startupProbe"] >= 600
    assert seconds["livenessProbe"] >= seconds["startupProbe"]


def test_one_pod_serves_while_another_is_replaced_or_evicted() -> None:
    assert {"cpu", "memory"} <= CONTAINER["resources"]["requests"].keys()
    assert SPEC["strategy"].keys() == {"type", "rollingUpdate"}
    rolling = SPEC["strategy"]["rollingUpdate"]
    pods = AUTOSCALER["spec"]["minReplicas"]
    assert rolling["maxUnavailable"] + rolling["maxSurge"] > 0, "the API refuses that both are 0"
    assert rolling["maxUnavailable"] < pods <= AUTOSCALER["spec"]["maxReplicas"]
    assert BUDGET["spec"]["maxUnavailable"] < pods
    assert "replicas" not in SPEC, "an apply would undo what the autoscaler has set"


def test_the_volume_is_mounted_and_never_written() -> None:
    (mount,) = CONTAINER["volumeMounts"]
    (volume,) = POD["volumes"]
    assert mount["name"] == volume["name"]
    assert mount["readOnly"], "a server writes nothing"
    assert str(options()["load"]).startswith(mount["mountPath"] + "/")


def test_clients_need_a_key_of_a_secret_and_the_service_name() -> None:
    (variable,) = CONTAINER["env"]
    assert variable["name"] == ENVIRONMENT
    assert variable["valueFrom"]["secretKeyRef"].keys() == {"name", "key"}, "no key is in the manifest"
    name = SERVICE["metadata"]["name"]
    application = create_application()
    for host in (name, f"{name}.default", f"{name}.default.svc.cluster.local"):
        assert get_status(application, "/ready", host) == 200
    assert get_status(application, "/ready", "evil.example") == 421


def test_the_autoscaler_follows_a_metric_that_the_server_has_and_the_adapter_offers() -> None:
    (metric,) = AUTOSCALER["spec"]["metrics"]
    name = metric["pods"]["metric"]["name"]
    assert served_samples()[name], name
    adapter = yaml.safe_load((ROOT / "infra/monitoring/prometheus-adapter.yaml").read_text("utf-8"))
    (rule,) = adapter["rules"]["custom"]
    assert rule["seriesQuery"].partition("{")[0] == name


def test_prometheus_scrapes_the_pods_without_a_key() -> None:
    documents = yaml.safe_load_all((ROOT / "infra/monitoring/pod-monitor.yaml").read_text("utf-8"))
    (monitor,) = [thing for thing in documents if thing["metadata"]["name"] == "mega-serve"]
    assert monitor["spec"]["selector"]["matchLabels"].items() <= LABELS.items()
    (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
    assert endpoint["port"] in {port["name"] for port in CONTAINER["ports"]}
    assert get_status(create_application(), endpoint["path"]) == 200
