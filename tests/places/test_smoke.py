"""Every kind of server runs decorated views, and the clients of the tests can do what they say."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.places.site import Site, wait_for_waiters
from tests.support.databases import OutsideCounter

#: The others are started by the tests of clients too.
KINDS = ["preload", *(pytest.param(kind, marks=pytest.mark.soak) for kind in ("sync", "gthread", "uvicorn", "daphne"))]


@pytest.mark.parametrize("kind", KINDS)
def test_a_view_holds_a_slot_while_it_runs_and_another_waits_for_it(
    kind: str, site: Callable[..., Site], alias: str
) -> None:
    running = site(kind)
    with OutsideCounter(alias, "places") as counter:
        with running.call(f"/patient?id=a-{kind}") as first:
            running.marks.wait(f"in-a-{kind}")
            with running.call(f"/patient?id=b-{kind}") as second:
                wait_for_waiters(alias, "one", 1)
                assert running.get(f"/at-once?id=c-{kind}").status == 503
                running.marks.set(f"go-a-{kind}")
                assert first.answer().text == f"done a-{kind}"
                running.marks.wait(f"in-b-{kind}")
                running.marks.set(f"go-b-{kind}")
                assert second.answer().text == f"done b-{kind}"
        assert (counter.entered, counter.peak, counter.current) == (2, 1, 0)
