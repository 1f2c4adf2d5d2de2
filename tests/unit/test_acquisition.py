"""The states of an acquisition: every transition of the table does what it says, and every other one is refused."""

from __future__ import annotations

import asyncio
import copy
import pickle
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from django_sqlsem import mutex, semaphore
from django_sqlsem.backends.base import Grant, Request
from django_sqlsem.core.identity import current
from django_sqlsem.core.names import resource_for
from django_sqlsem.runtime.acquisition import (
    GIVEN_BACK,
    TRANSITIONS,
    Acquisition,
    IllegalTransitionError,
    State,
    Transition,
)
from tests.support.databases import held_rows
from tests.support.keepers import keeper_of

GRANT = Grant((1,), (7,), (1,))


class Keeper:
    """As much of a keeper as an acquisition asks of it before it is held."""

    reach = SimpleNamespace(presence=Request.__dataclass_fields__["presence"].default)
    backend = SimpleNamespace(heartbeat=15.0)


def fresh() -> Acquisition:
    request = Request(resource_for("reports", "semaphore"), "0" * 32, 1, 1, 60.0, True, current())
    return Acquisition(Keeper(), request, max_hold=None)  # type: ignore[arg-type]


def test_a_semaphore_equals_its_copies() -> None:
    for lock in (semaphore("reports", slots=3), semaphore("reports", timeout=None), mutex("reports", max_waiting=1)):
        assert copy.deepcopy(lock) == copy.copy(lock) == pickle.loads(pickle.dumps(lock)) == lock  # noqa: S301


#: What a program of the library does to an acquisition, by transition.
DO: dict[Transition, Any] = {
    Transition.QUEUE: lambda each: each.queue(),
    Transition.GRANT: lambda each: each.granted(GRANT, 0.0, 60.0, at_once=True),
    Transition.TAKE: lambda each: each.taken(),
    Transition.ASK_ANEW: lambda each: each.ask_anew(),
    Transition.GIVE_UP: lambda each: each.give_up(),
    Transition.PUT_OFF: lambda each: each.put_off(),
    Transition.RELEASE: lambda each: each.release(),
    Transition.RETRY: lambda each: each.retry(),
    Transition.RELEASED: lambda each: each.released(),
    Transition.USE: lambda each: each.used(),
    Transition.PUT_BACK: lambda each: each.put_back(),
    Transition.ABANDON: lambda each: each.abandon(),
}


def in_state(state: State) -> Acquisition:
    found = fresh()
    found.state = state
    found.grant = None if state in (State.NEW, State.QUEUED, State.OVER) else GRANT
    return found


def test_the_table_is_whole() -> None:
    assert set(DO) == set(TRANSITIONS) == set(Transition)
    for changes, ignoring in TRANSITIONS.values():
        assert not set(changes) & ignoring
    reached = {after for changes, _ in TRANSITIONS.values() for after in changes.values()}
    assert reached | {State.NEW} == set(State)


@pytest.mark.parametrize("transition", Transition)
@pytest.mark.parametrize("state", State)
def test_each_transition_in_each_state(state: State, transition: Transition) -> None:
    changes, ignoring = TRANSITIONS[transition]
    found = in_state(state)
    before = (found.request, found.grant)
    if state not in changes and state not in ignoring and not (transition is Transition.RETRY and found.grant is None):
        with pytest.raises(IllegalTransitionError, match="cannot happen"):
            DO[transition](found)
        assert found.state is state
        return
    answer = DO[transition](found)
    if transition is Transition.RETRY and before[1] is None:
        assert (answer, found.state) == (False, state)
    elif state in changes:
        assert answer in (True, None)
        assert found.state is changes[state]
    else:
        assert answer in (False, None)
        assert (found.state, found.request, found.grant) == (state, *before)


@given(st.lists(st.sampled_from(list(Transition)), max_size=30))
def test_what_is_over_stays_over(steps: list[Transition]) -> None:
    """A permit that was given back is never held again, and a grant is known until the request is sent anew."""
    found, given_back = fresh(), False
    for step in steps:
        try:
            DO[step](found)
        except IllegalTransitionError:
            continue
        assert not given_back or found.state in GIVEN_BACK
        given_back = found.given_back
        if found.state in (State.NEW, State.QUEUED, State.OVER):
            assert found.grant is None
        if found.has_slots or found.given_back:
            assert found.grant == GRANT


def test_asking_anew_forgets_the_grant_and_its_id() -> None:
    found = fresh()
    found.queue()
    found.granted(GRANT, 0.0, 60.0, at_once=False)
    first, waited = found.permit_id, found.waited
    assert waited > 0
    assert found.ask_anew()
    assert (found.grant, found.sent, found.state) == (None, False, State.NEW)
    assert found.permit_id != first
    found.granted(GRANT, 0.0, 60.0, at_once=True)
    assert found.waited >= waited  # once it has waited, it has waited


@pytest.mark.django_db
def test_a_generator_that_ends_in_the_middle_of_a_step_is_given_back_once() -> None:
    """Without a keeper's thread, whoever comes next does what was left to it."""
    lock = semaphore("a step")
    keeper = lock._keeper()
    assert keeper.backend.process_local

    def hold() -> Iterator[None]:
        with lock:
            yield

    held: Any = hold()
    next(held)
    keeper.post(lambda: [held.close(), lock.status()])
    assert lock.status().held == 0
    with lock:
        pass


def test_who_was_told_and_has_closed_its_loop_keeps_what_it_took(database: str) -> None:
    """Another messenger may come late: the thread that brought the grant and the one that served it both tell."""
    permit = asyncio.run(semaphore("told twice", timeout=5, using=database).aacquire())
    permit._acquisition.tell()
    permit.check()
    assert not permit._acquisition.abandoned
    keeper_of(database).submit(lambda: None).result(60)
    assert len(held_rows(database)) == 1
    permit.check()
    permit.release()
