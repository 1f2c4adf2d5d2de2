"""The permit: the handle of one grant. All state of an acquisition lives here, never on the semaphore.

A semaphore is shared and keeps no state, so that which permit a ``with`` block ends is noted here too.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import logging
import secrets
import sys
import threading
import weakref
from collections.abc import Callable, Hashable, Iterable, Iterator
from functools import partial
from types import FrameType
from typing import Any, Final, NamedTuple, NoReturn, Self, TypeAlias, TypeVar

from django_sqlsem.backends import database_for
from django_sqlsem.backends.base import Grant
from django_sqlsem.core import forks
from django_sqlsem.core.clocks import boot_now
from django_sqlsem.core.durations import UNSET, Seconds, Unset
from django_sqlsem.core.modes import UPGRADE
from django_sqlsem.core.names import Name, key_of, validate_name
from django_sqlsem.core.text import numbers, shown
from django_sqlsem.core.threads import runs
from django_sqlsem.database import transactions
from django_sqlsem.exceptions import AlreadyHeldError, BackendError, NotEnteredError, PermitLostError
from django_sqlsem.locks import fences
from django_sqlsem.locks.acquire import refusal, seconds_to_wait
from django_sqlsem.runtime import callers, events
from django_sqlsem.runtime.acquisition import HAS_NOTHING, Acquisition, State
from django_sqlsem.snapshots import Loss, LossReason

logger = logging.getLogger("django_sqlsem")


class Permit:
    """One grant of one or more slots. Made by ``Semaphore.acquire`` and its kin only.

    A permit is also a context manager that releases at its end. One that is garbage-collected while it is held is
    given back, and logged as an ERROR.
    """

    #: Whether it is no mistake of the program if it is garbage-collected: a response has it, which may be thrown away.
    _goes_with_response = False

    def __init__(self, semaphore: Any, acquisition: Acquisition) -> None:
        #: The ``Semaphore`` that it was acquired by.
        self.semaphore: Any = semaphore
        self._acquisition = acquisition
        acquisition.permit = weakref.ref(self)

    @property
    def name(self) -> str:
        """The semaphore's name."""
        return self._acquisition.name

    @property
    def slot(self) -> int:
        """The number of the slot, from 1; of several, the lowest."""
        return self._grant.slots[0]

    @property
    def slots(self) -> tuple[int, ...]:
        """The numbers of all its slots, ascending."""
        return self._grant.slots

    @property
    def token(self) -> int | None:
        """The fencing token: it grows with every grant of one slot. Of several slots, the lowest slot's.

        ``None`` where no rows are kept: ``SQLSEM["RECORD"]`` on SQL Server.
        """
        return self._grant.tokens[0] if self._grant.tokens else None

    @property
    def tokens(self) -> tuple[int, ...]:
        """The fencing tokens of ``slots``, in their order."""
        return self._grant.tokens

    @property
    def waited(self) -> float:
        """Seconds that the acquire waited for it.

        Exactly 0 if its own claim was granted at once; more if it had to wait for another holder, or behind another
        waiter.
        """
        return self._acquisition.waited

    @property
    def expires_at(self) -> datetime.datetime | None:
        """When it will be lost unless it is renewed before: an aware instant on this host's clock, for display.

        ``None`` where nothing expires: on SQL Server, and where the locks are in the process's memory.
        """
        if not self._acquisition.keeper.backend.supports_renewal:
            return None
        left = self._acquisition.lease.deadline - boot_now()
        return datetime.datetime.now(datetime.UTC) + datetime.timedelta(seconds=left)

    @property
    def lost(self) -> Loss | None:
        """How the permit was lost, or ``None`` while it is ours. Decided when read, and for good."""
        return self._acquisition.current_loss()

    @property
    def released(self) -> bool:
        """Whether it has been given back, or will be when the transaction that is fenced with it ends."""
        return self._acquisition.given_back or self._acquisition.state is State.PUT_OFF

    def check(self) -> None:
        """Raise ``PermitLostError`` if the permit is no longer ours: lost, or released already. No database access."""
        loss = self.lost
        if loss is not None:
            raise PermitLostError(f"The permit of {self.name!r} was lost: {loss}.", loss=loss)
        if self.released:
            raise PermitLostError(f"The permit of {self.name!r} was released already.")

    def fence(self, using: str | None = None) -> None:
        """Make the calling thread's transaction fail unless the permit is live by the database's clock at this moment.

        Until that transaction ends, none of the slots can be taken over, revoked or purged, and a release of the
        permit waits for its end. ``using`` is the alias of the transaction's database, which must be the one that
        keeps the locks (else ``ValueError``). Outside a transaction it raises ``TransactionManagementError``, and
        ``PermitLostError`` when the permit is not live: the outermost one is then rolled back even if that is caught.
        Raises ``BackendError`` if the database failed, and ``SemaphoreError`` where nothing is recorded.
        """
        fences.fence(self, using)

    def on_lost(self, callback: Callable[[Permit], object]) -> None:
        """Have ``callback(permit)`` called, on a thread of its own, if the permit is lost; at once if it already is."""
        if not callable(callback):
            raise TypeError(f"on_lost takes a callable, not {shown(callback)}.")
        events.on_lost(self, callback)

    @property
    def stop_requested(self) -> bool:
        """Whether an operator asks its holder to stop. The permit is its own all the same. No database access."""
        return bool(self._acquisition.stop_by)

    @property
    def stop_requested_by(self) -> str:
        """By whom its holder was asked to stop first; empty if it was not."""
        return self._acquisition.stop_by

    def on_stop_requested(self, callback: Callable[[Permit], object]) -> None:
        """Have ``callback(permit)`` called once, on a thread of its own, if an operator asks its holder to stop.

        At once if one has asked already. Its exception is logged. Raises ``TypeError`` for what can't be called.
        """
        if not callable(callback):
            raise TypeError(f"on_stop_requested takes a callable, not {shown(callback)}.")
        events.on_stop_requested(self, callback)

    def release(self) -> None:
        """Give the slots back. Idempotent; removes only what this very permit holds.

        Raises ``BackendError`` if the database failed. The permit counts as released all the same: the keeper goes
        on trying, and the lease ends it at the latest. In a coroutine it leaves all of that to the keeper, and
        returns at once: ``arelease()`` waits for it. So it does in a signal handler or a finaliser that interrupts the
        library's own work. While a transaction that is fenced with it is open, it is only given back when that ends.
        """
        if not self._leave_to_keeper():
            self._give_back()

    async def arelease(self) -> None:
        """Give the slots back from a coroutine. Raises ``BackendError`` like ``release()``."""
        await self._agive_back()

    def detach(self) -> None:
        """Untie the permit from this thread or task: its new holder must release it.

        The thread or task may then take the semaphore again, and may end without the permit being given back.
        """
        callers.leave(self._acquisition)

    @property
    def _grant(self) -> Grant:
        grant = self._acquisition.grant
        if grant is None:
            raise PermitLostError(f"The permit of {self.name!r} was never granted.")
        return grant

    def _give_back(self) -> None:
        acquisition = self._acquisition
        if acquisition.fences and self._put_off():
            return
        with acquisition:  # what an interrupted release leaves goes back at once, not at the keeper's next look
            given_back = acquisition.keeper.release(acquisition)
        if given_back:
            events.released(self)

    async def _agive_back(self) -> None:
        acquisition = self._acquisition
        if acquisition.fences and self._put_off():
            return
        with acquisition:
            given_back = await acquisition.keeper.arelease(acquisition)
        if given_back:
            await events.areleased(self)

    def _put_off(self) -> bool:
        """Leave the giving back to the end of the transaction that is fenced with it. Return whether one is open."""
        acquisition = self._acquisition
        if not acquisition.fenced:
            return False
        acquisition.put_off()
        return acquisition.fenced  # else it has ended in another thread, perhaps before it could see that

    def _abandon(self) -> None:
        """Leave the giving back to the keeper: an exception has interrupted it."""
        if not self._acquisition.foreign:
            self._acquisition.keeper.abandon(self._acquisition)

    def _leave_to_keeper(self) -> bool:
        """Have the keeper give the slots back, if this code has interrupted the library's own work: return whether."""
        interrupts = callers.interrupts()
        if interrupts:
            self._acquisition.keeper.note(partial(self._close, waits=True))
        return interrupts

    def _finish(self, *, waits: bool = False) -> None:
        """End a block: release now, or at the end of the caller's transaction if the semaphore says so.

        ``waits``: it is known that this may wait for the library's locks.
        """
        if self.semaphore.release_policy == "on_commit":
            callers.stay_with_thread(self._acquisition)
            transactions.at_transaction_end(None, self._close)
        else:
            self._close(waits=waits)

    async def _afinish(self) -> None:
        """End an async block like ``_finish()``: a transaction may be open in the thread that waits for it."""
        if self.semaphore.release_policy == "on_commit" and callers.works_for_thread():
            await callers.to_its_end(self._finish)
        else:
            await self._aclose()

    def _close(self, *, waits: bool = False) -> None:
        """Release at the end of a block: its work is done, so a database error is logged instead of raised."""
        if not waits and self._leave_to_keeper():
            return
        try:
            self._give_back()
        except BackendError as error:
            self._log_failed_release(error)

    async def _aclose(self) -> None:
        """Release at the end of an async block, like ``_close()``."""
        if self._leave_to_keeper():
            return
        try:
            await self._agive_back()
        except BackendError as error:
            self._log_failed_release(error)

    def _log_failed_release(self, error: BackendError) -> None:
        message = "The permit of %r could not be given back; the keeper goes on trying: %s"
        extra = {"semaphore": self.name, "what": "release_failed"}
        level = logging.DEBUG if error.outage else logging.ERROR  # while the database is away, that was said once
        logger.log(level, message, self.name, error, exc_info=error, extra=extra)

    def __enter__(self) -> Permit:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._finish()

    async def __aenter__(self) -> Permit:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self._afinish()

    def __reduce__(self) -> NoReturn:
        raise TypeError(f"A permit can't be copied or pickled: it is one hold of {self.name!r}. Hand over its token.")

    def __repr__(self) -> str:
        acquisition = self._acquisition
        state = "released" if self.released else "lost" if acquisition.loss else acquisition.state.value
        slots = numbers(acquisition.grant.slots) if acquisition.grant else "-"
        return f"<Permit of {self.name!r}: slot {slots}, {state}>"

    def __del__(self) -> None:
        acquisition = getattr(self, "_acquisition", None)
        if acquisition is None or acquisition.state in HAS_NOTHING or acquisition.foreign:
            return
        # Only a note for the keeper: a finaliser may run at any point, in the keeper's own critical sections too.
        keeper = acquisition.keeper
        if acquisition.state in (State.HELD, State.PUT_OFF) and not self._goes_with_response:
            keeper.note(lambda: keeper.forget(acquisition, "it was garbage-collected"))
        else:
            keeper.note(lambda: keeper.abandon(acquisition))


