"""Who has which row of a project's own tables: written and deleted together with the row's status."""

from __future__ import annotations

from django.db import models
from django.utils.translation import gettext_lazy as _

from django_sqlsem.models.fields import ExactCharField


class ClaimRow(models.Model):
    """One row of some model that a worker has claimed. Its owner is whoever holds ``slot`` with ``token``.

    It stands for itself, without foreign keys: what it names may be deleted or purged at any time.
    """

    id = models.BigAutoField(primary_key=True)
    key = ExactCharField(_("key"), max_length=32, editable=False, db_column="semaphore_key")
    model = ExactCharField(_("model"), max_length=200)
    field = ExactCharField(_("status field"), max_length=100, db_column="field_name")
    object_pk = ExactCharField(_("primary key"), max_length=255)
    from_status = ExactCharField(_("status before"), max_length=255, null=True)
    status = ExactCharField(_("status meanwhile"), max_length=255, null=True)
    slot = models.PositiveIntegerField(_("slot"))
    token = models.BigIntegerField(_("token"))
    claimed_us = models.BigIntegerField(_("claimed at"))
    boot_id = ExactCharField(_("boot id"), max_length=36, default="", blank=True)
    host = ExactCharField(_("host"), max_length=255, default="", blank=True)
    pid = models.BigIntegerField(_("process"), default=0)
    thread = ExactCharField(_("thread"), max_length=100, default="", blank=True)
    label = ExactCharField(_("work"), max_length=200, default="", blank=True)

    class Meta:
        db_table = "sqlsem_claim"
        verbose_name = _("claimed row")
        verbose_name_plural = _("claimed rows")
        constraints = [models.UniqueConstraint(fields=["key", "object_pk"], name="sqlsem_claim_uniq")]
        default_permissions = ("view",)

    def __str__(self) -> str:
        return f"{self.model} {self.object_pk}"
