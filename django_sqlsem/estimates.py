"""When a slot may be free: from how long slots are usually held, how long they are held now, and who comes before."""

from __future__ import annotations

import heapq
import statistics
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from django_sqlsem.snapshots import SemaphoreSnapshot

#: The bounds of an estimate, in seconds.
LEAST: Final = 1.0
MOST: Final = 60.0


def retry_after(snapshot: SemaphoreSnapshot, before: int | None = None) -> float:
    """Estimate in how many seconds one more slot may be free, from 1 to 60.

    ``before``: how many are served earlier; omitted, all who wait and all tasks that will come back. Every slot is
    taken to be held for as long as slots of this name usually are (measured at each release, a moving average over
    some eight holds), and the holders of now to be through after what is left of that, or a tenth of it if they are
    over time. Then the queue is played through: each of those before takes the slot that is free first.
    """
    holders = [holder for holder in snapshot.holders if not holder.expired for _ in holder.numbers]
    hold = snapshot.usual_hold
    if hold is None:
        # Nothing was released yet: holders are about half done.
        hold = 2 * statistics.fmean(holder.age for holder in holders) if holders else 0.0
    free_in = [max(hold - holder.age, hold / 10) for holder in holders]
    free_in += [0.0] * (snapshot.slots - len(free_in))
    heapq.heapify(free_in)
    if before is None:
        before = snapshot.waiting + snapshot.away
    if hold > 0:
        for _ in range(before):
            if free_in[0] >= MOST:
                break
            heapq.heapreplace(free_in, free_in[0] + hold)
    return min(MOST, max(LEAST, free_in[0]))
