"""One acquisition: this process's record of it, from before its request is sent until its slots are back.

``docs/internals.md`` shows the states. Each method that changes the state is one event of ``TRANSITIONS``.
"""

from __future__ import annotations

import asyncio
import collections
import concurrent.futures
import contextlib
import dataclasses
import enum
import functools
import math
import secrets
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any, Final, Protocol, TypeVar

from django_sqlsem.backends.base import Acquired, BaseSemaphoreBackend, Crowd, Grant, Granted, Request
from django_sqlsem.core import forks
from django_sqlsem.core.clocks import boot_now
from django_sqlsem.core.names import Resource
from django_sqlsem.database.errors import Outage
from django_sqlsem.database.sessions import KeeperSession, Session
from django_sqlsem.exceptions import BackendError
from django_sqlsem.runtime.presence import Reach
from django_sqlsem.snapshots import Loss, LossReason

T = TypeVar("T")


class State(enum.Enum):
    """Where an acquisition stands."""

    #: Its caller does not wait yet; its first request may be on its way.
    NEW = "new"
    #: Its caller waits in this process's queue of the name.
    QUEUED = "queued"
    #: The database granted it, and its caller does not know that yet.
    GRANTED = "granted"
    #: Its caller has the permit.
    HELD = "held"
    #: Its caller has released it, and a fenced transaction keeps it until its end.
    PUT_OFF = "put off"
    #: Its caller gives it back.
    RELEASING = "releasing"
    #: The keeper gives it back, again and again until the database has answered.
    RETRYING = "retrying"
    #: Its slots are back, or were lost before.
    RELEASED = "released"
    #: Its units were taken for good: nothing is held.
    USED = "used"
    #: It ended without a grant.
    OVER = "over"
    #: Its caller has gone in the middle: the keeper gives back what it got, or may still get.
    ABANDONED = "abandoned"

    __hash__ = object.__hash__  # the one of enumerations is Python code


class Transition(enum.Enum):
    """What happens to an acquisition."""

    QUEUE = "queue"
    GRANT = "grant"
    TAKE = "take"
    ASK_ANEW = "ask anew"
    GIVE_UP = "give up"
    PUT_OFF = "put off"
    RELEASE = "release"
    RETRY = "retry"
    RELEASED = "released"
    USE = "use"
    PUT_BACK = "put back"
    ABANDON = "abandon"

    __hash__ = object.__hash__


#: States in which the permit is given back, or was.
GIVEN_BACK: Final = frozenset({State.RELEASING, State.RETRYING, State.RELEASED})
#: States in which the program has nothing yet.
_NOT_TAKEN: Final = frozenset({State.NEW, State.QUEUED, State.GRANTED})
_ANY: Final = frozenset(State)
_ENDED: Final = frozenset({State.RELEASED, State.USED})
#: States in which the program has nothing any more.
HAS_NOTHING: Final = frozenset({*GIVEN_BACK, State.USED, State.OVER, State.ABANDONED})

