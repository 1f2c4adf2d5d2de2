"""``tokens()``: a counting semaphore without a maximum. Anybody adds tokens; who acquires them has used them up.

Workers produce and consume: one process releases a token for each piece of work that is ready, others acquire them.
"""

from __future__ import annotations

import dataclasses
import logging
import uuid
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, NoReturn

from django.db import connections

from django_sqlsem import identity, refusals, scopes, testmode, token_grants, transactions
from django_sqlsem.backends import database_for, get_counting_backend
from django_sqlsem.backends.base import Claim
from django_sqlsem.backends.counting import TOKENS
from django_sqlsem.backends.rows_serve import LAPSE_US
from django_sqlsem.caller_sessions import CallerSession
from django_sqlsem.conf import config
from django_sqlsem.exceptions import AcquireTimeoutError, wrong_kind
from django_sqlsem.holds import Hold
from django_sqlsem.keepers import keeper_for
from django_sqlsem.naming import Resource, resource_for, validate_name
from django_sqlsem.snapshots import SemaphoreSnapshot
from django_sqlsem.timeouts import UNSET, Seconds, Unset, to_seconds
from django_sqlsem.wording import shown

if TYPE_CHECKING:
    from django_sqlsem.keeper import Keeper
    from django_sqlsem.sessions import Session

logger = logging.getLogger("django_sqlsem")

#: The most that one call adds or takes.
MAX_TOKENS: Final = 1_000_000_000
LAPSE: Final = LAPSE_US / 1e6  #: A grant that is not taken by then goes back into the count, in seconds.


def validate_count(count: object, *, what: str, minimum: int = 1) -> int:
    """Return ``count`` if it is an ``int`` from ``minimum`` to a billion. Raises ``TypeError`` or ``ValueError``."""
    if isinstance(count, bool) or not isinstance(count, int):
        kind = type(count).__name__
        raise TypeError(f"{what} must be an int from {minimum} to {MAX_TOKENS}, not {shown(count)} of type {kind}.")
    if not minimum <= count <= MAX_TOKENS:
        raise ValueError(f"{what} must be from {minimum} to {MAX_TOKENS}, not {shown(count)}.")
    return int(count)


@dataclass(frozen=True)
class TakenTokens:
    """Tokens that were taken: how many, and for how many seconds that waited. They are used up, unless put back."""

    tokens: Tokens
    count: int
    waited: float

    @property
    def name(self) -> str:
        """The name that they were taken from."""
        return self.tokens.name

    def put_back(self) -> None:
        """Add as many tokens again, as after work that failed. Every call does."""
        self.tokens.release(self.count)

    async def aput_back(self) -> None:
        """Add as many tokens again, from a coroutine."""
        await self.tokens.arelease(self.count)


