"""Metrics for Prometheus, by its own library, over real databases and processes."""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from django.db import connections
from django.test.utils import CaptureQueriesContext

from django_sqlsem import (
    control,
    mutex,
    semaphore,
    signals,
)
from django_sqlsem.contrib.metrics import OTHER, Labels
from django_sqlsem.exceptions import AcquireTimeoutError
from tests.support.databases import ROOT, child_environment
from tests.support.operators import hold, make_semaphore, wait
from tests.support.processes import Child
from tests.support.threads import wait_until

client = pytest.importorskip("prometheus_client")
from django_sqlsem.contrib import prometheus  # noqa: E402 - it needs the client

pytestmark = pytest.mark.process_side


@contextlib.contextmanager
def installed(**options: Any) -> Iterator[Any]:
    registry = client.CollectorRegistry()
    made = prometheus.install(registry, **options)
    try:
        yield registry
    finally:
        made.remove()


def value(registry: Any, name: str, database: str, label: str, **more: str) -> float | None:
    found: float | None = registry.get_sample_value(name, {"database": database, "semaphore": label, **more})
    return found


def refused(lock: Any) -> None:
    raised: list[BaseException] = []

    def run() -> None:
        try:
            lock.acquire(timeout=0.05)
        except AcquireTimeoutError as error:
            raised.append(error)
        finally:
            connections.close_all()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(30)
    assert raised


def test_waits_holds_timeouts_and_losses(database: str) -> None:
    lock = mutex("reports", using=database)
    with installed(using=database) as registry:
        with lock as permit:
            refused(lock)
            assert value(registry, "sqlsem_held", database, "reports") == 1
            assert permit.lost is None
        with lock as permit:
            control.revoke("reports", 1, permit.token or 0, by="ann", using=database, kill=True)
            wait_until(lambda: permit.lost)
            wait_until(lambda: value(registry, "sqlsem_losses_total", database, "reports", reason="revoked") == 1)
        assert value(registry, "sqlsem_wait_seconds_count", database, "reports") == 2
        assert value(registry, "sqlsem_wait_seconds_bucket", database, "reports", le="0.001") == 2
        assert value(registry, "sqlsem_hold_seconds_count", database, "reports") == 2
        assert (value(registry, "sqlsem_hold_seconds_sum", database, "reports") or 0) >= 0.05
        assert value(registry, "sqlsem_timeouts_total", database, "reports") == 1
        assert value(registry, "sqlsem_held", database, "reports") == 0
        assert registry.get_sample_value("sqlsem_up") == 1


def test_a_forgotten_permit_is_a_loss(database: str) -> None:
    with installed(using=database, standing=False) as registry:
        mutex("left behind", using=database).acquire()
        wait_until(lambda: value(registry, "sqlsem_losses_total", database, "left behind", reason="forgotten") == 1)


def test_what_goes_on_elsewhere_is_seen(database: str) -> None:
    code = "from django_sqlsem import semaphore\nwith semaphore(args[1], 3, using=args[0]): say('in'); listen()\n"
    with installed(using=database, templates=["sync:{user}"]) as registry:
        with Child(code, database, "sync:7") as one, Child(code, database, "sync:8") as two:
            for child in (one, two):
                child.expect("in", timeout=60)
            assert value(registry, "sqlsem_held", database, "sync:{user}") == 2
            assert value(registry, "sqlsem_held", database, "sync:7") is None
            for child in (one, two):
                child.send()
                child.finish()
        assert value(registry, "sqlsem_held", database, "sync:{user}") == 0


@pytest.mark.leaves_held
def test_the_gauges_say_what_the_rows_say(database: str) -> None:
    make_semaphore(database)
    hold(database, slot=1)
    hold(database, slot=2, left=-20)
    wait(database, waiting=4)
    make_semaphore(database, "idle")
    with installed(using=database) as registry:
        found = [value(registry, f"sqlsem_{figure}", database, "reports") for figure in ("held", "stale", "waiting")]
        assert found == [1, 1, 4]
        assert value(registry, "sqlsem_held", database, "idle") is None


def test_a_scrape_asks_little_whatever_the_number_of_names(database: str) -> None:
    for number in range(20):
        make_semaphore(database, f"idle-{number}")
    hold(database, "idle-3", left=0.001)
    with installed(using=database) as registry, CaptureQueriesContext(connections[database]) as few:
        client.generate_latest(registry)
    assert 1 <= len(few) <= 8


def test_labels_are_bounded(database: str) -> None:
    with installed(using=database, most=3) as registry:
        for number in range(6):
            with semaphore(f"by-hand-{number}", using=database):
                pass
        labels = {
            sample.labels["semaphore"]
            for family in registry.collect()
            for sample in family.samples
            if "semaphore" in sample.labels
        }
        assert labels == {"by-hand-0", "by-hand-1", "by-hand-2", OTHER}
        assert value(registry, "sqlsem_wait_seconds_count", database, OTHER) == 3