def current_permit(name: Name | None = None, *, using: str | None = None) -> Permit | None:
    """Return the permit that the calling thread or task took last; with a ``name``, that of this name, or ``None``.

    It is for the body of a decorated function, which is not handed its permit. A permit that was detached does not
    count. No database access. Raises ``TypeError`` or ``ValueError`` for a bad name.
    """
    if name is None and using is not None:
        raise TypeError("using= says where a name is kept, and no name was given.")
    caller = callers.current_caller()
    taken: Iterable[Acquisition]
    if name is None:
        taken = (each for each in callers.taken_here() if each.caller is not None and each.caller.itself is caller)
    else:
        taken = reversed(callers.taken_by(caller, database_for(using), key_of(validate_name(name))))
    for acquisition in taken:
        permit: Permit | None = acquisition.permit()
        if permit is not None and acquisition.grant is not None and not permit.released:
            return permit
    return None


P = TypeVar("P", bound=Permit)

_lock = threading.Lock()
#: What enters or leaves a block: a frame by its ``id()``, its code, and the instruction that it is at; or an object
#: that does so for others, by its ``id()``, its type, and its method's code. An ``ExitStack`` is known by what it
#: keeps, which ``pop_all()`` hands to another one.
Statement: TypeAlias = tuple[int, object, object]
#: The methods by which an object enters, or leaves, blocks for others.
_HELPERS: Final = frozenset(
    {"enter_context", "enter_async_context", "__enter__", "__exit__", "__aenter__", "__aexit__"}
)


