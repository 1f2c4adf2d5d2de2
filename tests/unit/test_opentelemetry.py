"""Metrics and traces by OpenTelemetry's own SDK, with exporters in memory."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from django.db import connections
from django.http import HttpResponse

from django_sqlsem import mutex
from django_sqlsem.exceptions import AcquireTimeoutError
from tests.support.operators import hold, make_semaphore, wait

pytest.importorskip("opentelemetry.sdk")
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode

from django_sqlsem.contrib import opentelemetry

pytestmark = pytest.mark.process_side


class Telemetry:
    """What was exported."""

    def __init__(self) -> None:
        self.reader = InMemoryMetricReader()
        self.meters = MeterProvider([self.reader])
        self.spans = InMemorySpanExporter()
        self.tracers = TracerProvider()
        self.tracers.add_span_processor(SimpleSpanProcessor(self.spans))
        self.receivers: Any = None

    def install(self, **options: Any) -> None:
        self.receivers = opentelemetry.install(self.meters, self.tracers, **options)

    def points(self) -> dict[str, list[Any]]:
        """Return the points of all metrics by their names."""
        found = self.reader.get_metrics_data()
        metrics = [
            metric
            for resource in (found.resource_metrics if found else [])
            for scope in resource.scope_metrics
            for metric in scope.metrics
        ]
        return {metric.name: list(metric.data.data_points) for metric in metrics}

    def span(self, name: str) -> Any:
        return next(span for span in self.spans.get_finished_spans() if span.name == name)


@pytest.fixture
def telemetry() -> Iterator[Telemetry]:
    made = Telemetry()
    yield made
    if made.receivers is not None:
        made.receivers.disconnect()
    made.meters.shutdown()
    made.tracers.shutdown()


def test_operators_see_the_trace_of_a_request(telemetry: Telemetry, committed: None, rf: Any) -> None:
    telemetry.install(standing=False)
    shown = []

    @mutex("traced")
    def view(request: Any) -> HttpResponse:
        (holder,) = mutex("traced").status().holders
        shown.append(holder.label)
        return HttpResponse()

    view(rf.get("/x/"))
    with telemetry.tracers.get_tracer("test").start_as_current_span("a request") as span:
        view(rf.get("/x/", headers={"X-Request-ID": "r-1"}))
    assert shown == ["GET /x/", f"GET /x/ [{span.get_span_context().trace_id:032x}]"]


def in_thread(work: Any) -> list[BaseException]:
    raised: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except BaseException as error:
            raised.append(error)
        finally:
            connections.close_all()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(30)
    return raised


def test_metrics(database: str, telemetry: Telemetry) -> None:
    telemetry.install(using=database)
    lock = mutex("reports", using=database)
    with lock:
        (error,) = in_thread(lambda: lock.acquire(timeout=0.05))
        assert isinstance(error, AcquireTimeoutError)
        assert [point.value for point in telemetry.points()["sqlsem.held"]] == [1]
    points = telemetry.points()
    (waited,), (held,), (timeouts,) = points["sqlsem.wait"], points["sqlsem.hold"], points["sqlsem.timeouts"]
    assert waited.attributes == {"sqlsem.database": database, "sqlsem.semaphore": "reports"}
    assert (waited.count, held.count, timeouts.value) == (1, 1, 1)
    assert held.sum >= 0.05
    assert 0.025 in waited.explicit_bounds
    assert [point.value for point in points["sqlsem.held"]] == [0]


@pytest.mark.leaves_held
def test_gauges_are_of_one_look(database: str, telemetry: Telemetry) -> None:
    telemetry.install(using=database)
    make_semaphore(database)
    hold(database, slot=1)
    hold(database, slot=2, left=-20)
    wait(database, waiting=4)
    for _ in range(2):
        points = telemetry.points()
        found = [point.value for name in ("held", "stale", "waiting") for point in points[f"sqlsem.{name}"]]
        assert found == [1, 1, 4]


def test_a_wait_is_a_span_of_whoever_waited(database: str, telemetry: Telemetry) -> None:
    telemetry.install(using=database, standing=False)
    lock, tracer = mutex("spans", using=database), telemetry.tracers.get_tracer("test")
    started, waits = threading.Event(), []

    def work() -> None:
        with tracer.start_as_current_span("request"):
            started.set()
            with lock.acquire(timeout=30) as permit:
                waits.append(permit.waited)

    permit = lock.acquire()
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    assert started.wait(30)
    deadline = time.monotonic() + 30
    while not lock.status().waiting:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    permit.release()
    thread.join(30)
    request, wait_span = telemetry.span("request"), telemetry.span("wait spans")
    assert wait_span.parent.span_id == request.context.span_id
    assert (wait_span.end_time - wait_span.start_time) / 1e9 == pytest.approx(waits[0], rel=0.01)
    assert [event.name for event in request.events] == ["sqlsem.acquired", "sqlsem.released"]
    assert request.events[0].attributes["sqlsem.name"] == "spans"
    assert request.events[0].attributes["sqlsem.slots"] == (1,)


def test_a_refusal_is_an_error_of_its_own_span(database: str, telemetry: Telemetry) -> None:
    telemetry.install(using=database, standing=False)
    lock, tracer = mutex("refused", using=database), telemetry.tracers.get_tracer("test")

    def work() -> None:
        with tracer.start_as_current_span("request"):
            lock.acquire(timeout=0.05)

    with lock:
        (error,) = in_thread(work)
    assert isinstance(error, AcquireTimeoutError)
    assert telemetry.span("wait refused").status.status_code is StatusCode.ERROR
    assert "sqlsem.timed_out" in [event.name for event in telemetry.span("request").events]


def test_outside_of_a_trace_there_are_no_spans(database: str, telemetry: Telemetry) -> None:
    telemetry.install(using=database, standing=False)
    lock = mutex("plain", using=database)
    with lock:
        in_thread(lambda: lock.acquire(timeout=0.01))
    assert telemetry.spans.get_finished_spans() == ()


def test_a_coroutines_trace(database: str, telemetry: Telemetry) -> None:
    telemetry.install(using=database, standing=False)
    tracer = telemetry.tracers.get_tracer("test")

    async def work() -> None:
        with tracer.start_as_current_span("request"):
            async with mutex("async", using=database):
                pass

    asyncio.run(work())
    assert [event.name for event in telemetry.span("request").events] == ["sqlsem.acquired", "sqlsem.released"]


def test_a_database_that_fails_has_no_figures(committed: None, telemetry: Telemetry, caplog: Any) -> None:
    telemetry.install(using="default")
    with connections["default"].cursor() as cursor:
        cursor.execute("ALTER TABLE sqlsem_slot RENAME TO sqlsem_elsewhere")
    try:
        points = telemetry.points()
    finally:
        with connections["default"].cursor() as cursor:
            cursor.execute("ALTER TABLE sqlsem_elsewhere RENAME TO sqlsem_slot")
    assert not any(points.get(f"sqlsem.{name}") for name in ("held", "stale", "waiting"))
    assert "There are no figures of the locks" in caplog.text
