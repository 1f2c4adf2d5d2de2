"""What is sent to databases is what ``tests/golden`` shows. After a change: ``python -m tests.golden``."""

from __future__ import annotations

import pytest

from tests.golden import calls, statements


@pytest.mark.parametrize("vendor", statements.VENDORS)
def test_statements_are_as_written(vendor: str) -> None:
    assert statements.golden(vendor) == (statements.FOLDER / f"{vendor}.sql").read_text(encoding="utf-8")


@pytest.mark.parametrize("vendor", ["postgresql", "citus"])
def test_statements_are_short_enough_for_psycopg_to_remember_what_it_made_of_them(vendor: str) -> None:
    """It parses a longer one at each call: ``MAX_CACHED_STATEMENT_LENGTH`` in ``psycopg/_queries.py``."""
    longest = max(statements.row_texts(vendor).values(), key=len)
    assert len(longest) <= 4096, longest


def test_calls_of_stored_procedures_are_as_written() -> None:
    assert calls.golden() == calls.FILE.read_text(encoding="utf-8")
