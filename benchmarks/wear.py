"""What a day's load does to PostgreSQL's tables: dead rows, updates in place, size, vacuum, and the time it takes.

``python -m benchmarks.wear --seconds 300``. Processes take and give back 20 names as fast as they can, with a queue at
each. The server should have its own settings, ``autovacuum`` above all. ``--set "sqlsem_slot fillfactor=50"`` tries
another setting of a table.
"""

from __future__ import annotations

import argparse
import sys
import time
from statistics import median
from typing import Any

from benchmarks.cli import migrate, number, say

NAMES, SLOTS, THREADS = 20, 1, 2
TABLES = ("sqlsem_slot", "sqlsem_waiter", "sqlsem_semaphore", "sqlsem_event", "sqlsem_minute")
STATS = """
SELECT relname, n_live_tup, n_dead_tup, n_tup_ins, n_tup_upd, n_tup_hot_upd, n_tup_del, autovacuum_count,
  pg_table_size(relid) / 1024, pg_indexes_size(relid) / 1024
FROM pg_stat_user_tables WHERE relname = ANY(%s) ORDER BY 1
"""
HEAD = ["table", "live", "dead", "inserted", "updated", "in place, %", "deleted", "vacuums", "table, kB", "indexes, kB"]


def main(arguments: list[str] | None = None) -> int:
    """Measure and print. Returns 1 if the server does not answer."""
    from benchmarks import servers as server_side

    parser = argparse.ArgumentParser(prog="python -m benchmarks.wear", description=__doc__)
    add = parser.add_argument
    add("--seconds", default=300.0, type=number(float, 1), metavar="N", help="for how long (default: 300)")
    add("--every", default=60.0, type=number(float, 1), metavar="N", help="seconds between two looks (default: 60)")
    add("--processes", default=4, type=number(int, 1), metavar="N", help="how many (default: 4, of two threads each)")
    add("--set", action="append", default=[], metavar="TEXT", help="a table and a storage parameter of it")
    options = parser.parse_args(arguments)
    with server_side.one("postgres", "benchmarks.settings") as entries:
        if not entries:
            return 1
        migrate({"postgres": entries["postgres"]})
        measure(options)
    return 0


def measure(options: argparse.Namespace) -> None:
    """Put the tables under load, and look at them now and then."""
    from django.db import connections

    from benchmarks.contenders import all_contenders
    from benchmarks.processes import processes

    connection = connections["postgres"]

    def rows(text: str, *given: Any) -> list[Any]:
        with connection.cursor() as cursor:
            cursor.execute(text, given or None)
            return list(cursor.fetchall()) if cursor.description else []

    for each in options.set:
        table, _, setting = each.partition(" ")
        rows(f"ALTER TABLE {table} SET ({setting})")
    say(f"autovacuum {rows('SHOW autovacuum')[0][0]}, every {rows('SHOW autovacuum_naptime')[0][0]}; {options.set}")
    kind = all_contenders()["django_sqlsem (PostgreSQL)"]
    with processes(kind, "hot0", SLOTS, int(options.processes)) as team:
        began = time.monotonic()
        for nth, worker in enumerate(team):
            more = {"seed": str(nth), "threads": THREADS, "skew": 0.5}
            worker.tell("spread", prefix="hot", count=NAMES, start=began, seconds=options.seconds, **more)
        while (left := began + options.seconds - time.monotonic()) > 0:
            time.sleep(min(left, options.every))
            tell(time.monotonic() - began, rows(STATS, list(TABLES)))
        events = [event for worker in team for event in worker.answer(options.seconds + 60)["events"]]
    tenth = options.seconds / 10
    early, late = (
        [1000 * (granted - asked) for asked, granted, _ in events if first <= asked - began < first + tenth]
        for first in (tenth, options.seconds - tenth)
    )
    say(f"\n{len(events):,} grants, {len(events) / options.seconds:.0f} a second.")
    if early and late:
        say(f"An acquire took {median(early):.2f} ms in the second tenth of the time, {median(late):.2f} in the last.")


def tell(seconds: float, found: list[Any]) -> None:
    """Print how the tables are."""
    from benchmarks.report import markdown

    lines = []
    for name, live, dead, inserted, updated, hot, deleted, vacuums, size, indexes in found:
        share = f"{100 * hot / updated:.1f}" if updated else "-"
        numbers = (f"{each:,}" for each in (live, dead, inserted, updated))
        lines.append([name, *numbers, share, f"{deleted:,}", str(vacuums), f"{size:,}", f"{indexes:,}"])
    say(f"\nAfter {seconds:.0f} s:\n\n{markdown(HEAD, lines)}")


if __name__ == "__main__":
    sys.exit(main())
