"""What has happened: events, and what each process counted in each minute. Nothing that grants a lock reads them."""

from __future__ import annotations

from django.db import models
from django.utils.translation import gettext_lazy as _

from django_sqlsem.models.fields import ExactCharField


class EventRow(models.Model):
    """Something that happened to one name: a grant, its end, a loss, an operator's act.

    Instants are microseconds of Unix time by the database's clock; on SQLite, by the host's, as its boot clock would
    begin anew. It stands for itself, without foreign keys: the name may be purged at any time.
    """

    id = models.BigAutoField(primary_key=True)
    key = ExactCharField(_("key"), max_length=32, editable=False, db_column="semaphore_key")
    name = ExactCharField(_("name"), max_length=200)
    at_us = models.BigIntegerField(_("at"))
    until_us = models.BigIntegerField(_("kept until"))
    what = ExactCharField(_("event"), max_length=16)
    slot = models.PositiveIntegerField(_("slot"), null=True)
    token = models.BigIntegerField(_("token"), null=True)
    waited_us = models.BigIntegerField(_("waited"), null=True)
    held_us = models.BigIntegerField(_("held"), null=True)
    host = ExactCharField(_("host"), max_length=255, default="", blank=True)
    pid = models.BigIntegerField(_("process"), default=0)
    thread = ExactCharField(_("thread"), max_length=100, default="", blank=True)
    label = ExactCharField(_("work"), max_length=200, default="", blank=True)
    user = ExactCharField(_("user"), max_length=150, default="", blank=True, db_column="user_name")
    by = ExactCharField(_("by"), max_length=150, default="", blank=True, db_column="done_by")
    detail = ExactCharField(_("detail"), max_length=500, default="", blank=True)

    class Meta:
        db_table = "sqlsem_event"
        verbose_name = _("event")
        verbose_name_plural = _("events")
        indexes = [
            models.Index(fields=["key", "at_us"], name="sqlsem_event_name"),
            models.Index(fields=["until_us"], name="sqlsem_event_until"),
        ]
        default_permissions = ()

    def __str__(self) -> str:
        return f"{self.what} {self.name}"


class MinuteRow(models.Model):
    """What one process counted of one name in one minute: several rows may be of the same minute, and add up.

    Its writer writes it anew while the minute lasts. ``waits`` and ``holds`` are histograms as text: see
    ``history.buckets``.
    """

    id = models.BigAutoField(primary_key=True)
    key = ExactCharField(_("key"), max_length=32, editable=False, db_column="semaphore_key")
    minute_us = models.BigIntegerField(_("minute"))
    #: A random number of the process.
    writer = models.BigIntegerField(_("writer"), default=0)
    until_us = models.BigIntegerField(_("kept until"))
    granted = models.PositiveIntegerField(_("granted"), default=0)
    released = models.PositiveIntegerField(_("released"), default=0)
    turned_away = models.PositiveIntegerField(_("turned away"), default=0)
    lost = models.PositiveIntegerField(_("lost"), default=0)
    #: Slots times microseconds, of what ended in this minute.
    held_us = models.BigIntegerField(_("held"), default=0)
    longest_hold_us = models.BigIntegerField(_("longest hold"), default=0)
    longest_wait_us = models.BigIntegerField(_("longest wait"), default=0)
    holds = models.CharField(_("holds"), max_length=1000, default="", blank=True)
    waits = models.CharField(_("waits"), max_length=1000, default="", blank=True)

    class Meta:
        db_table = "sqlsem_minute"
        verbose_name = _("minute")
        verbose_name_plural = _("minutes")
        constraints = [models.UniqueConstraint(fields=["key", "minute_us", "writer"], name="sqlsem_minute_uniq")]
        indexes = [models.Index(fields=["until_us"], name="sqlsem_minute_until")]
        default_permissions = ()

    def __str__(self) -> str:
        return f"{self.key} {self.minute_us}"
