"""Every text that application locks are made of, by name: for linters, and for people."""

from __future__ import annotations

from django_sqlsem.backends.applock.tsql import acquire, line, parts, plain, procedures, proof, quick, upgrades

#: What the names of stored procedures' texts begin with.
PROCEDURE = "procedure "


def all_batches() -> dict[str, parts.Batch]:
    """Return every batch by name."""
    return {
        "acquire": acquire.acquire(record=True),
        "acquire_unrecorded": acquire.acquire(record=False),
        "plain_acquire": plain.acquire(record=True),
        "plain_acquire_unrecorded": plain.acquire(record=False),
        "plain_acquire_in_line": plain.acquire(record=True, in_line=True),
        "plain_acquire_in_line_unrecorded": plain.acquire(record=False, in_line=True),
        "release": parts.release(record=True),
        "release_unrecorded": parts.release(record=False),
        "quick_acquire": quick.acquire(record=True),
        "quick_acquire_unrecorded": quick.acquire(record=False),
        "quick_acquire_to_read": quick.acquire(record=True, reads=True),
        "quick_release": quick.release(record=True),
        "quick_release_unrecorded": quick.release(record=False),
        "acquire_in_line": acquire.acquire(record=True, in_line=True),
        "acquire_in_line_unrecorded": acquire.acquire(record=False, in_line=True),
        "upgrade": upgrades.upgrade(record=True),
        "upgrade_unrecorded": upgrades.upgrade(record=False),
        "upgrade_in_line": upgrades.upgrade(record=True, in_line=True),
        "upgrade_in_line_unrecorded": upgrades.upgrade(record=False, in_line=True),
        "settle": upgrades.settle(record=True),
        "settle_unrecorded": upgrades.settle(record=False),
        "step_out": line.step_out(record=True),
        "step_out_unrecorded": line.step_out(record=False),
        "unwait": line.UNWAIT,
        "clean": parts.CLEAN,
        "unrecord": parts.UNRECORD,
        "rename": line.RENAME,
        "create": parts.CREATE,
        "declare": parts.DECLARE,
        "open": parts.OPEN,
        "prove": proof.prove(2),
        "prove_recorded": proof.prove(2, 2),
    }


def all_texts() -> dict[str, str]:
    """Return the text of every batch, and of every stored procedure, by name."""
    texts = {name: batch.text for name, batch in all_batches().items()}
    return texts | {f"{PROCEDURE}{name}": text for name, text in procedures.texts().items()}