#: By transition: the states that it changes, each with the next one; and those that it leaves alone, as another thread
#: was faster. In any other state it is a fault of the library: ``IllegalTransitionError``.
TRANSITIONS: Final[dict[Transition, tuple[dict[State, State], frozenset[State]]]] = {
    Transition.QUEUE: ({State.NEW: State.QUEUED}, _ANY - {State.NEW}),
    Transition.GRANT: ({State.NEW: State.GRANTED, State.QUEUED: State.GRANTED}, _ANY - {State.NEW, State.QUEUED}),
    Transition.TAKE: (
        dict.fromkeys((State.GRANTED, State.PUT_OFF), State.HELD),
        frozenset({State.HELD, State.ABANDONED, *GIVEN_BACK}),
    ),
    Transition.ASK_ANEW: ({State.GRANTED: State.NEW, State.HELD: State.NEW}, frozenset({State.ABANDONED, *GIVEN_BACK})),
    Transition.GIVE_UP: ({State.NEW: State.OVER, State.QUEUED: State.OVER}, _ANY - {State.NEW, State.QUEUED}),
    Transition.PUT_OFF: ({State.HELD: State.PUT_OFF}, frozenset({State.PUT_OFF, State.ABANDONED, *GIVEN_BACK})),
    Transition.RELEASE: (
        dict.fromkeys((State.GRANTED, State.HELD, State.PUT_OFF), State.RELEASING),
        _ANY - {State.GRANTED, State.HELD, State.PUT_OFF},
    ),
    Transition.RETRY: (
        dict.fromkeys(
            (State.GRANTED, State.HELD, State.PUT_OFF, State.ABANDONED, State.RELEASING, State.RETRYING), State.RETRYING
        ),
        frozenset({State.RELEASED, State.USED}),
    ),
    Transition.RELEASED: (
        dict.fromkeys((State.RELEASING, State.RETRYING), State.RELEASED),
        frozenset({State.RELEASED}),
    ),
    Transition.USE: (
        dict.fromkeys((State.GRANTED, State.HELD, State.ABANDONED), State.USED),
        frozenset({State.USED, *GIVEN_BACK}),
    ),
    Transition.PUT_BACK: ({State.USED: State.RELEASED}, _ANY - {State.USED}),
    Transition.ABANDON: (
        dict.fromkeys((State.NEW, State.QUEUED, State.GRANTED, State.HELD, State.PUT_OFF), State.ABANDONED),
        frozenset({State.ABANDONED, State.OVER, State.USED, *GIVEN_BACK}),
    ),
}


class IllegalTransitionError(RuntimeError):
    """An event that cannot happen to an acquisition in its state: a fault of the library."""


class Jumper(Protocol):
    """What tests do instead of waiting: see ``testing.clock()``."""

    def jump(self, acquisition: Acquisition) -> None:
        """Let time pass until the wait is over, if this one is not to be waited for."""

    async def ajump(self, acquisition: Acquisition, future: asyncio.Future[None]) -> None:
        """Do the same for a task."""


jumper: Jumper | None = None


class TurnedAwayError(Exception):
    """A request was refused instead of waiting; nothing of it is left in the database."""

    def __init__(self, crowd: Crowd) -> None:
        super().__init__()
        self.crowd = crowd


class Client(Protocol):
    """The client of a view that waits: once it has gone, the view need not wait any longer."""

    def wait(self, answer: Reply, timeout: float | None) -> bool:
        """Block until there is an answer. Return whether there is one; ``False`` too if the client has gone."""

    def check(self, name: str) -> None:
        """Raise what ends the call of a view that waited for ``name``, if the client has gone; else do nothing."""


class OpenFence(Protocol):
    """A transaction that is fenced with an acquisition: see ``locks.fences``."""

    #: Whether the transaction keeps all other writers out, the permit's renewals too.
    exclusive: bool

    @property
    def stands(self) -> bool:
        """Whether the transaction may be open."""


#: For how long a thread blocks at a time, in seconds.
_AT_A_TIME: Final = 1.0


class Reply:
    """What the caller of one acquisition waits for: that it was granted, or an error."""

    __slots__ = ("_future", "_lock", "error", "told", "wanted", "woken")

    def __init__(self) -> None:
        #: Whether a thread or task waits, or will.
        self.wanted = False
        self.told = False
        #: Whether the answer has reached the waiter: its messenger may be interrupted after it is ``told``.
        self.woken = False
        self.error: BaseException | None = None
        # A lock, as a signal that raises in the waiter leaves an Event in an unknown state.
        self._lock = threading.Lock()
        self._lock.acquire()
        self._future: asyncio.Future[None] | None = None

    def wait_here(self, timeout: float | None) -> bool:
        """Block this thread until there is an answer; ``None``: for ever. Return whether there is one."""
        if threading.current_thread() is threading.main_thread():
            return self._lock.acquire(timeout=-1 if timeout is None else min(timeout, threading.TIMEOUT_MAX))
        # A thread that blocks hears nothing of what another raises in it (``PyThreadState_SetAsyncExc``), as the time
        # limits of some workers do. So only the main thread blocks for long, which signals interrupt.
        deadline = math.inf if timeout is None else time.monotonic() + timeout
        while True:
            left = deadline - time.monotonic()
            if self._lock.acquire(timeout=max(0.0, min(left, _AT_A_TIME))):
                return True
            if left <= _AT_A_TIME:
                return False

    def prepare_future(self) -> asyncio.Future[None]:
        """Let the running event loop be told; returns the future to wait for."""
        self._future = asyncio.get_running_loop().create_future()
        return self._future

    async def wait_on_loop(self, timeout: float | None) -> bool:
        """Wait for the answer on the running event loop, in place of a thread that has asked."""
        future = self.prepare_future()
        try:
            if not self.told:  # else the answer came before the future
                await asyncio.wait({future}, timeout=timeout)
            return self.told
        finally:
            self._future = None

    def give(self, error: BaseException | None) -> bool:
        """Wake the waiter. Return ``False`` if its event loop was closed, so that the permit will not be taken."""
        self.error = error
        self.told = True
        with contextlib.suppress(RuntimeError):  # it was answered before
            self._lock.release()
        reached = self._future is None or _resolve(self._future)
        self.woken = True
        return reached


