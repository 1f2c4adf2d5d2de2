// Refreshes the part #sqlsem-live of a page every few seconds; without it the page is whole, and has a plain link.
"use strict";
(function start() {
  if (document.readyState === "loading") return document.addEventListener("DOMContentLoaded", start);
  const live = document.getElementById("sqlsem-live");
  const bar = document.querySelector("[data-sqlsem-bar]");
  if (!live || !bar || "sqlsemRuns" in live.dataset) return;
  live.dataset.sqlsemRuns = "";
  const HEADER = "X-Sqlsem-Fragment";
  const PERIOD = 1000 * (Number(live.dataset.sqlsemRefresh) || 3);
  const [STALE, LONGEST_PAUSE, TIMEOUT] = [10000, 30000, 10000];
  const age = bar.querySelector("[data-sqlsem-age]");
  const problem = bar.querySelector("[data-sqlsem-error]");
  const toggle = bar.querySelector("[data-sqlsem-toggle]");
  const text = bar.dataset;
  let asked = 0; // when the view that is shown was asked for: 0 is when this page was
  let [pause, paused, timer, busy, touched] = [PERIOD, false, 0, false, false];
  const EVERY = 1 + Number(live.dataset.sqlsemLight || 0);
  let light = EVERY - 1; // so many more answers need not have what costs most
  let etag = live.dataset.sqlsemEtag || ""; // what the view that is shown is called

  // Nothing moves while the pointer is on a row with buttons, or a finger is down: the next click is meant for it.
  const mouse = matchMedia("(hover: hover)");
  const isStill = () => touched || (mouse.matches && live.querySelector("[data-sqlsem-still]:hover") !== null);

  const showAge = () => {
    const [old, still] = [performance.now() - asked, isStill()], stale = old > STALE && !still;
    const said = paused ? text.textPaused : still ? text.textHeld : stale ? text.textStale : text.textAge;
    const shown = said.replace("%s", Math.round(old / 1000));
    if (age.textContent !== shown) age.textContent = shown;
    for (const each of [bar, live]) each.classList.toggle("sqlsem-old", stale);
    if (!paused && !isMarked()) countOn(old / 1000);
  };

  // A length of time as the pages have it: 0.4 s, 12 s, 3 min 05 s, 2 h 10 min, 1 d 03 h.
  const words = (seconds) => {
    const whole = Math.round(seconds);
    if (seconds < 9.95) return `${seconds.toFixed(1)} s`;
    if (whole < 60) return `${whole} s`;
    const units = [[60, 1, "min", "s"], [3600, 60, "h", "min"], [86400, 3600, "d", "h"]];
    const [large, small, unit, rest] = units[Number(whole >= 3600) + Number(whole >= 86400)];
    return `${Math.floor(whole / large)} ${unit} ${String(Math.floor((whole % large) / small)).padStart(2, "0")} ${rest}`;
  };

  const countOn = (more) => {
    for (const each of live.querySelectorAll("[data-sqlsem-ticks]")) {
      const first = Number(each.dataset.sqlsemTicks);
      const shown = words(first < 0 ? Math.max(0, -first - more) : first + more).replaceAll(" ", "\u00a0");
      if (each.textContent !== shown) each.textContent = shown;
    }
  };

  const say = (words, link) => {
    if (problem.dataset.said === words) return;
    problem.dataset.said = words;
    problem.textContent = words;
    if (link) {
      const anchor = document.createElement("a");
      anchor.href = location.href;
      anchor.textContent = link;
      problem.append(" ", anchor);
    }
  };

  const keyOf = (node) => (node.nodeType === Node.ELEMENT_NODE && (node.id || node.dataset.sqlsemKey)) || "";

  // Makes `old` like `fresh`, keeping whatever is the same: focus, checked boxes and open details stay by themselves.
  const morph = (old, fresh) => {
    if (old.nodeType !== Node.ELEMENT_NODE) {
      if (old.data !== fresh.data) old.data = fresh.data;
      return;
    }
    if ("sqlsemKeep" in old.dataset || "sqlsemKeep" in fresh.dataset) return;
    const kept = (name) => name === "open" && old.tagName === "DETAILS";
    if (old.tagName === "TR" && old.classList.contains("selected")) fresh.classList.add("selected");
    for (const { name } of [...old.attributes]) if (!fresh.hasAttribute(name) && !kept(name)) old.removeAttribute(name);
    for (const { name, value } of fresh.attributes) {
      if (old.getAttribute(name) !== value && !kept(name)) old.setAttribute(name, value);
    }
    morphChildren(old, fresh);
  };

  const morphChildren = (old, fresh) => {
    const keyed = new Map();
    for (const child of old.childNodes) if (keyOf(child)) keyed.set(keyOf(child), child);
    const wanted = new Set([...fresh.childNodes].map(keyOf));
    let at = old.firstChild;
    for (const child of [...fresh.childNodes]) {
      const key = keyOf(child);
      // One with a key is found by it when its turn comes, or removed below.
      while (at && keyOf(at) && !(key && wanted.has(keyOf(at)))) at = at.nextSibling;
      const same = key ? keyed.get(key) : at;
      if (same && same.nodeName === child.nodeName) {
        keyed.delete(key);
        if (same === at) at = at.nextSibling;
        else old.insertBefore(same, at);
        morph(same, child);
        same.sqlsemSeen = true;
      } else {
        child.sqlsemSeen = true;
        old.insertBefore(child, at);
      }
    }
    for (const child of [...old.childNodes]) {
      if (child.sqlsemSeen) delete child.sqlsemSeen;
      else child.remove();
    }
  };

  const isMarked = () => {
    const selection = document.getSelection();
    return selection && !selection.isCollapsed && live.contains(selection.anchorNode);
  };

  const inUse = () => {
    const active = document.activeElement;
    const field = "select, textarea, input:not([type=checkbox]):not([type=radio]):not([type=submit]):not([type=button])";
    return isStill() || isMarked() || (live.contains(active) && active.matches(field) && !active.closest("[data-sqlsem-keep]"));
  };

  const replace = (html) => {
    // Never again as it was asked for: that may have been a form.
    if ("sqlsemReload" in live.dataset) return location.replace(live.dataset.sqlsemUrl);
    const active = document.activeElement;
    const had = live.contains(active);
    const fresh = new DOMParser().parseFromString(html, "text/html").body;
    morphChildren(live, fresh);
    if (had && document.activeElement !== active) (active.isConnected ? active : live).focus({ preventScroll: true });
  };

  const schedule = (wait) => {
    clearTimeout(timer);
    if (!paused && !document.hidden) timer = setTimeout(refresh, wait);
  };

  const refresh = async () => {
    clearTimeout(timer);
    if (busy || paused || document.hidden) return;
    if (inUse()) return schedule(PERIOD);
    busy = true;
    const controller = new AbortController();
    const limit = setTimeout(() => controller.abort(), TIMEOUT);
    const sent = performance.now();
    try {
      const headers = { [HEADER]: "1" };
      if (etag) headers["If-None-Match"] = etag;
      if (light > 0) headers["X-Sqlsem-Light"] = "1";
      const options = { headers, cache: "no-store", redirect: "manual", signal: controller.signal };
      const answer = await fetch(live.dataset.sqlsemUrl, options);
      const body = await answer.text();
      const ours = answer.headers.has(HEADER);
      const good = answer.ok || answer.status === 304;
      if (good && ours && !inUse()) {
        if (!paused) {
          if (answer.ok) [etag] = [answer.headers.get("ETag") || "", replace(body)];
          asked = sent - 1000 * (Number(answer.headers.get("X-Sqlsem-Age")) || 0);
          light = light > 0 ? light - 1 : EVERY - 1;
        }
        pause = PERIOD;
        say("");
      } else if (!(good && ours)) {
        pause = Math.min(LONGEST_PAUSE, pause * 2);
        if (answer.type === "opaqueredirect" || answer.ok) say(text.textEnded, text.textLogin);
        else say(ours ? body : text.textStatus.replace("%s", answer.status));
      }
    } catch {
      pause = Math.min(LONGEST_PAUSE, pause * 2);
      say(controller.signal.aborted ? text.textSlow : text.textUnreachable);
    } finally {
      clearTimeout(limit);
      busy = false;
      showAge();
      schedule(pause);
    }
  };

  const again = () => {
    light = 0;
    clearTimeout(timer);
    refresh();
  };

  toggle.hidden = false;
  toggle.addEventListener("click", () => {
    paused = !paused;
    toggle.textContent = paused ? text.textResume : text.textPause;
    showAge();
    again();
  });
  live.addEventListener("pointerdown", () => (touched = true));
  for (const each of ["pointerup", "pointercancel"]) window.addEventListener(each, () => setTimeout(() => (touched = false)));
  document.addEventListener("visibilitychange", again);
  window.addEventListener("pageshow", (event) => event.persisted && again());
  live.tabIndex = -1;
  setInterval(showAge, 1000);
  showAge();
  schedule(PERIOD);
})();
