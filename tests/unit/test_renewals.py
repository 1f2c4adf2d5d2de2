"""When a permit is renewed, after a renewal that has failed."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from django_sqlsem.core.clocks import boot_now
from django_sqlsem.runtime.acquisition import Lease
from django_sqlsem.runtime.chores import MOST_OFTEN, BeaconChore, _not_renewed


def held(left: float, lease: float = 15.0) -> Any:
    """Return what chores look at, with so many seconds left of what it was granted."""
    found = SimpleNamespace(lease=Lease(), request=SimpleNamespace(lease=lease), has_slots=True)
    found.lease.deadline, found.lease.renew_at = boot_now() + left, boot_now() + 3.0
    return found


@pytest.mark.parametrize("lease", [15.0, 60.0])
@pytest.mark.parametrize("left", [1.6, 0.8, 0.4, -1.0])
def test_it_is_tried_again_in_a_part_of_what_is_left(left: float, lease: float) -> None:
    """What was handed over lasts for two seconds only, unless it is confirmed."""
    permit = held(left, lease)
    before = boot_now()
    _not_renewed(permit, "the database is away")
    assert before + MOST_OFTEN <= permit.lease.renew_at <= boot_now() + max(MOST_OFTEN, left / 4)


@pytest.mark.parametrize("lease", [15.0, 60.0])
def test_with_much_time_left_it_is_tried_again_within_a_second(lease: float) -> None:
    permit = held(lease, lease)
    _not_renewed(permit, "the database is away")
    assert permit.lease.renew_at <= boot_now() + 1.0


@pytest.mark.parametrize("beacon", [False, True])
def test_it_is_tried_again_as_soon_as_the_session_is_open_again(beacon: bool) -> None:
    """With a beacon all are renewed, as their rows must say whether it is lit."""
    failed, other = held(0.6), held(10.0)
    _not_renewed(failed, "the database is away")
    then = other.lease.renew_at
    keeper = SimpleNamespace(
        own=SimpleNamespace(is_open=True, asked_at=None),
        acquisitions={1: failed, 2: other},
        reach=SimpleNamespace(presence=SimpleNamespace(beacon=beacon), reopened=True, tied=False),
        outage=SimpleNamespace(passing=False),
        look_at_all=lambda: None,
    )
    BeaconChore(keeper).run(boot_now())  # type: ignore[arg-type]
    assert (failed.lease.renew_at, other.lease.renew_at) == (0.0, 0.0 if beacon else then)
