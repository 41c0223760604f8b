"""OpenTelemetry: gauges of the run as metrics, sent by OTLP over HTTP to a collector."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from mega_schema.app.install_hint import install_hint
from mega_schema.errors import ConfigError
from mega_train.config import LoggingConfig
from mega_train.telemetry.events import Event
from mega_train.telemetry.gauges import GAUGES, LABELS, gauge_values

if TYPE_CHECKING:
    from opentelemetry.sdk.metrics.export import MetricReader

METRIC_PREFIX = "mega_train."


class OpenTelemetry:
    """Sets gauges that the SDK sends every minute, or every OTEL_METRIC_EXPORT_INTERVAL."""

    def __init__(self, reader: MetricReader) -> None:
        from opentelemetry.sdk.metrics import MeterProvider
        from opentelemetry.sdk.resources import Resource

        resource = Resource.create({"service.name": "mega-train"})
        self._provider = MeterProvider([reader], resource=resource, shutdown_on_exit=False)
        meter = self._provider.get_meter("mega_train")
        self._gauges = {
            name: meter.create_gauge(METRIC_PREFIX + name, description=GAUGES[name]) for name in GAUGES
        }

    @classmethod
    def from_config(cls, log: LoggingConfig) -> OpenTelemetry:
        """Connect to the collector of --opentelemetry-endpoint.

        Raises:
            ConfigError: the SDK or its exporter is not installed.
        """
        try:
            from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
            from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader
        except ImportError:
            hint = install_hint("mega-train", "opentelemetry")
            raise ConfigError("--opentelemetry-endpoint", "needs OpenTelemetry's SDK", hint=hint) from None
        where = f"{log.opentelemetry_endpoint}".rstrip("/") + "/v1/metrics"
        return cls(PeriodicExportingMetricReader(OTLPMetricExporter(endpoint=where)))

    def on_event(self, event: Event) -> None:
        for name, value, labels in gauge_values(event, time.time()):
            self._gauges[name].set(value, dict(zip(LABELS.get(name, ()), labels, strict=True)))

    def close(self) -> None:
        """Send the remaining values."""
        self._provider.shutdown()
