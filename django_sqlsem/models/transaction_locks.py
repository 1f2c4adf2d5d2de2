"""The rows that transaction locks lock. They say nothing of who holds one: only the server knows."""

from __future__ import annotations

from django.db import models
from django.utils.translation import gettext_lazy as _

from django_sqlsem.models.fields import ExactCharField


class TransactionLockRow(models.Model):
    """One name that transactions lock, or one table that they lock where the database itself locks none.

    A row that is deleted while nobody has it locked is made again when it is needed.
    """

    key = ExactCharField(_("key"), max_length=32, primary_key=True, editable=False, db_column="name_key")
    name = ExactCharField(_("name"), max_length=200)
    #: How many committed transactions have had it. Counted on SQLite only, where nothing else tells who was waited for.
    grants = models.BigIntegerField(_("grants"), default=0)

    class Meta:
        db_table = "sqlsem_transaction_lock"
        verbose_name = _("transaction lock")
        verbose_name_plural = _("transaction locks")
        default_permissions = ("view",)

    def __str__(self) -> str:
        return str(self.name)
