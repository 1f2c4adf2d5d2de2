"""What is sent to databases is what ``tests/golden`` shows. After a change: ``python -m tests.golden``."""

from __future__ import annotations

import pytest

from tests.golden import calls, statements


@pytest.mark.parametrize("vendor", statements.VENDORS)
def test_statements_are_as_written(vendor: str) -> None:
    assert statements.golden(vendor) == (statements.FOLDER / f"{vendor}.sql").read_text(encoding="utf-8")


def test_calls_of_stored_procedures_are_as_written() -> None:
    assert calls.golden() == calls.FILE.read_text(encoding="utf-8")
