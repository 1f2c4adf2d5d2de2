"""The rows that fenced transactions lock, where a lock of the slot's own row would keep its renewals out."""

from __future__ import annotations

from django.db import models
from django.utils.translation import gettext_lazy as _


class FenceRow(models.Model):
    """One slot that was ever fenced. Who fences it reads this row with a shared lock; who takes it needs it alone."""

    slot_id = models.BigIntegerField(_("slot row"), primary_key=True)

    class Meta:
        db_table = "sqlsem_fence"
        verbose_name = _("fence")
        verbose_name_plural = _("fences")
        default_permissions = ()

    def __str__(self) -> str:
        return str(self.slot_id)