class Block(NamedTuple):
    """An open block: who entered, with which permit, and by which statement."""

    owner: weakref.ref[Any]
    permit: Permit
    statement: Statement | None

    def is_left_by(self, statement: Statement | None) -> bool:
        """Whether what has entered it leaves a block now.

        A frame is known by number, so that the block keeps nothing alive. The number of one that has ended may be
        another's by now, of the same function: but that is at the instruction at which the first one entered.
        """
        if self.statement is None or statement is None:
            return False
        return self.statement[:2] == statement[:2] and self.statement[2] != statement[2]


#: The open blocks, by what may leave them.
_entered: dict[Hashable, list[Block]] = {}


def _unlock() -> None:
    global _lock
    _lock = threading.Lock()


forks.register("open blocks", "a block would wait for ever for a lock of a thread of the parent", in_child=_unlock)


def statement() -> Statement | None:
    """Return what has called the caller, to enter or leave a block."""
    frame = sys._getframe(1).f_back
    if frame is None:
        return None
    code = frame.f_code
    helper = frame.f_locals.get(code.co_varnames[0]) if code.co_name in _HELPERS and code.co_argcount else None
    if isinstance(helper, (contextlib.ExitStack, contextlib.AsyncExitStack)):
        helper = getattr(helper, "_exit_callbacks", helper)
    return (id(frame), code, frame.f_lasti) if helper is None else (id(helper), type(helper), code)


