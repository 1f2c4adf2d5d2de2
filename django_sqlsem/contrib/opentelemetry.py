"""OpenTelemetry: metrics of waits, holds, timeouts and losses, and what a request or task waited for in its trace.

Needs the extra ``opentelemetry``, and a project that sets up the SDK and its exporters. See ``docs/observability.md``.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from typing import Any, Final

from opentelemetry import metrics, trace
from opentelemetry.metrics import CallbackOptions, Observation
from opentelemetry.trace import Status, StatusCode

from django_sqlsem.contrib.metrics import HOLD_BUCKETS, MOST, WAIT_BUCKETS, Labels, Receivers, Standing
from django_sqlsem.core import identity
from django_sqlsem.exceptions import BackendError

logger = logging.getLogger("django_sqlsem")

SCOPE: Final = "django_sqlsem"


class TelemetryReceivers(Receivers):
    """The metrics of this process, and the events and spans of its traces."""

    def __init__(self, labels: Labels, meter: metrics.Meter, tracer: trace.Tracer) -> None:
        super().__init__(labels)
        self._tracer = tracer
        self._waits = meter.create_histogram(
            "sqlsem.wait",
            "s",
            "Waits that ended in a permit.",
            explicit_bucket_boundaries_advisory=list(WAIT_BUCKETS),
        )
        self._holds = meter.create_histogram(
            "sqlsem.hold",
            "s",
            "For how long permits were held.",
            explicit_bucket_boundaries_advisory=list(HOLD_BUCKETS),
        )
        self._timeouts = meter.create_counter("sqlsem.timeouts", "{acquire}", "Acquires that found no slot in time.")
        self._losses = meter.create_counter(
            "sqlsem.losses", "{permit}", "Permits that were lost, or forgotten by their program."
        )

    def waited(self, of: tuple[str, str], seconds: float, name: str, slots: tuple[int, ...]) -> None:
        """A permit was granted after so long: an event of the current span, and a span of its own if it waited."""
        self._waits.record(seconds, _attributes(of))
        told: dict[str, Any] = {"sqlsem.name": name, "sqlsem.slots": slots, "sqlsem.waited": seconds}
        trace.get_current_span().add_event("sqlsem.acquired", told)
        if seconds > 0:
            self._span(of, seconds, told)

    def held(self, of: tuple[str, str], seconds: float) -> None:
        self._holds.record(seconds, _attributes(of))
        trace.get_current_span().add_event("sqlsem.released", {**_attributes(of), "sqlsem.held": seconds})

    def timed_out(self, of: tuple[str, str], seconds: float, name: str) -> None:
        self._timeouts.add(1, _attributes(of))
        told: dict[str, Any] = {"sqlsem.name": name, "sqlsem.waited": seconds}
        trace.get_current_span().add_event("sqlsem.timed_out", told)
        self._span(of, seconds, told, Status(StatusCode.ERROR, "no slot became free in time"))

    def lost(self, of: tuple[str, str], reason: str) -> None:
        self._losses.add(1, _attributes(of) | {"sqlsem.reason": reason})

    def _span(self, of: tuple[str, str], seconds: float, told: dict[str, Any], status: Status | None = None) -> None:
        """Add a wait that is over to the current trace, if there is one."""
        if not trace.get_current_span().is_recording():
            return
        now = time.time_ns()
        span = self._tracer.start_span(
            f"wait {of[1]}", start_time=now - round(seconds * 1e9), attributes=_attributes(of) | told
        )
        if status is not None:
            span.set_status(status)
        span.end(now)


def install(
    meter_provider: metrics.MeterProvider | None = None,
    tracer_provider: trace.TracerProvider | None = None,
    *,
    using: Iterable[str | None] | str = (None,),
    label: Callable[[str], str] | None = None,
    templates: Iterable[str] = (),
    most: int = MOST,
    standing: bool = True,
) -> TelemetryReceivers:
    """Report from now on, to the given providers or the global ones. Call it once per process.

    ``using``: the aliases whose locks the gauges show; by default the one that ``SQLSEM`` says. ``label``,
    ``templates`` and ``most`` bound the labels: see ``Labels``. ``standing=False`` leaves the gauges out, and with
    them every query. Returns the receivers, whose ``disconnect()`` ends it.
    """
    labels = Labels(label=label, templates=templates, most=most)
    meter = metrics.get_meter(SCOPE, meter_provider=meter_provider)
    tracer = trace.get_tracer(SCOPE, tracer_provider=tracer_provider)
    receivers = TelemetryReceivers(labels, meter, tracer)
    if standing:
        _gauges(meter, Standing(labels, (using,) if isinstance(using, str) else using))
    receivers.connect()
    identity.trace_ids[SCOPE] = _trace_id
    return receivers


def _trace_id() -> str:
    """Return the id of the trace that runs: operators are shown it with the requests that hold and wait."""
    context = trace.get_current_span().get_span_context()
    return trace.format_trace_id(context.trace_id) if context.is_valid else ""


def _gauges(meter: metrics.Meter, standing: Standing) -> None:
    """Make the gauges. An exporter asks for each of them by itself: one look at the database serves all."""
    left: dict[str, dict[tuple[str, str], int]] = {}

    def callback(figure: str) -> Callable[[CallbackOptions], Iterable[Observation]]:
        def observe(options: CallbackOptions) -> Iterable[Observation]:
            if figure not in left:
                left.clear()
                try:
                    left.update(standing.look())
                except BackendError as error:  # no figures are better than wrong ones
                    logger.warning("There are no figures of the locks: %s", error)
                    return []
            return [Observation(value, _attributes(of)) for of, value in left.pop(figure).items()]

        return observe

    for figure, text in Standing.FIGURES.items():
        meter.create_observable_gauge(f"sqlsem.{figure}", [callback(figure)], "{slot}", text)


def _attributes(of: tuple[str, str]) -> dict[str, Any]:
    return {"sqlsem.database": of[0], "sqlsem.semaphore": of[1]}
