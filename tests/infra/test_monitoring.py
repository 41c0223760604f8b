"""The dashboard and the alerts under infra/ query the metrics that runs and servers export."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
import yaml

from mega_train.telemetry.gauges import GAUGES, LABELS
from mega_train.telemetry.prometheus import METRIC_PREFIX
from tests.repo_rules.repository import ROOT
from tests.serving.metrics_page import served_samples

MONITORING = ROOT / "infra/monitoring"
DASHBOARD: dict[str, Any] = json.loads((MONITORING / "grafana-dashboard.json").read_text("utf-8"))
QUERY = re.compile(r"\b(mega_\w+)\{(.*?)\}")


def _queries() -> list[str]:
    panels = [target["expr"] for panel in DASHBOARD["panels"] for target in panel["targets"]]
    return [*panels, *(mark["expr"] for mark in DASHBOARD["annotations"]["list"])]


def test_every_metric_of_the_dashboard_is_one_that_a_run_serves() -> None:
    asked = set(re.findall(r"\bmega_\w+", json.dumps(DASHBOARD)))
    served = {METRIC_PREFIX + name for name in GAUGES}
    assert asked - served == set()
    without = {
        METRIC_PREFIX + name
        for name in ("parameters", "ranks", "consumed_samples", "consumed_tokens", "iteration_seconds")
    }
    assert served - asked == without | {METRIC_PREFIX + "validation_perplexity"}, (
        "what one reads once, or twice"
    )


def test_a_query_names_only_labels_that_the_metric_has() -> None:
    for query in _queries():
        selectors = QUERY.findall(query)
        assert selectors, query
        for metric, labels in selectors:
            has = {"instance", *LABELS.get(metric.removeprefix(METRIC_PREFIX), ())}
            assert set(re.findall(r"(\w+)(?:=~|!~|!=|=)", labels)) <= has, query
            assert query.count("(") == query.count(")")


def _alerts(group_name: str) -> list[dict[str, Any]]:
    """The alerts of a group of the file that Prometheus loads."""
    scrape = yaml.safe_load((MONITORING / "prometheus.yml").read_text("utf-8"))
    groups = yaml.safe_load((MONITORING / scrape["rule_files"][0]).read_text("utf-8"))["groups"]
    assert {group["name"] for group in groups} == {job["job_name"] for job in scrape["scrape_configs"]}
    (group,) = [group for group in groups if group["name"] == group_name]
    assert len(group["rules"]) >= 5
    rules: list[dict[str, Any]] = group["rules"]
    for rule in rules:
        assert rule["labels"]["severity"] in ("critical", "warning")
        assert rule["annotations"]["summary"]
        assert rule["expr"].count("(") == rule["expr"].count(")"), rule
    return rules


def test_every_alert_of_a_run_asks_for_metrics_that_a_run_serves() -> None:
    served = {METRIC_PREFIX + name for name in GAUGES}
    for rule in _alerts("mega-train"):
        asked = set(re.findall(r"\bmega_\w+", rule["expr"]))
        assert asked, rule
        assert asked <= served, rule


def test_every_alert_of_a_server_asks_for_metrics_and_labels_that_a_server_has() -> None:
    samples = served_samples()
    for rule in _alerts("mega-serve"):
        asked = re.findall(r"\b(mega_\w+)(?:\{(.*?)\})?", rule["expr"])
        assert asked, rule
        for metric, selectors in asked:
            assert samples[metric], (metric, rule)
            keys = {"instance"}.union(*(labels for labels in samples[metric]))
            for label, value in re.findall(r'(\w+)="(.*?)"', selectors):
                assert value in {labels.get(label) for labels in samples[metric]}, (metric, label, value)
            assert set(re.findall(r"(\w+)(?:=~|!~|!=|=)", selectors)) <= keys, rule
            for grouping in re.findall(r"by \((.*?)\)", rule["expr"]):
                assert set(grouping.split(", ")) <= keys, rule


def test_panels_do_not_cover_each_other() -> None:
    cells = [
        (x, y)
        for position in (panel["gridPos"] for panel in DASHBOARD["panels"])
        for x in range(position["x"], position["x"] + position["w"])
        for y in range(position["y"], position["y"] + position["h"])
    ]
    assert len(cells) == len(set(cells))
    assert max(x for x, _ in cells) < 24, "Grafana's grid is 24 wide"
    assert len({panel["id"] for panel in DASHBOARD["panels"]}) == len(DASHBOARD["panels"])


@pytest.mark.parametrize(
    ("file", "key"), [("prometheus.yml", "scrape_configs"), ("grafana-provisioning.yml", "providers")]
)
def test_what_prometheus_and_grafana_read_is_yaml_with_what_they_look_for(file: str, key: str) -> None:
    assert yaml.safe_load((MONITORING / file).read_text("utf-8"))[key]
