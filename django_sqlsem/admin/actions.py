"""What operators may do: as actions of the lists, and as buttons on the page of one lock.

Each act shows whom it means, and acts after a confirmation on just those.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final, cast

from django import forms
from django.contrib import admin, messages
from django.contrib.admin import helpers
from django.contrib.admin.utils import unquote
from django.core import signing
from django.core.exceptions import PermissionDenied, ValidationError
from django.db import Error as DatabaseError
from django.db.models import QuerySet
from django.http import HttpRequest, HttpResponse, HttpResponseRedirect
from django.urls import URLPattern, path
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy, ngettext, ngettext_lazy

from django_sqlsem import control, queries
from django_sqlsem.admin import live, tables
from django_sqlsem.admin.display import users, visible
from django_sqlsem.admin.tables import program_text
from django_sqlsem.core.names import MAX_SLOTS, ONE_SLOT, key_of
from django_sqlsem.exceptions import BackendError, SemaphoreError
from django_sqlsem.models import SemaphoreRow
from django_sqlsem.snapshots import HolderSnapshot, SemaphoreSnapshot, SlotState

#: What the targets of a page are signed with, before the name of its act.
_SALT: Final = "django_sqlsem.admin."
#: What a button sends: an act, and the slot and token of the holder that it is beside.
_BUTTON: Final = re.compile(r"(?P<act>[a-z_]*)(?: (?P<slot>[0-9]{1,9}) (?P<token>[0-9]{1,19}))?")


class NotDoneError(Exception):
    """Nothing was done to what a request means: the arguments are why, and the level of that message."""


def _damaged() -> NotDoneError:
    return NotDoneError(_("The form came back damaged: nothing was done."), messages.ERROR)


class ActionForm(helpers.ActionForm):
    """Chooses an action. django-unfold shows the button beside it once what ``x-model`` names has a value."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.fields["action"].widget.attrs["x-model"] = "action"


@dataclass(frozen=True, slots=True)
class Page:
    """What a confirmation page says."""

    #: The act by its name.
    action: str
    title: Any
    question: Any = ""
    confirm: Any = ""
    #: What the confirmation brings back: names, or names with slots and tokens.
    targets: Sequence[Any] = ()
    holders: Sequence[HolderSnapshot] = ()
    #: Holders that are shown but left alone, and why.
    others: Sequence[HolderSnapshot] = ()
    others_title: Any = ""
    semaphores: Sequence[SemaphoreSnapshot] = ()
    form: forms.Form | None = None
    dangerous: bool = False


def _confirmation(model_admin: Any, request: HttpRequest, page: Page) -> HttpResponse:
    match = request.resolver_match
    lock = unquote(match.kwargs.get("object_id", "")) if match else ""  # on a list there is none
    names = {each.name for each in page.semaphores} | {each.name for each in (*page.holders, *page.others)}
    context = {
        "title": page.title,
        "page": page,
        "tables": [
            tables.semaphores(page.semaphores),
            tables.meant("sqlsem-meant", _("Holders"), page.holders),
        ],
        "others": tables.meant("sqlsem-others", page.others_title, page.others),
        "targets": signing.dumps(page.targets, salt=_SALT + page.action),
        # Any one row makes the list view call the action again; whom it means is said by the targets alone.
        "selected": request.POST.getlist(helpers.ACTION_CHECKBOX_NAME)[:1],
        "action_checkbox_name": helpers.ACTION_CHECKBOX_NAME,
        "back": live.address(model_admin, "change", lock) if lock else request.get_full_path(),
        "one": users(names.pop()) if lock and len(names) == 1 else "",
    }
    answer: HttpResponse = live.page(model_admin, request, "admin/sqlsem/confirm_action.html", context)
    return answer


def _button(request: HttpRequest) -> tuple[str, tuple[int, int] | None]:
    """Return the act that a button of a lock's page stands for, and the slot and token of the holder beside it.

    ``("", None)``: no such button was pressed. Raises ``NotDoneError``.
    """
    found = _BUTTON.fullmatch(request.POST.get("do", ""))
    if found is None or int(found["token"] or 0) >= 2**63:
        raise _damaged()
    return found["act"], (int(found["slot"]), int(found["token"])) if found["token"] else None


