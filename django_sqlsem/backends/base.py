"""The contract of a backend: how one database grants, keeps and shows slots, and the records it speaks in."""

# ruff: noqa: B027 - what most backends have nothing to do for is an empty method

from __future__ import annotations

import abc
import logging
import math
import time
from collections import Counter
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import TYPE_CHECKING, Any, ClassVar, Final, Literal, NamedTuple

from django.apps import apps
from django.db.models import Count, Min, Q

from django_sqlsem.core.modes import MUTEX, SHARED, UPGRADE, WHOLE, line_of
from django_sqlsem.core.names import ONE_SLOT, key_of
from django_sqlsem.core.text import a_kind
from django_sqlsem.database.bells import MAX_NOTE
from django_sqlsem.database.dialects import DatabaseNow, dialect_for
from django_sqlsem.database.errors import database_errors, repeated
from django_sqlsem.database.sessions import OwnSession
from django_sqlsem.exceptions import SemaphoreError
from django_sqlsem.snapshots import (
    MOST_NAMES,
    MOST_TEMPLATES,
    InUse,
    SlotState,
    Survey,
    SurveyState,
    TemplateSnapshot,
    survey_of,
    templates_of,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

    from django.db.backends.base.base import BaseDatabaseWrapper

    from django_sqlsem.backends.clock import RowClock
    from django_sqlsem.core.identity import HolderIdentity
    from django_sqlsem.core.names import Resource
    from django_sqlsem.database.cursors import AnyCursor
    from django_sqlsem.database.sessions import KeeperSession, Session
    from django_sqlsem.snapshots import HolderSnapshot, Loss, SemaphoreSnapshot


logger = logging.getLogger("django_sqlsem")

#: A slot that was handed to another process lapses after this long unless it is confirmed, in microseconds.
LAPSE_US: Final = 2_000_000
#: The kind of lock that is a count: see ``counter()``. A request of this kind waits like any other. Its ``slots`` are
#: the units that a new name begins with; its grant lasts only a moment, until ``take()`` or ``release()``.
COUNTER: Final = "counter"


@dataclass(frozen=True, slots=True)
class Presence:
    """How other processes reach this one, and see that it lives. Both may change while it runs."""

    #: The channel on which a grant is announced to it; empty: it has to look for itself.
    channel: str = ""
    #: A LIKE pattern of the channels whose processes can reach it.
    near: str = ""
    #: A LIKE pattern of the channels whose bells can be rung from here.
    bells: str = ""
    #: Whether its beacon is lit.
    beacon: bool = False


#: Of a process that no other one can reach.
UNREACHED: Final = Presence()


@dataclass(frozen=True, slots=True)
class Request:
    """What one acquisition asks for. ``permit_id`` is random, and known before anything is sent."""

    resource: Resource
    permit_id: str
    #: The caller's own number of slots; ``None``: as declared elsewhere.
    slots: int | None
    take: int
    #: Seconds that the grant lasts unless it is renewed.
    lease: float
    #: Whether the request queues behind those that already wait.
    fair: bool
    holder: HolderIdentity
    presence: Presence = UNREACHED
    #: Whether the grant must survive a crash of the database's server.
    durable: bool = True
    #: The name under which a task keeps its place while it is away; empty for anything but such a task.
    rank: str = ""
    #: Whether the task has come back to that place, and so does not queue behind others of its process.
    apart: bool = False
    #: How it shares the name with others: see ``core.modes``. ``take`` is 0 where that means all slots.
    mode: str = SHARED
    #: How many may wait for the name already, over all processes, if it is to wait too; ``None``: any number.
    max_waiting: int | None = None
    #: Whether it is refused at once while the name is paused.
    refused_if_paused: bool = False
    #: The decorator's name before the call's arguments filled it in; empty for any other name.
    template: str = ""

    @property
    def bounded(self) -> bool:
        """Whether it may be refused instead of waiting."""
        return self.refused_if_paused or self.max_waiting is not None

    @property
    def lock_mode(self) -> str:
        """How it shares the name with others, as rows say it: its mode, and of a mutex that it is one."""
        return self.mode or (MUTEX if self.resource.kind == MUTEX else SHARED)

    @property
    def got(self) -> str:
        """The mode of what it gets."""
        return WHOLE if self.mode == UPGRADE else self.lock_mode

    @property
    def line(self) -> str:
        """The line in which it waits inside its process: one who declares fewer slots keeps none from the others."""
        line = line_of(self.resource.key, self.mode)
        if self.slots is not None and self.resource.kind != COUNTER and self.mode in (SHARED, WHOLE):
            line = f"{line}:{self.slots}"
        return f"{line} {self.rank}" if self.apart else line


@dataclass(frozen=True, slots=True)
class Grant:
    """What a request got: parallel tuples of slot numbers, tokens and the rows' ids."""

    slots: tuple[int, ...]
    tokens: tuple[int, ...]
    row_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Granted:
    """A grant that was handed to a waiter, known by its permit id."""

    permit_id: str
    grant: Grant
    #: Seconds that it lasts unless it is renewed, from the sending of the statement that told of it.
    lasts: float

    def note(self) -> str:
        """Return it in words for another process; if they are too many, only the permit id: it can ask for the rest."""
        numbers = chain(*zip(self.grant.row_ids, self.grant.slots, self.grant.tokens, strict=True))
        told = " ".join([self.permit_id, *map(str, numbers)])
        return told if len(told) <= MAX_NOTE else self.permit_id


@dataclass(frozen=True, slots=True)
class Place:
    """One process's place in the queue of a name."""

    #: When the process's oldest waiter came, by the boot clock.
    arrived: float
    #: How many threads and tasks wait in the process.
    waiting: int
    #: For how many seconds the most patient of them will wait at the most; ``None``: without a limit.
    patience: float | None = None


@dataclass(frozen=True, slots=True)
class Queue:
    """What a waiter sees around it."""

    #: How many processes have waited longer.
    ahead: int
    #: How many slots are free.
    free: int = 0
    #: Seconds until the next lease runs out; ``None``: not looked at, or none is held.
    expiry_in: float | None = None
    #: How many holders cannot wake this process.
    strangers: int = 0
    #: How many holders' beacons are out; ``None``: not known.
    suspects: int | None = None
    #: Whether the grant will be delivered without being asked for.
    told: bool = False


@dataclass(frozen=True, slots=True)
class Crowd:
    """Why a request is refused instead of waiting."""

    #: Whether an operator has paused the name; else this many wait already.
    paused: bool
    waiting: int
    #: Seconds until the pause ends by itself, if it does.
    resumes_in: float | None = None
    #: How many slots there are, and seconds for which they are usually held, if that is known.
    slots: int = 1
    usual_hold: float | None = None

    @classmethod
    def at(
        cls,
        request: Request,
        *,
        paused: bool,
        waiting: int,
        resumes_in: float | None = None,
        slots: int = 1,
        usual_hold: float | None = None,
    ) -> Crowd | None:
        """Return why this request is refused where the name stands like that; ``None``: it may wait."""
        full = request.max_waiting is not None and waiting >= request.max_waiting
        if not (full or (paused and request.refused_if_paused)):
            return None
        return cls(paused, waiting, resumes_in, slots, usual_hold)


@dataclass(frozen=True, slots=True)
class Waited:
    """The outcome of one step of waiting: grants to this process, or what is known of the queue."""

    granted: tuple[Granted, ...] = ()
    queue: Queue | None = None  #: ``None``: it has no place in the queue (any more).
    at_once: bool = False  #: Whether the request was granted before it had a place.
    refused: Crowd | None = None  #: Why it got no place.


@dataclass(frozen=True, slots=True)
class Acquired:
    """A granted acquisition, as a backend knows it: what was asked for, and what it got."""

    request: Request
    grant: Grant

    @property
    def permit_id(self) -> str:
        """The random id that the slots' rows carry."""
        return self.request.permit_id

    @property
    def resource(self) -> Resource:
        """The name."""
        return self.request.resource


@dataclass(frozen=True, slots=True)
class Released:
    """What a release did."""

    #: Whether any of the slots still was the permit's.
    freed: bool
    #: Waiters of this very process that got one of them.
    granted: tuple[Granted, ...] = ()


@dataclass(frozen=True, slots=True)
class Ended:
    """A hold of a process that is gone, which housekeeping has ended."""

    resource: Resource
    permit_id: str
    grant: Grant
    holder: HolderIdentity
    mode: str
    template: str
    #: How many seconds ago its process proved last that it lives, and for how long it had held by then.
    ago: float
    held: float


class Forgotten(NamedTuple):
    """How many names were deleted, the key after which to look next, and whether there seem to be more."""

    deleted: int = 0
    after: str = ""
    more: bool = False


class Templates(NamedTuple):
    """What the names of each template amount to."""

    found: list[TemplateSnapshot]
    #: How many names no template has made; ``None``: the tables have to be asked.
    plain: int | None = None
    #: Of how many names processes declare different numbers of slots, and one of these names.
    disputed: tuple[int, str] = (0, "")


@dataclass(frozen=True, slots=True)
class Renewal:
    """What became of the grants to renew, by permit id. One in neither could not be reached: ask again soon."""

    renewed: frozenset[str]
    lost: Mapping[str, Loss]
    #: Permits whose holders an operator asks to stop, and the operator's name.
    asked: Mapping[str, str] = field(default_factory=dict)


class BaseSemaphoreBackend(abc.ABC):
    """How one database alias grants, keeps and shows slots.

    It holds configuration only: all threads share it, and it is made anew after a fork. Methods that take a
    ``session`` run their statements there and commit before they return; any may raise ``BackendError``.
    """

    #: Does the backend live inside this process, without connections, threads and leases?
    process_local: ClassVar[bool] = False
    #: Does a task that is sent again keep its place meanwhile?
    keeps_ranks: ClassVar[bool] = False
    #: Does it keep counters?
    keeps_counters: ClassVar[bool] = False
    #: Does a grant last only as long as the database session that made it?
    released_on_disconnect: ClassVar[bool] = False
    #: Must a grant be renewed to be kept?
    supports_renewal: ClassVar[bool] = True
    #: The modes of requests besides the shared one that it knows by itself: see ``core.modes``.
    modes: ClassVar[frozenset[str]] = frozenset()
    #: The longest time between two proofs of possession, in seconds, whatever the lease.
    heartbeat: ClassVar[float] = math.inf

    def __init__(self, alias: str) -> None:
        self.alias = alias
        self._counted: tuple[float, list[tuple[str, int, str]]] = (0.0, [])

    def session(self) -> KeeperSession:
        """Return a session for the keeper's statements."""
        return OwnSession(self.alias)

    def opened(self, connection: BaseDatabaseWrapper) -> None:
        """Prepare a connection that a session has opened. Raises Django's database errors."""

    # The holder's side.

    @abc.abstractmethod
    def claim(self, session: Session, request: Request) -> Grant | None:
        """Atomically take ``request.take`` free slots, all or nothing, without waiting.

        A fair request gets nothing while any live process waits. A name seen for the first time is created.
        Raises ``ImproperlyConfigured`` if the name is another kind of lock.
        """

    @abc.abstractmethod
    def enrol(self, session: Session, request: Request, place: Place, *, first: bool) -> Waited:
        """Take a place in the queue of the name, by ``place.arrived``; ``first``: only if a claim gets nothing.

        With ``first`` a request that is bounded may be refused. Raises what ``claim`` does.
        """

    def crowd(self, session: Session, request: Request, here: int) -> Crowd | None:
        """Return why a bounded request is refused; ``here``: how many wait in this process."""
        found = self.snapshot(session, request.resource)
        if found is None:
            return None
        return Crowd.at(
            request,
            paused=found.paused,
            waiting=max(here, found.waiting),
            resumes_in=found.resumes_in,
            slots=found.slots,
            usual_hold=found.usual_hold,
        )

    @abc.abstractmethod
    def wait(self, session: Session, request: Request, place: Place) -> Waited:
        """Say that the waiter lives, look around, and see that free slots go to the oldest waiters."""

    @abc.abstractmethod
    def granted(self, session: Session, request: Request) -> Granted | None:
        """Return what a waiter was handed, if it was. Changes nothing."""

    @abc.abstractmethod
    def leave(self, session: Session, request: Request) -> None:
        """Give up a place in the queue, or what was granted there. Idempotent."""

    def step_aside(self, session: Session, request: Request, estimate: Callable[[int], float]) -> float:
        """Keep the place of ``request.rank`` while its task is away, without ever granting it.

        Returns the seconds that ``estimate`` says when this many are before it; the place lapses a while after that.
        """
        return estimate(0)

    def keeps_place(self, session: Session, request: Request) -> bool:
        """Return whether the place of ``request.rank`` is kept, so that its task has come back."""
        return False

    def hand_rank_on(self, session: Session, request: Request, heir: str) -> None:
        """Keep the place of ``request.rank`` for the rank ``heir`` from now on, if it is still kept."""
        return

    @abc.abstractmethod
    def release(self, session: Session, held: Acquired, *, wanted: bool = False, hand_on: bool = True) -> Released:
        """Atomically free the slots that still carry this very permit, and hand them to waiters. Idempotent.

        ``wanted``: a waiter is likely. ``hand_on``: false inside a transaction that is not ours, since a rollback
        would take back what a waiter got.
        """

    @abc.abstractmethod
    def hand_out(self, session: Session, resource: Resource) -> None:
        """Hand free slots to the oldest waiters. Idempotent."""

    @abc.abstractmethod
    def discard(self, session: Session, resource: Resource, permit_id: str) -> bool:
        """Free whatever a request whose outcome is unknown may have got. Return whether it had any. Idempotent."""

    @abc.abstractmethod
    def renew(self, session: Session, held: Sequence[Acquired]) -> Renewal:
        """Extend all these grants by their leases, in one statement."""

    @abc.abstractmethod
    def snapshot(self, session: Session, resource: Resource) -> SemaphoreSnapshot | None:
        """Return what one name is like now, read on ``session``; ``None`` if it was never used."""

    def free_dead(self, session: Session, resource: Resource, *, witness: bool) -> None:
        """Free for good the slots of dead holders, and those whose leases have run out.

        ``witness``: whether this process's own beacon is lit. There are none where locks end with their session.
        """

    def standing(self, session: Session, resource: Resource) -> set[tuple[int, int]]:
        """Return the slots that are held now, each with its token; for a while those of dead holders may be among them.

        Tokens never return: a pair that is not among them is gone for good.
        """
        found = self.snapshot(session, resource)
        holders = found.holders if found is not None else ()
        return {(holder.slot, holder.token) for holder in holders if holder.state is not SlotState.STALE}

    # Counters, of a backend that ``keeps_counters``.

    def add(
        self,
        session: Session,
        resource: Resource,
        count: int,
        *,
        initial: int,
        presence: Presence,
        hand_on: bool = True,
    ) -> tuple[Granted, ...]:
        """Add units, and hand them to waiters; returns those of this very process.

        ``initial``: what a new name begins with. ``hand_on``: false inside a transaction that is not ours. After a
        ``BackendError`` of a connection that broke at the commit, it is not known whether they were added.
        """
        raise NotImplementedError

    def take(self, session: Session, resource: Resource, permit_id: str) -> bool:
        """Take what was granted for good. Return whether it still was there to take."""
        raise NotImplementedError

    # Fences for the caller's own transactions and statements: only rows can tell who holds what.

    def fence(self, caller: BaseDatabaseWrapper, session: Session, held: Acquired) -> bool:
        """Keep the slots from being taken until the caller's transaction ends. Return whether the permit is live.

        ``session`` is one of our own. Raises ``BackendError``, and ``SemaphoreError`` where there are no fences.
        """
        raise _no_fences(caller)

    def keeps_renewals_out(self, caller: BaseDatabaseWrapper) -> bool:
        """Whether a fenced transaction keeps all others from writing, so that it must renew the permit itself."""
        return False

    def extend(self, caller: BaseDatabaseWrapper, held: Acquired) -> bool:
        """Renew the permit inside such a transaction, just before it commits. Return whether it was."""
        return False

    def fate(self, session: Session, held: Acquired) -> Loss | None:
        """Return how a grant that must be renewed was lost, by the database's word; ``None``: nothing is known."""
        return None

    def fenced_sql(self, caller: BaseDatabaseWrapper, held: Acquired) -> tuple[str, list[Any]]:
        """Return a condition, for a statement on ``caller``, that the permit is live, and its parameters."""
        raise _no_fences(caller)

    # What a backend tells by itself: without tables, or where the ends of sessions and grants are heard of.

    def taken_away(self, held: Acquired) -> Loss | None:
        """Return how a grant that needs no renewal was taken away, or ``None`` if it still stands."""
        return None

    def listen(self, changed: Callable[[], object]) -> None:
        """Have ``changed`` called when an operator has done something that may let waiters in."""

    def announce(self, deliver: Callable[[Granted, float, Resource], object]) -> None:
        """Have ``deliver`` called with what a waiter was granted, when it was asked for, and its name."""

    def before_fork(self, frozen: list[Any]) -> None:
        """Let statements under way finish. ``frozen`` gets each lock that is to be released after the fork, at once."""

    def after_fork(self) -> None:
        """In a forked child: leave alone what is the parent's."""

    def emptied(self) -> None:
        """Forget all locks: a test has emptied the tables."""

    # The operator's side. It runs on the alias's ordinary connection.

    def notes(self) -> list[str]:
        """Return sentences for operators about what cannot be shown."""
        return []

    @abc.abstractmethod
    def inspect(
        self,
        names: Collection[str] | None = None,
        *,
        prefix: str = "",
        template: str | None = None,
        at: RowClock | None = None,
    ) -> list[SemaphoreSnapshot]:
        """Return snapshots, ordered by name: of ``names`` if given, else of all names that begin with ``prefix``.

        ``template``: only the names that this template has made; empty: only those that none has.
        ``at``: the instant as of which they are read; omitted, now. A backend that tells the time by itself ignores it.
        """

    def in_use(self, most: int) -> list[SemaphoreSnapshot]:
        """Return snapshots, by name, of at most ``most`` names of which a slot is taken or waited for in the tables.

        One query finds them among any number of idle names.
        """
        slots, waiters = (
            apps.get_model("sqlsem", row)._default_manager.using(self.alias).order_by().values_list("semaphore__name")
            for row in ("SlotRow", "WaiterRow")
        )
        with database_errors(self.alias):
            used = slots.filter(lease_us__gt=0, expires_us__isnull=False).union(waiters)
            names = [name for (name,) in used[:most]]
        return self.inspect(names[:most])  # mssql-django leaves out the limit of a union

    def templates(self, *, at: RowClock | None = None, survey: Survey | None = None) -> Templates:
        """Return what the names of each template amount to, by template: of those with the most names.

        ``survey``: how names stand, if that is known already. Then it is told, too, of which names processes declare
        different numbers.
        """
        named = apps.get_model("sqlsem", "SemaphoreRow")._default_manager.using(self.alias)
        rows: Any = named.order_by().values_list("template")
        paused = Q(paused=True) & (Q(paused_until_us=None) | Q(paused_until_us__gt=NOW_UNIX))
        disputed = at.disputed() if at is not None and survey is not None else None
        with database_errors(self.alias):
            groups = self._count_names(rows)
            plain = next((count for template, count, _kind in groups if not template), 0)
            found = sorted([each for each in groups if each[0]][:MOST_TEMPLATES])
            known = self.template_sums(at=at, survey=survey) if found else {}
            special: dict[str, tuple[int, int, str]] = {}
            if disputed is not None:
                sums = {"stopped": Count("pk", filter=paused), "several": Count("pk", filter=disputed)}
                rows = rows.filter(paused | disputed).annotate(**sums, example=Min("name", filter=disputed))
                special = {template or "": (*counts, name or "") for template, *counts, name in rows}
            elif found:  # counted here, so that the index of what is paused finds them
                stopped = Counter(template or "" for (template,) in rows.filter(paused))
                special = {template: (count, 0, "") for template, count in stopped.items()}
        told = [
            replace(
                known.get(template) or TemplateSnapshot(template, 0),
                names=count,
                kind=kind,
                paused=special.get(template, (0, 0, ""))[0],
            )
            for template, count, kind in found
        ]
        several = [(count, name) for _paused, count, name in special.values() if count]
        return Templates(
            told,
            plain if plain or len(groups) <= MOST_TEMPLATES else None,
            (sum(count for count, _name in several), min((name for _count, name in several), default="")),
        )

    def _count_names(self, rows: Any) -> list[tuple[str, int, str]]:
        """Count the names of each template, with a kind of each: of very many only now and then, as that is long."""
        until, known = self._counted
        if (began := time.monotonic()) < until:
            return known
        # The index of templates tells it all.
        counted = rows.annotate(count=Count("*"), of_kind=Min("kind")).order_by("-count", "template")
        groups = [(template or "", count, kind) for template, count, kind in counted[: MOST_TEMPLATES + 1]]
        if sum(count for _template, count, _kind in groups) > COUNTED_ALWAYS:
            ended = time.monotonic()
            self._counted = (ended + min(LONGEST_COUNTED, COUNT_SHARE * (ended - began)), groups)
        return groups

    def template_sums(
        self, *, at: RowClock | None = None, survey: Survey | None = None
    ) -> Mapping[str, TemplateSnapshot]:
        """Return what the names in use amount to, by template. One whose tables tell that at once overrides this."""
        if survey is not None and survey.in_use is not None:
            return templates_of(survey.in_use.values())
        return templates_of(map(InUse.of, self.in_use(MOST_NAMES)))

    def survey(self, *, at: RowClock | None = None) -> Survey:
        """Return how all names stand. A backend whose tables tell that at once overrides this and the next two."""
        return survey_of(self.inspect(at=at))

    def in_state(self, state: SurveyState, *, at: RowClock | None = None) -> Q:
        """Return the condition on ``SemaphoreRow`` that a name is in a state at this moment."""
        return Q(pk__in=[key_of(snapshot.name) for snapshot in self.inspect(at=at) if getattr(snapshot, state)])

    def slots_in_state(self, state: SurveyState, *, at: RowClock | None = None) -> Q:
        """Return the condition on ``SlotRow`` that a slot is held or stale, or that its name is in another state."""
        found = {key_of(snapshot.name): snapshot for snapshot in self.inspect(at=at) if getattr(snapshot, state)}
        if state not in ("held", "stale"):
            return Q(semaphore__key__in=list(found))
        wanted = {
            (key, slot)
            for key, snapshot in found.items()
            for holder in snapshot.holders
            for slot in holder.numbers
            if (holder.state is SlotState.STALE if state == "stale" else not holder.expired)
        }
        # A lock that other programs took has no holder in its row.
        taken = apps.get_model("sqlsem", "SlotRow")._default_manager.using(self.alias)
        rows = taken.filter(semaphore__key__in=list(found)).values_list("pk", "semaphore", "slot")
        return Q(pk__in=[pk for pk, key, slot in rows if (key, slot) in wanted])

    @abc.abstractmethod
    def revoke(self, name: str, slot: int, token: int, *, by: str, kill: bool = False) -> HolderSnapshot | None:
        """Atomically take a slot away from the holder with this token. ``None`` if it is no longer the holder.

        ``kill``: its database session may be ended for that. Raises ``KillNeededError`` where nothing else helps.
        """

    @abc.abstractmethod
    def request_stop(self, name: str, slot: int, token: int, *, by: str) -> HolderSnapshot | None:
        """Ask the holder with this token to stop, whatever else it has of the name; ``None`` if it holds no longer.

        It learns of it at its next renewal at the latest. Raises ``SemaphoreError`` where it cannot be told.
        """

    @abc.abstractmethod
    def purge_slot(self, name: str, slot: int, token: int) -> bool:
        """Atomically free a slot whose lease has run out and still carries this token. Never touches a live one."""

    @abc.abstractmethod
    def purge_idle(self, name: str) -> bool:
        """Atomically delete a name without holders and waiters. Return whether it was deleted."""

    def forget(self, session: Session, *, seconds: float, after: str) -> Forgotten:
        """Delete names that nobody has used for so long, with their history: a few, whose keys follow ``after``.

        Never what is held, waited for or paused, what an operator has set, nor counters. A process that comes
        for one at that very moment makes it anew. Raises ``RefusedError`` besides: then nothing was deleted.
        """
        return Forgotten()

    @abc.abstractmethod
    def set_slots(
        self, name: str, slots: int | None, *, by: str = "", seconds: float | None = None, reason: str = ""
    ) -> bool:
        """Set the operator's number (``None``: leave it to the code). Return ``False`` if there is no such name.

        ``seconds``: after which the code's counts again by itself; ``None``: it does not.
        """

    @abc.abstractmethod
    def set_paused(self, name: str, paused: bool) -> bool:
        """Stop or resume granting; holders are not disturbed. Return ``False`` if there is no such name."""

    def pause(self, name: str, *, by: str, seconds: float | None = None, reason: str = "") -> bool:
        """Grant nothing more for this many seconds; ``None``: until it is resumed. ``False``: there is no such name."""
        # What is told of it first: without that, it would have no end.
        told = {"paused_us": NOW_UNIX, "paused_until_us": _until(seconds), "paused_by": by, "paused_reason": reason}
        _tell_pause(self.alias, name, None, told)
        return self.set_paused(name, True)

    def resume(self, name: str) -> bool:
        """Grant again. Return ``False`` if there is no such name."""
        done = self.set_paused(name, False)
        # Unless it was paused anew meanwhile.
        told = {"paused_us": None, "paused_until_us": None, "paused_by": "", "paused_reason": ""}
        _tell_pause(self.alias, name, False, told)
        return done

    def end_dead(
        self, session: Session, *, witness: bool, proofs: dict[tuple[int, int], int]
    ) -> tuple[list[Ended], bool]:
        """End the holds of processes that are gone. Return them, and whether to look again in a moment.

        ``witness``: whether this process's own beacon is lit. ``proofs``: kept by the caller from look to look. There
        is nothing to do where locks end with their sessions.
        """
        return [], False

    def held_by(self, session: Session, process: str) -> list[tuple[Resource, str]]:
        """Return the names of which a process has slots, and the ids of its permits, as far as they are written."""
        return []

    def end_acts(self, session: Session) -> list[OverAct]:
        """End the pauses and the numbers of slots whose time has passed, and return them.

        On rows that serves waiters of slots that are opened again; all others are served without it.
        """
        parameters = {"yes": True}
        over = session.run(lambda cursor: _rows(cursor, _OVER, parameters))
        ended = []
        for key, name, what, until_us in over:
            if what == "slots":
                self.settle(session, key)
            text, given = _ENDS[what], parameters | {"key": key}
            if session.run(lambda cursor, text=text, given=given: _change(cursor, text, given)):  # type: ignore[misc]
                ended.append(OverAct(name, what, int(until_us)))
        return ended

    def set_aside(self, session: Session) -> bool:
        """Note of some slots that nobody has used them for a while, for those who look for others. Are there more?"""
        return False

    def settle(self, session: Session, key: str) -> None:
        """Open the slots that were closed for an operator's number whose time has passed, and hand them out."""

    def procedures(self, *, drop: bool = False) -> tuple[str, ...]:
        """Return the batches that install, or remove, stored procedures for other programs; empty: it has none."""
        return ()


#: Up to this many names are counted anew for each page. The number of more is kept for this many times as long as the
#: count took, and at most for this many seconds.
COUNTED_ALWAYS: Final = 10_000
COUNT_SHARE: Final = 100
LONGEST_COUNTED: Final = 60.0
#: The clock that tokens and pauses follow.
NOW_UNIX: Final = DatabaseNow(unix=True)
# Two selects, so that each has an index.
_OVER: Final = (
    "SELECT name_key, name, 'pause', paused_until_us FROM sqlsem_semaphore"
    " WHERE paused = %(yes)s AND paused_until_us <= {token_now}"
    " UNION ALL SELECT name_key, name, 'slots', slots_until_us FROM sqlsem_semaphore"
    " WHERE slots_until_us <= {token_now}"
)
_ENDS: Final = {
    "pause": "UPDATE sqlsem_semaphore SET paused = %(no)s, paused_us = NULL, paused_until_us = NULL, paused_by = '',"
    " paused_reason = '' WHERE name_key = %(key)s AND paused = %(yes)s AND paused_until_us <= {token_now}",
    "slots": "UPDATE sqlsem_semaphore SET operator_slots = NULL, slots_until_us = NULL, slots_by = '',"
    " slots_reason = '' WHERE name_key = %(key)s AND slots_until_us <= {token_now}",
}


class OverAct(NamedTuple):
    """Something that an operator did to a name for a time, which has passed."""

    name: str
    what: Literal["pause", "slots"]
    #: When, by the clock that tokens follow.
    until_us: int


def _until(seconds: float | None) -> Any:
    """Return the end of an act that lasts this long from now, for a column; ``None``: it has none."""
    return None if seconds is None else NOW_UNIX + round(seconds * 1e6)


def sizing(slots: int | None, by: str, seconds: float | None, reason: str) -> dict[str, Any]:
    """Return what is written into a name's row as an operator sets its slots, or leaves them to the code again."""
    if slots is None:
        return {"operator_slots": None, "slots_until_us": None, "slots_by": "", "slots_reason": ""}
    return {"operator_slots": slots, "slots_until_us": _until(seconds), "slots_by": by, "slots_reason": reason}


def _rows(cursor: AnyCursor, text: str, parameters: dict[str, Any]) -> list[Any]:
    dialect_for(cursor.db).execute(cursor, text, parameters)
    return list(cursor.fetchall())


def _change(cursor: AnyCursor, text: str, parameters: dict[str, Any]) -> int:
    dialect_for(cursor.db).execute(cursor, text, parameters)
    return int(cursor.rowcount)


@repeated
def _tell_pause(alias: str, name: str, paused: bool | None, fields: dict[str, Any]) -> None:
    """Write what is told of a pause beside it; ``paused``: only if the name is, or is not."""
    wanted = Q(key=key_of(name)) if paused is None else Q(key=key_of(name), paused=paused)
    rows = apps.get_model("sqlsem", "SemaphoreRow")._default_manager.using(alias)
    with database_errors(alias):
        rows.filter(wanted).update(**fields)


def check_slots(name: str, kind: str, slots: int | None) -> None:
    """Raise ``ValueError`` if this kind of lock cannot have this many slots."""
    if kind == COUNTER:
        raise ValueError(f"{name!r} is a counter: it has no slots.")
    if kind in ONE_SLOT and slots not in (None, 1):
        raise ValueError(f"{name!r} is {a_kind(kind)}: it has one slot, not {slots}.")


def tell_of_two_kinds(alias: str, resource: Resource) -> None:
    """Log, once for each name, that this process uses it as one kind while others use it as the other."""
    if (alias, resource.key) in _told or len(_told) >= _MOST_TOLD:
        return
    _told.add((alias, resource.key))
    logger.warning(
        "%r is in use as a mutex and as a semaphore: one is let in at a time while anybody uses it as a mutex.",
        resource.name,
        extra={"semaphore": resource.name, "what": "two_kinds"},
    )


#: The names of which that was logged, by alias and key; of more than this many it is not.
_told: set[tuple[str, str]] = set()
_MOST_TOLD: Final = 10_000


def _no_fences(caller: BaseDatabaseWrapper) -> SemaphoreError:
    return SemaphoreError(
        f"Fences need lock rows, and the locks on {caller.alias!r} are not rows: compare permit.token instead."
    )
