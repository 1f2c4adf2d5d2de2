"""What the pages of the admin's overview cost with few and with very many names: queries, and milliseconds.

``python -m benchmarks.overview --database postgres --names 10 1000 100000``. Each name has three slots that have been
used; of a hundred slots one or so is held, of ten thousand one or so is stale, and some names are waited for or paused.
``--days 7``: there is a row for each minute of 7 days of each name with a queue. ``--templates 3``: three templates
have made all of them, and there is a row for each, which opens.
"""

from __future__ import annotations

import argparse
import io
import os
import sys
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.cli import number, one_of, say

PAGES = {
    "trouble first": "",
    "by name": "?o=1",
    "most held first": "?o=-2",
    "last 24 hours": "?range=24h",
    "last 7 days": "?range=7d",
    "state held": "?state=held",
    "state stale": "?state=stale",
    "state waiting": "?state=waiting",
    "state paused": "?state=paused",
    "state draining": "?state=draining",
    "one kind": "?kind=mutex",
    "search, few": "?q=7777",
    "search, letters": "?q=CUSTOMER+77",
    "search, none": "?q=nothing",
    "page 500": "?p=500",
    "page 500, by name": "?p=500&o=1",
    "refreshed part": "",
    "JSON": "snapshot.json",
    "JSON, page 500": "snapshot.json?p=500",
    "one template": "?template=sync:{user.pk}:0",
    "one template, p. 50": "?template=sync:{user.pk}:0&p=50",
    "locks list": "",
    "locks list, JSON": "",
}
HEADERS = "page                 queries median, ms least, ms  CPU, ms database, ms   kB"
SLOTS = 3
LEASE = 60_000_000
BATCH = 1000
#: How long what is held stays held: the run must not outlast it.
LASTING = 86_400_000_000


def main(arguments: list[str] | None = None) -> int:
    """Measure and print. Returns 1 if the server does not answer."""
    from benchmarks import servers as server_side

    parser = argparse.ArgumentParser(prog="python -m benchmarks.overview", description=__doc__)
    add = parser.add_argument
    add("--database", default="postgres", type=one_of(["sqlite", "postgres", "mariadb"], "database"))
    add("--names", nargs="+", default=[10, 1000, 100_000], type=number(int, 10), metavar="N", help="how many names")
    add("--requests", default=15, type=number(int, 1), metavar="N", help="how often each page is asked for")
    add("--templates", default=0, type=number(int, 0), metavar="N", help="how many templates have made them")
    add("--days", default=0, type=number(int, 0), metavar="N", help="days of minutes of each name with a queue")
    add("--explain", action="store_true", help="print how PostgreSQL reads each page of the largest table")
    options = parser.parse_args(arguments)
    os.environ["SQLSEM_BENCH_OVERVIEW"] = options.database
    with server_side.one(options.database, "benchmarks.overview_settings") as entries:
        if not entries:
            return 1
        measure(options)
    return 0


def measure(options: argparse.Namespace) -> None:
    """Fill the tables to each size, and ask for every page."""
    import django
    from django.core.management import call_command
    from django.db import connections

    django.setup()
    call_command("migrate", verbosity=0, skip_checks=True)
    client = operator()
    try:
        before = 0
        for count in sorted(map(int, options.names)):
            fill(before, count, int(options.templates), int(options.days))
            before = count
            say(f"\n{count:,} names ({os.getloadavg()[0]:.1f} processes want one of {os.cpu_count()} CPUs)")
            say(HEADERS)
            for title, query in PAGES.items():
                say(ask(client, title, query, int(options.requests)))
        if options.explain:
            explain(client)
    finally:
        connections.close_all()


def operator() -> Any:
    """Return a client that is logged in, in this process."""
    from django.contrib.auth.models import User
    from django.test import Client

    client = Client()
    client.force_login(User.objects.create_superuser("operator"))
    return client


def url(query: str) -> str:
    """Return the address of a page."""
    from django.urls import reverse

    return reverse("admin:sqlsem_semaphorerow_changelist") + query


def ask(client: Any, title: str, query: str, times: int) -> str:
    """Return one line of the table: what a page takes, asked for this many times."""
    headers = {"X-Sqlsem-Fragment": "1"} if title == "refreshed part" else {}
    from django_sqlsem.admin import live

    seconds, cpu, sql = [], [], []
    for turn in range(times + 1):
        live.forget()  # what another one was shown a moment ago
        spent: list[float] = []
        with noted(lambda _sql, took, spent=spent: spent.append(took)):
            used, started = cpu_seconds(), time.perf_counter()
            response = listed(title) if title.startswith("locks") else client.get(url(query), headers=headers)
            took = time.perf_counter() - started
        if response.status_code in (302, 400) and "p=500" in query:
            return f"{title:20} there are fewer pages"
        if response.status_code != 200:
            raise SystemExit(f"{url(query)} answers {response.status_code}")
        if turn:  # the first one reads templates
            seconds.append(took)
            cpu.append(cpu_seconds() - used)
            sql.append(sum(spent))
    return (
        f"{title:20} {len(spent):7} {1000 * median(seconds):10.1f} {1000 * min(seconds):9.1f} {1000 * median(cpu):8.1f}"
        f" {1000 * median(sql):12.1f} {len(response.content) / 1000:4.0f}"
    )


