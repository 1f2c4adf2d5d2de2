"""A process's place in the line for one name: a thread that waits in the server while anybody here waits."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Callable
from typing import TYPE_CHECKING, Final, Protocol

from django_sqlsem.backends.applock.acquire import Stand
from django_sqlsem.backends.applock.tsql import parts
from django_sqlsem.core.clocks import boot_now
from django_sqlsem.database.sqlserver import broke_off, failure
from django_sqlsem.exceptions import BackendError

if TYPE_CHECKING:
    from django_sqlsem.backends.applock.acquire import Answer
    from django_sqlsem.backends.applock.pool import LockPool
    from django_sqlsem.backends.applock.sessions import LockSession
    from django_sqlsem.backends.base import Granted, Place, Request
    from django_sqlsem.database.sqlserver import LockNames


#: A head's batch waits for so long, in milliseconds: then the process is asked whether it still wants to.
BUDGET_MS: Final = 500
#: How long a thread that nobody needs any more waits for the next one who does, in seconds.
LINGER: Final = 1.0
#: One that gave up may have a successor in the same process: so long the place is kept for it, in seconds.
SUCCESSION: Final = 0.05
#: So long after the last one gave up, in seconds, the wait is cut: by then, most of them have ended by themselves.
CUT_AFTER: Final = 3 * SUCCESSION
#: The longest wait for the gate in one batch, in seconds: where it can be cut short from here, and where it can't.
LONGEST: Final = 86_400.0
LONGEST_UNCUT: Final = 5.0
#: How often in a row its session may end before its waiters hear of it; one that stood so many seconds begins anew.
ENDS: Final = 8
STEADY: Final = 5.0
#: It looks again after so many seconds if the server did not let it wait: while paused, shrinking, or too small.
PAUSE: Final = 0.1


class Claimant(Protocol):
    """What the line needs of the backend."""

    pool: LockPool
    #: To be called with what was granted, when it was asked for, its name, and ``at_once``.
    deliver: Callable[..., object]

    def attempt(self, session: LockSession, request: Request, stand: Stand, *, fair: int) -> Answer:
        """Claim on this session, after standing in line if need be."""

    def pass_on(self, session: LockSession, request: Request, successor: Request) -> Granted | None:
        """Make what this session has got for a claim another one's, or let it go if that has been served elsewhere."""

    def give_up(self, session: LockSession | None, request: Request) -> None:
        """Free what a claim has got that nobody wants any more."""

    def step_out(self, session: LockSession, names: LockNames, ticket: str) -> None:
        """Open the gate if it is held, and take the waiter's row away."""


