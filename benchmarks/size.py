"""What a step costs with few and with very many names: milliseconds, statements, and how much the database reads.

``python -m benchmarks.size --database postgres --names 1000 100000 1000000``. Beside the other runs, which compare
contenders, this one fills the tables in SQL and asks PostgreSQL for the plan of each statement as it was run
(``auto_explain``): rows and buffers do not depend on what else the machine does.

Each name has three slots and was used days ago, so that housekeeping has set them aside; one name in five more than 30
days ago. A template has made every second name. Then 10,000 of the names are waited for; and 50 names have a year of
history, a row for every 30 minutes.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import json
import os
import random
import secrets
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from statistics import median
from typing import Any, ClassVar, NamedTuple

from benchmarks.cli import number, one_of, say
from benchmarks.overview import cpu_seconds, operator, url

SLOTS, MANY_SLOTS = 3, 1000
WAITED_FOR = 10_000
HISTORY_NAMES, EVERY_MINUTES, YEAR_MINUTES = 50, 30, 525_600
DAY = 86_400_000_000
TEMPLATE = "customer:{customer.pk}"
CHUNK = 100_000
#: A row that was read by a scan of more rows than this is shown with its table.
WIDE = 5000


class Step(NamedTuple):
    """One step: ``run`` does it the n-th time, and returns how long that took, in seconds."""

    title: str
    run: Callable[[int], float]
    times: int = 15


class Found(NamedTuple):
    """What a step costs. Rows, buffers and wide scans are PostgreSQL's."""

    seconds: float
    cpu: float
    statements: int | None = None
    rows: int | None = None
    buffers: int | None = None
    wide: str = ""

    def cells(self) -> list[str]:
        counts = ["-" if each is None else f"{each:,}" for each in (self.statements, self.rows, self.buffers)]
        return [f"{1000 * self.seconds:.2f}", f"{1000 * self.cpu:.2f}", *counts, self.wide]


def main(arguments: list[str] | None = None) -> int:
    """Measure and print. Returns 1 if the server does not answer."""
    from benchmarks import servers as server_side

    parser = argparse.ArgumentParser(prog="python -m benchmarks.size", description=__doc__)
    add = parser.add_argument
    add("--database", default="postgres", type=one_of(["sqlite", "postgres", "mariadb"], "database"))
    add("--names", nargs="+", default=[1000, 100_000, 1_000_000], type=number(int, 100), metavar="N", help="how many")
    add("--only", default="", metavar="WORDS", help="only steps whose titles have this in them")
    add("--without", nargs="+", default=[], metavar="WHAT", type=one_of(["waiters", "history"], "part"))
    options = parser.parse_args(arguments)
    os.environ["SQLSEM_BENCH_OVERVIEW"] = options.database
    with server_side.one(options.database, "benchmarks.overview_settings") as entries:
        if not entries:
            return 1
        measure(options)
    return 0