def check_selected(model_admin: Any, request: HttpRequest) -> None:
    """Raise ``NotDoneError`` if what a list sends as chosen rows cannot be such."""
    field = model_admin.opts.pk
    for value in request.POST.getlist(helpers.ACTION_CHECKBOX_NAME):
        try:
            found = field.to_python(value)
        except ValidationError:
            raise _damaged() from None
        if isinstance(found, int) and not 0 <= found < 2**63:
            raise _damaged()


def _is_confirmed(request: HttpRequest) -> bool:
    """Whether this is the answer to a confirmation page."""
    return "confirmed" in request.POST


def _targets(request: HttpRequest, action: str) -> list[Any]:
    """Return what the confirmed page of this very act means. Raises ``NotDoneError``."""
    try:
        return list(signing.loads(request.POST.get("targets", ""), salt=_SALT + action))
    except signing.BadSignature:
        raise _damaged() from None


def _shown(request: HttpRequest, queryset: QuerySet[Any]) -> tuple[list[SemaphoreSnapshot], list[HolderSnapshot]]:
    """Return the semaphores of the selected rows, and the holders of the selected slots, or the one beside a button.

    Raises ``NotDoneError`` if that one has gone since the button was shown.
    """
    slots = queryset.model is not SemaphoreRow
    rows = set(queryset.values_list("semaphore__name", "slot") if slots else queryset.values_list("name"))
    snapshots = list(live.reading_of(request).by_name(name for name, *_slot in rows).values())
    holders = [
        holder
        for snapshot in snapshots
        for holder in snapshot.holders
        if not slots or any((holder.name, slot) in rows for slot in holder.numbers)
    ]
    beside = _button(request)[1]
    if beside is not None:
        holders = [holder for holder in holders if (holder.slot, holder.token) == beside]
        if not holders:
            raise NotDoneError(_changed([(snapshots[0].name if snapshots else "", beside[0])]), messages.WARNING)
    return snapshots, holders


def _log(model_admin: Any, request: HttpRequest, name: str, message: str) -> None:
    """Note an act with its reason in Django's log, under the semaphore's name."""
    if why := _who(request)["reason"]:
        message = _("%(message)s Reason: %(reason)s") % {"message": message, "reason": why}
    model_admin.log_change(request, SemaphoreRow(key=key_of(name), name=name), visible(message))


def _who(request: HttpRequest) -> dict[str, Any]:
    """Return who acts, and why, as ``control`` wants it."""
    reason = " ".join(request.POST.get("reason", "").split())[: control.MAX_REASON_LENGTH]
    return {"by": str(request.user.get_username()), "using": queries.locks_database(), "reason": reason}


def _changed(changed: Collection[tuple[str, int]]) -> str:
    """Return which holders were left alone, by name and slot, and who is there now."""
    text = ngettext(
        "The holder of %(slots)s has changed since it was shown: nobody there was disturbed. Now: %(now)s.",
        "The holders of %(slots)s have changed since they were shown: nobody there was disturbed. Now: %(now)s.",
        len(changed),
    )
    found, now = queries.by_name({name for name, _slot in changed}), []
    for name, slot in sorted(changed):
        holders = found[name].holders if name in found else ()
        there = next((str(each) for each in holders if slot in each.numbers), None)
        now.append(visible(there or _("slot %(slot)d is free") % {"slot": slot}))
    return text % {"slots": ", ".join(_place(name, slot) for name, slot in sorted(changed)), "now": "; ".join(now)}


def _standing(snapshot: SemaphoreSnapshot) -> str:
    """Return how a lock stands, in a few words."""
    parts = [_("%(held)d of %(slots)d held") % {"held": snapshot.held, "slots": snapshot.slots}]
    if snapshot.operator_slots is not None:
        parts.append(_("slots set by an operator") if not snapshot.slots_by else
                     _("slots set by %(user)s") % {"user": visible(snapshot.slots_by)})  # fmt: skip
    if snapshot.paused:
        by = snapshot.paused_by
        parts.append(_("paused by %(user)s") % {"user": visible(by)} if by else _("paused"))
    else:
        parts.append(_("not paused"))
    return _("%(name)s: %(standing)s") % {"name": visible(snapshot.name), "standing": ", ".join(parts)}