class Line:
    """The thread and what it waits for. The keeper tells whom the next grant is for; it may change at any time."""

    def __init__(self, claimant: Claimant, names: LockNames, ended: Callable[[Line], bool]) -> None:
        self.claimant = claimant
        self.names = names
        #: The name of this place in the line.
        self.ticket = uuid.uuid4().hex
        self.error: Exception | None = None
        #: Whether it is the first in line.
        self.is_head = False
        self._ended = ended
        #: The claim that came first and found nobody waiting here, until the server has been asked for it.
        self._unhindered = ""
        #: Entered by itself: a signal may strike within a condition's own ``__enter__``, and would leave it locked.
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        #: Who waits, by permit id: one, unless two threads asked at the same moment.
        self._claims: dict[str, tuple[Request, Place]] = {}
        self._thread: threading.Thread | None = None
        self._blocked: LockSession | None = None
        self._cut = False
        #: Whether the last session that it stood on has ended; and the last one that did so in line.
        self._session_ended = False
        self._cut_short: LockSession | None = None
        self._ending = False
        #: Whether it may have the gate, and a waiter's row.
        self._in_line = False

    # What the keeper's thread calls.

    def enrol(self, request: Request, place: Place, *, first: bool = False) -> None:
        """Wait for this claim from now on. ``first``: it has asked for nothing before."""
        with self._lock:
            self._unhindered = request.permit_id if first and not self._claims else ""
            self._claims[request.permit_id] = (request, place)
            self.error = None
            self._changed.notify()

    def enrol_again(self, request: Request, place: Place) -> None:
        """Note how things are with a claim that it waits for already."""
        with self._lock:
            if request.permit_id in self._claims:
                self._claims[request.permit_id] = (request, place)

    @property
    def wanted(self) -> bool:
        """Whether anybody here waits."""
        return bool(self._claims)

    def waits_for(self, permit_id: str) -> bool:
        """Whether this claim has neither been served nor left."""
        return permit_id in self._claims

    def leave(self, permit_id: str) -> None:
        """Wait for this claim no longer. Soon after, unless another one waits, the place is given up."""
        with self._lock:
            if self._claims.pop(permit_id, None) is None or self._claims:
                return
            self._changed.notify()
            if self._blocked is not None:
                timer = threading.Timer(CUT_AFTER, self._give_up)
                timer.daemon = True
                try:
                    timer.start()
                except RuntimeError:  # no thread can start at the interpreter's end
                    self._give_up()

    def _give_up(self) -> None:
        with self._lock:
            if not self._claims and self._blocked is not None:
                self._cut = True
                self._blocked.cut()

    def end(self, timeout: float) -> None:
        """Wait for the thread to step out of line, for so many seconds at the most, unless it is wanted."""
        thread = self._thread
        if thread is not None and thread is not threading.current_thread() and not self._claims:
            self._ending = True
            with self._lock:
                self._changed.notify()
            self._give_up()
            thread.join(timeout)
            self._ending = False

    # The thread.

    def start(self) -> None:
        """Start waiting, unless it does already. Raises ``RuntimeError`` if no thread can start."""
        if self._thread is None or not self._thread.is_alive():
            self._thread = threading.Thread(target=self._run, name="sqlsem-line", daemon=True)
            self._thread.start()

    def _run(self) -> None:
        failures = 0
        while self._thread is threading.current_thread():  # one whose start was interrupted gives way to the next
            with self._lock:
                if not self._ending and (not self._claims or self.error is not None):
                    self._changed.wait(LINGER)  # the keeper has yet to read the error
                wanted = bool(self._claims) and self.error is None
            if not wanted:
                if self._ended(self):
                    if self._cut_short is not None:  # the server may have written the waiter's row after it was deleted
                        self.claimant.step_out(self._cut_short, self.names, self.ticket)
                    return
                continue
            began = boot_now()
            try:
                self.stand()
                failures = 0
            except Exception as error:  # noqa: BLE001 - it belongs to those who wait
                failures = failures + 1 if boot_now() - began < STEADY else 1
                self._fail(error, again=self._session_ended and failures < ENDS)
                if failures > 1:
                    with self._lock:
                        self._changed.wait(PAUSE)

    def stand(self) -> None:
        """Wait on a session of its own, until there is a grant or nobody wants one."""
        self._session_ended = False
        try:
            session = self.claimant.pool.alone()
        except BackendError as error:
            self._session_ended = broke_off(error)  # in the middle of its login
            raise
        try:
            self._wait_on(session)
        finally:
            self._session_ended, self.is_head = bool(session.ended), False
            self.claimant.pool.give_back(session)

    def _fail(self, error: Exception, *, again: bool) -> None:
        """Leave an error for the keeper to find, unless it is our own doing, or a new session may do better."""
        with self._lock:
            cut, self._cut = self._cut, False
            if not cut and not again and self._claims:
                self.error = error

    def _wait_on(self, session: LockSession) -> None:
        """Stand in line, then be the head, until there is a grant or nobody wants one."""
        try:
            while (request := self._wanted()) is not None:
                if self._ask(session, request):
                    return
        finally:
            if self._in_line:
                self._in_line = False
                self.claimant.step_out(session, self.names, self.ticket)
                self._cut_short = session if session.ended else self._cut_short

    def _wanted(self) -> Request | None:
        with self._lock:
            if not self._claims and not self._ending:
                self._changed.wait(SUCCESSION)
            return next((request for request, _place in self._claims.values()), None)

    def _ask(self, session: LockSession, request: Request) -> bool:
        """Wait in one batch: for the gate, then for slots. Return whether there was a grant."""
        with self._lock:
            if request.permit_id not in self._claims:
                return False
            _request, place = self._claims[request.permit_id]
            self._blocked, self._cut = session, False
            unhindered, self._unhindered = self._unhindered == request.permit_id, ""
        longest = LONGEST if session.can_be_cut else LONGEST_UNCUT
        patience = longest if place.patience is None else min(place.patience + SUCCESSION, longest)
        stand = Stand(self.ticket, place.waiting, patience, place.arrived, BUDGET_MS, heads=self.is_head)
        began = boot_now()
        self._in_line = True
        try:
            granted, status, self.is_head, at_once = self.claimant.attempt(session, request, stand, fair=False)
        finally:
            with self._lock:
                self._blocked = None
        if granted is not None:
            self._in_line = False  # the batch has opened the gate
            self._hand_over(session, request, granted, at_once=unhindered and at_once)
            return True
        if status not in (parts.BUSY, parts.PAUSED):
            raise failure(self.claimant.pool.alias, status)
        if boot_now() - began < min(patience, BUDGET_MS / 2000):
            with self._lock:
                self._changed.wait(PAUSE)
        elif not self.is_head and patience < longest:
            with self._lock:  # whoever waits gives up at this moment
                self._changed.wait(SUCCESSION)
        return False

    def _hand_over(
        self, session: LockSession | None, request: Request, granted: Granted, *, at_once: bool = False
    ) -> None:
        with self._lock:
            wanted = self._claims.pop(request.permit_id, None) is not None
        if not wanted:  # who left has looked already for what it might have got
            successor = None if self._cut else self._wanted()  # nothing stands on a session that was cut
            if successor is None or session is None or _wants(successor) != _wants(request):
                self.claimant.give_up(session, request)
                return
            passed = self.claimant.pass_on(session, request, successor)
            if passed is None:
                return
            granted, request, at_once = passed, successor, False
            with self._lock:
                wanted = self._claims.pop(request.permit_id, None) is not None
        if wanted:
            self.claimant.deliver(granted, boot_now(), request.resource, at_once=at_once)
        else:
            self.claimant.give_up(session, request)


def _wants(request: Request) -> tuple[int, int | None, str]:
    return request.take, request.slots, request.mode