def measure(options: argparse.Namespace) -> None:
    """Fill the tables to each size, and do every step."""
    import django
    from django.core.management import call_command
    from django.db import connections

    from benchmarks.report import markdown

    django.setup()
    from django_sqlsem import lifecycle

    call_command("migrate", verbosity=0, skip_checks=True)
    head = ["", "median, ms", "CPU, ms", "statements", "rows", "buffers", "wide scans"]
    found: dict[str, dict[str, Found]] = {}
    before, client = 0, operator()

    def do(size: str, steps: list[Step]) -> None:
        lines = {}
        for step in steps:
            if options.only in step.title:
                lines[step.title] = found.setdefault(step.title, {})[size] = cost(step)
        say(f"\n{size} ({os.getloadavg()[0]:.1f} processes want one of {os.cpu_count()} CPUs)\n")
        say(markdown(head, [[title, *each.cells()] for title, each in lines.items()]))

    try:
        for count in sorted(map(int, options.names)):
            began = time.monotonic()
            fill_names(before, count)
            before = count
            say(f"\nFilled in {time.monotonic() - began:.0f} s.")
            do(f"{count:,} names", [*lock_steps(count), *page_steps(client), *chore_steps()])
        do(f"{MANY_SLOTS:,} slots", slot_steps())
        if "waiters" not in options.without:
            waited = min(WAITED_FOR, before // 2)
            fill_waiters(waited)
            steps = [*lock_steps(before), *page_steps(client)[:3], *chore_steps()]
            do(f"{before:,} names, {waited:,} of them waited for", steps)
        if "history" not in options.without:
            began = time.monotonic()
            rows = fill_minutes()
            say(f"\nFilled in {time.monotonic() - began:.0f} s.")
            do(f"{rows:,} minutes", history_steps(client))
    finally:
        lifecycle.stop_all()
        connections.close_all()


def cost(step: Step) -> Found:
    """Do a step again and again; then once more with the plans of what it sends."""
    from django.db import connection

    step.run(0)  # opens connections, prepares statements, reads templates
    took, cpu = [], []
    for nth in range(1, step.times + 1):
        used = cpu_seconds()
        took.append(step.run(nth))
        cpu.append(cpu_seconds() - used)
    if connection.vendor != "postgresql":
        return Found(median(took), median(cpu))
    with plans_noted() as plans:
        step.run(step.times + 1)  # connections are opened anew
        plans.clear()
        step.run(step.times + 2)
        told = list(plans)
    scans = [scan for plan in told for scan in scans_of(plan["Plan"])]
    wide: Counter[str] = Counter()
    for scan, rows in scans:
        if rows > WIDE:
            wide[f"{scan['Node Type']} {scan['Relation Name']}"] += rows
    return Found(
        median(took),
        median(cpu),
        len(told),
        sum(rows for _, rows in scans),
        sum(plan["Plan"]["Shared Hit Blocks"] + plan["Plan"]["Shared Read Blocks"] for plan in told),
        ", ".join(f"{scan}: {rows:,}" for scan, rows in wide.items()),
    )


class plans_noted:  # noqa: N801 - used as a function
    """Within the block PostgreSQL tells the plan of every statement of this process, as it was run."""

    OPTIONS: ClassVar = {
        "session_preload_libraries": "auto_explain",
        "auto_explain.log_min_duration": "0",
        "auto_explain.log_analyze": "on",
        "auto_explain.log_buffers": "on",
        "auto_explain.log_timing": "off",
        "auto_explain.log_format": "json",
        "client_min_messages": "log",
        "log_min_messages": "panic",
    }

    def __init__(self, alias: str = "default") -> None:
        self.alias = alias
        self.plans: list[dict[str, Any]] = []

    def __enter__(self) -> list[dict[str, Any]]:
        from django.db import connections
        from django.db.backends.signals import connection_created

        self._anew()
        options = connections[self.alias].settings_dict["OPTIONS"]
        self.before = options.get("options", "")
        options["options"] = " ".join([self.before, *(f"-c {key}={value}" for key, value in self.OPTIONS.items())])
        connection_created.connect(self._listen)
        return self.plans

    def __exit__(self, *exc_info: object) -> None:
        from django.db import connections
        from django.db.backends.signals import connection_created

        connection_created.disconnect(self._listen)
        connections[self.alias].settings_dict["OPTIONS"]["options"] = self.before
        self._anew()

    def _anew(self) -> None:
        from django.db import connections

        from django_sqlsem import lifecycle

        lifecycle.stop_all()
        connections[self.alias].close()

    def _listen(self, connection: Any, **kwargs: Any) -> None:
        if connection.alias == self.alias:
            connection.connection.add_notice_handler(self._note)

    def _note(self, notice: Any) -> None:
        _, found, plan = (notice.message_primary or "").partition("plan:\n")
        if found:
            self.plans.append(json.loads(plan))


def scans_of(plan: dict[str, Any]) -> Iterator[tuple[dict[str, Any], int]]:
    """Yield each scan of a table in a plan, with how many rows it has looked at."""
    if "Relation Name" in plan and "Scan" in plan["Node Type"]:
        removed = plan.get("Rows Removed by Filter", 0) + plan.get("Rows Removed by Index Recheck", 0)
        yield plan, round((plan["Actual Rows"] + removed) * plan["Actual Loops"])
    for part in plan.get("Plans", ()):
        yield from scans_of(part)


# The steps.


def timed(work: Callable[[], object]) -> float:
    """Return how long it took, in seconds."""
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def idle_name(each: int) -> str:
    """Return one of the names that the tables are filled with."""
    return f"customer:{each:07}"


def lock_steps(count: int) -> list[Step]:
    """Return the steps of those who use locks."""
    from django.db import connection

    from django_sqlsem import semaphore
    from django_sqlsem.core.names import key_of
    from django_sqlsem.models import SlotRow, WaiterRow

    rng = random.Random(7)  # noqa: S311

    def pair(name: str) -> float:
        one = semaphore(name, SLOTS, timeout=None)
        return timed(lambda: one.acquire().release())

    def with_a_waiter(nth: int) -> float:
        """Release a slot that goes to somebody who waits: a process that nobody hears."""
        name = f"waited:{count}:{nth}"
        permit = semaphore(name, 1, timeout=None).acquire()
        now = database_now()
        WaiterRow.objects.create(
            ticket=secrets.token_hex(16), semaphore_id=key_of(name), queued_us=now, expires_us=now + DAY, slots=1,
            lease_us=60_000_000, host="web9", pid=1, process_id="f" * 32, boot_id=boot_id(), channel="nobody",
        )  # fmt: skip
        took = timed(permit.release)
        freed = SlotRow.objects.filter(semaphore=key_of(name), process_id="f" * 32).update(expires_us=None)
        assert freed, "it was not handed over"  # noqa: S101
        return took

    def idle() -> str:
        return idle_name(rng.randrange(count // 2, count))  # the others may be held

    assert connection.alias == "default"  # noqa: S101
    return [
        Step("pair, one name", lambda nth: pair("hot"), 200),
        Step("pair, an idle name", lambda nth: pair(idle()), 200),
        Step("pair, a new name", lambda nth: pair(f"new:{count}:{secrets.token_hex(8)}"), 100),
        Step("release to a waiter", with_a_waiter, 50),
    ]


def page_steps(client: Any) -> list[Step]:
    """Return the steps of operators."""
    from django.core.management import call_command

    def page(query: str, address: str = "") -> Callable[[int], float]:
        def get(nth: int) -> float:
            from django_sqlsem.admin import live

            live.forget()  # what another one was shown a moment ago
            began = time.perf_counter()
            response = client.get(address or url(query))
            took = time.perf_counter() - began
            assert response.status_code == 200, (query, response.status_code)  # noqa: S101
            return took

        return get

    def listed(*arguments: str) -> Callable[[int], float]:
        return lambda nth: timed(lambda: call_command("locks", "list", *arguments, stdout=io.StringIO()))

    return [
        Step("overview", page("")),
        Step("overview, a template", page(f"?template={TEMPLATE}")),
        Step("locks list --busy", listed("--busy"), 5),
        Step("overview, page 5", page("?p=5")),
        Step("overview, search", page("?q=0000777")),
        Step("overview, state held", page("?state=held")),
        Step("page of a lock", page("", url("").rstrip("/") + f"/{hashed(idle_name(2))}/change/")),
        Step("locks list, one name", listed("--name", idle_name(4))),
    ]


def chore_steps() -> list[Step]:
    """Return the steps of every process, now and then."""
    from django_sqlsem import semaphore
    from django_sqlsem.backends import get_backend
    from django_sqlsem.database.sessions import OwnSession

    backend, permits = get_backend("default"), {}
    from tests.support.keepers import keeper_of

    def session() -> OwnSession:
        made: OwnSession = OwnSession("default")
        made.run(lambda cursor: None)
        return made

    def with_session(work: Callable[[OwnSession], object]) -> Callable[[int], float]:
        def run(nth: int) -> float:
            own = session()
            try:
                return timed(lambda: work(own))
            finally:
                own.close()

        return run

    def renew(own: OwnSession) -> None:
        backend.renew(own, permits["held"])

    def renewal(nth: int) -> float:
        permit = semaphore("renewed", SLOTS, timeout=None).acquire()
        permits["held"] = [each.acquired for each in keeper_of("default").acquisitions.values() if each.has_slots]
        try:
            return with_session(renew)(nth)
        finally:
            permit.release()

    return [
        Step("renewal of a permit", renewal),
        Step("housekeeping: the dead", with_session(lambda own: backend.end_dead(own, witness=True, proofs={}))),
        Step("housekeeping: acts", with_session(backend.end_acts)),
        Step(
            "forgetting, one look",
            with_session(lambda own: backend.forget(own, seconds=30 * 86400.0, after=secrets.token_hex(16))),
            5,
        ),
    ]


def slot_steps() -> list[Step]:
    """Return the steps of a name with very many slots, all but one of which are held."""
    from django_sqlsem import control, semaphore
    from django_sqlsem.core.names import key_of
    from django_sqlsem.models import SlotRow

    many = semaphore("many slots", MANY_SLOTS, timeout=None)
    many.acquire().release()
    now = database_now()

    def fill(free: int) -> None:
        rows = SlotRow.objects.filter(semaphore=key_of("many slots"))
        rows.update(expires_us=now + DAY, acquired_us=now, lease_us=60_000_000, boot_id=boot_id(), process_id="e" * 32)
        rows.filter(slot__gt=MANY_SLOTS - free).update(expires_us=None)

    def last_free(nth: int) -> float:
        fill(1)
        return timed(lambda: many.acquire().release())

    def resize(nth: int) -> float:
        return timed(lambda: control.set_slots("many slots", MANY_SLOTS - 1 - nth % 2, by="operator"))

    return [
        Step("pair, the last free slot", last_free),
        Step("another number of slots", resize),
    ]


def history_steps(client: Any) -> list[Step]:
    """Return the steps of those who look back."""
    from django.db import connection

    from django_sqlsem import queries
    from django_sqlsem.database.sessions import OwnSession, briefly
    from django_sqlsem.history import writer
    from django_sqlsem.models import MinuteRow

    names = [idle_name(each) for each in range(HISTORY_NAMES)]

    def one(window: float, step: float) -> Callable[[int], float]:
        return lambda nth: timed(lambda: queries.minutes(names[nth % HISTORY_NAMES], window=window, step=step))

    def all_of_them(window: float, step: float) -> Callable[[int], float]:
        def read(nth: int) -> float:
            now = queries.history_clock()
            return timed(lambda: queries.trends(names, [TEMPLATE], window=window, step=step, now=now))

        return read

    def prune(nth: int) -> float:
        own, now = OwnSession("default"), token_now() + 100 * DAY  # the oldest have run out then
        own.run(lambda cursor: None)
        try:
            return timed(lambda: briefly(own, lambda cursor: writer.delete_old(cursor, MinuteRow, now), 5))
        finally:
            own.close()

    assert connection.alias == "default"  # noqa: S101
    day = 86400.0
    return [
        Step("a name, 24 hours", one(day, 1800)),
        Step("a name, 7 days", one(7 * day, 7200)),
        Step("a name, 30 days", one(30 * day, 86400)),
        Step("50 names and their template, 24 hours", all_of_them(day, 1800)),
        Step("50 names and their template, 7 days", all_of_them(7 * day, 7200), 5),
        Step("50 names and their template, 30 days", all_of_them(30 * day, 86400), 5),
        Step("deletion of 200 minutes", prune),
    ]


# What fills the tables, in SQL.


def database_now() -> int:
    """Return the database's clock."""
    from django.db import connection

    from django_sqlsem.database.dialects import dialect_for

    with connection.cursor() as cursor:
        return dialect_for(connection).now(cursor)


def token_now() -> int:
    """Return the clock that tokens follow."""
    from django.db import connection

    from django_sqlsem.database.dialects import dialect_for

    return dialect_for(connection).token_clock(database_now())


def boot_id() -> str:
    """Return the boot that rows are stamped with."""
    from django.db import connection

    from django_sqlsem.database.dialects import dialect_for

    return dialect_for(connection).boot_id


def hashed(name: str) -> str:
    """Return the key of a name, as the texts below make it."""
    return hashlib.sha256(name.encode()).hexdigest()[:32]


def insert(model: Any, source: str, **values: object) -> None:
    """Insert rows of a model from a source of rows: a text is SQL, all else a value; other columns as by default."""
    from django.db import connection

    columns, picked = [], []
    for field in model._meta.concrete_fields:
        if field.name == "id":
            continue
        value = values.get(field.attname, values.get(field.name, None if field.null else repr(field.get_default())))
        columns.append(str(field.column))
        picked.append("NULL" if value is None else str(value).replace("None", "NULL"))
    with connection.cursor() as cursor:
        into = f"{model._meta.db_table} ({', '.join(columns)})"
        cursor.execute(f"INSERT INTO {into} SELECT {', '.join(picked)} FROM {source}")  # noqa: S608 - texts of ours


def numbers(first: int, count: int, name: str = "n") -> str:
    """Return a source of the whole numbers from ``first`` on up to ``count``, as a column."""
    from django.db import connection

    if connection.vendor == "postgresql":
        return f"generate_series({first}::bigint, {count - 1}) {name}({name})"
    if connection.vendor == "mysql":
        return f"(SELECT seq AS {name} FROM seq_{first}_to_{count - 1}) {name}"  # noqa: S608
    rows = f"SELECT {first} UNION ALL SELECT {name} + 1 FROM r WHERE {name} < {count - 1}"  # noqa: S608
    return f"(WITH RECURSIVE r({name}) AS ({rows}) SELECT {name} FROM r) {name}"  # noqa: S608


def name_sql(n: str = "n.n") -> tuple[str, str]:
    """Return ``idle_name()`` and its key in SQL."""
    from django.db import connection

    if connection.vendor == "postgresql":
        name = f"'customer:' || lpad({n}::text, 7, '0')"
        return name, f"substr(encode(sha256(convert_to({name}, 'UTF8')), 'hex'), 1, 32)"
    if connection.vendor == "mysql":
        name = f"CONCAT('customer:', LPAD({n}, 7, '0'))"
        return name, f"LEFT(SHA2({name}, 256), 32)"
    connection.ensure_connection()
    connection.connection.create_function("hashed", 1, hashed, deterministic=True)
    name = f"('customer:' || substr('0000000' || {n}, -7))"
    return name, f"hashed({name})"


def analyze(*tables: str) -> None:
    """Have the database look at its tables, as it does by itself after a while."""
    from django.db import connection

    texts = {"postgresql": "VACUUM ANALYZE", "mysql": f"ANALYZE TABLE {', '.join(tables)}"}
    with connection.cursor() as cursor:
        cursor.execute(texts.get(connection.vendor, "ANALYZE"))
        cursor.fetchall() if connection.vendor == "mysql" else None


def fill_names(first: int, count: int) -> None:
    """Make the names from ``first`` on, up to ``count`` of them in all."""
    from django_sqlsem.models import SemaphoreRow, SlotRow

    name, key = name_sql()
    now, token = database_now(), token_now()
    for start in range(first, count, CHUNK):
        some = numbers(start, min(count, start + CHUNK))
        insert(
            SemaphoreRow, some, key=key, name=name, kind="'semaphore'", declared_slots=SLOTS, declared_us=now,
            template=f"CASE WHEN n.n % 2 = 0 THEN '{TEMPLATE}' ELSE '' END",
        )  # fmt: skip
        insert(
            SlotRow, f"{some} CROSS JOIN {numbers(1, SLOTS + 1, 's')}", semaphore_id=key, slot="s.s",
            token=f"{token} - (CASE WHEN n.n % 5 = 1 THEN 40 ELSE 2 END) * {DAY} - n.n",
            acquired_us=f"{now - DAY} + n.n", lease_us=0, held_us=12_000, host="'web1.example.org'",
            pid=4711, thread="'MainThread'", label="'GET /sync/'", process_id=f"'{'a' * 32}'", boot_id=f"'{boot_id()}'",
            channel="'sqlsem_0123456789abcdef'", beacon="TRUE",
        )  # fmt: skip
    analyze("sqlsem_semaphore", "sqlsem_slot")


def fill_waiters(count: int) -> None:
    """Have one process hold all slots of this many names, and another one wait for each."""
    from django_sqlsem.models import SlotRow, WaiterRow

    _, key = name_sql()
    now = database_now()
    keys = [hashed(idle_name(each)) for each in range(count)]
    for start in range(0, count, 500):
        SlotRow.objects.filter(semaphore__in=keys[start : start + 500]).update(
            expires_us=now + DAY, acquired_us=now, lease_us=60_000_000, boot_id=boot_id(), beacon=False
        )
    insert(
        WaiterRow, numbers(0, count), ticket=key, semaphore_id=key, queued_us=now, expires_us=now + DAY,
        lease_us=60_000_000, host="'web2.example.org'", pid=4712, process_id=f"'{'b' * 32}'", boot_id=f"'{boot_id()}'",
        channel="'nobody'", slots=SLOTS,
    )  # fmt: skip
    analyze("sqlsem_slot", "sqlsem_waiter")


def fill_minutes() -> int:
    """Write a year of history; return how many rows that are."""
    from django_sqlsem.models import MinuteRow

    key = name_sql()[1]
    last = token_now() // 60_000_000 * 60_000_000
    minutes = YEAR_MINUTES // EVERY_MINUTES
    for month in range(12):
        some = numbers(minutes * month // 12, minutes * (month + 1) // 12, "m")
        at = f"{last} - m.m * {EVERY_MINUTES * 60_000_000}"
        insert(
            MinuteRow, f"{numbers(0, HISTORY_NAMES)} CROSS JOIN {some}", key=key, template=f"'{TEMPLATE}'",
            minute_us=at, writer=1, until_us=f"{at} + {365 * DAY}", granted=3, released=3, turned_away=1,
            held_us=40_000_000, longest_hold_us=20_000_000, holds="'10:3'", waits="'10:3'",
        )  # fmt: skip
    analyze("sqlsem_minute")
    return HISTORY_NAMES * minutes


if __name__ == "__main__":
    sys.exit(main())
