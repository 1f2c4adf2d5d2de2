"""Taking free slots without waiting, by one conditional UPDATE; what is missing is created, and then tried again."""

from __future__ import annotations

import functools
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final, TypeVar

from django_sqlsem.backends.base import Crowd, Grant, Granted, Queue, Request, Waited, tell_of_two_kinds
from django_sqlsem.backends.rows import exclusive, handoff, queue, reading
from django_sqlsem.backends.rows.beacons import suspects, take_from_suspects
from django_sqlsem.backends.rows.exclusive import GONE
from django_sqlsem.backends.rows.statements import (
    KEPT,
    LOCK,
    NEW_SEMAPHORE,
    NEW_SLOT,
    NEXT_TOKEN,
    Statements,
    bound,
    change,
    granting,
    request_parameters,
    row_of,
)
from django_sqlsem.core.modes import MUTEX, RWLOCK, WRITER, interchangeable
from django_sqlsem.core.names import MAX_SLOTS
from django_sqlsem.database.dialects import Dialect
from django_sqlsem.exceptions import never_met, wrong_kind

if TYPE_CHECKING:
    from django_sqlsem.backends.base import Place
    from django_sqlsem.database.cursors import AnyCursor
    from django_sqlsem.database.sessions import Session


K = TypeVar("K")
V = TypeVar("V")

#: Two years in microseconds, and a little.
_YEARS_US: Final = 1 << 46
#: How often a process says that its number of slots differs from the declared one, in seconds; and, on MySQL, looks.
_DECLARE_EVERY: Final = 60.0
#: How many names are remembered for each.
_MOST_KNOWN: Final = 10_000

#: To whom a claim yields: a newcomer to every live waiter; a task that comes back, to those that wait longer; who
#: barges, to those that want everybody to leave. Who waits for the writer's place beside readers is in nobody's way.
_YIELDS_TO: Final = {
    "barge": "w.take = 0",
    "ranked": f"w.lock_mode <> 'update' AND w.queued_us < COALESCE({KEPT}, {{now}})",
    "newcomer": "w.lock_mode <> 'update'",
}
#: Up to which slot those may want them: to the number that each declares; a mutex wants to be alone. Whatever asks for
#: more than that is never served.
_WANTED: Final = {
    turn: f"(SELECT COALESCE(MAX(CASE WHEN w.take = 0 OR w.lock_mode = 'mutex' THEN {MAX_SLOTS}"
    " WHEN w.take <= COALESCE({n.operator}, w.slots, n.declared_slots)"
    " THEN COALESCE({n.operator}, w.slots, n.declared_slots) END), 0)"
    " FROM sqlsem_semaphore n JOIN sqlsem_waiter w ON w.semaphore_key = n.name_key"
    f" WHERE n.name_key = %(key)s AND {{w.waits}} AND {who})"
    for turn, who in _YIELDS_TO.items()
}
_DECLARED: Final = "SELECT declared_slots FROM sqlsem_semaphore WHERE name_key = %(key)s"
_TAKE: Final = f"UPDATE sqlsem_slot SET {granting(NEXT_TOKEN, lasts='%(lease_us)s')}"
#: A semaphore gives; ``m`` is its row.
_GIVES: Final = "m.kind = %(kind)s AND {m.unpaused}"
_LIMIT: Final = "COALESCE({m.operator}, %(slots)s, m.declared_slots)"
#: What a mutex takes by one statement, ``{t}`` being the slot's table; whether there is such a slot: see ``exclusive``.
_MUTEX: Final = " AND {t}lock_mode = 'mutex'"
_WAS_MUTEX: Final = "EXISTS (SELECT 1 FROM sqlsem_slot l WHERE l.semaphore_key = %(key)s AND l.lock_mode = 'mutex')"

