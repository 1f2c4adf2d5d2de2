"""Signals about permits. Senders are ``Semaphore`` classes; receivers take ``**kwargs``."""

from __future__ import annotations

from typing import Any

from django.dispatch import Signal


class PermitSignal(Signal):
    """A signal with a second list of receivers, ``inline``, for those that never wait for anything.

    In a coroutine Django runs ordinary receivers on the one thread that ``sync_to_async`` has for them, which may be
    busy for long. Those of ``inline`` are called where they are told, at once, in coroutines too.
    """

    def __init__(self) -> None:
        super().__init__()
        self.inline = Signal()

    @property
    def heard(self) -> bool:
        """Whether it has receivers."""
        return bool(self.receivers or self.inline.receivers)

    def send_robust(self, sender: Any, **named: Any) -> list[tuple[Any, Any]]:
        """Tell all receivers; what they raise is logged and returned."""
        told: list[tuple[Any, Any]] = self.inline.send_robust(sender, **named)
        return told + super().send_robust(sender, **named)

    async def asend_robust(self, sender: Any, **named: Any) -> list[tuple[Any, Any]]:
        """Tell all receivers from a coroutine."""
        told: list[tuple[Any, Any]] = self.inline.send_robust(sender, **named)
        return told + (await super().asend_robust(sender, **named) if self.receivers else [])


#: A permit was granted. Arguments: ``semaphore``, ``permit``, ``waited`` (seconds).
permit_acquired = PermitSignal()
#: A permit was given back by its holder. Arguments: ``semaphore``, ``permit``, ``held`` (seconds).
permit_released = PermitSignal()
#: A permit was lost; sent on a thread of its own. Arguments: ``semaphore``, ``permit``, ``loss``, ``held`` (seconds).
permit_lost = PermitSignal()
#: A permit was forgotten by its program and is given back; sent on a thread of its own, without a sender, as there may
#: be no permit any more. Arguments: ``name``, ``using`` (the database's alias), ``loss``, ``held`` (seconds).
permit_forgotten = PermitSignal()
#: An operator asks a holder to stop; sent on a thread of its own. Arguments: ``semaphore``, ``permit``, ``by``.
permit_stop_requested = PermitSignal()
#: No slot was free in time. Arguments: ``semaphore``, ``error``, ``waited`` (seconds).
acquire_timed_out = PermitSignal()
#: An operator acted. Arguments: ``action``, ``name``, ``by``, ``detail``, ``reason``.
operator_acted = Signal()
