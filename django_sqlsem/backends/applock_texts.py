"""Every text that application locks are made of, by name: for linters, and for people."""

from __future__ import annotations

from django_sqlsem.backends import applock_acquire_sql as waiting
from django_sqlsem.backends import applock_line_sql as line
from django_sqlsem.backends import applock_plain_sql as plain
from django_sqlsem.backends import applock_procedures, applock_proof_sql, applock_quick_sql
from django_sqlsem.backends import applock_sql as sql
from django_sqlsem.backends import applock_upgrade_sql as upgrading

#: What the names of stored procedures' texts begin with.
PROCEDURE = "procedure "


def all_batches() -> dict[str, sql.Batch]:
    """Return every batch by name."""
    return {
        "acquire": waiting.acquire(record=True),
        "acquire_unrecorded": waiting.acquire(record=False),
        "plain_acquire": plain.acquire(record=True),
        "plain_acquire_unrecorded": plain.acquire(record=False),
        "plain_acquire_in_line": plain.acquire(record=True, in_line=True),
        "plain_acquire_in_line_unrecorded": plain.acquire(record=False, in_line=True),
        "release": sql.release(record=True),
        "release_unrecorded": sql.release(record=False),
        "quick_acquire": applock_quick_sql.acquire(record=True),
        "quick_acquire_unrecorded": applock_quick_sql.acquire(record=False),
        "quick_acquire_to_read": applock_quick_sql.acquire(record=True, reads=True),
        "quick_release": applock_quick_sql.release(record=True),
        "quick_release_unrecorded": applock_quick_sql.release(record=False),
        "acquire_in_line": waiting.acquire(record=True, in_line=True),
        "acquire_in_line_unrecorded": waiting.acquire(record=False, in_line=True),
        "upgrade": upgrading.upgrade(record=True),
        "upgrade_unrecorded": upgrading.upgrade(record=False),
        "upgrade_in_line": upgrading.upgrade(record=True, in_line=True),
        "upgrade_in_line_unrecorded": upgrading.upgrade(record=False, in_line=True),
        "settle": upgrading.settle(record=True),
        "settle_unrecorded": upgrading.settle(record=False),
        "step_out": line.step_out(record=True),
        "step_out_unrecorded": line.step_out(record=False),
        "unwait": line.UNWAIT,
        "clean": sql.CLEAN,
        "unrecord": sql.UNRECORD,
        "rename": line.RENAME,
        "create": sql.CREATE,
        "declare": sql.DECLARE,
        "open": sql.OPEN,
        "prove": applock_proof_sql.prove(2),
        "prove_recorded": applock_proof_sql.prove(2, 2),
    }


def all_texts() -> dict[str, str]:
    """Return the text of every batch, and of every stored procedure, by name."""
    texts = {name: batch.text for name, batch in all_batches().items()}
    return texts | {f"{PROCEDURE}{name}": text for name, text in applock_procedures.texts().items()}