#: Takes the lowest free slot, and tells which.
_TAKE_AND_TELL: Final = f"""{_TAKE} WHERE semaphore_key = %(key)s AND id = (
  SELECT s.id FROM sqlsem_slot s JOIN sqlsem_semaphore m ON m.name_key = s.semaphore_key
  WHERE s.semaphore_key = %(key)s AND {_GIVES} AND {{m.settled}} AND s.closed = %(no)s
  AND s.slot > {{wanted}} AND s.slot <= {_LIMIT} AND {{s.free}}{{mutex}}
  ORDER BY s.slot LIMIT 1 {{pick}}
) RETURNING id, slot, token, ({_DECLARED}){{unflushed}}"""
#: Takes it where another statement has to tell; ``{by_id}`` or ``{lowest}`` says which.
_TAKE_ONE: Final = (
    f"{{take}} WHERE {{by_id}}semaphore_key = %(key)s AND closed = %(no)s AND {{free}}{{mutex}} AND slot > {{wanted}}"
    f" AND slot <= (SELECT {_LIMIT} FROM sqlsem_semaphore m WHERE m.name_key = %(key)s AND {_GIVES}"
    " AND {m.settled}){lowest}"
)
#: The answer to an UPDATE on MySQL has no rows, but one number: the argument of LAST_INSERT_ID(). Here that is how far
#: the slot's new token is ahead of a time some years ago, and the slot. 0: the row has another id than this process
#: knows of the slot, or the token is years away. It stands first, as MySQL reckons with what was set before.
#: The value is compared so that it is computed. ``suspect_us`` is NULL either way.
_AHEAD: Final = "(GREATEST(token + 1, {token_now}) - %(years_ago)s)"
_TELLING: Final = (
    f"CASE WHEN LAST_INSERT_ID(CASE WHEN id = slot + %(gap)s AND {_AHEAD} BETWEEN 0 AND {2 * _YEARS_US}"
    f" THEN {_AHEAD} * {MAX_SLOTS + 1} + slot ELSE 0 END) = 0 THEN NULL END"
)
_TAKE_TELLING: Final = f"UPDATE sqlsem_slot SET {granting(NEXT_TOKEN, lasts='%(lease_us)s', suspect=_TELLING)}"
#: Of a place: not if ``_TAKE_ONE`` would take a slot at this moment, which costs less than to stand and be served.
_UNLESS_FREE: Final = (
    " AND NOT (m.paused = %(no)s AND {m.settled} AND EXISTS (SELECT 1 FROM sqlsem_slot f"
    f" WHERE f.semaphore_key = %(key)s AND f.closed = %(no)s AND f.slot > {_WANTED['newcomer']}"
    f" AND f.slot <= {_LIMIT} AND {{f.free}}))"
)
#: Where an UPDATE cannot pick a slot: the free ones, in order.
_CANDIDATES: Final = (
    "SELECT id FROM sqlsem_slot WHERE semaphore_key = %(key)s AND closed = %(no)s AND {free} ORDER BY slot"
)
_GRANTED: Final = (
    f"SELECT id, slot, token, ({_DECLARED}) FROM sqlsem_slot"
    " WHERE semaphore_key = %(key)s AND permit_id = %(permit_id)s ORDER BY slot"
)
#: What a refused claim wants to know, but for who is suspect. Last: whether there is a free slot, and the name is a
#: mutex whose slot was somebody else's (3), or somebody stands before it (1), or (2) it was made or freed since the
#: claim, or is locked: to be taken, or deleted with its name.
_LOOK: Final = (
    "SELECT m.kind, m.declared_slots, {m.operator}, CASE WHEN {m.settled} THEN 0 ELSE 1 END,"
    " (SELECT COUNT(*) FROM sqlsem_slot s WHERE s.semaphore_key = %(key)s AND s.slot > 0),"
    " {suspects}, CASE WHEN {m.unpaused} AND EXISTS (SELECT 1 FROM sqlsem_slot f WHERE f.semaphore_key = %(key)s"
    f" AND f.closed = %(no)s AND f.slot BETWEEN 1 AND {_LIMIT} AND {{f.free}})"
    f" THEN CASE WHEN m.kind = 'mutex' AND NOT {_WAS_MUTEX} THEN 3"
    " WHEN EXISTS (SELECT 1 FROM sqlsem_waiter d WHERE d.semaphore_key = %(key)s AND d.away = %(no)s)"
    " THEN 1 ELSE 2 END ELSE 0 END{crowd}"
    " FROM sqlsem_semaphore m WHERE m.name_key = %(key)s"
)
#: And what one that is bounded wants to know: see ``Crowd``.
_CROWD: Final = (
    ", CASE WHEN {m.unpaused} THEN 0 ELSE 1 END, m.paused_until_us - {token_now},"
    " (SELECT SUM(w.waiting) FROM sqlsem_waiter w WHERE w.semaphore_key = %(key)s AND {w.waits}"
    " AND w.process_id <> %(process_id)s),"
    " (SELECT AVG(h.held_us) FROM sqlsem_slot h WHERE h.semaphore_key = %(key)s AND h.held_us > 0)"
)
_DECLARE: Final = (
    "UPDATE sqlsem_semaphore SET other_slots = declared_slots, other_us = {now}, declared_slots = %(slots)s,"
    " declared_us = {now} WHERE name_key = %(key)s AND declared_slots <> %(slots)s"
)
#: Takes the first slots of a name that only this transaction can see.
_TAKE_NEW: Final = f"{_TAKE} WHERE semaphore_key = %(key)s AND slot BETWEEN 1 AND %(take)s"
_SLOTS: Final = "SELECT slot FROM sqlsem_slot WHERE semaphore_key = %(key)s"


