"""Prometheus: what this process waits for, holds and loses, and what the database says of all processes.

Needs the extra ``prometheus``. See ``docs/observability.md``, also for several processes on one address.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final

from prometheus_client import REGISTRY, CollectorRegistry, Counter, Histogram
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from django_sqlsem.contrib.metrics import HOLD_BUCKETS, MOST, WAIT_BUCKETS, Labels, Receivers, Standing
from django_sqlsem.exceptions import BackendError

_LABELS: Final = ("database", "semaphore")


class StandingCollector(Collector):
    """The gauges ``sqlsem_held``, ``sqlsem_waiting`` and ``sqlsem_stale``, and ``sqlsem_up``: 0 if the database failed.

    They are read from the database at each scrape, and are the same in every process.
    """

    def __init__(self, labels: Labels | None = None, *, using: Iterable[str | None] = (None,)) -> None:
        self._standing = Standing(labels or Labels(), using)

    def describe(self) -> Iterator[Metric]:
        """Say what there will be, without asking the database."""
        for figure, text in Standing.FIGURES.items():
            yield GaugeMetricFamily(f"sqlsem_{figure}", text, labels=_LABELS)
        yield self._up()

    def collect(self) -> Iterator[Metric]:
        """Ask the database. While it fails, only ``sqlsem_up`` is there."""
        try:
            found = self._standing.look()
        except BackendError:
            yield self._up(0)
            return
        for figure, text in Standing.FIGURES.items():
            family = GaugeMetricFamily(f"sqlsem_{figure}", text, labels=_LABELS)
            for labels, value in found[figure].items():
                family.add_metric(labels, value)
            yield family
        yield self._up(1)

    def _up(self, value: float | None = None) -> Metric:
        return GaugeMetricFamily("sqlsem_up", "Whether the database of the locks could be asked.", value=value)


class PrometheusReceivers(Receivers):
    """The histograms and counters of this process."""

    def __init__(self, labels: Labels, registry: CollectorRegistry) -> None:
        super().__init__(labels)
        named: dict[str, Any] = {"labelnames": _LABELS, "registry": registry}
        self._waits = Histogram("sqlsem_wait_seconds", "Waits that ended in a permit.", buckets=WAIT_BUCKETS, **named)
        self._holds = Histogram("sqlsem_hold_seconds", "For how long permits were held.", buckets=HOLD_BUCKETS, **named)
        self._timeouts = Counter("sqlsem_timeouts", "Acquires that found no slot in time.", **named)
        named["labelnames"] = (*_LABELS, "reason")
        self._losses = Counter("sqlsem_losses", "Permits that were lost, or forgotten by their program.", **named)

    def waited(self, of: tuple[str, str], seconds: float, name: str, slots: tuple[int, ...]) -> None:
        self._waits.labels(*of).observe(seconds)

    def held(self, of: tuple[str, str], seconds: float) -> None:
        self._holds.labels(*of).observe(seconds)

    def timed_out(self, of: tuple[str, str], seconds: float, name: str) -> None:
        self._timeouts.labels(*of).inc()

    def lost(self, of: tuple[str, str], reason: str) -> None:
        self._losses.labels(*of, reason).inc()


class Installed:
    """What ``install()`` has set up; ``remove()`` undoes it."""

    def __init__(
        self, receivers: PrometheusReceivers, collector: StandingCollector | None, registry: CollectorRegistry
    ) -> None:
        self.receivers = receivers
        self.collector = collector
        self._registry = registry

    def remove(self) -> None:
        """Hear no more signals, and take the metrics out of the registry."""
        self.receivers.disconnect()
        metrics = self.receivers
        for each in (metrics._waits, metrics._holds, metrics._timeouts, metrics._losses, self.collector):
            if each is not None:
                self._registry.unregister(each)


def install(
    registry: CollectorRegistry = REGISTRY,
    *,
    using: Iterable[str | None] | str = (None,),
    label: Callable[[str], str] | None = None,
    templates: Iterable[str] = (),
    most: int = MOST,
    standing: bool = True,
) -> Installed:
    """Count from now on, in ``registry``. Call it once per process, as in an app's ``ready()``.

    ``using``: the aliases whose locks the gauges show; by default the one that ``SQLSEM`` says. ``label``,
    ``templates`` and ``most`` bound the labels: see ``Labels``. ``standing=False`` leaves the gauges out, and with
    them every query: for processes that another process's gauges are enough for, and where the registry that is
    exposed is another one, as with several processes on one address. Raises ``ValueError`` if it was called before.
    """
    labels = Labels(label=label, templates=templates, most=most)
    receivers = PrometheusReceivers(labels, registry)
    collector = None
    if standing:
        collector = StandingCollector(labels, using=(using,) if isinstance(using, str) else using)
        registry.register(collector)
    receivers.connect()
    return Installed(receivers, collector, registry)