def _resolve(future: asyncio.Future[None]) -> bool:
    def resolve() -> None:
        if not future.done():
            future.set_result(None)

    try:
        future.get_loop().call_soon_threadsafe(resolve)
    except RuntimeError:
        return False
    return True


class Lease:
    """Until when an acquisition may be counted on, by the boot clock of this process."""

    deadline = 0.0
    renew_at = 0.0
    #: Why it could not be renewed; empty: it was.
    error = ""
    #: When the last statement was sent that found it still waiting, or made it wait.
    proved = 0.0

    def darken(self, until: float) -> None:
        """The process's beacon is out: unless it is lit again by then, others may take the slot soon after."""
        self.deadline = min(self.deadline, until)
        self.error = self.error or "the session that shows that this process lives has ended"


@functools.cache
def margin(lease: float) -> float:
    """Return how much earlier than the database a holder counts its lease as over, in seconds."""
    return min(1.0, lease / 20)


@functools.cache
def renewal_interval(lease: float, heartbeat: float) -> float:
    """Return how often a lease is renewed by a backend with this heartbeat, in seconds."""
    return min(lease / 4, heartbeat)


class Announcement:
    """Something that the program is told once, by callbacks on a thread of their own."""

    __slots__ = ("_once", "callbacks")

    def __init__(self) -> None:
        self.callbacks: collections.deque[Callable[[Any], object]] = collections.deque()
        self._once = [True]

    def once(self) -> bool:
        """Return whether this is the first call; it takes no lock, so that finalisers may call it."""
        try:
            return self._once.pop()
        except IndexError:
            return False

    def anew(self) -> None:
        """Forget that it was told."""
        self._once = [True]


#: Counts the forks behind this process: an acquisition of another generation belongs to an ancestor.
_generation = 0


def _disown() -> None:
    global _generation
    _generation += 1


forks.register("acquisitions", "the child would give back what its parent holds", in_child=_disown)


class Trail:
    """What a flow of control took last, and its trail before that. It never changes: a child's goes on from it."""

    __slots__ = ("before", "length", "swept_at", "taken")

    def __init__(self, acquisition: Acquisition, before: Trail | None, swept_at: int) -> None:
        self.taken = weakref.ref(acquisition)
        self.before = before
        self.length: int = 1 if before is None else before.length + 1
        #: The length at which what has been given back is left out.
        self.swept_at = swept_at

    def back(self) -> Iterator[Acquisition]:
        """Yield what is left of it, newest first: what was neither given back nor inherited from a parent process."""
        trail: Trail | None = self
        while trail is not None:
            taken = trail.taken()
            if taken is not None and not (taken.foreign or taken.given_back or taken.abandoned):
                yield taken
            trail = trail.before


