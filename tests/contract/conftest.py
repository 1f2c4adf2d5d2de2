"""Bounds of the contract's tests are wider where the server, or its driver, is known to be slow."""

from __future__ import annotations

from typing import Any, Final

import pytest

from tests.support import databases

#: By the names of bounds in the tests: what a stand-in for SQL Server may take longer, in that bound's unit. A fresh
#: session costs it half a second of work, and so does each batch that it sees for the first time on a session.
STAND_IN: Final = {
    "HEARTBEAT": 4.0,
    "LAPSE": 4.0,
    "PROMPT": 4.0,
    "SOON": 4.0,
    "HEARTBEAT_US": 4_000_000,
    "PATIENT": 5,
    "FIGHT": 30.0,
    "MIXED": 30.0,
    "PURGED": 8.0,
    "THRONG": 16,
    "STARVED": 15,
}
#: What Microsoft's driver takes longer to give up a query whose answer does not come than it was told, in seconds.
DRIVER: Final = {"BOUND": 15.0}


@pytest.fixture(autouse=True)
def _patience(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    parameters: dict[str, Any] = getattr(getattr(request.node, "callspec", None), "params", {})
    if "mssql" not in parameters.values():
        return
    more: dict[str, float] = dict(DRIVER)
    if "stand-in" in (databases.version("mssql") or ""):
        more |= STAND_IN
    for name, longer in more.items():
        if hasattr(request.module, name):
            monkeypatch.setattr(request.module, name, getattr(request.module, name) + longer)
