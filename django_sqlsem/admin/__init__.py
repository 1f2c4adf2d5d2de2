"""The admin, for operators: lists that nobody can edit, a page of each lock, and actions that ask first."""

from __future__ import annotations

from django_sqlsem.admin.lists import ClaimAdmin, OperatorAdmin, RefreshAdmin, SlotAdmin, TransactionLockAdmin
from django_sqlsem.admin.locks import SemaphoreAdmin

__all__ = ["ClaimAdmin", "OperatorAdmin", "RefreshAdmin", "SemaphoreAdmin", "SlotAdmin", "TransactionLockAdmin"]
