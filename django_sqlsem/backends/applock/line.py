"""A process's place in the line for one name: a thread that waits in the server while anybody here waits."""

from __future__ import annotations

import contextlib
import threading
import uuid
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

from django_sqlsem.backends.applock import calls
from django_sqlsem.backends.applock.acquire import PASSES_THE_STUCK, holder_values, same_wish
from django_sqlsem.core.clocks import boot_now
from django_sqlsem.core.modes import WHOLE
from django_sqlsem.core.threads import DaemonThread
from django_sqlsem.database import sockets
from django_sqlsem.database.sqlserver import broke_off
from django_sqlsem.exceptions import BackendError

if TYPE_CHECKING:
    from django_sqlsem.backends.applock.acquire import Answer, Claims, Upgrades
    from django_sqlsem.backends.applock.sessions import LockSession
    from django_sqlsem.backends.base import Granted, Place, Request


#: How long a thread that nobody needs any more waits for the next one who does, in seconds.
LINGER: Final = 1.0
#: One that gave up may have a successor in the same process: so long the place is kept for it, in seconds.
SUCCESSION: Final = 0.05
#: The longest wait in one call, in seconds: where it can be cut short from here, and where it can't.
LONGEST: Final = 86_400.0
LONGEST_UNCUT: Final = 5.0
#: One step of waiting for the readers to leave, in milliseconds.
STEP_MS: Final = 250
#: What others get of the session between two of them, in seconds.
BETWEEN: Final = 0.002
#: How often in a row its session may end before its waiters hear of it; one that stood for a while begins anew.
ENDS: Final = 8
STEADY: Final = 5.0
#: While an operator lets nobody in, the thread asks again after a pause, which doubles each time. In seconds.
PAUSE: Final = 0.1
LONGEST_PAUSE: Final = 1.0
#: A wait gets a row when its thread has stood in line this long, or has tried to in vain for so long as the second; the
#: row is renewed this often. In seconds.
SHOWN_AFTER: Final = 0.25
SHOWN_ANYHOW: Final = 5.0
SHOWN_EVERY: Final = 2.0
#: How long nothing may move behind a gate before the keeper looks past it, in seconds. It doubles with each look.
FIRST_LOOK: Final = 5.0
LAST_LOOK: Final = 60.0