def _place(name: str, slot: int) -> str:
    """Return a slot of a name in words."""
    return _("%(name)s slot %(slot)d") % {"name": visible(name), "slot": slot}


_IDS: Final = "id_sqlsem_%s"


class ReasonForm(forms.Form):
    """Why an operator acts."""

    field_order = ("slots", "seconds", "reason")

    reason = forms.CharField(
        label=gettext_lazy("Reason"),
        required=False,
        widget=forms.TextInput(attrs={"maxlength": control.MAX_REASON_LENGTH, "class": "sqlsem-wide"}),
        help_text=gettext_lazy(
            "Shown on the page of the lock and in the audit log, for instance: provider down, INC-12"
        ),
    )


def _for_how_long(without_end: Any, afterwards: Any) -> forms.TypedChoiceField:
    return forms.TypedChoiceField(
        label=gettext_lazy("For"),
        coerce=int,
        empty_value=None,
        required=False,
        choices=(
            ("", without_end),
            (300, gettext_lazy("5 minutes")),
            (900, gettext_lazy("15 minutes")),
            (1800, gettext_lazy("30 minutes")),
            (3600, gettext_lazy("1 hour")),
            (4 * 3600, gettext_lazy("4 hours")),
            (86400, gettext_lazy("1 day")),
        ),
        help_text=afterwards,
    )


class PauseForm(ReasonForm):
    """For how long nothing is granted, and why."""

    seconds = _for_how_long(
        gettext_lazy("until somebody resumes it"), gettext_lazy("Afterwards it is resumed by itself.")
    )


class SlotsForm(ReasonForm):
    """An operator's number of slots, for how long, and why."""

    slots = forms.IntegerField(
        label=gettext_lazy("Slots"),
        min_value=1,
        max_value=MAX_SLOTS,
        required=False,
        help_text=gettext_lazy("Leave it empty to use the number from the code."),
    )
    seconds = _for_how_long(
        gettext_lazy("until somebody undoes it"),
        gettext_lazy("Afterwards the number that the code declares counts again, by itself."),
    )

    def clean(self) -> dict[str, Any] | None:
        """Refuse an end for the code's own number."""
        found = super().clean()
        if self.cleaned_data.get("seconds") is not None and not self.errors and self.cleaned_data["slots"] is None:
            self.add_error("seconds", _("The number that the code declares has no end."))
        return found


# What is done to holders.


def _on_holders(
    action: str,
    title: Any,
    ask: Callable[[Page, Sequence[HolderSnapshot]], Page | str],
    act: Callable[[HttpRequest, str, int, int], Sequence[HolderSnapshot]],
    *,
    permission: str,
    entry: Any,
    done: Any,
) -> Any:
    """Return an action that is for holders.

    ``ask()`` fills the page that asks, or says why there is none; ``act()`` acts on one holder, by name, slot and
    token, and returns it if it is still there. ``entry``: what is logged of each; ``done``: what is said.
    """

    @admin.action(description=title, permissions=[permission])
    def run(model_admin: Any, request: HttpRequest, queryset: QuerySet[Any]) -> HttpResponse | None:
        if not _is_confirmed(request):
            page = ask(Page(action, title), _shown(request, queryset)[1])
            if isinstance(page, Page):
                targets = [(holder.name, holder.slot, holder.token) for holder in page.holders]
                page = replace(page, targets=targets, form=ReasonForm(auto_id=_IDS))
                return _confirmation(model_admin, request, page)
            model_admin.message_user(request, page, messages.INFO)
            return None
        count, changed = 0, set()
        for name, slot, token in _targets(request, action):
            try:
                holders = act(request, name, slot, token)
            except SemaphoreError as error:
                model_admin.message_user(request, visible(str(error)), messages.ERROR)
                continue
            if not holders:
                changed.add((name, slot))
            for holder in holders:
                count += 1
                _log(model_admin, request, name, entry % {"holder": holder})
        if count:
            model_admin.message_user(request, done % {"count": count}, messages.SUCCESS)
        if changed:
            model_admin.message_user(request, _changed(changed), messages.WARNING)
        return None

    run.__name__ = action
    return run


