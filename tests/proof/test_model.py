"""The model of the hand-over, checked by Spin in every order of its steps; and the mistakes that it must find."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

MODEL = Path(__file__).with_name("handover.pml")
#: What may go wrong: a lease that runs out under a living holder, a crash, an ended session, a clock that is set ahead.
NOTHING = {"LATES": 0, "CRASHES": 0, "CUTS": 0, "STEPS": 0}
#: A mistake that is put back, what must go wrong for it to show, and what it breaks.
MISTAKES = {
    "NO_SECOND_LOOK": {},
    "GRANTS_IN_ONE": {},
    "NOT_IN_ORDER": {},
    "IGNORES_LEASE": {},
    "NO_GRACE": {"CUTS": 1},
}


def check(folder, *mistakes, **faults):
    """Look through all states. Return how many there are, and whether an assertion or a dead end was met."""
    if not (shutil.which("spin") and shutil.which("gcc")):
        pytest.skip("no spin, or no gcc: apt-get install spin")
    defined = [f"-D{mistake}" for mistake in mistakes]
    defined += [f"-D{name}={count}" for name, count in (NOTHING | faults).items()]
    subprocess.run(["spin", "-a", *defined, MODEL], cwd=folder, check=True, capture_output=True)
    subprocess.run(["gcc", "-w", "-O1", "-DSAFETY", "-DCOLLAPSE", "-o", "pan", "pan.c"], cwd=folder, check=True)
    told = subprocess.run(["./pan", "-m3000000", "-w24"], cwd=folder, check=True, capture_output=True, text=True).stdout
    print(told)
    assert "max search depth too small" not in told
    return int(re.search(r"(\d+) states, stored", told)[1]), "errors: 0" not in told


def test_no_order_of_steps_breaks_the_model(tmp_path):
    states, broken = check(tmp_path)
    assert not broken
    assert states > 500_000


@pytest.mark.parametrize("mistake", MISTAKES)
def test_the_model_finds_a_mistake_that_is_put_back(tmp_path, mistake):
    _, broken = check(tmp_path, mistake, **MISTAKES[mistake])
    assert broken


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("fault", NOTHING)
def test_no_fault_breaks_the_model(tmp_path, fault):
    states, broken = check(tmp_path, **{fault: int(os.environ.get("PROOF_FAULTS", "1"))})
    assert not broken
    assert states > 5_000_000
