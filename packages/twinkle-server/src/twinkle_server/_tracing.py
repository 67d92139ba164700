"""OpenTelemetry spans of requests and calls, where the extra `otel` is installed and `tracing` is on; else nothing."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.metadata import version
from typing import Any

from ._errors import ConfigError

INSTALL = "pip install 'twinkle-server[otel]'"


class Tracing:
    """Spans. The exporter is OpenTelemetry's own choice, by its environment variables (OTEL_EXPORTER_OTLP_ENDPOINT, OTEL_SERVICE_NAME, ...).

    is_on: without, every method does nothing and nothing of OpenTelemetry is imported. provider: a tracer provider to use instead (tests, embedding).

    Raises ConfigError when it is on and OpenTelemetry is not installed.
    """

    def __init__(self, is_on: bool, provider: Any = None) -> None:
        self._tracer: Any = None
        self._own: Any = None
        if not is_on and provider is None:
            return
        try:
            from opentelemetry import propagate, trace
        except ImportError as error:
            raise ConfigError(f"tracing is on, and OpenTelemetry is not installed: {INSTALL}") from error
        if provider is None:
            provider = self._own = _provider()
        self._tracer = trace.get_tracer("twinkle_server", version("twinkle-server"), tracer_provider=provider)
        self._extract = propagate.extract
        self._kinds = {"server": trace.SpanKind.SERVER, "internal": trace.SpanKind.INTERNAL}
        self._failed = trace.StatusCode.ERROR

    @property
    def is_on(self) -> bool:
        """Whether spans are made."""
        return self._tracer is not None

    @contextmanager
    def request(self, name: str, headers: Mapping[str, str], attributes: Mapping[str, Any]) -> Iterator[Any]:
        """The span of a request; the caller's `traceparent` is its parent. Yields the span, or None."""
        if self._tracer is None:
            yield None
            return
        with self._tracer.start_as_current_span(name, self._extract(headers), self._kinds["server"], attributes=dict(attributes)) as span:
            yield span

    @contextmanager
    def call(self, kind: str, attributes: Mapping[str, Any]) -> Iterator[Any]:
        """The span of a call while it runs, in its queue's thread. Yields the span, or None."""
        if self._tracer is None:
            yield None
            return
        with self._tracer.start_as_current_span(kind, None, self._kinds["internal"], attributes=dict(attributes)) as span:
            yield span

    def fail(self, span: Any, text: str) -> None:
        """Mark a span as one of something that failed."""
        if span is not None:
            span.set_status(self._failed, text)

    def close(self) -> None:
        """Send what has not been sent."""
        if self._own is not None:
            self._own.shutdown()


def _provider() -> Any:
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import SERVICE_NAME, Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        raise ConfigError(f"tracing is on, and OpenTelemetry's SDK and exporter are not installed: {INSTALL}") from error
    named = {} if os.environ.get("OTEL_SERVICE_NAME") else {SERVICE_NAME: "twinkle-server"}
    provider = TracerProvider(resource=Resource.create(named))
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    return provider
