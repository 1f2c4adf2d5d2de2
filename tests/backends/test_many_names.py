"""With very many idle names, or dead rows, nothing that is done often reads more of the tables, or sends more."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator

import pytest
from django.db import connections

from benchmarks.size import plans_noted, scans_of
from django_sqlsem import queries, semaphore
from django_sqlsem.backends import get_backend
from django_sqlsem.core.clocks import boot_now
from django_sqlsem.core.names import key_of
from django_sqlsem.database.sessions import OwnSession
from django_sqlsem.history import writer
from django_sqlsem.models import MinuteRow, SemaphoreRow, SlotRow, WaiterRow
from tests.support import databases
from tests.support.keepers import chore_of, keeper_of
from tests.support.operators import hold, make_semaphore, now_us, wait
from tests.support.threads import wait_until

POSTGRES = pytest.mark.parametrize(
    "database", [alias for alias in databases.covered() if databases.label(alias).startswith("postgres")], indirect=True
)
IDLE = 20_000
#: What any step may look at: some slots, and the names of one look of housekeeping.
FEW = 4000
#: How many more statements it takes to look up in the history what there is to forget only then, and to delete it.
FORGETS = {"forgetting": 13}

FILL = (
    "INSERT INTO sqlsem_semaphore (name_key, name, kind, declared_slots, declared_us, paused, shrinking)"
    " SELECT left(encode(sha256(convert_to('idle:' || n, 'UTF8')), 'hex'), 32), 'idle:' || n, 'semaphore', 2, 0, FALSE,"
    f" FALSE FROM generate_series(1, {IDLE}) n ON CONFLICT DO NOTHING",
    "INSERT INTO sqlsem_slot (semaphore_key, slot, closed, beacon, token, lease_us, held_us, host, pid, thread, label,"
    " user_name, process_id, boot_id, channel, revoked_by) SELECT name_key, s, FALSE, FALSE, 7, 0, 0, '', 0, '', '',"
    " '', '', '', '', '' FROM sqlsem_semaphore, generate_series(1, 2) s WHERE declared_us = 0",
    "INSERT INTO sqlsem_minute (semaphore_key, template, minute_us, writer, until_us, granted, released, turned_away,"
    " lost, held_us, longest_hold_us, longest_wait_us, holds, waits) SELECT name_key, '', m * 60000000::bigint, 1,"
    " 9000000000000000, 1, 1, 0, 0, 0, 0, 0, '', '' FROM sqlsem_semaphore, generate_series(1, 2) m",
    "VACUUM ANALYZE",
)


@contextlib.contextmanager
def a_session(alias: str) -> Iterator[OwnSession]:
    session = OwnSession(alias)
    try:
        yield session
    finally:
        session.close()


def steps(alias: str, session: OwnSession) -> dict[str, Callable[[], object]]:
    """Return what is done often, each with names of its own."""
    backend = get_backend(alias)
    numbers = iter(range(1000))

    def pair(name: str) -> None:
        semaphore(name, 2, timeout=0, using=alias).acquire().release()

    def handed_over() -> None:
        name = f"waited:{next(numbers)}"
        permit = semaphore(name, 1, timeout=0, using=alias).acquire()
        wait(alias, name)
        permit.release()
        assert SlotRow.objects.using(alias).filter(semaphore=key_of(name)).update(expires_us=None, permit_id=None) == 1

    return {
        "a pair of an idle name": lambda: pair(f"idle:{next(numbers) + 1}"),
        "a pair of a new name": lambda: pair(f"new:{next(numbers)}"),
        "a release to a waiter": handed_over,
        "housekeeping: the dead": lambda: backend.end_dead(session, witness=True, proofs={}),
        "housekeeping: idle slots": lambda: backend.set_aside(session),
        "housekeeping: acts": lambda: backend.end_acts(session),
        "forgetting": lambda: backend.forget(session, seconds=86400.0, after="8"),
        "old minutes": lambda: session.transaction(lambda cursor: writer.delete_old(cursor, MinuteRow, 7)),
        "the survey": lambda: queries.survey(using=alias),
        "what is busy": lambda: queries.semaphores(state="busy", using=alias),
        "one name": lambda: queries.semaphore("idle:7", using=alias),
        "one name's minutes": lambda: queries.minutes("idle:7", using=alias),
    }


def costs(alias: str) -> dict[str, tuple[int, set[str]]]:
    """Return of each step how many statements it sends, and which scans looked at more rows than a few."""
    found = {}
    with plans_noted(alias) as plans, a_session(alias) as session:
        for title, step in steps(alias, session).items():
            step()  # opens what it needs
            counts, wide = [], set()
            for _ in range(3):  # the keeper's own statements are among them now and then
                plans.clear()
                step()
                scans = [scan for plan in list(plans) for scan in scans_of(plan["Plan"])]
                wide |= {f"{scan['Node Type']} {scan['Relation Name']}" for scan, rows in scans if rows > FEW}
                counts.append(len(plans))
            found[title] = min(counts), wide
    return found


@pytest.fixture
def superuser(database: str) -> None:
    with connections[database].cursor() as cursor:
        cursor.execute("SELECT current_setting('is_superuser')")
        if cursor.fetchone()[0] != "on":
            pytest.skip("only a superuser may load auto_explain")


@POSTGRES
@pytest.mark.usefixtures("superuser")
def test_many_idle_names_cost_no_step_a_statement_or_a_scan(database: str) -> None:
    few = costs(database)
    with connections[database].cursor() as cursor:
        for text in FILL:
            cursor.execute(text)
    many = costs(database)
    assert {title: wide for title, (_, wide) in many.items() if wide} == {}
    assert {title: count for title, (count, _) in many.items() if count > few[title][0] + FORGETS.get(title, 0)} == {}


@POSTGRES
@pytest.mark.usefixtures("superuser")
def test_waiters_that_came_and_went_are_passed_over_in_the_index(database: str) -> None:
    """Only this kind of scan marks dead rows in the index; any other reads them all again each time, until a vacuum."""
    name, key = "crowded", key_of("crowded")
    make_semaphore(database, name, slots=1)
    wait(database, name)
    columns = [field.column for field in WaiterRow._meta.concrete_fields if not field.primary_key]
    values = ", ".join({"ticket": "md5(n::text)", "queued_us": "queued_us + n"}.get(each, each) for each in columns)
    with connections[database].cursor() as cursor:
        cursor.execute(
            f"INSERT INTO sqlsem_waiter ({', '.join(columns)}) SELECT {values}"
            " FROM sqlsem_waiter, generate_series(1, 20000) n WHERE semaphore_key = %s",
            [key],
        )
        cursor.execute("DELETE FROM sqlsem_waiter")
    with plans_noted(database) as plans:
        permit = semaphore(name, 1, timeout=0, using=database).acquire()
        wait(database, name)
        permit.release()
    scans = [scan for plan in list(plans) for scan, _ in scans_of(plan["Plan"])]
    waiters = Counter(scan["Node Type"] for scan in scans if scan["Relation Name"] == "sqlsem_waiter")
    assert set(waiters) == {"Index Scan"}
    assert waiters["Index Scan"] >= 2  # a claim looks for them, and a release


@POSTGRES
def test_only_what_people_search_by_has_an_index_for_that(database: str) -> None:
    with connections[database].cursor() as cursor:
        cursor.execute(
            "SELECT indexdef FROM pg_indexes WHERE tablename LIKE 'sqlsem%%' AND indexdef LIKE '%%_pattern_ops%%'", []
        )
        columns = {row[0].partition("(")[2].split()[0] for row in cursor.fetchall()}
    assert columns == {"name", "identity"}


def lease_of(alias: str, name: str) -> list[int]:
    rows = SlotRow.objects.using(alias).filter(semaphore=key_of(name), slot__gt=0)
    return list(rows.order_by("slot").values_list("lease_us", flat=True))


def test_slots_that_nobody_has_used_for_a_while_are_set_aside_and_no_others(database: str) -> None:
    backend = get_backend(database)
    if backend.released_on_disconnect:
        pytest.skip("the rows are no truth there")
    unix = round(queries.history_clock(database).timestamp() * 1e6)
    for name in ("long idle", "just used", "held for long", "stale"):
        make_semaphore(database, name, slots=1)
        row = hold(database, name, age=3600.0, left=-7.0 if name == "stale" else 50.0, token=unix - 3_600_000_000)
        free = {"expires_us": None, "token": unix - 60_000_000 if name == "just used" else row.token}
        if name in ("long idle", "just used"):
            SlotRow.objects.using(database).filter(pk=row.pk).update(**free)
    with a_session(database) as session:
        assert backend.set_aside(session) is False
    assert lease_of(database, "long idle") == [0]
    assert {name: min(lease_of(database, name)) > 0 for name in ("just used", "held for long", "stale")} == {
        "just used": True,
        "held for long": True,
        "stale": True,
    }
    assert {each.name for each in queries.semaphores(state="busy", using=database)} == {"held for long", "stale"}
    with semaphore("long idle", 1, timeout=0, using=database):
        assert min(lease_of(database, "long idle")) > 0
        assert {each.name for each in queries.semaphores(state="held", using=database)} >= {"long idle"}
    SlotRow.objects.using(database).update(expires_us=None)


def test_housekeeping_sets_them_aside(database: str) -> None:
    if get_backend(database).released_on_disconnect:
        pytest.skip("the rows are no truth there")
    make_semaphore(database, "long idle", slots=1)
    an_hour_ago = round(queries.history_clock(database).timestamp() * 1e6) - 3_600_000_000
    SlotRow.objects.using(database).update(lease_us=60_000_000, token=an_hour_ago, acquired_us=now_us(database) - 1)

    def tidied() -> bool:
        keeper_of(database).submit(lambda: chore_of(database, "housekeeping").run(boot_now())).result(30)
        return lease_of(database, "long idle") == [0]

    with semaphore("another", 1, timeout=0, using=database):
        wait_until(tidied)
    assert SemaphoreRow.objects.using(database).filter(name="long idle").exists()