@callers.under_lock
def push(key: Hashable, permit: P, by: Statement | None) -> P:
    """Note that the one who has just acquired this permit has entered a block with it. Return it."""
    caller = permit._acquisition.caller
    owner = caller.ref if caller is not None and caller.ref is not None else weakref.ref(callers.current_caller())
    with _lock:
        _entered.setdefault(key, []).append(Block(owner, permit, by))
    return permit


def innermost(semaphore: Any, by: Statement | None = None, *, own: bool = False) -> Permit:
    """Return the permit of the block that is left by a statement, else the innermost of the current task or thread.

    The garbage collector, and an event loop, end a generator's block in any thread or task. Other blocks may be left by
    another task than entered them too (async fixtures do so): then it is the newest one whose task or thread has
    ended, else the newest of all. Not so if only one's ``own`` counts. Raises ``NotEnteredError``.

    It takes no lock: see ``callers.interrupts()``.
    """
    blocks: list[Block] = list(_entered.get(semaphore._blocks, []))
    if not blocks:
        raise NotEnteredError(f"No open block of {semaphore.name!r} to leave.")
    left = [each for each in blocks if each.is_left_by(by)]
    if len(left) == 1:
        return left[0].permit
    if len(blocks) == 1 and not own and not semaphore._left_by_its_own:
        return blocks[0].permit
    blocks = left or _left_elsewhere(blocks) or blocks  # one helper may serve several threads
    current = callers.current_caller()
    mine = [each for each in blocks if each.owner() is current]
    found = _taken_here(mine) or (mine[-1].permit if mine else None)
    if found is None and not own:
        found = next((each.permit for each in reversed(blocks) if _ended(each.owner())), None) or _taken_here(blocks)
    if found is None and (own or semaphore._left_by_its_own):
        raise NotEnteredError(f"Only the thread or task that entered {semaphore.name!r} may leave it.")
    return blocks[-1].permit if found is None else found


@callers.under_lock
def remove(key: Hashable, permit: Permit) -> None:
    """Note that the block of this permit has ended."""
    with _lock:
        blocks = _entered.get(key, [])
        if len(blocks) > 1:
            _entered[key] = [*(block for block in blocks if block.permit is not permit)]
        elif blocks and blocks[0].permit is permit:
            del _entered[key]


