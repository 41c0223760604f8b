"""Remote monitoring: Prometheus, OpenTelemetry, Weights & Biases, CodeCarbon."""

from __future__ import annotations

import csv
import importlib.util
import io
import math
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import ModuleType
from typing import Any
from urllib.request import urlopen

import pytest

from mega_model.distributed.mesh import World
from mega_schema.app.install_hint import install_hint
from mega_schema.errors import ConfigError
from mega_train.config import CheckpointConfig, LoggingConfig, RunConfig
from mega_train.telemetry.codecarbon import CodeCarbon
from mega_train.telemetry.events import CheckpointSaved, Event, LogLine, StepEnd, TrainStart, ValidationEnd
from mega_train.telemetry.factory import open_observers
from mega_train.telemetry.gauges import GAUGES
from mega_train.telemetry.prometheus import METRIC_PREFIX, Prometheus
from mega_train.telemetry.wandb import WeightsAndBiases

BEGAN = TrainStart(
    iteration=10,
    iterations=100,
    consumed_samples=40,
    family="gpt",
    parameters=1234,
    layout={"tp": 2, "pp": 1, "dp": 4},
    world=8,
    global_batch_size=4,
    seq_length=16,
    device="cpu",
    config={"log": {"tensorboard_dir": Path("t"), "interval": 5}, "data": {"path": ("a", "b")}},
)
STEP = StepEnd(
    iteration=20,
    consumed_samples=80,
    loss=2.4,
    learning_rate=3e-4,
    grad_norm=1.25,
    skipped_samples=8,
    loss_scale=1.0,
    global_batch_size=4,
    seq_length=16,
    seconds=0.5,
)
LINE = LogLine(
    iteration=20,
    iterations=100,
    consumed_samples=80,
    loss=2.5,
    learning_rate=3e-4,
    grad_norm=1.25,
    skipped=0,
    loss_scale=1.0,
    iteration_seconds=0.5,
    tokens_per_second=12345.5,
    seconds=10.0,
    global_batch_size=4,
    seq_length=16,
    tflops=412.25,
    mfu=0.5,
    memory={"reserved": 7000, "allocated": 5000, "allocated_count": 9},
    timers={"forward-compute": 0.25, "optimizer": 0.125},
)
VALIDATED = ValidationEnd(iteration=20, consumed_samples=80, loss=2.0, perplexity=7.5, seconds=1.0)
SAVED = CheckpointSaved(iteration=20, blocked_seconds=0.75, write_seconds=1.5)
EVENTS: list[Event] = [BEGAN, STEP, LINE, VALIDATED, SAVED]
BERT_EVENTS: list[Event] = [
    replace(STEP, loss_terms={"lm loss": 2.0, "sop loss": 0.4}),
    replace(VALIDATED, loss_terms={"lm loss": 1.5, "sop loss": 0.5}),
]


def _text(port: int) -> str:
    """The page of metrics in Prometheus' text format."""
    with urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        text: str = answer.read().decode()
    return text


