"""Signals about permits. Senders are ``Semaphore`` classes; receivers take ``**kwargs``."""

from __future__ import annotations

from django.dispatch import Signal

#: A permit was granted. Arguments: ``semaphore``, ``permit``.
permit_acquired = Signal()
#: A permit was given back by its holder. Arguments: ``semaphore``, ``permit``.
permit_released = Signal()
#: A permit was lost; sent on a thread of its own. Arguments: ``semaphore``, ``permit``, ``loss``.
permit_lost = Signal()
#: An operator asks a holder to stop; sent on a thread of its own. Arguments: ``semaphore``, ``permit``, ``by``.
permit_stop_requested = Signal()
#: No slot was free in time. Arguments: ``semaphore``, ``error``.
acquire_timed_out = Signal()
#: An operator acted. Arguments: ``action``, ``name``, ``by``, ``detail``.
operator_acted = Signal()