class Line:
    """The thread and what it waits for. The keeper tells whom the next grant is for; it may change at any time."""

    def __init__(self, claims: Claims, ended: Callable[[Line], bool]) -> None:
        self.claims = claims
        #: The name of this place in the line.
        self.ticket = uuid.uuid4().hex
        self.error: Exception | None = None
        #: Whether it is known to be the first in line: while an operator's pause lasts.
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
        #: The session of the call that waits now, and for whom it asks.
        self._blocked: LockSession | None = None
        self._asked: Request | None = None
        self._cut = False
        #: Whether the last session that it waited on has ended.
        self._session_ended = False
        self._ending = False
        #: Whether an operator lets nobody in, or has left fewer slots than are wanted.
        self._holds_off = False
        # What others see of it, by the boot clock; and what was seen behind the gate.
        self._telling = threading.Lock()
        #: Since when its thread has stood in line; 0: it does not, as it has no session yet.
        self._stood_at = 0.0
        self._show_at = self._look_at = 0.0
        self._look_after = FIRST_LOOK
        self._shown: Request | None = None
        self._mark: int | None = None

    # What the keeper's thread calls.

    def enrol(self, request: Request, place: Place, *, first: bool = False) -> None:
        """Wait for this claim from now on. ``first``: it has asked for nothing before."""
        with self._lock:
            self._unhindered = request.permit_id if first and not self._claims else ""
            self._claims[request.permit_id] = (request, place)
            self.error = None
            self._changed.notify()
        now = boot_now()
        self._show_at = now
        self._look_at, self._look_after, self._mark = now + FIRST_LOOK, FIRST_LOOK, None

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

    def show(self, request: Request, place: Place) -> None:
        """Have the rows say that it waits, if it is time. Whatever is wrong with that costs nobody a grant."""
        now = boot_now()
        if now < self._show_at or not self.claims.possession.record:
            return
        # Others that see the row may rely on its place in line.
        due = self._stood_at + SHOWN_AFTER if self._stood_at else place.arrived + SHOWN_ANYHOW
        if now < due:
            return
        self._show_at = now + SHOWN_EVERY
        with self._telling:  # else its row may be written after it was deleted, and stay
            with self._lock:
                if request.permit_id not in self._claims:
                    return
                self._shown = request
            self._tell(request, place.waiting, now - place.arrived)

    def hide(self) -> None:
        """Have the rows say that it waits no longer, if they say that it does."""
        with self._telling:
            with self._lock:
                shown, self._shown = self._shown, None
            if shown is not None:
                self._tell(shown, 0, 0.0)

    def _tell(self, request: Request, waiting: int, age: float) -> None:
        values: dict[str, Any] = {"ticket": self.ticket, "key": request.resource.key}
        values |= {"take": 0 if request.mode == WHOLE else request.take, "waiting": waiting, "age": int(age * 1e6)}
        with contextlib.suppress(BackendError), self.claims.pool.shared("") as session:
            session.run(calls.WAITING, holder_values(request, session) | {"lock_mode": request.lock_mode} | values)

    def look_past(self, request: Request) -> Granted | None:
        """See whether a slot is free behind a gate where nothing moves: a cancelled call may have left it closed.

        Only if nothing at all was granted since the last look, and seldom. Returns what it got.
        """
        now = boot_now()
        if now < self._look_at:
            return None
        if self._mark is not None:  # the first look only notes what was granted last
            self._look_after = min(2 * self._look_after, LAST_LOOK)
        self._look_at = now + self._look_after
        answer = self.claims.try_claim(request, fair=PASSES_THE_STUCK, mark=self._mark)
        self._mark = answer.mark
        return answer.granted

    def leave(self, permit_id: str) -> None:
        """Wait for this claim no longer. Soon after, unless another one wants the same, the place is given up."""
        with self._lock:
            if self._claims.pop(permit_id, None) is None or self._serves_anybody():
                return
            self._changed.notify()
            if self._blocked is not None:
                sockets.watch.call_soon(self._give_up)  # by then, most waits have ended by themselves

    def _give_up(self) -> None:
        with self._lock:
            if self._blocked is not None and not self._serves_anybody():
                self._cut = True
                self._blocked.cut()

    def _serves_anybody(self) -> bool:
        """Whether somebody waits whom a grant would serve for which the call asks; any, if none is under way."""
        asked = self._asked
        return any(
            asked is None or request.permit_id == asked.permit_id or same_wish(request, asked)
            for request, _place in self._claims.values()
        )

    def end(self, timeout: float) -> None:
        """Wait for the thread to leave the line, unless somebody waits. ``timeout`` is in seconds."""
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
            self._thread = DaemonThread("sqlsem-line", self._run)
            self._thread.start()

    def _run(self) -> None:
        failures = 0
        while self._thread is threading.current_thread():  # one whose start was interrupted gives way to the next
            with self._lock:
                if not self._claims and not self._ending and self._shown is None:
                    self._changed.wait(LINGER)
                elif self.error is not None and not self._ending:
                    self._changed.wait(LINGER)  # the keeper has yet to read the error
                wanted = bool(self._claims) and self.error is None
            if not wanted:
                self.hide()
                if self._ended(self):
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
            session = self.claims.pool.alone()
        except BackendError as error:
            self._session_ended = broke_off(error)  # in the middle of its login
            raise
        try:
            pause = PAUSE
            while (request := self._wanted()) is not None and not self._ask(session, request):
                if self._holds_off:
                    with self._lock:
                        self._changed.wait(pause)
                    pause = min(2 * pause, LONGEST_PAUSE)
        finally:
            if self.is_head and not session.ended:  # it waited for the end of a pause, and nobody wants to any more
                session.end("it was left at the head of the line")
            self._session_ended, self.is_head, self._stood_at = bool(session.ended), False, 0.0
            self.claims.pool.give_back(session)

    def _fail(self, error: Exception, *, again: bool) -> None:
        """Leave an error for the keeper to find, unless it is our own doing, or a new session may do better."""
        with self._lock:
            cut, self._cut = self._cut, False
            if not cut and not again and self._claims:
                self.error = error

    def _wanted(self) -> Request | None:
        with self._lock:
            if not self._claims and not self._ending:
                self._changed.wait(SUCCESSION)
            return next((request for request, _place in self._claims.values()), None)

    def _ask(self, session: LockSession, request: Request) -> bool:
        """Wait in one call: for the gate, then for slots. Return whether there was a grant."""
        with self._lock:
            if request.permit_id not in self._claims:
                return False
            _request, place = self._claims[request.permit_id]
            self._blocked, self._asked, self._cut = session, request, False
            self._stood_at = self._stood_at or boot_now()
            unhindered, self._unhindered = self._unhindered == request.permit_id, ""
        longest = LONGEST if session.can_be_cut else LONGEST_UNCUT
        patience = longest if place.patience is None else min(place.patience + SUCCESSION, longest)
        try:
            answer = self.claims.attempt(
                session, request, int(patience * 1000), fair=int(request.fair), head=self.is_head
            )
        finally:
            with self._lock:
                self._blocked = self._asked = None
        self.is_head, self._holds_off = answer.head, answer.result in (calls.ON_HOLD, calls.TOO_FEW)
        if answer.granted is not None:
            self._hand_over(session, request, answer, at_once=unhindered and answer.result == calls.TAKEN_AT_ONCE)
            return True
        if answer.result == calls.BUSY and patience < longest:
            with self._lock:  # whoever waits gives up at this moment
                self._changed.wait(SUCCESSION)
        return False

    def _hand_over(
        self, session: LockSession | None, request: Request, answer: Answer, *, at_once: bool = False
    ) -> None:
        granted, possession = answer.granted, self.claims.possession
        with self._lock:
            wanted = self._claims.pop(request.permit_id, None) is not None
        if not wanted:  # who left has looked already for what it might have got
            successor = None if self._cut else self._wanted()  # nothing stands on a session that was cut
            if successor is None or session is None or not same_wish(successor, request):
                possession.give_up(session, request)
                return
            granted = self.claims.pass_on(session, request, successor)
            if granted is None:
                return
            request, at_once = successor, False
            with self._lock:
                wanted = self._claims.pop(request.permit_id, None) is not None
        if wanted:
            self.claims.deliver(granted, boot_now(), request.resource, at_once=at_once)
        else:
            possession.give_up(session, request)