def _page(port: int) -> dict[tuple[str, str], float]:
    """What a scrape finds: by name and label."""
    from prometheus_client.parser import text_string_to_metric_families

    text = _text(port)
    return {
        (sample.name, "".join(sample.labels.values())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_a_scrape_has_the_known_values_of_the_run_only() -> None:
    seen = Prometheus(LoggingConfig(prometheus_port=0))
    try:
        assert _page(seen.port) == {}
        seen.on_event(BEGAN)
        assert _page(seen.port)[METRIC_PREFIX + "iteration", ""] == 10
        for event in (*EVENTS[1:], *BERT_EVENTS):
            seen.on_event(event)
        page = _page(seen.port)
    finally:
        seen.close()
    assert {name for name, _ in page} == {METRIC_PREFIX + name for name in GAUGES}, "every gauge has been set"
    assert page[METRIC_PREFIX + "loss", ""] == 2.4
    assert page[METRIC_PREFIX + "tokens_per_second", ""] == 12345.5
    assert page[METRIC_PREFIX + "eta_seconds", ""] == 40
    assert page[METRIC_PREFIX + "loss_term", "sop loss"] == 0.4
    assert page[METRIC_PREFIX + "validation_loss", "validation"] == 2.0
    assert (
        page[METRIC_PREFIX + "last_checkpoint_iteration", ""],
        page[METRIC_PREFIX + "checkpoint_failed", ""],
    ) == (20, 0)
    assert page[METRIC_PREFIX + "memory_bytes", "reserved"] == 7000
    assert page[METRIC_PREFIX + "phase_seconds", "optimizer"] == 0.125
    assert (METRIC_PREFIX + "memory_bytes", "allocated_count") not in page
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind(("127.0.0.1", seen.port))  # it has been given back


def test_a_metric_has_its_unit_and_a_validation_its_split_in_the_text_that_is_scraped() -> None:
    seen = Prometheus(LoggingConfig(prometheus_port=0))
    try:
        for event in (*EVENTS, BERT_EVENTS[1], replace(VALIDATED, split="test", loss=1.75)):
            seen.on_event(event)
        lines = _text(seen.port).splitlines()
    finally:
        seen.close()
    values = [line.removeprefix(METRIC_PREFIX) for line in lines if not line.startswith("#")]
    assert [line for line in values if line.startswith("validation_")] == [
        'validation_loss{split="validation"} 2.0',
        'validation_loss{split="test"} 1.75',
        'validation_perplexity{split="validation"} 7.5',
        'validation_perplexity{split="test"} 7.5',
        'validation_loss_term{split="validation",term="lm loss"} 1.5',
        'validation_loss_term{split="validation",term="sop loss"} 0.5',
    ]
    assert set(values) >= {
        "learning_rate 0.0003",
        "grad_norm 1.25",
        "seq_length 16.0",
        "iteration_seconds 0.5",
        "eta_seconds 40.0",
        'phase_seconds{phase="optimizer"} 0.125',
        "last_checkpoint_iteration 20.0",
        "checkpoint_blocked_seconds 0.75",
        "checkpoint_write_seconds 1.5",
        "checkpoint_failed 0.0",
    }


def test_a_save_that_failed_leaves_the_newest_checkpoint_where_it_was() -> None:
    seen = Prometheus(LoggingConfig(prometheus_port=0))
    try:
        for event in (SAVED, replace(SAVED, iteration=40, error="No space left on device")):
            seen.on_event(event)
        page = _page(seen.port)
    finally:
        seen.close()
    assert (
        page[METRIC_PREFIX + "last_checkpoint_iteration", ""],
        page[METRIC_PREFIX + "checkpoint_failed", ""],
    ) == (20, 1)


def test_a_loss_that_is_no_number_leaves_the_gauge_as_it_was() -> None:
    seen = Prometheus(LoggingConfig(prometheus_port=0))
    try:
        for event in (BEGAN, STEP, replace(STEP, iteration=21, loss=None, grad_norm=None)):
            seen.on_event(event)
        page = _page(seen.port)
    finally:
        seen.close()
    assert (page[METRIC_PREFIX + "iteration", ""], page[METRIC_PREFIX + "loss", ""]) == (21, 2.4)


def test_a_port_that_somebody_has_is_refused_in_one_line_before_anything_begins(tmp_path: Path) -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        run = RunConfig(
            log=LoggingConfig(prometheus_port=port), checkpoint=CheckpointConfig(save=tmp_path / "run")
        )
        with pytest.raises(ConfigError) as caught, open_observers(run, World(), io.StringIO()):
            pass
    assert str(caught.value) == (
        f"--prometheus-port: cannot be listened on (Address already in use): found 127.0.0.1:{port}, "
        "wanted an address of this machine, and a free port; hint: --prometheus-port 0 selects a free port"
    )
    assert list(tmp_path.iterdir()) == []


def test_an_address_of_another_machine_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"^--prometheus-port: cannot be listened on \(.*found 192.0.2.1:0"):
        Prometheus(LoggingConfig(prometheus_port=0, prometheus_host="192.0.2.1"))


@contextmanager
def _collector() -> Iterator[tuple[str, list[tuple[str, bytes]]]]:
    """An OTLP collector on this machine: its address, and path and body of what it was sent."""
    requests: list[tuple[str, bytes]] = []

    class Take(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            requests.append((self.path, self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(200)
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Take)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", requests
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def test_a_collector_is_sent_the_gauges_over_otlp() -> None:
    from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest

    with _collector() as (address, requests):
        run = RunConfig(log=LoggingConfig(opentelemetry_endpoint=address + "/"))
        with open_observers(run, World(), io.StringIO()) as watch:
            for event in (*EVENTS, *BERT_EVENTS):
                watch.on_event(event)
    ((path, body),) = requests
    assert path == "/v1/metrics"
    (resource,) = ExportMetricsServiceRequest.FromString(body).resource_metrics
    assert ("service.name", "mega-train") in {
        (a.key, a.value.string_value) for a in resource.resource.attributes
    }
    sent = {
        (metric.name, "".join(a.value.string_value for a in point.attributes)): point.as_double
        or point.as_int
        for metric in resource.scope_metrics[0].metrics
        for point in metric.gauge.data_points
    }
    assert {name for name, _ in sent} == {f"mega_train.{name}" for name in GAUGES}
    assert sent["mega_train.loss", ""] == 2.4
    assert sent["mega_train.phase_seconds", "optimizer"] == 0.125


class StandIn(ModuleType):
    """A module that remembers how it was called, in the place of one that is not installed."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.calls: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)

        def call(*args: Any, **options: Any) -> StandIn:
            self.calls.append((name, args, options))
            return self

        return call


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> Any:
    def put(name: str) -> StandIn:
        module = StandIn(name)
        monkeypatch.setitem(sys.modules, name, module)
        return module

    return put


def test_weights_and_biases_is_told_megatrons_names_with_the_samples_beside(
    stand_in: Any, tmp_path: Path
) -> None:
    module = stand_in("wandb")
    log = LoggingConfig(wandb_project="p", tensorboard_interval=2)
    seen = WeightsAndBiases(RunConfig(log=log, checkpoint=CheckpointConfig(save=tmp_path / "small")))
    assert module.calls == []
    for event in (BEGAN, replace(STEP, iteration=19), STEP, LINE, VALIDATED, SAVED):
        seen.on_event(event)
    seen.close()
    _, init, *logged, finish = module.calls
    assert init[0] == "init"
    assert {key: init[2][key] for key in ("project", "name", "dir")} == {
        "project": "p",
        "name": "small",
        "dir": str(tmp_path / "small" / "wandb"),
    }
    assert (tmp_path / "small" / "wandb").is_dir()
    assert init[2]["config"] == {
        "log": {"tensorboard_dir": "t", "interval": 5},
        "data": {"path": ["a", "b"]},
        "parameters": 1234,
        "layout": {"tp": 2, "pp": 1, "dp": 4},
        "world_size": 8,
    }
    step = {"learning-rate": 3e-4, "lm loss": 2.4, "loss-scale": 1.0, "grad-norm": 1.25}
    assert logged == [
        ("log", ({**step, "skipped-train-samples": 8, "samples vs steps": 80},), {"step": 20}),
        ("log", ({"lm loss validation": 2.0},), {"step": 20}),
    ], "every second step; the line of the log has nothing that was asked for"
    assert finish == ("finish", (), {})


def test_weights_and_biases_itself_takes_a_run_offline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    if importlib.util.find_spec("wandb") is None:
        pytest.skip("wandb is not installed; a stand-in is told the same in the test above")
    monkeypatch.setenv("WANDB_MODE", "offline")
    run = RunConfig(log=LoggingConfig(wandb_project="p", wandb_exp_name="n", wandb_save_dir=tmp_path))
    with open_observers(run, World(), io.StringIO()) as watch:
        for event in EVENTS:
            watch.on_event(event)
    assert len(list(tmp_path.glob("wandb/offline-run-*/*.wandb"))) == 1
    assert [record for record in caplog.records if record.name == "mega.train"] == []


def test_codecarbon_measures_from_the_beginning_and_leaves_what_it_has_at_every_save(
    stand_in: Any, tmp_path: Path
) -> None:
    module = stand_in("codecarbon")
    seen = CodeCarbon(LoggingConfig(codecarbon_dir=tmp_path / "e", codecarbon_country="DEU"), 8)
    for event in EVENTS:
        seen.on_event(event)
    seen.close()
    assert [name for name, _, _ in module.calls] == ["OfflineEmissionsTracker", "start", "flush", "stop"]
    settings = module.calls[0][2]
    assert (settings["country_iso_code"], settings["output_dir"]) == ("DEU", str(tmp_path / "e"))
    assert settings["output_file"] == "emissions-008.csv"


def test_one_rank_of_a_machine_measures_it(stand_in: Any, tmp_path: Path) -> None:
    run = RunConfig(log=LoggingConfig(codecarbon_dir=tmp_path))
    for world, count in ((World(9, 16, 1), 0), (World(8, 16, 0), 1)):
        module = stand_in("codecarbon")
        with open_observers(run, world, io.StringIO()) as watch:
            watch.on_event(BEGAN)
        assert [name for name, _, _ in module.calls].count("start") == count


def test_codecarbon_itself_writes_a_table(tmp_path: Path) -> None:
    if importlib.util.find_spec("codecarbon") is None:
        pytest.skip("codecarbon is not installed; a stand-in is told the same in the test above")
    with open_observers(
        RunConfig(log=LoggingConfig(codecarbon_dir=tmp_path)), World(), io.StringIO()
    ) as watch:
        watch.on_event(BEGAN)
        watch.on_event(SAVED)
    with (tmp_path / "emissions-000.csv").open(encoding="utf-8", newline="") as table:
        rows = list(csv.DictReader(table))
    assert {row["country_iso_code"] for row in rows} == {"FRA"}
    assert all(math.isfinite(float(row["emissions"])) for row in rows)


@pytest.mark.parametrize(
    ("log", "absent", "line"),
    [
        (
            LoggingConfig(prometheus_port=0),
            "prometheus_client",
            f"--prometheus-port: needs prometheus-client; hint: {install_hint('mega-train', 'prometheus')}",
        ),
        (
            LoggingConfig(opentelemetry_endpoint="http://localhost:1"),
            "opentelemetry.exporter.otlp.proto.http.metric_exporter",
            "--opentelemetry-endpoint: needs OpenTelemetry's SDK; "
            'hint: pip install -e "packages/mega-train[opentelemetry]"',
        ),
        (
            LoggingConfig(wandb_project="p"),
            "wandb",
            '--wandb-project: needs wandb; hint: pip install -e "packages/mega-train[wandb]"',
        ),
        (
            LoggingConfig(codecarbon_dir=Path("c")),
            "codecarbon",
            '--codecarbon-dir: needs codecarbon; hint: pip install -e "packages/mega-train[codecarbon]"',
        ),
    ],
)
def test_a_package_that_is_not_installed_is_named(
    log: LoggingConfig, absent: str, line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, absent, None)
    with pytest.raises(ConfigError) as caught, open_observers(RunConfig(log=log), World(), io.StringIO()):
        pass
    assert str(caught.value) == line
    assert list(tmp_path.iterdir()) == []