def _ask_to_stop(page: Page, holders: Sequence[HolderSnapshot]) -> Page | str:
    new = [holder for holder in holders if holder.recorded and not (holder.expired or holder.stop_requested)]
    if not new:
        return _("Nobody holds any of these who has not been asked already.")
    return replace(
        page,
        question=_(
            "These holders will be asked to stop. They keep their slots until they are done; nothing is taken from"
            " anybody. Each learns it at its next renewal at the latest, if its code asks at all."
        ),
        confirm=_("Yes, ask to stop"),
        holders=new,
        others=[holder for holder in holders if holder.stop_requested and not holder.expired],
        others_title=_("Asked already"),
    )


def _ask_to_revoke(page: Page, holders: Sequence[HolderSnapshot]) -> Page | str:
    if not holders:
        return _("Nobody holds any of these: nothing to revoke.")
    kills = any(holder.needs_kill for holder in holders)
    lose = _("These holders will lose their slots at once. Each learns it within a quarter of its lease, and may"
             " still be at work until it checks that.")  # fmt: skip
    end = _("These slots belong to database sessions. The sessions will be ended, with whatever else they hold."
            " Each holder learns it within 2 seconds, and may still be at work until it checks that.")  # fmt: skip
    return replace(
        page,
        question=end if kills else lose,
        confirm=_("Yes, end the sessions") if kills else _("Yes, revoke"),
        holders=holders,
        others=queries.held_along(holders),
        others_title=_("To be lost as well: the same sessions hold these"),
        dangerous=True,
    )


def _ask_to_purge(page: Page, holders: Sequence[HolderSnapshot]) -> Page | str:
    expired = [holder for holder in holders if holder.expired]
    others = [holder for holder in holders if holder.state is SlotState.STALE and not holder.expired]
    if expired:
        return replace(
            page,
            question=_(
                "The leases of these holders have run out, or their sessions have ended. Their slots will be freed; no"
                " live holder is touched."
            ),
            confirm=_("Yes, purge"),
            holders=expired,
            others=others,
            others_title=_("Left alone: these seem gone, but their lease still runs"),
        )
    text = _("The lease of none of these has run out: nothing to purge.")
    if others:
        soon = max(others, key=lambda holder: -(holder.lease_left or 0.0))
        text += " " + _("%(slot)s seems gone; its lease runs out in %(seconds).0f s.") % {
            "slot": _place(soon.name, soon.slot),
            "seconds": soon.lease_left,
        }
    return text


def _purge(request: HttpRequest, name: str, slot: int, token: int) -> Sequence[HolderSnapshot]:
    found = live.reading_of(request).by_name([name]).values()
    held = [each for snapshot in found for each in snapshot.holders if (each.slot, each.token) == (slot, token)]
    who = _who(request)
    plan = control.PurgePlan(who["using"], slots=tuple(each for each in held if each.expired))
    return control.execute_purge(plan, by=who["by"], reason=who["reason"]).freed


stop = _on_holders(
    "stop",
    gettext_lazy("Ask to stop"),
    _ask_to_stop,
    lambda request, *holder: control.request_stop(*holder, **_who(request)),
    permission="stop",
    entry=gettext_lazy("Asked %(holder)s to stop."),
    done=ngettext_lazy("Asked %(count)d holder to stop.", "Asked %(count)d holders to stop.", "count"),
)
revoke = _on_holders(
    "revoke",
    gettext_lazy("Revoke permits"),
    _ask_to_revoke,
    lambda request, *holder: control.revoke(*holder, **_who(request), kill=True),
    permission="revoke",
    entry=gettext_lazy("Revoked %(holder)s."),
    done=ngettext_lazy("Revoked %(count)d permit.", "Revoked %(count)d permits.", "count"),
)
purge_stale = _on_holders(
    "purge_stale",
    gettext_lazy("Purge stale slots"),
    _ask_to_purge,
    _purge,
    permission="revoke",
    entry=gettext_lazy("Purged %(holder)s."),
    done=ngettext_lazy("Freed %(count)d slot.", "Freed %(count)d slots.", "count"),
)