class UpgradeLine(Line):
    """The thread that waits for an upgrade, on the session of the upgradable reader."""

    def __init__(self, claims: Claims, upgrades: Upgrades, ended: Callable[[Line], bool]) -> None:
        super().__init__(claims, ended)
        self.upgrades = upgrades

    def stand(self) -> None:
        """Ask again and again, until there is a grant or nobody wants one."""
        key = ""
        try:
            while (request := self._wanted()) is not None:
                key = request.resource.key
                self.is_head = True
                if self._step(request):
                    key = ""
                    return
                threading.Event().wait(BETWEEN)
        finally:
            self.is_head, self._stood_at = False, 0.0
            if key:
                self.upgrades.stop(key)

    def _step(self, request: Request) -> bool:
        with self._lock:
            if request.permit_id not in self._claims:
                return False
            _request, place = self._claims[request.permit_id]
            self._stood_at = self._stood_at or boot_now()
        left = STEP_MS if place.patience is None else min(STEP_MS, 1 + int(place.patience * 1000))
        answer = self.upgrades.ask(request, left, close=True, wanted=lambda: self.waits_for(request.permit_id))
        if answer.granted is None:
            if answer.result == calls.ON_HOLD:
                threading.Event().wait(STEP_MS / 1000)
            return False
        self._hand_over(None, request, answer)
        return True
