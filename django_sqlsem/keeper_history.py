"""What a keeper tells the history, and when it takes the time to write that down: after all else that it does."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from django_sqlsem.clocks import boot_now
from django_sqlsem.exceptions import AcquireTimeoutError
from django_sqlsem.history.recorder import Recorder
from django_sqlsem.history.writing import LONGEST, Writer
from django_sqlsem.holds import Hold, State
from django_sqlsem.keeper_care import CaringKeeper
from django_sqlsem.snapshots import Loss, LossReason

if TYPE_CHECKING:
    from django_sqlsem.backends.base import BaseSemaphoreBackend


class RecordingKeeper(CaringKeeper):
    """The part of the thread's keeper that notes what happens. Nothing is sent where it is noted."""

    def __init__(self, backend: BaseSemaphoreBackend) -> None:
        super().__init__(backend)
        self.history: Recorder = Recorder(self.alias, beside_rows=backend.released_on_disconnect)
        self._writer = Writer(self.history, self.own)

    # What is told.

    def acquire(self, hold: Hold, timeout: float | None) -> bool:
        """Get the hold granted within ``timeout`` seconds; see ``Keeper.acquire()``."""
        try:
            return super().acquire(hold, timeout)
        except AcquireTimeoutError:
            self._turned_away(hold)
            raise

    def settled(self, hold: Hold, answered: bool) -> bool:
        """After a wait: whether it is over; see ``Keeper.settled()``."""
        over = super().settled(hold, answered)
        if over and hold.kept and hold.state is State.HELD and hold.grant is not None:
            self.history.granted(hold.claim, hold.grant, hold.granted_at, hold.waited)
        return over

    def drop(self, hold: Hold) -> None:
        """The acquire ended without a grant."""
        super().drop(hold)
        self._turned_away(hold)

    def _turned_away(self, hold: Hold) -> None:
        tried_once = hold.patient_until is not None and hold.patient_until <= hold.arrived
        self.history.turned_away(hold.claim, None if tried_once else boot_now() - hold.arrived)

    def released(self, hold: Hold, freed: bool) -> None:
        """Note that the database has the slots back, or had given them to somebody else already."""
        super().released(hold, freed)
        loss = hold.loss
        if loss is not None and loss.reason is not LossReason.STOPPED:
            self._lost(hold, loss)  # another thread has found it, and may be about to tell of it
        elif self._ends(hold) and hold.grant is not None:
            detail = str(loss) if loss is not None else ""
            held = hold.releasing_since - hold.granted_at
            self.history.released(hold.claim, hold.grant, hold.releasing_since, max(0.0, held), detail)

    def tell_lost(self, hold: Hold) -> None:
        """Log a loss, and tell the program and the history."""
        super().tell_lost(hold)
        if hold.loss is not None:
            self._lost(hold, hold.loss)

    def _lost(self, hold: Hold, loss: Loss) -> None:
        if loss.reason is not LossReason.FORKED and self._ends(hold) and hold.grant is not None:
            self.history.lost(hold.claim, hold.grant, boot_now() - hold.granted_at, loss)

    def _ends(self, hold: Hold) -> bool:
        """Whether a grant that was told of ends now: it does so once."""
        return hold.settled and hold.kept and hold.recorded.acquire(blocking=False)

    # When it is written.

    def write_history(self, now: float) -> None:
        """Write some of it if it is time for that, and time is left."""
        if not self._writer.due(now):
            return
        if self._writer.shares and self.holds and not self.own.is_open:
            return  # to open it is no small matter while something is held
        self._writer.write(self._leisure(now))

    def end_history(self, since: float | None = None) -> None:
        """Write what there is: the thread ends, or the process, since an instant of ``time.monotonic()``."""
        if self._writer.unfinished:
            began, ends = time.monotonic() if since is None else since, since is not None
            self._writer.finish(began, lambda: not ends and bool(self.holds or self.arbiters))
        elif since is not None:
            self._writer.begin_anew()
        self._writer.leave()

    def last_words(self, since: float) -> None:
        """Write what there is, now that everything has been given back."""
        super().last_words(since)
        self.end_history(since)

    def _leisure(self, now: float) -> float:
        """How long a statement may take, in seconds: there are a few, and the nearest lease is to outlast them."""
        if not self.backend.supports_renewal:
            return LONGEST
        deadlines = [hold.deadline for hold in list(self.holds.values()) if hold.grant is not None and not hold.loss]
        left = [deadline - now for deadline in deadlines if deadline > now]
        statements = 3 if self._writer.shares else 8
        return min([LONGEST, *(each / statements for each in left)])