def give_up(semaphore: Any, permit: Permit | None, by: Statement | None = None) -> None:
    """An exception interrupted the entering or leaving of a block: let its permit go, by default the innermost's."""
    if permit is None:
        with contextlib.suppress(RuntimeError):  # there is no open block, which is what went wrong
            permit = innermost(semaphore, by)
    if permit is not None:
        permit._abandon()
        remove(semaphore._blocks, permit)


def _left_elsewhere(blocks: list[Block]) -> list[Block]:
    """Return the blocks but for those whose ``with`` runs in a thread now: that leaves them."""
    running = set()
    for innermost_frame in sys._current_frames().values():
        frame: FrameType | None = innermost_frame
        while frame is not None:
            running.add((id(frame), frame.f_code))
            frame = frame.f_back
    return [each for each in blocks if each.statement is None or each.statement[:2] not in running]


def _taken_here(blocks: list[Block]) -> Permit | None:
    """Return the permit of the innermost of these blocks, as far as this flow of control knows."""
    # Threads that work for one task share its name; what they took themselves they know best.
    entered = {id(each.permit._acquisition): each.permit for each in blocks}
    for acquisition in callers.taken_here():
        if (permit := entered.get(id(acquisition))) is not None:
            return permit
    return None


def _ended(owner: Any) -> bool:
    if owner is None:
        return True
    done = getattr(owner, "done", None)
    return bool(done()) if done is not None else not runs(owner)


