"""Prometheus metrics of the run at http://HOST:PORT/metrics of rank 0."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from mega_schema.app.install_hint import install_hint
from mega_schema.errors import ConfigError
from mega_train.config import LoggingConfig
from mega_train.telemetry.events import Event
from mega_train.telemetry.gauges import GAUGES, LABELS, gauge_values

if TYPE_CHECKING:
    from prometheus_client import Gauge

METRIC_PREFIX = "mega_train_"


class Prometheus:
    """Serves the gauges during the run.

    A gauge without a value is not exported.

    Attributes:
        port, address: port and URL of the server.
    """

    def __init__(self, log: LoggingConfig) -> None:
        """Start the HTTP server.

        Raises:
            ConfigError: prometheus-client is not installed, or host and port cannot be listened on.
        """
        try:
            from prometheus_client import CollectorRegistry, start_http_server
        except ImportError:
            hint = install_hint("mega-train", "prometheus")
            raise ConfigError("--prometheus-port", "needs prometheus-client", hint=hint) from None
        assert log.prometheus_port is not None
        self._registry = CollectorRegistry()
        self._gauges: dict[str, Gauge] = {}
        try:
            self._server, self._thread = start_http_server(
                log.prometheus_port, log.prometheus_host, self._registry
            )
        except OSError as error:
            raise ConfigError(
                "--prometheus-port",
                f"cannot be listened on ({error.strerror})",
                found=f"{log.prometheus_host}:{log.prometheus_port}",
                wanted="an address of this machine, and a free port",
                hint="--prometheus-port 0 selects a free port",
            ) from None
        self.port = self._server.server_port
        self.address = f"http://{log.prometheus_host}:{self.port}/metrics"

    def on_event(self, event: Event) -> None:
        for name, value, labels in gauge_values(event, time.time()):
            gauge = self._gauge(name)
            (gauge.labels(*labels) if labels else gauge).set(value)

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def _gauge(self, name: str) -> Gauge:
        if name not in self._gauges:
            from prometheus_client import Gauge

            labels = LABELS.get(name, ())
            self._gauges[name] = Gauge(METRIC_PREFIX + name, GAUGES[name], labels, registry=self._registry)
        return self._gauges[name]
