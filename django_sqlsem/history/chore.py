"""The history as a keeper's chore: it notes what happens, and writes it down when the keeper has time."""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING

from django_sqlsem.backends.base import Request
from django_sqlsem.core.clocks import boot_now
from django_sqlsem.history import acts
from django_sqlsem.history.events import DEADLOCK, GRANTED, LOST, RELEASED, TIMED_OUT
from django_sqlsem.history.recorder import Recorder
from django_sqlsem.history.writer import Writer
from django_sqlsem.runtime.chores import Chore
from django_sqlsem.snapshots import Loss, LossReason

if TYPE_CHECKING:
    from django_sqlsem.backends.base import Ended, OverAct
    from django_sqlsem.database.sessions import OwnSession
    from django_sqlsem.runtime.acquisition import Acquisition, AcquisitionKeeper


class HistoryChore(Chore):
    """Notes what is granted, refused, released and lost, and writes it after all else that the keeper does."""

    name = "history"
    wakes = False

    def __init__(self, keeper: AcquisitionKeeper) -> None:
        self._keeper = keeper
        self.recorder = Recorder(keeper.alias, beside_rows=keeper.backend.released_on_disconnect)
        self.writer = Writer(self.recorder, keeper.own)
        #: The acquisitions whose grants were noted, and whose ends were not.
        self._open: dict[int, Acquisition] = {}

    # What it is told.

    def granted(self, acquisition: Acquisition) -> None:
        """Note a grant."""
        if acquisition.undo is None:
            self._open[id(acquisition)] = acquisition
        note, at = self.recorder.note, acquisition.granted_at
        note(GRANTED, acquisition.request, acquisition.grant, at=at, waited=acquisition.waited)

    def refused(self, request: Request, waited: float | None) -> None:
        """Note that a caller got nothing."""
        self.recorder.note(TIMED_OUT, request, waited=waited)

    def released(self, acquisition: Acquisition) -> None:
        """Note that a permit was given back; one that was lost ended by that."""
        loss = acquisition.loss
        if loss is not None and loss.reason is not LossReason.STOPPED:
            self.lost(acquisition, loss)  # another thread has found it, and may be about to tell of it
        elif self._open.pop(id(acquisition), None) is not None:
            note, at = self.recorder.note, acquisition.releasing_since
            held = max(0.0, at - acquisition.granted_at)
            detail = str(loss) if loss is not None else ""
            note(RELEASED, acquisition.request, acquisition.grant, at=at, held=held, detail=detail)

    def lost(self, acquisition: Acquisition, loss: Loss) -> None:
        """Note a loss."""
        if loss.reason is not LossReason.FORKED and self._open.pop(id(acquisition), None) is not None:
            held, detail = boot_now() - acquisition.granted_at, f"{loss.reason}: {loss.detail}"
            self.recorder.note(LOST, acquisition.request, acquisition.grant, held=held, by=loss.by, detail=detail)

    def ended(self, hold: Ended) -> None:
        """Note how long a hold lasted whose process is gone: until it proved last that it lives."""
        request = Request(
            resource=hold.resource,
            permit_id=hold.permit_id,
            slots=None,
            take=len(hold.grant.slots),
            lease=0.0,
            fair=True,
            holder=hold.holder,
            mode=hold.mode,
            template=hold.template,
        )
        detail = f"{LossReason.EXPIRED}: its process is gone"
        self.recorder.note(LOST, request, hold.grant, at=boot_now() - hold.ago, held=hold.held, detail=detail)

    def act_over(self, session: OwnSession, act: OverAct) -> None:
        """Write that the time of an operator's act is over."""
        acts.record_over(session, act)

    def deadlocked(self, request: Request, waited: float, detail: str) -> None:
        """Note a deadlock."""
        self.recorder.note(DEADLOCK, request, waited=waited, detail=detail)

    # When it is written.

    def next_at(self) -> float:
        """Return when to write: now, or not yet."""
        return 0.0 if self.writer.due(boot_now()) else math.inf

    def run(self, now: float) -> None:
        """Write some of it if time is left."""
        shares = self.writer.shares
        if shares and self._keeper.acquisitions and not self._keeper.own.is_open:
            return  # to open it is no small matter while something is held
        self.writer.write(self._keeper.time_left(now) / (3 if shares else 8))

    def finish(self, since: float | None) -> None:
        """Write what there is: the thread ends, or the process."""
        if self.writer.unfinished:
            began = time.monotonic() if since is None else since
            self.writer.finish(began, lambda: since is None and self._keeper.is_in_use())
        elif since is not None:
            self.writer.begin_anew()
        self.writer.leave()
