"""The sessions of one process and database that keep locks: shared by its permits, one permit of a name on each."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Final, NoReturn, TypeVar

from django.db import Error as DjangoDatabaseError
from django.db import connections

from django_sqlsem.backends.applock.sessions import INSIDE, Holding, LockSession
from django_sqlsem.core import threads
from django_sqlsem.core.modes import UPDATE, line_of
from django_sqlsem.database import sockets
from django_sqlsem.database.dialects import dialect_for
from django_sqlsem.database.errors import backend_error
from django_sqlsem.database.sessions import FORK_PATIENCE
from django_sqlsem.exceptions import BackendError

if TYPE_CHECKING:
    from django.db.backends.base.base import BaseDatabaseWrapper

    from django_sqlsem.database.cursors import AnyCursor


T = TypeVar("T")

#: How many sessions serve all claims of a process, unless they have what is asked for already: a crowd takes turns.
ENOUGH: Final = 2
#: For how many seconds a claim waits for its turn: batches that do not wait are short.
TURN: Final = 5.0
#: How often whoever may open a session looks whether it is its turn to, in seconds.
LOOK_AGAIN: Final = 0.5


class LockPool:
    """All lock sessions of one alias. Any thread may call it."""

    repeats = 0  # what may have been done is not sent again

    def __init__(self, alias: str) -> None:
        self.alias = alias
        self.dialect = dialect_for(connections[alias])
        self.attempts = 0
        self.last_used = time.monotonic()
        #: Since when a batch is under way, by the boot clock: only the keeper's own sessions say so.
        self.asked_at: float | None = None
        self._lock = threading.Lock()
        self._freed = threading.Condition(self._lock)
        self._sessions: list[LockSession] = []
        self._by_permit: dict[str, tuple[LockSession, Holding]] = {}
        self._opening: list[threads.User] = []
        self._failed: tuple[float, BackendError] | None = None
        #: Called before the sessions are closed: who waits on one that nobody needs any more leaves it.
        self.closing: Callable[[], object] = lambda: None

    # What is held.

    def holder(self, permit_id: str) -> tuple[LockSession, Holding] | None:
        """Return the session that has a permit's locks, and what they are."""
        found = self._by_permit.get(permit_id)
        return found if found is not None and found[0].held.get(found[1].line) is found[1] else None

    def note(self, session: LockSession, holding: Holding) -> bool:
        """Know that a session has a permit's locks; its lock is held. Return whether it is the first one that has."""
        session.held[holding.line] = holding
        session.kept = session.kept or holding.mode == UPDATE
        return self._by_permit.setdefault(holding.permit_id, (session, holding))[0] is session

    def forget(self, session: LockSession, holding: Holding) -> None:
        """Know that it has them no longer."""
        if session.held.get(holding.line) is holding:
            del session.held[holding.line]
        session.kept = session.kept and bool(session.held)
        found = self._by_permit.get(holding.permit_id)
        if found is not None and found[0] is session:
            del self._by_permit[holding.permit_id]

    def sessions(self) -> list[LockSession]:
        """Return the sessions that stand."""
        with self._lock:
            return [*(session for session in self._sessions if not session.ended)]

    def upgradable(self, key: str) -> tuple[LockSession, Holding] | None:
        """Return the session that has the writer's place of a name beside readers, and its holding."""
        line = line_of(key, UPDATE)
        return next(((each, held) for each in self.sessions() if (held := each.held.get(line)) is not None), None)

    def unclear(self, key: str) -> list[LockSession]:
        """Return the sessions on which a claim of a name was cut short; who waits on one sees to it by itself."""
        return [session for session in self.sessions() if key in session.unclear and not session.waiting]

    # Taking a session for a while.

    @contextlib.contextmanager
    def shared(self, key: str, *, empty: bool = False) -> Iterator[LockSession]:
        """Yield a session, for batches that do not wait, that has nothing of this name; ``empty``: nothing at all.

        Raises ``BackendError``.
        """
        asked = time.monotonic()

        def fits(session: LockSession) -> bool:
            return not (session.held if empty else key in session.held)

        session = self._idle(fits, key, asked, TURN) or self._open(asked)
        with self._using(session):
            yield session

    def alone(self) -> LockSession:
        """Return a session for somebody who will wait on it: it holds nothing, and nobody else gets it meanwhile.

        ``give_back`` ends that. Raises ``BackendError``.
        """
        asked = time.monotonic()
        session = self._idle(lambda each: not each.held and not each.unclear, "", asked, 0.0) or self._open(asked)
        session.waiting = True
        return session

    def give_back(self, session: LockSession) -> None:
        """Let others use it again."""
        if session.unclear:  # nobody may look at it any more; what was granted well leaves nothing unclear
            session.end("a claim on it was cut short")
        session.waiting = False
        self._done(session)

    @contextlib.contextmanager
    def own(self, session: LockSession, timeout: float = -1) -> Iterator[bool]:
        """Use this very session. Yields whether it could be had in time."""
        if not session.lock.acquire(timeout=timeout):
            yield False
            return
        with self._using(session):
            yield True

    @contextlib.contextmanager
    def _using(self, session: LockSession) -> Iterator[None]:
        try:
            yield
        except GeneratorExit:  # of one that was struck on the way into its block: by now the turn may be another's
            raise
        except BaseException:
            self._done(session)
            raise
        self._done(session)

    def _done(self, session: LockSession) -> None:
        self.last_used = session.last_used = time.monotonic()
        if session.ended:
            with self._lock, contextlib.suppress(ValueError):
                self._sessions.remove(session)
        session.lock.release()
        with self._lock:
            # With few sessions, whoever stands in line can use any. Else the next one may have no use for this one.
            if len(self._sessions) + len(self._opening) <= ENOUGH:
                self._freed.notify()
            else:
                self._freed.notify_all()

    def _idle(self, fits: Callable[[LockSession], bool], key: str, asked: float, patience: float) -> LockSession | None:
        """Return a session whose turn it is, or ``None``: then the caller opens one.

        Where logins are slow, a crowd would open one session each, one after the other, while the first ones are long
        idle: so few do at a time, and the others take what becomes free meanwhile.
        """
        self.attempts += 1
        give_up = asked + patience
        with self._lock:
            return self._idle_one(fits, key, asked, give_up)

    def _idle_one(
        self, fits: Callable[[LockSession], bool], key: str, asked: float, give_up: float
    ) -> LockSession | None:
        while True:
            fitting = [each for each in self._sessions if not (each.ended or each.waiting or each.kept) and fits(each)]
            # One that is in use for this very name will do when its turn has come; one that was left so won't.
            fitting = [each for each in fitting if key not in each.unclear or each.lock.locked()]
            # One that holds something first, so that the others can be closed.
            for each in sorted(fitting, key=lambda each: -len(each.held)):
                if each.lock.acquire(blocking=False):
                    if fits(each) and key not in each.unclear and not (each.ended or each.kept):
                        return each
                    each.lock.release()
            left = give_up - time.monotonic()
            self._opening = [each for each in self._opening if threads.is_there(each)]
            if len(self._opening) < ENOUGH and (len(fitting) + len(self._opening) < ENOUGH or left <= 0):
                self._opening.append(threads.user(INSIDE))
                return None
            if left <= 0:
                self._hear_of_failures(asked)
            self._freed.wait(left if left > 0 else LOOK_AGAIN)

    def _open(self, asked: float) -> LockSession:
        try:
            return self._open_one(asked)
        finally:
            with self._lock:
                mine = threading.get_ident()
                self._opening = [*(each for each in self._opening if each[1] != mine)]
                self._freed.notify_all()

    def _hear_of_failures(self, asked: float) -> None:
        # Who stood in line meanwhile need not find it out anew, one long login after the other.
        if self._failed is not None and self._failed[0] >= asked:
            raise BackendError(str(self._failed[1])) from self._failed[1].__cause__

    def _open_one(self, asked: float) -> LockSession:
        self._hear_of_failures(asked)
        try:
            session = LockSession(self.alias, lambda: self._hear_of_failures(asked))
        except DjangoDatabaseError as error:
            failed = backend_error(self.alias, error)
            self._failed = (time.monotonic(), failed)
            raise failed from error
        self._failed = None
        session.lock.acquire()
        with self._lock:
            self._sessions.append(session)
        return session

    # The life of the pool, as the keeper sees it: see ``sessions.Session``.

    @property
    def connection(self) -> BaseDatabaseWrapper:
        """There is no Django connection."""
        raise RuntimeError("application locks live on sessions of their own")

    @property
    def is_open(self) -> bool:
        """Nothing has to be opened for the keeper's sake."""
        return True

    def unreachable(self, since: float) -> bool:
        """Whether no session could be opened since an instant of ``time.monotonic()``."""
        return self._failed is not None and self._failed[0] >= since

    def run(self, work: Callable[[AnyCursor], T], *, again: bool = True) -> NoReturn:
        """There is no cursor to work with."""
        raise RuntimeError("application locks live on sessions of their own")

    transaction = run

    def close(self) -> None:
        """Close the sessions that nobody uses and that hold nothing."""
        self.closing()
        for session in self.sessions():
            if session.lock.acquire(blocking=False):
                if not session.held:
                    session.end("closed")
                self._done(session)

    def trim(self, idle: float) -> None:
        """Close the sessions that have held nothing for this many seconds, but for one."""
        now, spare = time.monotonic(), 0
        for session in self.sessions():
            if not session.held and session.lock.acquire(blocking=False):
                spare += 1
                if not session.held and spare > 1 and now - session.last_used >= idle:
                    session.end("closed")
                    self._done(session)
                else:
                    session.lock.release()

    def freeze(self, frozen: list[Any]) -> None:
        """Before a fork: let the short batches under way finish. ``frozen`` gets each lock that is to be released."""
        if sockets.gate.acquire(timeout=FORK_PATIENCE, for_good=True):
            frozen.append(sockets.gate)
        for each in self.sessions():
            if not each.waiting and each.lock.acquire(timeout=FORK_PATIENCE, for_good=True):
                frozen.append(each.lock)  # noqa: PERF401 - each one at once

    def after_fork(self) -> None:
        """In a forked child: never close or finalise the parent's sessions, which would speak on them."""
        threads.after_fork()
        _inherited.append(self)


_inherited: list[LockPool] = []
