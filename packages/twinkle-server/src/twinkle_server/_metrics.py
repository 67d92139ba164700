"""What Prometheus scrapes: requests, calls, queues, sessions, adapters. Labels are routes, verbs and models, never what a caller chose."""

from __future__ import annotations

from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

if TYPE_CHECKING:
    from ._service import Service

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_REQUEST_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 10, 60)
_CALL_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300, 1800)


class Metrics:
    """The metrics of one service."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._requests = Counter("twinkle_http_requests", "HTTP requests", ["method", "route", "status"], registry=self.registry)
        self._request_s = Histogram(
            "twinkle_http_request_seconds",
            "From a request's first byte to its answer's last",
            ["route"],
            buckets=_REQUEST_BUCKETS,
            registry=self.registry,
        )
        self._calls = Counter("twinkle_calls", "Calls of models and samplers that have ended", ["queue", "kind", "status"], registry=self.registry)
        self._call_s = Histogram("twinkle_call_seconds", "What calls ran", ["queue", "kind"], buckets=_CALL_BUCKETS, registry=self.registry)
        self._wait_s = Histogram(
            "twinkle_call_wait_seconds", "What calls waited in their queue", ["queue"], buckets=_CALL_BUCKETS, registry=self.registry
        )
        self._waiting = Gauge("twinkle_queue_waiting", "Calls that wait", ["queue"], registry=self.registry)
        self._running = Gauge("twinkle_queue_running", "Calls that run", ["queue"], registry=self.registry)
        self._ready = Gauge("twinkle_ready", "1 where a model, a sampler or the database is ready", ["part"], registry=self.registry)
        self._sessions = Gauge("twinkle_sessions", "Live sessions", registry=self.registry)
        self._loras = Gauge("twinkle_loras", "Adapters that can be in memory, and that are", ["state"], registry=self.registry)

    def request(self, method: str, route: str, status: int, seconds: float) -> None:
        """A request has been answered. route: its template, '' where none matched."""
        self._requests.labels(method, route, str(status)).inc()
        self._request_s.labels(route).observe(seconds)

    def call(self, queue: str, kind: str, status: str, *, wait_s: float, run_s: float) -> None:
        """A call has ended, as 'done' or 'failed'."""
        self._calls.labels(queue, kind, status).inc()
        self._call_s.labels(queue, kind).observe(run_s)
        self._wait_s.labels(queue).observe(wait_s)

    def text(self, service: Service) -> bytes:
        """Everything in Prometheus's text format. Blocks."""
        for name, queue in service.calls.queues.items():
            self._waiting.labels(name).set(queue.length)
            self._running.labels(name).set(len(queue.running))
        for part, state in service.checks().items():
            self._ready.labels(part).set(state == "ok")
        self._sessions.set(service.sessions.count)
        largest, used = service.capacity
        self._loras.labels("max").set(largest)
        self._loras.labels("used").set(used)
        return generate_latest(self.registry)