@functools.cache
def take_sql(dialect: Dialect, turn: str, *, durable: bool, mutex: bool = False) -> str:
    """Take one free slot."""
    words = {
        "{take}": _TAKE_TELLING if dialect.update_limit else _TAKE,
        "{mutex}": _MUTEX.replace("{t}", "s." if dialect.returning else "") if mutex else "",
        "{wanted}": _WANTED[turn],
        "{by_id}": "" if dialect.update_limit else "id = %(id)s AND ",
        # By both: else MariaDB sorts all slots that are free, and locks them for that.
        "{lowest}": " ORDER BY semaphore_key, slot LIMIT 1" if dialect.update_limit else "",
    }
    text = _TAKE_AND_TELL if dialect.returning else _TAKE_ONE
    if durable:
        words["{unflushed}"] = ""
    return functools.reduce(lambda sql, word: sql.replace(word, words[word]), words, text)


@functools.cache
def take_or_stand(dialect: Dialect, *, durable: bool, mutex: bool = False) -> str:
    """Take one slot, or else a place in the queue, in one statement."""
    kinds = f"m.kind = %(kind)s AND {_WAS_MUTEX}" if mutex else "m.kind = %(kind)s"
    return f"""
    WITH c AS ({take_sql(dialect, "newcomer", durable=durable, mutex=mutex)}), i AS (
      {queue.place_sql(dialect, ranked=False, kinds=kinds)} AND NOT EXISTS (SELECT 1 FROM c) RETURNING (
        SELECT COUNT(*) FROM sqlsem_waiter w WHERE w.semaphore_key = %(key)s AND {{w.waits}}) AS ahead)
    SELECT id, slot, token, declared_slots, NULL::bigint, NULL::text FROM c
    UNION ALL SELECT NULL, NULL, NULL, NULL, ahead{{unflushed}} FROM i"""


def wanted_sql(turn: str) -> str:
    """Say up to which slot others come first; no row: the semaphore does not give."""
    return f"SELECT {_WANTED[turn]} FROM sqlsem_semaphore m WHERE m.name_key = %(key)s AND {_GIVES}"


@functools.cache
def look_sql(dialect: Dialect, *, bounded: bool = False) -> str:
    """``_LOOK``, with who is suspect."""
    return _LOOK.replace("{suspects}", suspects(dialect)).replace("{crowd}", _CROWD if bounded else "")


#: What a transaction returns that has taken nothing, and is to be committed.
_NOTHING: Final = Grant((), (), ())


