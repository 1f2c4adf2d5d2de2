"""What is measured: one small class per scenario."""

from __future__ import annotations

from benchmarks.scenarios.base import Scenario


def all_scenarios() -> dict[str, Scenario]:
    """Return every scenario by its name, in the order in which they run."""
    from benchmarks.scenarios import budget, contention, crash, handoff, many, names, pair, scaling, waiters

    modules = (pair, handoff, contention, budget, waiters, crash, names, many, scaling)
    return {scenario.name: scenario for module in modules for scenario in module.SCENARIOS}
