"""The dashboard under infra/ queries exactly the metrics that a run exports."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
import yaml

from mega_train.telemetry.gauges import GAUGES, LABELS
from mega_train.telemetry.prometheus import METRIC_PREFIX
from tests.repo_rules.repository import ROOT

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
            has = {"instance", LABELS.get(metric.removeprefix(METRIC_PREFIX), "instance")}
            assert set(re.findall(r"(\w+)(?:=~|!~|!=|=)", labels)) <= has, query
            assert query.count("(") == query.count(")")


def test_every_alert_asks_for_metrics_that_a_run_serves() -> None:
    scrape = yaml.safe_load((MONITORING / "prometheus.yml").read_text("utf-8"))
    (group,) = yaml.safe_load((MONITORING / scrape["rule_files"][0]).read_text("utf-8"))["groups"]
    assert len(group["rules"]) >= 5
    served = {METRIC_PREFIX + name for name in GAUGES}
    for rule in group["rules"]:
        asked = set(re.findall(r"\bmega_\w+", rule["expr"]))
        assert asked, rule
        assert asked <= served, rule
        assert rule["labels"]["severity"] in ("critical", "warning")
        assert rule["annotations"]["summary"]


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