# What is done to names.


def _on_names(
    page: Page,
    act: Callable[..., bool],
    done: Any,
    *,
    permission: str = "configure",
    form: type[ReasonForm] = ReasonForm,
    done_already: Callable[[SemaphoreSnapshot], bool] | None = None,
) -> Any:
    """Return an action that is for names: it asks, and acts on those that are still as they were shown.

    ``act()`` gets the name, who acts, and what the form says; ``done``: what is logged and said.
    ``done_already()``: whether a lock is already as the act would make it.
    """

    @admin.action(description=page.title, permissions=[permission])
    def run(model_admin: Any, request: HttpRequest, queryset: QuerySet[Any]) -> HttpResponse | None:
        if not _is_confirmed(request):
            semaphores = _shown(request, queryset)[0]
            useful = [each for each in semaphores if done_already is None or not done_already(each)]
            if useful or not semaphores:
                return _ask(model_admin, request, page, form(auto_id=_IDS), useful)
            told = {"title": page.title, "now": "; ".join(map(_standing, semaphores[:_MOST_NAMED]))}
            text = _("%(title)s: done already, nothing was changed. Now: %(now)s.") % told
            model_admin.message_user(request, text, messages.WARNING)
            return None
        filled, targets = form(request.POST, auto_id=_IDS), _targets(request, page.action)
        if not filled.is_valid():
            shown = live.reading_of(request).by_name(name for name, *_state in targets)
            return _ask(model_admin, request, page, filled, list(shown.values()))
        arguments = {"slots": "slots", "seconds": "duration"}
        how = {arguments[field]: each for field, each in filled.cleaned_data.items() if field in arguments}
        said: Any = _AS_DECLARED if how.get("slots", 0) is None else done
        _act(model_admin, request, targets, partial(act, **_who(request), **how), said, how)
        return None

    run.__name__ = page.action
    return run


def _ask(
    model_admin: Any, request: HttpRequest, page: Page, form: ReasonForm, semaphores: Sequence[SemaphoreSnapshot]
) -> HttpResponse:
    if len(semaphores) == 1:
        form.initial["slots"] = semaphores[0].operator_slots
    meant = [(each.name, each.operator_slots, each.paused) for each in semaphores]
    holders = [each for found in semaphores for each in found.holders]
    page = replace(page, form=form, targets=meant, semaphores=semaphores, others=holders)
    return _confirmation(model_admin, request, page)


def _act(model_admin: Any, request: HttpRequest, targets: list[Any], act: Any, done: Any, told: dict[str, Any]) -> None:
    """Act on names, log it, and say what happened: of one that is not as it was shown, what it is now."""
    reading, names = live.reading_of(request), []
    for name, *state in targets:
        found = reading.by_name([name]).get(name)
        if found is not None and [found.operator_slots, found.paused] != state:
            text = _("%(name)s has changed since it was shown, and nothing was done. Now: %(now)s.")
            now = {"name": visible(name), "now": _standing(found)}
            model_admin.message_user(request, text % now, messages.WARNING)
            continue
        try:
            known = act(name)
        except (SemaphoreError, TypeError, ValueError) as error:
            model_admin.message_user(request, visible(str(error)), messages.ERROR)
            continue
        if known:
            names.append(name)
            _log(model_admin, request, name, str(done % {"names": name, **told}))
        else:
            text = _("There is no semaphore %(name)s any more.") % {"name": visible(name)}
            model_admin.message_user(request, text, messages.WARNING)
    if names:
        many = ngettext("%(count)d lock", "%(count)d locks", len(names)) % {"count": len(names)}
        listed = ", ".join(map(visible, names)) if len(names) <= _MOST_NAMED else many
        model_admin.message_user(request, done % {"names": listed, **told}, messages.SUCCESS)