@dataclass(frozen=True)
class Tokens:
    """A named count of tokens. Make it with ``tokens()``.

    It holds no state and touches nothing before its first use: one object at module level may be used by any number
    of threads and tasks at once.
    """

    name: str
    initial: int = 0
    _: dataclasses.KW_ONLY
    take: int = 1
    timeout: float | Unset | None = UNSET
    using: str | None = None

    def release(self, n: int = 1) -> None:
        """Add ``n`` tokens, and wake whom they suffice for. Anybody may, also who never acquired one.

        They are there at once, whatever becomes of the caller's transaction; on SQLite inside ``atomic()``, with its
        commit. Raises ``BackendError``.
        """
        count = validate_count(n, what="n")
        _refuse_event_loop("arelease")
        keeper = self._keeper()
        session = keeper.session_here()
        self._add(keeper, session, count, hand_on=not isinstance(session, CallerSession))
        if isinstance(session, CallerSession):  # nobody may get before the commit what a rollback would take back
            resource = self._resource()
            transactions.at_transaction_end(
                keeper.alias, lambda: keeper.post(lambda: keeper.backend.hand_out(keeper.own, resource))
            )
        keeper.post(_nothing)  # its thread closes the connection that was opened for this, once it is idle

    async def arelease(self, n: int = 1) -> None:
        """Add ``n`` tokens from a coroutine; see ``release()``."""
        count = validate_count(n, what="n")
        keeper = self._keeper()
        await keeper.call(lambda: self._add(keeper, keeper.own, count))

    def acquire(self, n: int | None = None, *, timeout: Seconds | Unset | None = UNSET) -> TakenTokens:
        """Take ``n`` tokens for good, all or none, waiting up to ``timeout`` seconds (``None``: for ever).

        An omitted ``n`` is the ``take`` that the tokens were made with, an omitted timeout is theirs too, else
        ``SQLSEM["TIMEOUT"]``. First come, first served: who wants many is not overtaken. Raises
        ``AcquireTimeoutError``; ``BackendError``.
        """
        take, seconds = self._wanted(n), self._seconds(timeout)
        return self._acquire(take, seconds) or self._refuse(self.status(), take, seconds)

    def try_acquire(self, n: int | None = None) -> TakenTokens | None:
        """Take ``n`` tokens if they are there and nobody waits for them, without waiting; else return ``None``."""
        return self._acquire(self._wanted(n), 0.0)

    async def aacquire(self, n: int | None = None, *, timeout: Seconds | Unset | None = UNSET) -> TakenTokens:
        """Take ``n`` tokens from a coroutine: see ``acquire()``. Waiting holds no thread."""
        take, seconds = self._wanted(n), self._seconds(timeout)
        return await self._aacquire(take, seconds) or self._refuse(await self.astatus(), take, seconds)

    async def atry_acquire(self, n: int | None = None) -> TakenTokens | None:
        """Take ``n`` tokens if they are there and nobody waits for them; else return ``None``."""
        return await self._aacquire(self._wanted(n), 0.0)

    def status(self) -> SemaphoreSnapshot:
        """Return a frozen snapshot: ``tokens``, ``waiting``, ``waiters``. A name never used has its initial tokens."""
        keeper = self._keeper()
        found = keeper.backend.snapshot(keeper.session_here(), self._resource())
        keeper.post(_nothing)
        return self._snapshot(found)

    async def astatus(self) -> SemaphoreSnapshot:
        """Return what ``status()`` does, without blocking the event loop."""
        keeper = self._keeper()
        return self._snapshot(await keeper.call(lambda: keeper.backend.snapshot(keeper.own, self._resource())))

    def count(self) -> int:
        """Return how many tokens there are to take: as of now, and no promise that they are there when you ask."""
        return self.status().tokens or 0

    async def acount(self) -> int:
        """Return how many tokens there are to take."""
        return (await self.astatus()).tokens or 0

    def __enter__(self) -> NoReturn:
        raise TypeError(
            f"Tokens are used up, and nothing is given back at the end of a block: use {self.name!r} by acquire(), "
            "or a semaphore()."
        )

    __aenter__ = __enter__

    def __exit__(self, *exc_info: object) -> None:
        """Never gets here."""

    async def __aexit__(self, *exc_info: object) -> None:
        """Never gets here."""

    def _resource(self) -> Resource:
        return resource_for(self.name, TOKENS)

    def _keeper(self) -> Keeper:
        alias = database_for(self.using)
        backend = get_counting_backend(alias)
        if not backend.process_local:
            testmode.refuse_forbidden(connections[alias])
        return keeper_for(backend)

    def _snapshot(self, found: SemaphoreSnapshot | None) -> SemaphoreSnapshot:
        if found is None:
            return SemaphoreSnapshot(self.name, TOKENS, self.initial, self.initial, None, False, tokens=self.initial)
        if found.kind != TOKENS:
            raise wrong_kind(self.name, found.kind, TOKENS)
        return found

    def _wanted(self, n: int | None) -> int:
        return self.take if n is None else validate_count(n, what="n")

    def _seconds(self, timeout: Seconds | Unset | None) -> float | None:
        if isinstance(timeout, Unset):
            timeout = self.timeout
        if isinstance(timeout, Unset):
            return config(database_for(self.using)).timeout
        return to_seconds(timeout, what="timeout", allow_none=True)

    def _hold(self, keeper: Keeper, take: int) -> Hold:
        claim = Claim(
            resource=self._resource(),
            permit_id=uuid.uuid4().hex,
            slots=self.initial,
            take=take,
            lease=LAPSE,
            fair=True,
            holder=identity.current(),
            presence=keeper.presence,
        )
        return Hold(keeper, claim, max_hold=None, kept=False)

    def _acquire(self, take: int, timeout: float | None) -> TakenTokens | None:
        _refuse_event_loop("aacquire")
        if refusals.forced_refusal(self.name):
            return None
        keeper = self._keeper()
        token_grants.get_ready(keeper)
        hold = self._hold(keeper, take)
        try:
            while keeper.acquire(hold, timeout):
                if token_grants.take(keeper, hold):
                    return self._taken(hold)
                hold.rearm()  # it came too late for them, and stands where it stood
            keeper.drop(hold)
        except BaseException:
            token_grants.give_up(keeper, hold, self._put_back)
            raise
        return None

    async def _aacquire(self, take: int, timeout: float | None) -> TakenTokens | None:
        if refusals.forced_refusal(self.name):
            return None
        keeper = self._keeper()
        await token_grants.aget_ready(keeper)
        hold = self._hold(keeper, take)
        try:
            while await keeper.aacquire(hold, timeout):
                if await token_grants.atake(keeper, hold):
                    return self._taken(hold)
                hold.rearm()
            keeper.drop(hold)
        except BaseException:
            token_grants.give_up(keeper, hold, self._put_back)
            raise
        return None

    def _taken(self, hold: Hold) -> TakenTokens:
        taken = TakenTokens(self, hold.claim.take, hold.waited)
        told = {"semaphore": self.name, "what": "tokens_taken", "count": taken.count, "waited": taken.waited}
        logger.debug("Took %(count)d of the tokens %(semaphore)r, after %(waited).3f s.", told, extra=told)
        return taken

    def _put_back(self, keeper: Keeper, count: int) -> None:
        self._add(keeper, keeper.own, count)

    def _add(self, keeper: Keeper, session: Session, count: int, *, hand_on: bool = True) -> None:
        token_grants.add(keeper, session, self._resource(), count, initial=self.initial, hand_on=hand_on)

    def _refuse(self, snapshot: SemaphoreSnapshot, take: int, timeout: float | None) -> NoReturn:
        wanted = "No token" if take == 1 else f"No {take} tokens"
        when = "at once" if timeout == 0 else f"within {timeout:g} s" if timeout is not None else "ever"
        message = f"{wanted} of {snapshot.name!r} {when} (there are {snapshot.tokens}, {snapshot.waiting} waiting)"
        message += "; it is paused by an operator." if snapshot.paused else "."
        raise AcquireTimeoutError(message, name=self.name, timeout=timeout, waiting=snapshot.waiting)