class SlotRequest:
    """One request for slots, and the session that it runs on."""

    __slots__ = ("crowd", "dialect", "parameters", "request", "session", "turn")

    def __init__(self, session: Session, request: Request, place: Place | None = None) -> None:
        #: Why it may not wait, as far as it was seen.
        self.crowd: Crowd | None = None
        self.session = session
        self.request = request
        self.dialect = session.dialect
        self.parameters = request_parameters(request, place)
        #: To whom it yields: see ``_YIELDS_TO``.
        self.turn = "barge" if not request.fair else "ranked" if request.rank else "newcomer"

    def take(self) -> Grant | None:
        """Take slots, without waiting."""
        quick = self.request.take == 1 and not self.request.mode
        grant = (quick and self.take_one()) or self.look_and_take()
        if grant and self.request.rank:
            change(self.session, queue.BACK, self.parameters)
        return grant or None

    def take_one(self) -> Grant | None:
        """Take one slot of a name that is as it should be, by one statement."""
        # Once sent, a claim may have been granted although the answer got lost: it is not repeated as it is.
        row = self.session.run(self._take, again=False)
        return None if row is None else self._grant(row)

    def take_or_stand(self) -> Waited | None:
        """Take one slot, or else a place in the queue, in one statement; ``None``: neither was to be had."""
        mutex = self.request.resource.kind == MUTEX
        text = take_or_stand(self.dialect, durable=self.request.durable, mutex=mutex)
        row = row_of(self.session, text, self.parameters, again=False)
        if row is None:
            return None
        return Waited((), Queue(ahead=int(row[4]))) if row[0] is None else self.granted(self._grant(row))

    def _grant(self, row: Sequence[Any]) -> Grant:
        row_id, slot, token, declared_slots = row[:4]
        if self.request.slots not in (None, declared_slots):
            self._declare(self.request.resource.kind, declared_slots)
        return Grant((slot,), (token,), (row_id,))

    def granted(self, grant: Grant, *, at_once: bool = True) -> Waited:
        """Return a grant as the outcome of a first step of waiting."""
        return Waited((Granted(self.request.permit_id, grant, self.request.lease),), at_once=at_once)

    def look_and_take(self, *, unseen: bool = False) -> Grant | None:
        """Check the name, create what is missing, and take what there is by now.

        ``unseen``: when it was tried, the name was not there, and by now may be, with slots that are free.
        """
        look = look_sql(self.dialect, bounded=self.request.bounded)
        while (found := row_of(self.session, look, self.parameters)) is None:
            unseen = True
            grant = self._create(self.request.slots or 1)
            if grant is not None:
                return grant
        kind, declared_slots, operator_slots, shrinking, rows, suspected, free, *crowd = found
        name, wanted = self.request.resource.name, self.request.resource.kind
        if not interchangeable(kind, wanted):
            known = reading.read_snapshot(self.session, self.request.resource)
            raise wrong_kind(name, kind, wanted, self.session.connection.alias, known)
        limit = bound(operator_slots, self.request.slots, declared_slots)
        if self.request.take > limit:
            raise never_met(name, limit, self.request.take)
        if rows < limit:
            self._create(limit)
        self._declare(kind, declared_slots)
        if crowd and self._is_crowded(crowd, limit):
            return None
        more = rows < limit or take_from_suspects(self.session, self.dialect, self.request, suspected)
        if free in (1, 3) and queue.sweep_dead(self.session, self.dialect, self.parameters):
            more = True  # only the dead stood before it
        if self.request.mode:
            grant = exclusive.claim(self.session, self.request, self.parameters)
        elif kind != wanted or self.request.take > 1 or shrinking or free in (2, 3):
            grant = self._take_locked()
        else:
            return self.take_one() if more or unseen else None
        if grant is GONE:
            return self.look_and_take(unseen=True)
        if grant is None and kind != wanted:
            tell_of_two_kinds(self.session.connection.alias, self.request.resource)
        return grant

    def _is_crowded(self, row: Sequence[Any], slots: int, here: int = 0) -> bool:
        """Note why the request may not wait. Return whether nothing could be granted either."""
        paused, left_us, waiting, usual_us = row
        self.crowd = Crowd.at(
            self.request,
            paused=bool(paused),
            waiting=int(waiting or 0) + here,
            resumes_in=int(left_us) / 1e6 if paused and left_us is not None else None,
            slots=slots,
            usual_hold=float(usual_us) / 1e6 if usual_us else None,
        )
        return self.crowd is not None and (self.crowd.paused or self.crowd.waiting > 0)

    def look_at_crowd(self, here: int) -> Crowd | None:
        """Return why the request may not wait, though it has not been tried."""
        found = row_of(self.session, look_sql(self.dialect, bounded=True), self.parameters)
        if found is not None:
            self._is_crowded(found[7:], bound(found[2], self.request.slots, found[1]), here)
        return self.crowd

    def _take_locked(self) -> Grant | None:
        """Take what one statement does not: several slots, one of a name that shrinks, or is to be of another kind.

        It is done under the lock of the semaphore's row. A name becomes another kind only if something is granted.
        """
        kind = self.request.resource.kind

        def work(cursor: AnyCursor) -> Grant | None:
            statements = Statements(cursor, self.parameters)
            found = statements.row(LOCK)
            if found is None:
                return GONE
            adopts = found[5] != kind
            if adopts and interchangeable(found[5], kind) and exclusive.adopt(statements, kind):
                if self.request.slots is not None:
                    statements.change(_DECLARE)
                found = statements.row(LOCK)
            wanted = statements.row(wanted_sql(self.turn))
            if wanted is None:
                return None
            operator_slots, declared_slots, _paused, shrinking, now, _kind = found
            above, whole = exclusive.settle(statements, found) if shrinking else (False, False)
            limit = bound(operator_slots, self.request.slots, declared_slots)
            free = handoff.free_rows(statements, self.request.take, wanted[0], limit, crowded=above)
            if whole or not free:
                return None if adopts else _NOTHING
            return handoff.give(statements, free, int(now), self.parameters["lease_us"])

        grant = self.session.transaction(work, again=False)
        return None if grant is _NOTHING else grant

    def _take(self, cursor: AnyCursor) -> Any:
        """Take one slot; return the row's id, slot, token and the declared number of slots, or ``None``."""
        mutex = self.request.resource.kind == MUTEX
        text = take_sql(self.dialect, self.turn, durable=self.request.durable, mutex=mutex)
        if self.dialect.returning:
            self.dialect.execute(cursor, text, self.parameters)
            return cursor.fetchone()
        statements = Statements(cursor, self.parameters)
        if self.dialect.update_limit:
            gap, years_ago = self._gap(), time.time_ns() // 1000 - _YEARS_US
            taken = statements.change(text, gap=gap, years_ago=years_ago) > 0
            if taken and gap is not None and cursor.lastrowid:
                ahead, slot = divmod(cursor.lastrowid, MAX_SLOTS + 1)
                return slot + gap, slot, years_ago + ahead, self.request.slots
        else:
            taken = any(statements.change(text, id=row_id) for (row_id,) in statements.rows(_CANDIDATES))
        row = statements.row(_GRANTED) if taken else None  # it may have been revoked at once
        if row is not None and self.dialect.update_limit and row[0] >= row[1]:
            _remember(_gaps, self._place, (row[0] - row[1], time.monotonic() + _DECLARE_EVERY))
        return row

    @property
    def _place(self) -> tuple[str, str, int | None]:
        return self.session.connection.alias, self.request.resource.key, self.request.slots

    def _gap(self) -> int | None:
        """Return how far the rows' ids are above the slots' numbers; ``None``: the name is to be looked at again."""
        gap, until = _gaps.get(self._place, (None, 0.0))
        return gap if time.monotonic() < until else None

    def _create(self, slots: int) -> Grant | None:
        """Create what is missing. A new name is born with what is claimed taken: others never see it all free."""
        request = self.request

        def create(cursor: AnyCursor) -> Grant:
            statements = Statements(cursor, self.parameters)
            new = statements.insert(NEW_SEMAPHORE, name=request.resource.name, declared=slots, units=None)
            # Locked: while somebody has all slots, no more of them may be open.
            found = statements.row(LOCK)
            if found is None:
                return _NOTHING  # it was deleted at this very moment
            there = {row[0] for row in statements.rows(_SLOTS)}
            for slot in range(WRITER if request.resource.kind == RWLOCK else 1, slots + 1):
                if slot not in there:
                    closed = bool(found[3] or (found[5] == MUTEX and slot > 1)) or slot == WRITER
                    statements.insert(NEW_SLOT, slot=slot, closed=closed)
            if not new or there or request.mode or request.take > slots:
                return _NOTHING
            statements.change(_TAKE_NEW)
            ids, numbers, tokens, _ = zip(*statements.rows(_GRANTED), strict=True)
            return Grant(numbers, tokens, ids)

        # It may have been granted although the answer got lost: like a claim, it is not repeated as it is.
        grant = self.session.transaction(create, again=False)
        return grant if grant is not None and grant.slots else None

    def _declare(self, kind: str, declared_slots: int) -> None:
        """Say if this process's number of slots differs; two processes that disagree say so once a minute.

        A request of another kind than the name's says so when it is granted.
        """
        if kind != self.request.resource.kind or self.request.slots in (None, declared_slots):
            return
        place = (self.session.connection.alias, self.request.resource.key)
        if time.monotonic() < _declared.get(place, 0.0):
            return
        _remember(_declared, place, time.monotonic() + _DECLARE_EVERY)
        change(self.session, _DECLARE, self.parameters)