#: The most names that a message lists.
_MOST_NAMED: Final = 5
_AS_DECLARED: Final = gettext_lazy("Slots of %(names)s are as the code declares.")
_KEEP: Final = gettext_lazy("Holders, who keep their slots")

set_slots = _on_names(
    Page(
        "set_slots",
        gettext_lazy("Set slots"),
        gettext_lazy("The number counts at once, for every process. No holder is interrupted by a smaller one: nothing"
                     " is granted until fewer are held."),
        gettext_lazy("Set slots"),
        others_title=_KEEP,
    ),
    control.set_slots,
    gettext_lazy("Slots of %(names)s set to %(slots)d."),
    form=SlotsForm,
)  # fmt: skip
undo_slots = _on_names(
    Page(
        "undo_slots",
        gettext_lazy("Use the code's number of slots"),
        gettext_lazy(
            "The number that the code declares counts again, at once. No holder is interrupted by a smaller one."
        ),
        gettext_lazy("Yes, as the code declares"),
        others_title=_KEEP,
    ),
    partial(control.set_slots, slots=None),
    _AS_DECLARED,
    done_already=lambda snapshot: snapshot.operator_slots is None,
)
pause = _on_names(
    Page(
        "pause",
        gettext_lazy("Pause"),
        gettext_lazy(
            "Nothing more will be granted until these are resumed. Whoever waits already goes on waiting until its"
            " timeout; new calls of views and tasks are refused at once."
        ),
        gettext_lazy("Yes, pause"),
        others_title=_KEEP,
    ),
    control.pause,
    gettext_lazy("Paused: %(names)s."),
    form=PauseForm,
    done_already=lambda snapshot: snapshot.paused,
)
resume = _on_names(
    Page(
        "resume",
        gettext_lazy("Resume"),
        gettext_lazy("Slots will be granted again, first to those who have waited longest."),
        gettext_lazy("Yes, resume"),
        others_title=_KEEP,
    ),
    control.resume,
    gettext_lazy("Resumed: %(names)s."),
    done_already=lambda snapshot: not snapshot.paused,
)
drain = _on_names(
    Page(
        "drain",
        gettext_lazy("Drain"),
        gettext_lazy(
            "Nothing more will be granted until these are resumed, and whoever holds one is asked to stop. Holders"
            " that ignore it keep their slots until they are done; nothing is taken from anybody."
        ),
        gettext_lazy("Yes, drain"),
        others_title=gettext_lazy("Holders, who are asked to stop"),
    ),
    control.drain,
    gettext_lazy("Draining %(names)s: holders are asked to stop."),
    permission="drain",
    form=PauseForm,
)

#: By the names that they have on lists, which are those of the functions.
ACTIONS: Final[dict[str, Any]] = {
    act.__name__: act for act in (stop, revoke, purge_stale, set_slots, undo_slots, pause, resume, drain)
}


def permitted(model_admin: Any, request: HttpRequest) -> tuple[str, ...]:
    """Return what somebody may do, which is what the same view differs by."""
    return tuple(
        act
        for act, action in ACTIONS.items()
        if any(getattr(model_admin, f"has_{needed}_permission")(request) for needed in action.allowed_permissions)
    )


def refuse(model_admin: Any, request: HttpRequest) -> None:
    """Answer 403 to who sends a list an act without permission: Django would say that none was chosen."""
    if request.method == "POST":
        wanted = {act for act in request.POST.getlist("action") if act in ACTIONS}
        if not wanted <= set(permitted(model_admin, request)):
            raise PermissionDenied


@dataclass(frozen=True, slots=True)
class Button:
    """One button: what it sends, what is on it, and, for who does not see what it is beside, what it is about."""

    value: str
    text: str
    label: str
    dangerous: bool = False


