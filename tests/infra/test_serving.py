"""The Deployment and the Service of mega-serve agree with each other and with the server."""

from __future__ import annotations

from typing import Any

import pytest
import yaml
from fastapi.routing import APIRoute
from fastapi.testclient import TestClient

from mega_serve.api.app import create_app
from mega_serve.server import Server
from tests.repo_rules.repository import ROOT

SERVICE, DEPLOYMENT = yaml.safe_load_all((ROOT / "infra/kubernetes/serve.yaml").read_text("utf-8"))
SPEC: dict[str, Any] = DEPLOYMENT["spec"]
POD: dict[str, Any] = SPEC["template"]["spec"]
(CONTAINER,) = POD["containers"]
PROBES = ("startupProbe", "readinessProbe", "livenessProbe")


class UnusedEngine:
    """An engine that fails the test if a probe calls it."""

    def generate(self, request: object, should_abort: object) -> dict[str, object]:
        raise AssertionError(request)


def test_the_service_and_the_deployment_select_the_pods() -> None:
    labels = SPEC["template"]["metadata"]["labels"]
    assert SPEC["selector"]["matchLabels"].items() <= labels.items()
    assert SERVICE["spec"]["selector"].items() <= labels.items()
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
    options = dict(word[2:].split("=", 1) for word in CONTAINER["args"])
    (port,) = CONTAINER["ports"]
    assert str(port["containerPort"]) == options["port"]
    assert options["host"] == "0.0.0.0", "127.0.0.1 is reachable only inside the pod"
    (service_port,) = SERVICE["spec"]["ports"]
    assert service_port["targetPort"] == port["name"]
    assert {CONTAINER[probe]["httpGet"]["port"] for probe in PROBES} == {port["name"]}


@pytest.mark.parametrize("probe", PROBES)
def test_a_probe_asks_a_route_that_does_not_use_the_engine(probe: str) -> None:
    app = create_app(UnusedEngine())
    path = CONTAINER[probe]["httpGet"]["path"]
    assert path in {route.path for route in app.routes if isinstance(route, APIRoute)}
    assert TestClient(app).get(path).status_code == 200


def test_requests_in_progress_have_time_before_a_pod_is_killed() -> None:
    pre_stop = int(CONTAINER["lifecycle"]["preStop"]["exec"]["command"][1])
    server = Server(create_app(UnusedEngine()), on_ready=lambda: None)
    timeout = server.config.timeout_graceful_shutdown
    assert timeout is not None
    assert pre_stop + timeout < POD["terminationGracePeriodSeconds"]


def test_the_startup_probe_allows_10_minutes_and_a_pod_requests_its_resources() -> None:
    startup = CONTAINER["startupProbe"]
    assert startup["periodSeconds"] * startup["failureThreshold"] >= 600
    assert {"cpu", "memory"} <= CONTAINER["resources"]["requests"].keys()
    assert SPEC["strategy"].keys() == {"type", "rollingUpdate"}
    rolling = SPEC["strategy"]["rollingUpdate"]
    assert rolling["maxUnavailable"] + rolling["maxSurge"] > 0, "the API refuses that both are 0"
    assert rolling["maxUnavailable"] < SPEC["replicas"], "one pod serves while another is replaced"
    (mount,) = CONTAINER["volumeMounts"]
    (volume,) = POD["volumes"]
    assert mount["name"] == volume["name"]
    assert mount["readOnly"], "a server writes nothing"
