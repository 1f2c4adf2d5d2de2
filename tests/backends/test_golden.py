"""The statements of the rows backend are what ``tests/golden`` shows. After a change: ``python -m tests.golden``."""

from __future__ import annotations

import pytest

from tests.golden import statements


@pytest.mark.parametrize("vendor", statements.VENDORS)
def test_statements_are_as_written(vendor: str) -> None:
    assert statements.golden(vendor) == (statements.FOLDER / f"{vendor}.sql").read_text(encoding="utf-8")