class Buttons:
    """What a user may do to one lock, as buttons. They belong to the form of ``_acts_form.html``.

    ``url`` is where the form goes, ``lock`` the buttons of the lock as a whole; ``beside(holder)`` those of a holder.
    """

    def __init__(self, model_admin: Any, request: HttpRequest, snapshot: SemaphoreSnapshot) -> None:
        self._may = permitted(model_admin, request)
        self.url = live.address(model_admin, "act", key_of(snapshot.name))
        of_the_lock = {button.value: button for button in self._of_the_lock(snapshot)}
        #: What undoes what an operator has set: it stands beside the notice of that.
        self.undo = {act: of_the_lock.pop(act) for act in ("undo_slots", "resume") if act in of_the_lock}
        self.lock = list(of_the_lock.values())

    def __bool__(self) -> bool:
        """Whether the user may do anything at all."""
        return bool(self._may)

    def beside(self, holder: HolderSnapshot) -> list[Button]:
        """Return the buttons of one holder: it is meant by its slot and token."""
        texts = {
            "stop": (_("Ask to stop"), not holder.expired and _can_be_asked(holder)),
            "revoke": (_("Revoke"), not holder.expired),
            "purge_stale": (_("Purge"), holder.expired),
        }
        return self._made(texts, f" {holder.slot} {holder.token}", f"{holder.where}: {program_text(holder)}")

    def _of_the_lock(self, snapshot: SemaphoreSnapshot) -> list[Button]:
        unasked = [each for each in snapshot.holders if not each.expired and _can_be_asked(each)]
        texts = {
            "stop": (_("Ask all to stop"), len(unasked) > 1),
            "set_slots": (_("Set slots"), snapshot.units is None and snapshot.kind not in ONE_SLOT),
            "undo_slots": (_("Undo: slots as the code declares"), snapshot.operator_slots is not None),
            "pause": (_("Pause"), not snapshot.paused),
            "resume": (_("Resume"), snapshot.paused),
            "drain": (_("Drain"), not snapshot.paused or bool(unasked)),
        }
        return self._made(texts, "", snapshot.name)

    def _made(self, texts: dict[str, tuple[str, bool]], place: str, about: str) -> list[Button]:
        return [
            Button(
                f"{act}{place}",
                text,
                _("%(act)s: %(about)s") % {"act": text, "about": visible(about)},
                dangerous=act == "revoke",
            )
            for act, (text, useful) in texts.items()
            if useful and act in self._may
        ]


def _can_be_asked(holder: HolderSnapshot) -> bool:
    # Without a record there is no place for the request.
    return holder.recorded and not holder.stop_requested


def urls(model_admin: Any) -> list[URLPattern]:
    """Return where the buttons lead."""

    def act_view(request: HttpRequest, object_id: str) -> HttpResponse:
        return _view(model_admin, request, unquote(object_id))

    name = f"{model_admin.opts.app_label}_{model_admin.opts.model_name}_act"
    return [path("<path:object_id>/act/", model_admin.admin_site.admin_view(act_view), name=name)]


def _view(model_admin: Any, request: HttpRequest, key: str) -> HttpResponse:
    """Ask, and act after the confirmation; then show the page of the lock again, with what happened."""
    if not model_admin.has_view_permission(request):
        raise PermissionDenied
    back = HttpResponseRedirect(live.address(model_admin, "change", key))
    if request.method != "POST":  # somebody had to log in again, say
        return back
    try:
        act = _button(request)[0] or request.POST.get("action", "")
        if act not in ACTIONS:
            raise _damaged()
        if act not in permitted(model_admin, request):
            raise PermissionDenied
        chosen = model_admin.get_queryset(request).filter(pk=key)
        if not _is_confirmed(request) and not chosen.exists():
            return cast("HttpResponse", model_admin._get_obj_does_not_exist_redirect(request, model_admin.opts, key))
        return ACTIONS[act](model_admin, request, chosen) or back
    except NotDoneError as why:
        model_admin.message_user(request, *why.args)
    except ValidationError:  # no row has such a key
        model_admin.message_user(request, *_damaged().args)
    except (BackendError, DatabaseError) as error:
        model_admin.message_user(request, live.first_line(error), messages.ERROR)
    return back
