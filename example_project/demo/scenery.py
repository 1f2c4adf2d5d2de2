"""Locks with an hour behind them, written straight into the tables: for pictures, never for real work."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

from django.db import connection

from django_sqlsem.core.names import resource_for
from django_sqlsem.database.dialects import dialect_for
from django_sqlsem.history import recorder
from django_sqlsem.models import (
    EventRow,
    MinuteRow,
    SemaphoreRow,
    SlotRow,
    WaiterRow,
)
from django_sqlsem.queries import history_clock

MINUTE = 60_000_000
HOUR = 60 * MINUTE
HOSTS = ("web-1", "web-2", "web-3", "worker-1", "worker-2")
USERS = ("", "", "ann", "bob", "chen", "dora")
#: A name's slots, usual hold in seconds, how much of the time it is held, and what is special about it.
LOCKS: tuple[tuple[str, int, float, float, dict[str, Any]], ...] = (
    ("billing:close", 1, 90, 0.6, {"kind": "mutex", "work": "task billing.close", "waiting": 2}),
    ("exports:csv", 8, 35, 0.9, {"work": "GET /exports/orders.csv", "waiting": 5}),
    ("geocoder", 3, 4, 0.7, {"work": "task places.geocode"}),
    ("imports:nightly", 1, 600, 0.8, {"kind": "mutex", "work": "manage.py import_prices", "stale": 1}),
    ("invoices:pdf", 4, 12, 0.5, {"work": "POST /invoices/print/"}),
    ("mailing", 10, 20, 0.3, {"work": "task mail.send_batch", "operator": 6}),
    ("payments:provider", 6, 3, 0.6, {"work": "POST /checkout/pay/", "paused": "Provider is down: INC-12"}),
    ("search-index", 1, 45, 0.4, {"kind": "mutex", "work": "task search.reindex"}),
    ("thumbnails", 24, 6, 0.8, {"work": "task media.thumbnail"}),
    ("transcoder", 2, 240, 0.95, {"work": "task video.transcode", "asked": 1, "waiting": 1}),
    ("warehouse:sync", 2, 60, 0.2, {"work": "task stock.sync"}),
)


def hour(name: str, slots: int, hold: float, used: float, work: str, *, seed: int) -> None:
    """Write what happened to a name in the last hour."""
    chance = random.Random(seed)
    key, now = resource_for(name, "semaphore").key, int(history_clock().timestamp() * 1e6)
    events: list[EventRow] = []
    rows: dict[int, MinuteRow] = {}
    waits: dict[int, Counter[int]] = {}
    holds: dict[int, Counter[int]] = {}

    def note(at: int, what: str, **fields: Any) -> None:
        kept = {"key": key, "name": name, "at_us": at, "until_us": now + 30 * 24 * HOUR, "what": what}
        events.append(EventRow(**(kept | fields)))

    def minute(at: int) -> MinuteRow:
        start = at - at % MINUTE
        waits.setdefault(start, Counter())
        holds.setdefault(start, Counter())
        return rows.setdefault(start, MinuteRow(key=key, minute_us=start, until_us=now + 7 * 24 * HOUR))

    for slot in range(1, slots + 1):
        at = now - HOUR + int(chance.random() * hold * 1e6)
        while True:
            length = int(chance.lognormvariate(0, 0.5) * hold * 1e6)
            if at + length >= now - 5_000_000:
                break
            wait = int(max(0, chance.gauss(0.1, 0.8)) * hold * used * 2e5)
            who = {"host": chance.choice(HOSTS), "pid": chance.randrange(900, 9000), "thread": "MainThread"}
            who |= {"label": work, "user": chance.choice(USERS), "slot": slot, "token": at, "waited_us": wait}
            end = at + length
            lost = chance.random() < 0.004
            note(end, "lost" if lost else "released", held_us=length, detail="lease expired" if lost else "", **who)
            row = minute(end)
            row.granted, row.released, row.lost = row.granted + 1, row.released + (not lost), row.lost + lost
            row.held_us += length
            row.longest_hold_us = max(row.longest_hold_us, length)
            row.longest_wait_us = max(row.longest_wait_us, wait)
            waits[row.minute_us][recorder.bucket(wait)] += 1
            holds[row.minute_us][recorder.bucket(length)] += 1
            if chance.random() < used * 0.06:
                row.turned_away += 1
                note(end, "timed_out", waited_us=5_000_000, **{each: who[each] for each in ("host", "pid", "label")})
            at = end + int(chance.expovariate(1.0) * hold * (1 - used) / used * 1e6)
    for start, row in rows.items():
        row.waits, row.holds = recorder.to_text(waits[start]), recorder.to_text(holds[start])
    if name == "reports":
        note(now - 41 * MINUTE, "paused", by="ann")
        note(now - 38 * MINUTE, "resumed", by="ann")
        note(now - 12 * MINUTE, "resized", by="bob", detail="4 slots")
        note(now - 9 * MINUTE, "resized", by="bob", detail="as declared by the code")
    EventRow.objects.bulk_create(events)
    MinuteRow.objects.bulk_create(rows.values())


def lock(name: str, slots: int, hold: float = 20, used: float = 0.5, *, seed: int = 1, **special: Any) -> None:
    """Write a name with holders and waiters of this moment."""
    chance = random.Random(seed)
    used = 1 if special.get("waiting") else used
    with connection.cursor() as cursor:
        dialect = dialect_for(connection)
        now, boot = dialect.now(cursor), dialect.boot_id
    key = resource_for(name, "semaphore").key
    row = SemaphoreRow(key=key, name=name, declared_slots=slots, declared_us=now, kind=special.get("kind", "semaphore"))
    row.operator_slots, row.paused = special.get("operator"), bool(special.get("paused"))
    if row.paused:
        unix = int(history_clock().timestamp() * 1e6)
        row.paused_us, row.paused_by, row.paused_reason = unix - 12 * MINUTE, "ann", special["paused"]
    row.save(force_insert=True)
    for slot in range(1, slots + 1):
        place = SlotRow(semaphore=row, slot=slot, closed=slot > (row.operator_slots or slots))
        if slot <= special.get("stale", 0) or (not place.closed and chance.random() < used):
            gone = slot <= special.get("stale", 0)
            age = int(chance.random() * hold * 1e6)
            place.token, place.permit_id, place.boot_id = now - age, f"{chance.getrandbits(128):032x}", boot
            place.acquired_us, place.lease_us = now - age, 60_000_000
            place.mode = row.kind if row.kind == "mutex" else ""
            place.expires_us = now - 8_000_000 if gone else now + HOUR
            place.host, place.pid = chance.choice(HOSTS), chance.randrange(900, 9000)
            place.thread, place.label, place.user = "MainThread", special.get("work", ""), chance.choice(USERS)
            if slot <= special.get("asked", 0):
                place.stop_token, place.stop_by = place.token, "ann"
        place.save(force_insert=True)
    for number in range(special.get("waiting", 0)):
        WaiterRow.objects.create(
            ticket=f"{key[:24]}{number:08d}",
            semaphore=row,
            queued_us=now - int((number + 1) * hold * 2e5),
            expires_us=now + HOUR,
            host=HOSTS[number % len(HOSTS)],
            pid=1200 + number,
            thread="MainThread",
            label=special.get("work", ""),
            mode=row.kind if row.kind == "mutex" else "",
            boot_id=boot,
        )


def town() -> None:
    """Write the locks of a project of some size."""
    for number, (name, slots, hold, used, special) in enumerate(LOCKS):
        lock(name, slots, hold, used, seed=number, **special)
        hour(name, slots, hold, used, special["work"], seed=number)


def crowd(count: int) -> None:
    """Write a lock for each of this many customers; a few are held."""
    for number in range(count):
        lock(f"customer:{number:05d}", 2, used=0.03, seed=number, work="POST /orders/", waiting=number % 97 == 5)


def clear() -> None:
    """Forget everything."""
    for model in (EventRow, MinuteRow, WaiterRow, SlotRow, SemaphoreRow):
        model._default_manager.all().delete()
