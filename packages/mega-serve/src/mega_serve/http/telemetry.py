"""Traces for OpenTelemetry, only if the operator names an endpoint.

FastAPI would configure exporters from the environment (FASTAPI_OTEL_AUTO_CONFIGURE, OTEL_*): always off here,
so that no variable makes the server open a connection.
"""

from __future__ import annotations

from fastapi.telemetry import TelemetryConfig

from mega_schema.errors import ConfigError


def telemetry_config(traces_endpoint: str) -> TelemetryConfig:
    """Return FastAPI's settings.

    Args:
        traces_endpoint: URL of an OTLP collector (HTTP); "": nothing is recorded.

    Raises:
        ConfigError: the exporter is not installed.
    """
    # bodies and exception messages may quote prompts: no logs and no spans of operations, ever
    config: TelemetryConfig = {
        "auto_configure": False,
        "tracing": False,
        "metrics": False,
        "logs": False,
        "operation_spans": False,
    }
    if not traces_endpoint:
        return config
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError:
        hint = "pip install opentelemetry-sdk opentelemetry-exporter-otlp-proto-http"
        raise ConfigError("--otlp-traces-endpoint", "OpenTelemetry is not installed", hint=hint) from None
    provider = TracerProvider(resource=Resource({"service.name": "mega-serve"}))
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=traces_endpoint)))
    return {**config, "tracing": True, "tracer_provider": provider}