def listed(title: str) -> Any:
    """Return what ``manage.py locks list`` prints, as an answer."""
    from django.core.management import call_command
    from django.http import HttpResponse

    out = io.StringIO()
    call_command("locks", "list", *(["--format", "json"] if "JSON" in title else []), stdout=out)
    return HttpResponse(out.getvalue())


def cpu_seconds() -> float:
    """Return the CPU seconds of this process and, on PostgreSQL, of the server's process that answers it.

    On an idle machine they are what a page takes; on a busy one they say what it would take on an idle one.
    """
    from django.db import connection

    used = time.process_time()
    if connection.vendor == "postgresql":
        connection.ensure_connection()
        path = Path(f"/proc/{connection.connection.info.backend_pid}/schedstat")
        if path.exists():
            used += int(path.read_text().split()[0]) / 1e9
    return used


def noted(note: Any) -> Any:
    """Call ``note`` with each statement and how long it took."""
    from django.db import connection

    def wrapper(execute: Any, sql: str, parameters: Any, many: bool, context: Any) -> Any:
        started = time.perf_counter()
        try:
            return execute(sql, parameters, many, context)
        finally:
            note((sql, parameters), time.perf_counter() - started)

    return connection.execute_wrapper(wrapper)


def explain(client: Any) -> None:
    """Print the plans of what takes longest on each page."""
    from django.db import connection

    for title, query in PAGES.items():
        seen: list[Any] = []
        with noted(lambda sql, took, seen=seen: seen.append((took, *sql))):
            client.get(url(query))
        for took, sql, parameters in sorted(seen, key=lambda each: -each[0])[:3]:
            say(f"\n{title}: {1000 * took:.1f} ms: {' '.join(sql.split())[:160]}")
            with connection.cursor() as cursor:
                cursor.execute(f"EXPLAIN (ANALYZE, COSTS OFF, SUMMARY OFF) {sql}", parameters)
                for (row,) in cursor.fetchall():
                    say(f"    {row[:200]}")


def fill(first: int, count: int, templates: int = 0, days: int = 0) -> None:
    """Make the names from ``first`` on, up to ``count`` of them in all."""
    from django.db import connection

    from django_sqlsem.core.names import resource_for
    from django_sqlsem.database.dialects import dialect_for
    from django_sqlsem.models import MinuteRow, SemaphoreRow, SlotRow, WaiterRow

    with connection.cursor() as cursor:
        now = dialect_for(connection).now(cursor)
    boot = dialect_for(connection).boot_id
    who = {"host": "web1.example.org", "pid": 4711, "thread": "MainThread", "label": "GET /sync/", "boot_id": boot}
    numbers: Iterator[int] = iter(range(first, count))
    while chunk := list(islice(numbers, BATCH)):
        names = {each: resource_for(f"sync:customer {each * 7919 % count}:{each}", "semaphore") for each in chunk}
        SemaphoreRow.objects.bulk_create(
            SemaphoreRow(
                key=name.key, name=name.name, kind="mutex" if each % 10 == 7 else "semaphore", declared_slots=SLOTS,
                paused=each % 4000 == 3, template=f"sync:{{user.pk}}:{each % templates}" if templates else "",
            )
            for each, name in names.items()
        )  # fmt: skip
        slots = []
        for each, name in names.items():
            for slot in range(1, SLOTS + 1):
                serial = SLOTS * each + slot
                held = serial % 150 == 5 or (slot == 1 and each % 8000 == 3)
                gone = serial % 15_000 == 6
                expires = now + LASTING if held else now - 1 if gone else None
                slots.append(
                    SlotRow(
                        semaphore_id=name.key, slot=slot, token=now - serial, acquired_us=now - 10_000_000,
                        expires_us=expires, lease_us=LEASE, held_us=12_000, permit_id=f"{serial:032x}"[:32],
                        process_id="a" * 32, channel="sqlsem_0123456789abcdef", **who,
                    )
                )  # fmt: skip
        SlotRow.objects.bulk_create(slots, batch_size=BATCH)
        minute = dialect_for(connection).token_clock(now) // 60_000_000 * 60_000_000
        MinuteRow.objects.bulk_create(
            MinuteRow(
                key=name.key, minute_us=minute, writer=1, until_us=minute + LASTING, granted=3, turned_away=1,
                template=f"sync:{{user.pk}}:{each % templates}" if templates else "",
            )
            for each, name in names.items()
        )  # fmt: skip
        busy = [name.key for each, name in names.items() if each % 250 == 1]
        for day in range(days):
            MinuteRow.objects.bulk_create(
                (
                    MinuteRow(
                        key=key, minute_us=minute - (1440 * day + nth) * 60_000_000, writer=2,
                        until_us=minute + LASTING, granted=3, turned_away=nth % 7 == 0, held_us=40_000_000,
                        longest_hold_us=20_000_000,
                    )
                    for key in busy for nth in range(1, 1441)
                ),
                batch_size=10 * BATCH,
            )  # fmt: skip
        WaiterRow.objects.bulk_create(
            WaiterRow(ticket=f"{each:032x}", semaphore_id=name.key, queued_us=now, expires_us=now + LASTING,
                      waiting=2, **who)
            for each, name in names.items() if each % 250 == 1
        )  # fmt: skip
    with connection.cursor() as cursor:
        analyze = {
            "postgresql": "VACUUM ANALYZE",
            "mysql": "ANALYZE TABLE sqlsem_semaphore, sqlsem_slot, sqlsem_minute",
        }
        cursor.execute(analyze.get(connection.vendor, "ANALYZE"))


if __name__ == "__main__":
    sys.exit(main())
