"""The keeper of a process-local backend: no thread, no connection."""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

from django_sqlsem.runtime import events
from django_sqlsem.runtime.keeper import Keeper

if TYPE_CHECKING:
    from django_sqlsem.backends.base import BaseSemaphoreBackend
    from django_sqlsem.core.names import Resource
    from django_sqlsem.runtime.acquisition import Acquisition
    from django_sqlsem.runtime.queue import Arbiter


class InlineKeeper(Keeper):
    """Runs every step where it arises."""

    def __init__(self, backend: BaseSemaphoreBackend) -> None:
        super().__init__(backend)
        self._stepping = threading.RLock()
        backend.listen(self._look_again)

    def register(self, acquisition: Acquisition) -> None:
        """Know of a hold; and do what finalisers left to do."""
        super().register(acquisition)
        self._drain()

    def post(self, step: Callable[[], object]) -> None:
        """Run it now."""
        self._drain()
        step()

    def poke(self, arbiter: Arbiter) -> None:
        """Look again now."""
        with self._stepping:
            arbiter.look_soon()
            arbiter.step(self.own)

    def reconsider(self, arbiter: Arbiter) -> None:
        """What is known here is always up to date."""

    def released(self, acquisition: Acquisition, freed: bool) -> None:
        """Note that the slots are back, and let whoever waits look: an upgrade first."""
        super().released(acquisition, freed)
        key = acquisition.request.resource.key
        for line in sorted((line for line in list(self.arbiters) if line.startswith(key)), reverse=True):
            if (arbiter := self.arbiters.get(line)) is not None:
                self.poke(arbiter)

    def doubt_permit(self, resource: Resource, permit_id: str) -> None:
        """In memory, a claim's outcome is known."""
        self.backend.discard(self.own, resource, permit_id)

    def _look_again(self) -> None:
        for arbiter in list(self.arbiters.values()):
            self.poke(arbiter)
        acquisitions = [
            acquisition
            for acquisition in list(self.acquisitions.values())
            if acquisition.grant is not None and acquisition.kept
        ]
        asked = self.backend.renew(self.own, [acquisition.acquired for acquisition in acquisitions]).asked
        for acquisition in acquisitions:
            if acquisition.permit_id in asked:
                events.ask(acquisition, asked[acquisition.permit_id])

    def renew_now(self, acquisition: Acquisition) -> None:
        """Nothing to prove: what is held here never runs out."""

    def _drain(self) -> None:
        with contextlib.suppress(queue.Empty):
            while True:
                self.inbox.get_nowait()()
