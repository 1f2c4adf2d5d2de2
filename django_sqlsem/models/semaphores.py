"""The rows of semaphores: their names, slots and waiters, and the starts of the server that keeps them."""

from __future__ import annotations

from django.db import models
from django.utils.translation import gettext_lazy as _

from django_sqlsem.models.fields import ExactCharField


class SemaphoreRow(models.Model):
    """One named semaphore: how many slots it has, and what an operator has said about it."""

    key = ExactCharField(_("key"), max_length=32, primary_key=True, editable=False, db_column="name_key")
    name = ExactCharField(_("name"), max_length=200, db_index=True)
    kind = ExactCharField(_("kind"), max_length=16, default="semaphore")
    declared_slots = models.PositiveIntegerField(_("declared slots"))
    declared_us = models.BigIntegerField(_("declared at"), default=0)
    other_slots = models.PositiveIntegerField(_("slots declared otherwise"), null=True)
    other_us = models.BigIntegerField(_("declared otherwise at"), null=True)
    operator_slots = models.PositiveIntegerField(_("operator's slots"), null=True)
    paused = models.BooleanField(_("paused"), default=False)
    shrinking = models.BooleanField(_("shrinking"), default=False)
    # Of the kind "tokens" only. What was handed to waiters that have not taken it yet is in their rows.
    tokens = models.BigIntegerField(_("tokens"), null=True)

    class Meta:
        db_table = "sqlsem_semaphore"
        verbose_name = _("semaphore")
        verbose_name_plural = _("semaphores")
        indexes = [models.Index(fields=["paused"], name="sqlsem_semaphore_paused")]
        permissions = [
            ("operate_semaphorerow", "Can revoke permits and purge stale slots"),
            ("configure_semaphorerow", "Can set slots, pause and resume"),
        ]
        default_permissions = ("view",)

    def __str__(self) -> str:
        return str(self.name)

    @property
    def slots(self) -> int:
        """How many slots count now: the operator's number, else the declared one."""
        return self.declared_slots if self.operator_slots is None else self.operator_slots


class HolderFields(models.Model):
    """Who holds or waits."""

    host = ExactCharField(_("host"), max_length=255, default="", blank=True)
    pid = models.BigIntegerField(_("process"), default=0)
    thread = ExactCharField(_("thread"), max_length=100, default="", blank=True)
    label = ExactCharField(_("work"), max_length=200, default="", blank=True)
    user = ExactCharField(_("user"), max_length=150, default="", blank=True, db_column="user_name")
    process_id = ExactCharField(_("process id"), max_length=32, default="", blank=True)
    boot_id = ExactCharField(_("boot id"), max_length=36, default="", blank=True)
    channel = ExactCharField(_("channel"), max_length=64, default="", blank=True)
    beacon = models.BooleanField(_("has a beacon"), default=False)

    class Meta:
        abstract = True


class SlotRow(HolderFields):
    """One slot of a semaphore. ``expires_us`` is null while it is free.

    Slot 0 is the writer's place, which only locks of readers and writers have: it is closed to everybody else.
    """

    id = models.BigAutoField(primary_key=True)
    semaphore = models.ForeignKey(
        SemaphoreRow,
        models.CASCADE,
        db_column="semaphore_key",
        db_constraint=False,  # no extra lock on the semaphore's row; purging deletes slots first
        db_index=False,  # the unique constraint serves
        related_name="slot_rows",
        verbose_name=_("semaphore"),
    )
    slot = models.PositiveIntegerField(_("slot"))
    closed = models.BooleanField(_("closed"), default=False)
    token = models.BigIntegerField(_("token"), default=0)
    permit_id = ExactCharField(_("permit id"), max_length=32, null=True)
    acquired_us = models.BigIntegerField(_("acquired at"), null=True)
    expires_us = models.BigIntegerField(_("expires at"), null=True)
    lease_us = models.BigIntegerField(_("lease"), default=0)
    held_us = models.BigIntegerField(_("usual hold"), default=0)
    suspect_us = models.BigIntegerField(_("beacon out since"), null=True)
    session_id = models.BigIntegerField(_("database session"), null=True)
    session_us = models.BigIntegerField(_("database session since"), null=True)
    #: How its permit shares the name with others: see ``modes``.
    mode = ExactCharField(_("mode"), max_length=8, default="", db_default="", blank=True, db_column="lock_mode")
    fenced = models.BigIntegerField(_("fenced token"), null=True)
    revoked_token = models.BigIntegerField(_("revoked token"), null=True)
    revoked_by = ExactCharField(_("revoked by"), max_length=150, default="", blank=True)
    #: The token whose holder an operator has asked to stop, and who that was.
    stop_token = models.BigIntegerField(_("asked to stop"), null=True)
    stop_by = ExactCharField(_("asked to stop by"), max_length=150, default="", db_default="", blank=True)

    class Meta:
        db_table = "sqlsem_slot"
        verbose_name = _("slot")
        verbose_name_plural = _("slots")
        constraints = [models.UniqueConstraint(fields=["semaphore", "slot"], name="sqlsem_slot_uniq")]
        default_permissions = ("view",)

    def __str__(self) -> str:
        return f"{self.semaphore_id}/{self.slot}"


class WaiterRow(HolderFields):
    """One process that waits for a semaphore, at the place of its oldest waiting thread or task.

    ``ticket`` is the permit id under which it will be granted. A Celery task that will come back is ``away``: it keeps
    its place under its own id, and is never granted. On a name of tokens, one that is ``away`` has been handed the
    tokens that it wants, and has not taken them yet. ``take`` is 0 if it wants all slots.
    """

    id = models.BigAutoField(primary_key=True)
    ticket = ExactCharField(_("ticket"), max_length=32, unique=True)
    semaphore = models.ForeignKey(
        SemaphoreRow,
        models.CASCADE,
        db_column="semaphore_key",
        db_constraint=False,
        db_index=False,
        related_name="waiter_rows",
        verbose_name=_("semaphore"),
    )
    queued_us = models.BigIntegerField(_("waiting since"))
    expires_us = models.BigIntegerField(_("expires at"))
    take = models.PositiveIntegerField(_("slots wanted"), default=1)
    slots = models.PositiveIntegerField(_("slots declared"), null=True)
    lease_us = models.BigIntegerField(_("lease"), default=0)
    away = models.BooleanField(_("away"), default=False)
    mode = ExactCharField(_("mode"), max_length=8, default="", db_default="", blank=True, db_column="lock_mode")
    waiting = models.PositiveIntegerField(_("waiting"), default=1)

    class Meta:
        db_table = "sqlsem_waiter"
        verbose_name = _("waiter")
        verbose_name_plural = _("waiters")
        indexes = [models.Index(fields=["semaphore", "queued_us"], name="sqlsem_waiter_queue")]
        default_permissions = ("view",)

    def __str__(self) -> str:
        return str(self.ticket)


class ServerRow(models.Model):
    """One start or promotion of the database's server: when it was first seen, by its own clock."""

    identity = ExactCharField(_("identity"), max_length=200, primary_key=True)
    seen_us = models.BigIntegerField(_("first seen"))

    class Meta:
        db_table = "sqlsem_server"
        verbose_name = _("server start")
        verbose_name_plural = _("server starts")
        default_permissions = ()

    def __str__(self) -> str:
        return str(self.identity)