def tokens(
    name: str,
    initial: int = 0,
    *,
    take: int = 1,
    timeout: Seconds | Unset | None = UNSET,
    using: str | None = None,
) -> Tokens:
    """Return the tokens ``name``: a count in the database without a maximum, with ``release`` and ``acquire``.

    ``initial``: how many there are when the name is used for the first time; say the same everywhere. ``take``: how
    many an acquire takes unless it says otherwise, all or none. ``timeout``: seconds or ``timedelta`` to wait,
    ``None`` for ever, 0 not at all; omitted, 30 s. ``using``: alias of the database that keeps the locks.

    Nothing is looked up before the first use. Raises ``TypeError`` or ``ValueError`` for a bad argument.
    """
    if not isinstance(timeout, Unset):
        timeout = to_seconds(timeout, what="timeout", allow_none=True)
    if using is not None and not isinstance(using, str):
        raise TypeError(f"using must be the alias of a database or None, not {shown(using)}.")
    return Tokens(
        validate_name(name),
        validate_count(initial, what="initial", minimum=0),
        take=validate_count(take, what="take"),
        timeout=timeout,
        using=using,
    )


def _nothing() -> Any:
    """Nothing to do but to look at the clock."""


def _refuse_event_loop(verb: str) -> None:
    scopes.refuse_event_loop(f"An event loop must not be blocked: use `await tokens.{verb}()`.")