#: Until when this process has said its number of slots, by alias and name.
_declared: dict[tuple[str, str], float] = {}
#: By how much the ids of a name's rows are above the slots' numbers, and until when that counts; see ``_TELLING``.
_gaps: dict[tuple[str, str, int | None], tuple[int, float]] = {}


def _remember(known: dict[K, V], place: K, what: V) -> None:
    if len(known) > _MOST_KNOWN:
        known.clear()
    known[place] = what


def enrol(session: Session, request: Request, place: Place, *, first: bool) -> Waited:
    """Take slots if need be (``first``), or else a place in the queue; on PostgreSQL in one statement."""
    claim = SlotRequest(session, request, place)
    plain = request.take == 1 and not request.rank and not request.mode
    grant, unless = None, ""
    if first and request.bounded:
        grant = claim.take()
        if grant is None and claim.crowd is not None:
            return Waited(refused=claim.crowd)
    elif plain and request.fair and claim.dialect.inserting_ctes:
        # The place is only taken if the name is in order, so that no look is needed first.
        waited = claim.take_or_stand()
        if waited is not None:  # who asks for the first time looks around a little later
            early = first or waited.granted
            return waited if early else queue.look_around(session, request, claim.parameters, new=True)
        grant = claim.look_and_take(unseen=True)
    elif plain:
        grant = claim.take_one() if first else None
        unless = _UNLESS_FREE if request.fair and not claim.dialect.sharded else ""
    elif first:
        grant = claim.take()
    if grant is not None:
        return claim.granted(grant)
    while not queue.stand(session, request, claim.parameters, unless):  # a free slot, a new name, or too few slots
        unless = ""
        grant = claim.look_and_take(unseen=True)
        if grant is not None:
            return claim.granted(grant, at_once=first)
    # A slot may have been freed between the claim and this, by someone that saw nobody waiting.
    waited = queue.look_around(session, request, claim.parameters, new=True)
    most = request.max_waiting
    if first and most is not None and not waited.granted and waited.queue is not None and waited.queue.ahead >= most:
        queue.leave(session, request)  # others have taken their places at the same moment, before this one
        return Waited(refused=Crowd(False, waited.queue.ahead))
    return waited