class Caller:
    """Who asked for an acquisition: a task or a thread, and what it had taken by then."""

    #: The task or thread, while the permit is its own.
    ref: weakref.ref[Any] | None = None
    #: The alias and the name's key, for as long.
    scope: tuple[str, str] | None = None
    #: Where it is found by its caller and its name: see ``callers``.
    place: tuple[int, str] | None = None
    #: The thread that works for the task.
    worker: weakref.ref[threading.Thread] | None = None
    #: The thread that it blocks while it waits.
    thread: weakref.ref[threading.Thread] | None = None
    #: The task or thread, whosever the permit is.
    asker: weakref.ref[Any] | None = None
    #: What had been taken when it asked, by the asker and by those whose context it has.
    beside: Trail | None = None

    @property
    def itself(self) -> Any:
        """The task or thread; ``None`` if it is gone, or has handed the permit over."""
        return self.ref() if self.ref is not None else None


class AcquisitionKeeper(Protocol):
    """What an acquisition, the queues and the chores need of their keeper: see ``keeper.Keeper``."""

    alias: str
    backend: BaseSemaphoreBackend
    work: KeeperSession
    own: KeeperSession
    reach: Reach
    outage: Outage
    acquisitions: dict[int, Acquisition]
    waiting: dict[str, Acquisition]
    queue_lock: threading.Lock

    @property
    def rests_until(self) -> float: ...
    def answered(self) -> None: ...
    def present(self, request: Request) -> Request: ...
    def session_here(self) -> Session: ...
    def post(self, step: Callable[[], object]) -> None: ...
    def note(self, step: Callable[[], object]) -> None: ...
    async def call(self, work: Callable[[Session], T]) -> T: ...
    def submit(self, work: Callable[[], T]) -> concurrent.futures.Future[T]: ...
    def tell(self, event: str, *about: Any) -> None: ...
    def acquire(self, acquisition: Acquisition, timeout: float | None) -> bool: ...
    async def aacquire(self, acquisition: Acquisition, timeout: float | None) -> bool: ...
    def deliver(
        self, granted: Granted, sent: float | None = None, resource: Resource | None = None, *, at_once: bool = False
    ) -> None: ...
    def answer_again(self, acquisition: Acquisition) -> None: ...
    def in_doubt(self, acquisition: Acquisition, *, asked: bool) -> bool: ...
    def renew_request(self, acquisition: Acquisition) -> None: ...
    def forget_queue(self, queue: Any) -> bool: ...
    def withdraw(self, acquisition: Acquisition) -> None: ...
    def break_off(self, acquisition: Acquisition, error: Exception) -> bool: ...
    def release(self, acquisition: Acquisition) -> bool: ...
    async def arelease(self, acquisition: Acquisition) -> bool: ...
    def give_back(self, acquisition: Acquisition, session: Session) -> None: ...
    def clear(self, acquisition: Acquisition) -> None: ...
    def abandon(self, acquisition: Acquisition) -> None: ...
    def drop(self, acquisition: Acquisition) -> None: ...
    def forget(self, acquisition: Acquisition, why: str) -> None: ...
    def used(self, acquisition: Acquisition) -> None: ...
    def tell_lost(self, acquisition: Acquisition) -> None: ...
    def doubt(self, request: Request) -> None: ...
    def doubt_permit(self, resource: Resource, permit_id: str) -> None: ...
    def knows(self, permit_id: str) -> bool: ...
    def renew_now(self, acquisition: Acquisition) -> None: ...
    def look_at_all(self) -> None: ...
    def is_in_use(self) -> bool: ...
    def time_left(self, now: float) -> float: ...


class _Asking:
    """Lives for as long as the frame of a caller that asks."""

    __slots__ = ("__weakref__",)


