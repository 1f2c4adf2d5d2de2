"""The lock tables. They hold state and its vocabulary; all locking logic is in the backends.

Instants are whole microseconds by the database's own clock (on SQLite, by the host's boot clock): exact,
without time zones, and the same on every database.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, Final

from django.apps import apps
from django.core.exceptions import ValidationError
from django.db import models
from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.models.lookups import In
from django.utils.translation import gettext_lazy as _

from django_sqlsem.core.names import MAX_SLOTS
from django_sqlsem.exceptions import not_installed

if apps.apps_ready and not apps.is_installed("django_sqlsem"):  # Django would speak of an app label
    raise not_installed()

__all__ = [
    "HOLDER_COLUMNS",
    "ClaimRow",
    "EventRow",
    "ExactCharField",
    "FenceRow",
    "HolderFields",
    "MinuteRow",
    "RefreshRow",
    "SemaphoreRow",
    "ServerRow",
    "SlotRow",
    "TransactionLockRow",
    "WaitRow",
    "WaiterRow",
]


#: The length of keys and of random ids.
KEY_LENGTH: Final = 32
#: SQL Server gets up to this many keys as parameters.
_FEW_KEYS: Final = 500
_KEY: Final = re.compile(f"[0-9a-f]{{{KEY_LENGTH}}}")


class ExactCharField(models.CharField):  # type: ignore[type-arg]
    """Text that compares by its code points and stores any of Unicode, whatever the database's own collation."""

    def to_python(self, value: Any) -> Any:
        """Refuse NUL, which PostgreSQL cannot even look for: an address with one leads to no row, and to no error."""
        if isinstance(value, str) and "\0" in value:
            raise ValidationError("There is no text with NUL in it.")
        return super().to_python(value)

    def db_type(self, connection: BaseDatabaseWrapper) -> str | None:
        """Return the column type, with a binary collation where the default may fold case or cut characters."""
        if connection.vendor == "mysql":
            return f"varchar({self.max_length}) CHARACTER SET utf8mb4 COLLATE utf8mb4_bin"
        if connection.vendor == "microsoft":
            # Its length is counted in UTF-16 units, of which a character may take two.
            return f"nvarchar({2 * (self.max_length or 0)}) COLLATE Latin1_General_100_BIN2"
        if connection.vendor == "postgresql" and self.max_length == KEY_LENGTH:
            # By this name Django adds no second index for LIKE: nobody looks for what a key or an id begins with.
            return f"character varying({KEY_LENGTH})"
        return super().db_type(connection)


@ExactCharField.register_lookup
class _In(In):
    """``in``: on SQL Server many keys are written into the statement, which takes no more than 2,100 parameters.

    mssql-django would put more than 2,048 into a temporary table, and fails at a column with a collation of its own.
    """

    def as_microsoft(self, compiler: Any, connection: BaseDatabaseWrapper) -> tuple[str, Sequence[Any]]:
        """Write keys and ids, which are hex digits; anything else as Django does."""
        keys = list(dict.fromkeys(self.rhs)) if isinstance(self.rhs, (list, tuple, set)) else []
        if len(keys) <= _FEW_KEYS or not all(isinstance(key, str) and _KEY.fullmatch(key) for key in keys):
            return self.as_sql(compiler, connection)
        column, parameters = self.process_lhs(compiler, connection)
        return f"{column} IN ({', '.join(map(repr, keys))})", parameters


class SemaphoreRow(models.Model):
    """One named semaphore: how many slots it has, and what an operator has said about it."""

    key = ExactCharField(_("key"), max_length=32, primary_key=True, editable=False, db_column="name_key")
    name = ExactCharField(_("name"), max_length=200, db_index=True)
    kind = ExactCharField(_("kind"), max_length=16, default="semaphore")
    #: The decorator's name before a call's arguments filled it in: ``sync:{request.user.pk}``. Empty for other names.
    template = ExactCharField(_("template"), max_length=200, default="", db_default="", blank=True)
    declared_slots = models.PositiveIntegerField(_("declared slots"))
    declared_us = models.BigIntegerField(_("declared at"), default=0)
    other_slots = models.PositiveIntegerField(_("slots declared otherwise"), null=True)
    other_us = models.BigIntegerField(_("declared otherwise at"), null=True)
    operator_slots = models.PositiveIntegerField(_("operator's slots"), null=True)
    # Of an operator's number: until when, by the clock that tokens follow. Then the code's number counts again.
    slots_until_us = models.BigIntegerField(_("operator's slots until"), null=True)
    slots_by = ExactCharField(_("slots set by"), max_length=150, default="", db_default="", blank=True)
    slots_reason = ExactCharField(_("reason of the slots"), max_length=200, default="", db_default="", blank=True)
    paused = models.BooleanField(_("paused"), default=False)
    # Of a pause: since when and until when, by the clock that tokens follow. It is over by itself when that has passed.
    paused_us = models.BigIntegerField(_("paused since"), null=True)
    paused_until_us = models.BigIntegerField(_("paused until"), null=True)
    paused_by = ExactCharField(_("paused by"), max_length=150, default="", db_default="", blank=True)
    paused_reason = ExactCharField(_("reason of the pause"), max_length=200, default="", db_default="", blank=True)
    shrinking = models.BooleanField(_("shrinking"), default=False)
    # Of counters only. What was handed to waiters that have not taken it yet is in their rows.
    units = models.BigIntegerField(_("units"), null=True)

    class Meta:
        db_table = "sqlsem_semaphore"
        verbose_name = _("lock")
        verbose_name_plural = _("locks")
        indexes = [
            models.Index(fields=["paused"], name="sqlsem_semaphore_paused"),
            models.Index(fields=["slots_until_us"], name="sqlsem_semaphore_until"),
            models.Index(fields=["other_us"], name="sqlsem_semaphore_other"),
            models.Index(fields=["template", "name", "kind"], name="sqlsem_semaphore_template"),
        ]
        # Whoever writes a larger one by hand would have rows made for each of them.
        constraints = [
            models.CheckConstraint(condition=models.Q(declared_slots__lte=MAX_SLOTS), name="sqlsem_declared_slots"),
            models.CheckConstraint(condition=models.Q(operator_slots__lte=MAX_SLOTS), name="sqlsem_operator_slots"),
        ]
        permissions = [
            ("stop_semaphorerow", "Can ask holders to stop"),
            ("revoke_semaphorerow", "Can revoke permits and purge stale slots"),
            ("configure_semaphorerow", "Can set slots, pause and resume"),
        ]
        default_permissions = ("view",)

    def __str__(self) -> str:
        return str(self.name)


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