class UpgradablePermit(Permit):
    """A reader beside readers, the only one of its kind. ``upgrade()`` makes it the writer, ``downgrade()`` undoes it.

    The upgrade is a second grant, of all the slots: if one of the two is lost, the permit is.
    """

    _upgrade: Permit | None = None
    #: The grants of its upgrades, and those that are waited for, which end with it.
    _parts: tuple[Acquisition, ...] = ()

    @property
    def upgraded(self) -> bool:
        """Whether it is the writer now."""
        upgrade = self._upgrade
        return upgrade is not None and upgrade._acquisition.grant is not None and not upgrade.released

    @property
    def lost(self) -> Loss | None:
        """How the permit was lost, or ``None`` while it is ours. Decided when read, and for good."""
        upgrade, loss = self._upgrade, self._acquisition.current_loss()
        if loss is None and upgrade is not None and not upgrade.released and (gone := upgrade.lost) is not None:
            self._acquisition.lose(gone)
            return gone
        return loss

    def fence(self, using: str | None = None) -> None:
        """Fence the transaction: see ``Permit.fence``. Until its end no ``downgrade()`` frees what the upgrade has."""
        if self._upgrade is not None and self.upgraded and self._acquisition.keeper.backend.supports_renewal:
            fences.fence(self._upgrade, using)  # the slots of the upgrade have a lease of their own
        super().fence(using)

    def upgrade(self, timeout: Seconds | Unset | None = UNSET) -> Self:
        """Become the writer: wait for the readers to leave, before all who wait, and let none in.

        Takes the timeouts of ``acquire()``, and raises ``AcquireTimeoutError`` as that does: then it is an upgradable
        reader still. Raises ``AlreadyHeldError`` if it is the writer, or about to be, and ``PermitLostError``.
        """
        callers.refuse_event_loop("A permit can't be upgraded synchronously here: use `await aupgrade()`.")
        seconds = seconds_to_wait(timeout, self.semaphore.timeout, self._acquisition.keeper.alias)
        with self._upgrading() as acquisition:
            if acquisition.keeper.acquire(acquisition, seconds):
                self.check()
                return self
            acquisition.keeper.drop(acquisition)
        raise refusal(self.semaphore.status(), seconds, self.semaphore.kind, 0, UPGRADE)

    async def aupgrade(self, timeout: Seconds | Unset | None = UNSET) -> Self:
        """Become the writer, from a coroutine: see ``upgrade()``."""
        seconds = seconds_to_wait(timeout, self.semaphore.timeout, self._acquisition.keeper.alias)
        with self._upgrading() as acquisition:
            if await acquisition.keeper.aacquire(acquisition, seconds):
                self.check()
                return self
            acquisition.keeper.drop(acquisition)
        raise refusal(await self.semaphore.astatus(), seconds, self.semaphore.kind, 0, UPGRADE)

    def downgrade(self) -> None:
        """Become a reader that is upgradable again: others may read. Idempotent.

        Raises ``BackendError``, and ``PermitLostError`` if it was lost meanwhile.
        """
        if self._upgrade is not None:
            self._step_down()
            if self.lost is not None:
                self.check()

    async def adowngrade(self) -> None:
        """Do what ``downgrade()`` does, from a coroutine."""
        if self._upgrade is not None:
            await self._astep_down()
            if self.lost is not None:
                self.check()

    def _give_back(self) -> None:
        if self._put_off():  # a fenced transaction counts on the upgrade too
            return
        try:
            self._step_down()
        finally:
            super()._give_back()

    async def _agive_back(self) -> None:
        if self._put_off():
            return
        try:
            await self._astep_down()
        finally:
            await super()._agive_back()

    def _step_down(self) -> None:
        if (upgrade := self._part_with()) is not None:
            upgrade.release()

    async def _astep_down(self) -> None:
        if (upgrade := self._part_with()) is not None:
            await upgrade.arelease()

    def _part_with(self) -> Permit | None:
        """Return the upgrade that ends; it stays this one's while a fenced transaction keeps it."""
        upgrade = self._upgrade
        if upgrade is not None and not upgrade._acquisition.fenced:
            self._upgrade = None
        return upgrade

    def detach(self) -> None:
        """Untie the permit from this thread or task; see ``Permit.detach()``."""
        super().detach()
        if self._upgrade is not None:
            self._upgrade.detach()

    def _abandon(self) -> None:
        if self._upgrade is not None:
            self._upgrade._abandon()
        super()._abandon()

    @contextlib.contextmanager
    def _upgrading(self) -> Iterator[Acquisition]:
        """Ask for the upgrade inside the block. At its end there is none unless it was granted."""
        permit = self._prepare()
        try:
            self._begin(permit)
            with permit._acquisition:
                yield permit._acquisition
        finally:
            if self._upgrade is permit and not permit._acquisition.has_slots:
                self._upgrade = None

    def _prepare(self) -> Permit:
        """Return a permit for an upgrade, which no keeper knows yet."""
        self.check()
        mine = self._acquisition
        request = dataclasses.replace(mine.request, permit_id=secrets.token_hex(16), mode=UPGRADE, take=0, rank="")
        acquisition = Acquisition(mine.keeper, request, max_hold=None)
        acquisition.part_of = mine  # who is asked to stop, is asked once
        callers.ask_besides(acquisition, mine)

        def lost_without_it(_permit: Permit) -> None:
            if acquisition.loss is not None:
                mine.lose(acquisition.loss)

        acquisition.losing.callbacks.append(lost_without_it)
        return Permit(self.semaphore, acquisition)

    @callers.under_lock
    def _begin(self, permit: Permit) -> None:
        """Make it the permit of the upgrade, unless there is one; nothing has been asked for it yet."""
        mine = self._acquisition
        with _lock:
            if self._upgrade is not None and not self._upgrade._acquisition.given_back:
                raise AlreadyHeldError(f"The permit of {self.name!r} has been upgraded already, or is about to be.")
            self._upgrade = permit
            if _lose_parts not in mine.losing.callbacks:
                mine.losing.callbacks.appendleft(_lose_parts)  # before the program's, which may take their time
            going = tuple(part for part in self._parts if id(part) in part.keeper.acquisitions)
            self._parts = (*going, permit._acquisition)


def _lose_parts(permit: Permit) -> None:
    """A permit was lost: so are its upgrades."""
    loss = permit._acquisition.loss
    for acquisition in permit._parts if isinstance(permit, UpgradablePermit) else ():
        if loss is None or acquisition.given_back or acquisition.abandoned:
            continue
        if acquisition.grant is None:  # it waits in vain
            acquisition.tell(PermitLostError(f"The permit of {permit.name!r} was lost: {loss}.", loss=loss))
            continue
        acquisition.lose(loss)
        if loss.reason is LossReason.FORGOTTEN:  # else it would stay
            acquisition.keeper.note(partial(acquisition.keeper.give_back, acquisition, acquisition.keeper.own))
