"""``locks stop`` and ``locks drain``: asking holders to stop, and waiting until they have left."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, Final

from django.core.management.base import BaseCommand, CommandError
from django.db import close_old_connections

from django_sqlsem import control, queries
from django_sqlsem.core.durations import Unset
from django_sqlsem.exceptions import BackendError, SemaphoreError
from django_sqlsem.management import arguments, output

if TYPE_CHECKING:
    from django_sqlsem.snapshots import HolderSnapshot


#: How often a drain looks whether the holders have left, in seconds.
LOOK: Final = 0.5


class StoppingVerbs(BaseCommand):
    """The verbs that ask; ``Command`` has what they talk with."""

    _known: Any
    _by: Any
    _print: Any
    _print_lines: Any

    def handle_stop(self, *, name: str, slot: int | None, token: int | None, database: str | None, **_: Any) -> None:
        """Ask the holders, and say whom."""
        if token is not None and slot is None:
            raise CommandError("A token belongs to a slot: give --slot too.", returncode=2)
        self._known(name, database)
        try:
            asked = control.request_stop(name, slot, token, by=self._by(), using=database)
        except BackendError:
            raise
        except SemaphoreError as error:
            raise CommandError(output.clean(str(error))) from error
        if not asked:
            which = "" if slot is None else f"slot {slot} of "
            if token is not None:
                raise CommandError(
                    f"{token} is not the token of {which}{output.clean(name)!r} any more: whoever holds it now was not"
                    " asked."
                )
            self._print(f"Nobody holds {which}{output.clean(name)!r}: there is nobody to ask.")
            return
        self._print(self.style.SUCCESS(f"Asked to stop ({output.count(len(asked), 'holder')}):"))
        self._print_lines(map(output.sentence, asked))
        self._print("Nothing was taken from them: they leave when they heed it.")

    def handle_drain(self, *, name: str, wait: Any, database: str | None, **_: Any) -> None:
        """Pause it, ask the holders to stop, and wait for them if that is wanted."""
        self._known(name, database)
        by = self._by()
        if not control.drain(name, by=by, using=database):
            raise CommandError(f"{output.clean(name)!r} was purged meanwhile.")
        self._print(f"{output.clean(name)} is paused, and its holders are asked to stop.")
        left = self._left(name, database)
        if not isinstance(wait, Unset):
            left = self._wait_for(name, by, wait, database)
        self._print_lines(map(output.sentence, left))
        if left and not isinstance(wait, Unset):
            still = f"{output.count(len(left), 'holder has', 'holders have')} not left"
            raise CommandError(f"{still} within {wait:g} s. It stays paused.", returncode=arguments.BUSY)
        if left:
            self._print(f"{output.count(len(left), 'holder has', 'holders have')} not left yet.")
        else:
            self._print(self.style.SUCCESS("It is drained: nobody holds it."))
        self._print(f"Nothing more is granted until `locks set {output.clean(name)} --resume`.")

    def _wait_for(self, name: str, by: str, wait: float | None, database: str | None) -> list[HolderSnapshot]:
        """Return who has not left after so many seconds."""
        give_up = None if wait is None else time.monotonic() + wait
        while True:
            left = self._left(name, database)
            # A grant that was under way when it was paused.
            for holder in left:
                if holder.recorded and not holder.stop_requested:
                    control.request_stop(name, holder.slot, holder.token, by=by, using=database)
            now = time.monotonic()
            if not left or (give_up is not None and now >= give_up):
                return left
            time.sleep(LOOK if give_up is None else min(LOOK, give_up - now))
            close_old_connections()

    def _left(self, name: str, database: str | None) -> list[HolderSnapshot]:
        found = queries.semaphore(name, using=database)
        return [holder for holder in found.holders if not holder.expired] if found else []