#: The columns that tell who holds or waits.
HOLDER_COLUMNS: Final = tuple(str(field.column) for field in HolderFields._meta.local_fields)


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
    #: Its permit's, or the last one's; 0 in slots that nobody has used for a while. Whoever looks for taken slots
    #: passes over those by an index, which the claims of a busy slot need not touch.
    lease_us = models.BigIntegerField(_("lease"), default=0)
    held_us = models.BigIntegerField(_("usual hold"), default=0)
    suspect_us = models.BigIntegerField(_("beacon out since"), null=True)
    session_id = models.BigIntegerField(_("database session"), null=True)
    session_us = models.BigIntegerField(_("database session since"), null=True)
    #: How its permit, the last one if it is free, shares the name with others: see ``modes``.
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
        indexes = [models.Index(fields=["lease_us"], name="sqlsem_slot_lease")]
        constraints = [models.UniqueConstraint(fields=["semaphore", "slot"], name="sqlsem_slot_uniq")]
        default_permissions = ("view",)

    def __str__(self) -> str:
        return f"{self.semaphore_id}/{self.slot}"


class WaiterRow(HolderFields):
    """One process that waits for a semaphore, at the place of its oldest waiting thread or task.

    ``ticket`` is the permit id under which it will be granted. A Celery task that will come back is ``away``: it keeps
    its place under its own id, and is never granted. On a counter, one that is ``away`` has been handed the
    units that it wants, and has not taken them yet. ``take`` is 0 if it wants all slots.
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


class FenceRow(models.Model):
    """One slot that was ever fenced. Who fences it reads this row with a shared lock; who takes it needs it alone.

    Who takes it also writes it, and who fences it on a cluster with several writers: of two nodes one can commit.
    """

    slot_id = models.BigIntegerField(_("slot row"), primary_key=True)
    writes = models.BigIntegerField(_("writes"), default=0)

    class Meta:
        db_table = "sqlsem_fence"
        verbose_name = _("fence")
        verbose_name_plural = _("fences")
        default_permissions = ()

    def __str__(self) -> str:
        return str(self.slot_id)


class TransactionLockRow(models.Model):
    """One name that transactions lock, or one table that they lock where the database itself locks none.

    A row that is deleted while nobody has it locked is made again when it is needed.
    """

    key = ExactCharField(_("key"), max_length=32, primary_key=True, editable=False, db_column="name_key")
    name = ExactCharField(_("name"), max_length=200)
    #: How many committed transactions have had it. Counted on SQLite, where nothing else tells who was waited for, and
    #: on clusters with several writers, whose nodes see each other's writes only.
    grants = models.BigIntegerField(_("grants"), default=0)

    class Meta:
        db_table = "sqlsem_transaction_lock"
        verbose_name = _("transaction lock")
        verbose_name_plural = _("transaction locks")
        default_permissions = ("view",)

    def __str__(self) -> str:
        return str(self.name)


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
    ``history.recorder``.
    """

    id = models.BigAutoField(primary_key=True)
    key = ExactCharField(_("key"), max_length=32, editable=False, db_column="semaphore_key")
    template = ExactCharField(_("template"), max_length=200, default="", db_default="", blank=True)
    minute_us = models.BigIntegerField(_("minute"))
    #: A random number of the process.
    writer = models.BigIntegerField(_("writer"), default=0)
    until_us = models.BigIntegerField(_("kept until"))
    granted = models.PositiveIntegerField(_("granted"), default=0)
    released = models.PositiveIntegerField(_("released"), default=0)
    turned_away = models.PositiveIntegerField(_("refused"), default=0)
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
        indexes = [
            models.Index(fields=["until_us"], name="sqlsem_minute_until"),
            models.Index(fields=["template", "minute_us"], name="sqlsem_minute_template"),
        ]
        default_permissions = ()

    def __str__(self) -> str:
        return f"{self.key} {self.minute_us}"
