"""Who waits for one name while holding others: the edges of the graph in which deadlocks are looked for."""

from __future__ import annotations

from django.db import models
from django.utils.translation import gettext_lazy as _

from django_sqlsem.models.fields import ExactCharField
from django_sqlsem.models.semaphores import HolderFields


class WaitRow(HolderFields):
    """One thread or task that has waited for a while, and holds permits meanwhile.

    ``wait_id`` is the id of the permit that it waits for. ``permits`` is what it holds, as ``key/permit id``, separated
    by spaces. Instants are as in ``WaiterRow``.
    """

    id = models.BigAutoField(primary_key=True)
    wait_id = ExactCharField(_("wait id"), max_length=32, unique=True)
    key = ExactCharField(_("key"), max_length=32, editable=False, db_column="semaphore_key")
    name = ExactCharField(_("name"), max_length=200)
    take = models.PositiveIntegerField(_("slots wanted"), default=1)
    slots = models.PositiveIntegerField(_("slots declared"), null=True)
    mode = ExactCharField(_("mode"), max_length=8, default="", blank=True, db_column="lock_mode")
    fair = models.BooleanField(_("stands in line"), default=True)
    permits = models.TextField(_("permits held"))
    since_us = models.BigIntegerField(_("waiting since"))
    expires_us = models.BigIntegerField(_("expires at"))

    class Meta:
        db_table = "sqlsem_wait"
        verbose_name = _("wait")
        verbose_name_plural = _("waits")
        default_permissions = ()

    def __str__(self) -> str:
        return f"{self.wait_id} for {self.name}"
