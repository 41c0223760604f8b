"""The Deployment and the Service of mega-serve fit each other, the server's command and its routes."""

from __future__ import annotations

from typing import Any

import pytest
import yaml
from fastapi.routing import APIRoute
from fastapi.testclient import TestClient

from mega_serve.api.app import create_app
from mega_serve.server import Server
from tests.house.house import ROOT

SERVICE, DEPLOYMENT = yaml.safe_load_all((ROOT / "infra/kubernetes/serve.yaml").read_text("utf-8"))
SPEC: dict[str, Any] = DEPLOYMENT["spec"]
POD: dict[str, Any] = SPEC["template"]["spec"]
(CONTAINER,) = POD["containers"]
PROBES = ("startupProbe", "readinessProbe", "livenessProbe")


class Idle:
    """An engine that no probe may ask for an answer."""

    def answer(self, ask: object, gone: object) -> dict[str, object]:
        raise AssertionError(ask)


def test_the_service_and_the_deployment_select_the_pods() -> None:
    labels = SPEC["template"]["metadata"]["labels"]
    assert SPEC["selector"]["matchLabels"].items() <= labels.items()
    assert SERVICE["spec"]["selector"].items() <= labels.items()
    others = [
        thing["spec"]["template"]["metadata"]["labels"]
        for name in ("train-job", "data-job")
        for thing in yaml.safe_load_all((ROOT / f"infra/kubernetes/{name}.yaml").read_text("utf-8"))
        if thing["kind"] == "Job"
    ]
    assert len(others) == 2
    assert [each for each in others if SERVICE["spec"]["selector"].items() <= each.items()] == []


def test_the_service_and_the_probes_reach_the_port_that_the_server_listens_on() -> None:
    says = dict(word[2:].split("=", 1) for word in CONTAINER["args"])
    (port,) = CONTAINER["ports"]
    assert str(port["containerPort"]) == says["port"]
    assert says["host"] == "0.0.0.0", "127.0.0.1 answers nobody outside the pod"
    (front,) = SERVICE["spec"]["ports"]
    assert front["targetPort"] == port["name"]
    assert {CONTAINER[probe]["httpGet"]["port"] for probe in PROBES} == {port["name"]}


@pytest.mark.parametrize("probe", PROBES)
def test_a_probe_asks_a_route_of_the_server_that_answers_without_the_model(probe: str) -> None:
    app = create_app(Idle())
    path = CONTAINER[probe]["httpGet"]["path"]
    assert path in {route.path for route in app.routes if isinstance(route, APIRoute)}
    assert TestClient(app).get(path).status_code == 200


def test_requests_in_progress_have_time_before_a_pod_is_killed() -> None:
    before = int(CONTAINER["lifecycle"]["preStop"]["exec"]["command"][1])
    patience = Server(create_app(Idle()), ready=lambda: None).config.timeout_graceful_shutdown
    assert patience is not None
    assert before + patience < POD["terminationGracePeriodSeconds"]


def test_a_checkpoint_is_read_within_the_startup_probe_and_a_pod_asks_for_what_it_takes() -> None:
    startup = CONTAINER["startupProbe"]
    assert startup["periodSeconds"] * startup["failureThreshold"] >= 600
    assert {"cpu", "memory"} <= CONTAINER["resources"]["requests"].keys()
    assert SPEC["strategy"].keys() == {"type", "rollingUpdate"}
    rolling = SPEC["strategy"]["rollingUpdate"]
    assert rolling["maxUnavailable"] + rolling["maxSurge"] > 0, "the API refuses that both are 0"
    assert rolling["maxUnavailable"] < SPEC["replicas"], "one pod serves while another is made anew"
    (mount,) = CONTAINER["volumeMounts"]
    (volume,) = POD["volumes"]
    assert mount["name"] == volume["name"]
    assert mount["readOnly"], "a server writes nothing"
