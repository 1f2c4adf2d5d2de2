"""The rows of values that are rebuilt once a period: when each was built last, by whom, and with which token."""

from __future__ import annotations

from django.db import models
from django.utils.translation import gettext_lazy as _

from django_sqlsem.models.fields import ExactCharField
from django_sqlsem.models.semaphores import HolderFields


class RefreshRow(HolderFields):
    """One value that is rebuilt once a period. The holder's columns say who built it last.

    ``token`` is that of the permit under which the value was built that counts now; 0: there is none yet.
    """

    key = ExactCharField(_("key"), max_length=32, primary_key=True, editable=False, db_column="name_key")
    name = ExactCharField(_("name"), max_length=200, db_index=True)
    token = models.BigIntegerField(_("token"), default=0)
    period_us = models.BigIntegerField(_("period"), default=0)
    built_us = models.BigIntegerField(_("built at"), null=True)
    took_us = models.BigIntegerField(_("build took"), default=0)
    invalidations = models.BigIntegerField(_("invalidations"), default=0)
    built_for = models.BigIntegerField(_("built for"), default=0)
    failed_us = models.BigIntegerField(_("failed at"), null=True)

    class Meta:
        db_table = "sqlsem_refresh"
        verbose_name = _("refreshed value")
        verbose_name_plural = _("refreshed values")
        default_permissions = ("view",)

    def __str__(self) -> str:
        return str(self.name)