class Acquisition:
    """One acquisition, from its request to its end. The program has its ``Permit``."""

    def __init__(
        self,
        keeper: AcquisitionKeeper,
        request: Request,
        *,
        max_hold: float | None,
        undo: Callable[[Acquisition], object] | None = None,
    ) -> None:
        self.keeper = keeper
        self.request = request
        self.max_hold = max_hold
        #: Undoes on the keeper's side what its caller takes for good in a moment; ``None``: a grant is kept until it is
        #: released.
        self.undo = undo
        self.grant: Grant | None = None
        self.loss: Loss | None = None
        #: By whom its holder was asked to stop; empty: by nobody.
        self.stop_by = ""
        self.lease = Lease()
        self.arrived = boot_now()
        #: The boot clock when its caller gives up waiting; ``None``: never.
        self.patient_until: float | None = None
        self.granted_at = 0.0
        self.waited = 0.0
        self.releasing_since = 0.0
        #: Whether the database may know of the request, as it is now.
        self.sent = False
        #: Whether another statement may free its slots before its release: that frees nothing then, which is no loss.
        self.freed_elsewhere = False
        #: The caller's transactions that are fenced with it: until they end, it is not given back.
        self.fences: tuple[OpenFence, ...] = ()
        #: The acquisition that it belongs to, if it is only a part of what its holder has.
        self.part_of: Acquisition | None = None
        #: Returns its permit while the program has it.
        self.permit: Callable[[], Any] = _no_permit_yet
        self.client: Client | None = None
        self.caller: Caller | None = None
        # These are made when they are needed: most acquisitions are granted at once, and end without a word.
        self._answer: Reply | None = None
        self._losing: Announcement | None = None
        self._stopping: Announcement | None = None
        #: Where it stands. Only this class changes it.
        self.state = State.NEW
        self._asking: weakref.ref[_Asking] | None = None
        self._lock = threading.RLock()  # a finaliser may run in any line
        self._generation = _generation

    def __repr__(self) -> str:
        return f"<Acquisition of {self.request.resource.name!r}: {self.state.value}>"

    def __enter__(self) -> object:
        """Begin the block in which its caller asks and gets its permit. Its frame keeps what this returns."""
        asking = _Asking()
        self._asking = weakref.ref(asking)
        return asking

    def __exit__(self, kind: type[BaseException] | None, *exc_info: object) -> None:
        """End it. After an exception, whatever it was, the keeper gives back what was or will be granted."""
        refused = kind is not None and issubclass(kind, BackendError) and self.given_back
        if kind is not None and not refused:  # a release that the database refused is the keeper's already
            self.keeper.abandon(self)
            if self.undo is not None:
                self.keeper.post(functools.partial(self.undo, self))

    # The state.

    def _happens(self, event: Transition) -> bool:
        """Change the state as ``TRANSITIONS`` says. Return whether this very call has changed it."""
        with self._lock:
            changes, ignoring = TRANSITIONS[event]
            after = changes.get(self.state)
            if after is not None:
                self.state = after
                return True
            if self.state in ignoring:
                return False
        raise IllegalTransitionError(f"{event.value!r} cannot happen to {self!r}.")

    @property
    def kept(self) -> bool:
        """Whether a grant is kept until it is released; else its caller takes it for good in a moment."""
        return self.undo is None

    @property
    def given_back(self) -> bool:
        """Whether its release has begun."""
        return self.state in GIVEN_BACK

    @property
    def abandoned(self) -> bool:
        """Whether its caller has gone in the middle."""
        return self.state is State.ABANDONED

    @property
    def has_slots(self) -> bool:
        """Whether it was granted, and its release has not begun."""
        return self.state in (State.GRANTED, State.HELD, State.PUT_OFF)

    def was_served(self) -> bool:
        """Whether it was granted, also if it has been given back since; not if its caller went before it knew."""
        return self.grant is not None and self.state is not State.ABANDONED

    def queue(self) -> bool:
        """Its caller waits for an answer from now on. Return ``False`` if it does not ask any more."""
        queued = self._happens(Transition.QUEUE)
        if queued:
            self.answer.wanted = True
        return queued

    def granted(self, grant: Grant, sent: float, lasts: float, *, at_once: bool) -> bool:
        """Note the grant; ``sent`` is the boot clock from which its ``lasts`` seconds count here.

        ``at_once``: the request's own statement was granted, as a slot was free and no waiter came before it.
        Return ``False`` if it was granted before, or its caller does not want it any more.
        """
        with self._lock:
            if not self._happens(Transition.GRANT):
                return False
            self.grant = grant
            self.granted_at = boot_now()
            if not at_once or self.waited:  # once it has waited, it has waited, whatever became of that grant
                self.waited = max(self.granted_at - self.arrived, 1e-9)
            self.renewed(sent, min(lasts, self.request.lease))
            return True

    def taken(self) -> bool:
        """Its caller has the permit, or has it again: who enters an rlock whose release was put off."""
        return self._happens(Transition.TAKE)

    def ask_anew(self) -> bool:
        """Forget a grant that came to nothing, and ask again."""
        with self._lock:
            if not self._happens(Transition.ASK_ANEW):
                return False
            self.fresh_request()
            self.grant = self.loss = None
            self.stop_by = ""
            if self._losing is not None:
                self._losing.anew()
            if self._stopping is not None:
                self._stopping.anew()
            self._answer = None
            return True

    def give_up(self) -> bool:
        """Its caller waits no longer. Return ``False`` if it was granted before, or has ended."""
        return self._happens(Transition.GIVE_UP)

    def put_off(self) -> None:
        """It was released, and is given back at the end of the transaction that is fenced with it."""
        self._happens(Transition.PUT_OFF)

    def release(self) -> bool:
        """Its release begins. Return whether this call has to give it back."""
        if self._generation != _generation or not self._happens(Transition.RELEASE):
            return False
        self.releasing_since = boot_now()
        return True

    def retry(self) -> bool:
        """The keeper gives it back. Return ``False`` if nothing is left to give back."""
        if self.grant is None or not self._happens(Transition.RETRY):
            return False
        self.releasing_since = boot_now()
        return True

    def released(self) -> None:
        """The database has its slots back."""
        self._happens(Transition.RELEASED)

    def used(self) -> None:
        """Its units were taken for good."""
        if self.grant is not None or not self.abandoned:  # it was abandoned before it was granted anything
            self._happens(Transition.USE)

    def put_back(self) -> bool:
        """Units that were taken go back. Return whether this call has to see to that."""
        return self._happens(Transition.PUT_BACK)

    def abandon(self) -> None:
        """Its caller has gone in the middle."""
        self._happens(Transition.ABANDON)

    # What it asks for, and how long that is good for.

    @property
    def permit_id(self) -> str:
        """The random id that the request carries."""
        return self.request.permit_id

    @property
    def name(self) -> str:
        """The name of the lock."""
        return self.request.resource.name

    @property
    def acquired(self) -> Acquired:
        """What to tell the backend of a grant."""
        assert self.grant is not None  # noqa: S101
        request, keeper = self.request, self.keeper
        if request.presence is not keeper.reach.presence:
            request = keeper.present(request)
        return Acquired(request, self.grant)

    @property
    def has_permit(self) -> bool:
        """Whether its permit was made."""
        return self.permit is not _no_permit_yet

    @property
    def is_dropped(self) -> bool:
        """Whether the program has lost its permit without releasing it."""
        return self.has_permit and self.state is not State.PUT_OFF and self.permit() is None

    @property
    def is_left(self) -> bool:
        """Whether its caller has gone without a word: a second interruption came while the first was cleaned up."""
        if self._asking is None or self._asking() is not None:
            return False
        # In this order: the frame ends as soon as the permit is made.
        return self.state in (State.NEW, State.QUEUED, State.GRANTED, State.HELD, State.OVER) and not self.has_permit

    @property
    def foreign(self) -> bool:
        """Whether this is a parent process's acquisition, inherited by fork."""
        return self._generation != _generation

    @property
    def fenced(self) -> bool:
        """Whether a transaction that is fenced with it is open."""
        return bool(self.fences) and any(fence.stands for fence in self.fences)

    @property
    def overdue(self) -> str:
        """Says in words that it is held for longer than it may be; else empty."""
        if self.max_hold is None or boot_now() - self.granted_at <= self.max_hold:
            return ""
        return f"held for longer than max_hold={self.max_hold:g} s"

    @property
    def held_for(self) -> float:
        """For how many seconds it was held, until its release began; 0 if it never was."""
        return max(0.0, (self.releasing_since or boot_now()) - self.granted_at) if self.granted_at else 0.0

    def patience(self, now: float) -> float | None:
        """For how many more seconds its caller waits; ``None``: for ever."""
        return None if self.patient_until is None else max(0.0, self.patient_until - now)

    def fresh_request(self) -> None:
        """Ask under a new permit id: what became of the old one is unknown."""
        self.request = dataclasses.replace(self.request, permit_id=secrets.token_hex(16))
        self.sent = False

    def stand_apart(self) -> None:
        """Wait in a place of its own: a task that has come back is before those of its process who came later."""
        self.request = dataclasses.replace(self.request, apart=True)

    def renewed(self, sent: float, lasts: float | None = None) -> None:
        """Note a proof of possession that was asked for at ``sent`` on the boot clock, good for ``lasts`` seconds."""
        whole, keeper = self.request.lease, self.keeper
        lease = whole if lasts is None else lasts
        self.lease.deadline = sent + lease - margin(lease)
        # One that was handed over must be confirmed soon, unless it is given back sooner still.
        interval = renewal_interval(whole, keeper.backend.heartbeat)
        self.lease.renew_at = sent + interval if lease >= whole else self.granted_at + lease / 8
        self.lease.error = ""

    # How it was lost.

    def current_loss(self) -> Loss | None:
        """Return how the permit was lost, if it was: decided at this very moment, and for good."""
        if self.loss is None:
            if self.foreign:
                self.loss = Loss(LossReason.FORKED, "it belongs to the parent process")
            elif self.grant is not None and self.state not in _ENDED and (loss := self._judge()) is not None:
                self.lose(loss)
        return self.loss

    def _judge(self) -> Loss | None:
        keeper = self.keeper
        if not keeper.backend.supports_renewal:
            loss = keeper.backend.taken_away(self.acquired)
            return None if self.given_back else loss
        if boot_now() < self.lease.deadline or any(fence.exclusive and fence.stands for fence in self.fences):
            return None
        if self.lease.error:
            return Loss(LossReason.CUT_OFF, f"it could not be renewed: {self.lease.error}")
        asked_at = keeper.own.asked_at
        if asked_at is not None and asked_at < self.lease.deadline:
            # Its turn never came: the keeper still waits for the answer to something else.
            return Loss(LossReason.CUT_OFF, "it could not be renewed: the database has not answered yet")
        return Loss(LossReason.EXPIRED, "its lease ran out while this process did not run")

    def lose(self, loss: Loss) -> None:
        """Latch a loss, and tell the program once."""
        if self.loss is None:
            self.loss = loss
        if self.losing.once():
            self.keeper.tell_lost(self)

    # What is told of it.

    @property
    def losing(self) -> Announcement:
        """What to tell the program when it is lost."""
        with self._lock:
            self._losing = self._losing or Announcement()
            return self._losing

    @property
    def stopping(self) -> Announcement:
        """What to tell the program when its holder is asked to stop."""
        with self._lock:
            self._stopping = self._stopping or Announcement()
            return self._stopping

    @property
    def answer(self) -> Reply:
        """What its caller waits for."""
        with self._lock:
            self._answer = self._answer or Reply()
            return self._answer

    @property
    def waits_unanswered(self) -> bool:
        """Whether its caller waits, and has not heard of anything yet."""
        return self._answer is not None and self._answer.wanted and not self._answer.woken

    def tell(self, error: BaseException | None = None) -> None:
        """Wake the caller that waits: it was granted, or ``error`` happened. Called from any thread."""
        # A second messenger may come late: the holder may have closed its loop since.
        if not self.answer.give(error) and self.state in _NOT_TAKEN:
            self.keeper.abandon(self)

    @property
    def has_error(self) -> bool:
        """Whether the answer is an error."""
        return self._answer is not None and self._answer.error is not None

    def take_error(self) -> BaseException:
        """Return the error and forget it: its traceback keeps what its callers hold, and must be on no cycle."""
        error, self.answer.error = self.answer.error, None
        assert error is not None  # noqa: S101
        return error

    def wait(self, timeout: float | None) -> bool:
        """Block this thread until there is an answer. Return whether there is one; not if its client has gone."""
        if jumper is not None:
            jumper.jump(self)
        return self.answer.wait_here(timeout) if self.client is None else self.client.wait(self.answer, timeout)

    async def answered(self, future: asyncio.Future[None], timeout: float | None) -> None:
        """Wait for the future of an answer, or until the timeout."""
        if jumper is not None:
            await jumper.ajump(self, future)
        await asyncio.wait({future}, timeout=timeout)


def _no_permit_yet() -> None:
    return None