def test_labels() -> None:
    labels = Labels(templates=["sync:{user.pk}", "tenant"], most=3)
    assert [labels.of_name(name) for name in ("sync:1", "tenant:4", "x", "y", "sync:")] == [
        "sync:{user.pk}",
        "tenant",
        "x",
        OTHER,
        OTHER,
    ]
    assert labels.given == ("sync:{user.pk}", "tenant", "x", OTHER)
    assert Labels(label=lambda name: name[:1]).of_name("abc") == "a"
    with pytest.raises(ValueError, match="most must be"):
        Labels(most=0)
    with pytest.raises(TypeError, match="label must be a function"):
        Labels(label="x")  # type: ignore[arg-type]


def test_a_database_that_fails_is_down_and_the_rest_is_there(committed: None) -> None:
    with installed(using="default") as registry:
        with semaphore("before", using="default"):
            pass
        with connections["default"].cursor() as cursor:
            cursor.execute("ALTER TABLE sqlsem_slot RENAME TO sqlsem_elsewhere")
        try:
            text = client.generate_latest(registry).decode()
        finally:
            with connections["default"].cursor() as cursor:
                cursor.execute("ALTER TABLE sqlsem_elsewhere RENAME TO sqlsem_slot")
        assert "sqlsem_up 0.0" in text
        assert "sqlsem_held{" not in text
        assert 'sqlsem_wait_seconds_count{database="default",semaphore="before"} 1.0' in text
        assert "sqlsem_up 1.0" in client.generate_latest(registry).decode()


def test_an_exporters_thread_leaves_no_connection_open(database: str) -> None:
    left: list[Any] = []

    def scrape() -> None:
        client.generate_latest(registry)
        left.append(connections[database].connection)

    with installed(using=database) as registry:
        thread = threading.Thread(target=scrape, daemon=True)
        thread.start()
        thread.join(30)
    assert left == [None]


def test_removed_metrics_hear_nothing(committed: None) -> None:
    with installed(using="default") as registry:
        assert signals.permit_acquired.heard
    assert not signals.permit_acquired.heard
    assert not list(registry.collect())


MULTIPROCESS = """
import sys
import django
django.setup()
from django_sqlsem import mutex
from django_sqlsem.contrib import prometheus
prometheus.install(standing=False)
for _ in range(3):
    with mutex("shared"):
        pass
"""


def test_several_processes_on_one_address(committed: None, tmp_path: Any) -> None:
    environment = child_environment(PROMETHEUS_MULTIPROC_DIR=str(tmp_path))
    for _ in range(2):
        done = subprocess.run(
            [sys.executable, "-c", MULTIPROCESS], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120
        )
        assert done.returncode == 0, done.stderr
    code = """
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.multiprocess import MultiProcessCollector
import django
django.setup()
from django_sqlsem.contrib.prometheus import StandingCollector
registry = CollectorRegistry()
MultiProcessCollector(registry)
registry.register(StandingCollector())
print(generate_latest(registry).decode())
"""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120
    )
    assert 'sqlsem_wait_seconds_count{database="default",semaphore="shared"} 6.0' in done.stdout, done.stderr
    assert "sqlsem_up 1.0" in done.stdout
    assert os.listdir(tmp_path)


def exported() -> dict[str, set[str]]:
    """Return what is exported, with its labels: by the names that queries use."""
    with installed() as registry:
        lock = semaphore("exported", 1, timeout=0)
        with lock:
            refused(lock)
        found: dict[str, set[str]] = {}
        for family in registry.collect():
            for sample in family.samples:
                found.setdefault(sample.name, set()).update(sample.labels)
    return found | {"sqlsem_losses_total": {"database", "semaphore", "reason"}}


@pytest.mark.leaves_held
def test_the_dashboard_and_the_alerts_ask_for_what_is_exported(committed: None) -> None:
    yaml = pytest.importorskip("yaml")
    folder = ROOT / "docs" / "grafana"
    dashboard = json.loads((folder / "dashboard.json").read_text(encoding="utf-8"))
    alerts = yaml.safe_load((folder / "alerts.yaml").read_text(encoding="utf-8"))
    rules = [rule for group in alerts["groups"] for rule in group["rules"]]
    queries = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    queries += [each["query"] for each in dashboard["templating"]["list"] if each["type"] == "query"]
    queries += [rule["expr"] for rule in rules]
    known = exported()
    asked = set()
    for query in queries:
        names = re.findall(r"sqlsem_\w+", query)
        assert names, query
        asked.update(names)
        labels = {label for group in re.findall(r"by \(([^)]*)\)", query) for label in re.split(r",\s*", group)}
        labels |= set(re.findall(r"(\w+)=~?\"", query)) | set(re.findall(r"label_values\(.*, (\w+)\)", query))
        for name in names:
            assert labels <= known[name], query
        assert query.count("(") == query.count(")"), query
    assert {name.removesuffix("_created") for name in asked} <= set(known)
    of_families = {re.sub(r"_(bucket|count|sum|total|created)$", "", name) for name in known}
    assert {re.sub(r"_(bucket|count|total)$", "", name) for name in asked} == of_families, "every metric is shown"
    used = {label for rule in rules for label in re.findall(r"\$labels\.(\w+)", str(rule["annotations"]))}
    assert used == {"semaphore", "reason"}
    assert len({panel["id"] for panel in dashboard["panels"]}) == len(dashboard["panels"])
