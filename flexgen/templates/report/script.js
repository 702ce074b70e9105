
"use strict";
(() => {
  const byId = (id) => document.getElementById(id);

  // The mask: pointing at a tile, or moving over tiles with the arrow keys, tells what it is.
  const picture = byId("mask-picture");
  if (picture) {
    const data = JSON.parse(byId("mask-data").textContent);
    const names = [
      "empty: never visited", "full: computed without the mask", "full, yet computed with the mask",
      "partial: computed with the mask", "empty, visited in vain",
    ];
    const states = new Uint8Array(data.rows * data.columns);
    let place = 0;
    for (const [state, length] of data.states) { states.fill(state, place, place + length); place += length; }
    const live = new Map();
    if (data.live.length) {
      let next = 0;
      states.forEach((state, index) => { if (state === 3) { live.set(index, data.live[next]); next += 1; } });
    }
    const cursor = byId("mask-cursor"), readout = byId("mask-readout"), tiles = picture.querySelector(".tiles");
    const span = (cell, step, length) => [cell * step, Math.min((cell + 1) * step, length) - 1];
    const range = ([first, last]) => (first === last ? `${first}` : `${first} to ${last}`);
    let at = { row: 0, column: 0 };

    const show = (row, column) => {
      at = { row, column };
      cursor.setAttribute("x", column);
      cursor.setAttribute("y", row);
      cursor.setAttribute("visibility", "visible");
      const index = row * data.columns + column;
      const q = span(row, data.q_step, data.q_len), kv = span(column, data.kv_step, data.kv_len);
      const pairs = (q[1] - q[0] + 1) * (kv[1] - kv[0] + 1);
      const joined = data.side > 1 ? ` (${data.side} x ${data.side} tiles joined)` : "";
      let text = `q_idx ${range(q)}\nkv_idx ${range(kv)}\n${names[states[index]]}${joined}`;
      if (live.has(index)) {
        const count = live.get(index);
        text += `\n${count.toLocaleString("en")} of ${pairs.toLocaleString("en")} pairs live`;
      }
      readout.textContent = text;
    };
    const point = (event) => {
      const box = tiles.getBoundingClientRect();
      const inner = tiles.getScreenCTM();
      const spot = new DOMPoint(event.clientX, event.clientY).matrixTransform(inner.inverse());
      const column = Math.floor(spot.x), row = Math.floor(spot.y);
      if (box.width && column >= 0 && row >= 0 && column < data.columns && row < data.rows) show(row, column);
    };
    picture.addEventListener("pointermove", point);
    picture.addEventListener("pointerdown", point);
    picture.addEventListener("pointerleave", () => cursor.setAttribute("visibility", "hidden"));
    picture.addEventListener("focus", () => show(at.row, at.column));
    picture.addEventListener("keydown", (event) => {
      const steps = {
        ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1],
        PageUp: [-8, 0], PageDown: [8, 0], Home: [0, -data.columns], End: [0, data.columns],
      };
      const step = steps[event.key];
      if (!step) return;
      event.preventDefault();
      const keep = (value, count) => Math.max(0, Math.min(count - 1, value));
      show(keep(at.row + step[0], data.rows), keep(at.column + step[1], data.columns));
    });
  }

  // Tabs of kernels.
  const tabs = [...document.querySelectorAll("[role=tab]")];
  const panelOf = (tab) => byId(tab.getAttribute("aria-controls"));
  const choose = (chosen) => tabs.forEach((tab) => {
    tab.setAttribute("aria-selected", String(tab === chosen));
    tab.tabIndex = tab === chosen ? 0 : -1;
    panelOf(tab).hidden = tab !== chosen;
  });
  tabs.forEach((tab, number) => {
    tab.addEventListener("click", () => choose(tab));
    tab.addEventListener("keydown", (event) => {
      const steps = { ArrowLeft: number - 1, ArrowRight: number + 1, Home: 0, End: tabs.length - 1 };
      if (!(event.key in steps)) return;
      event.preventDefault();
      const next = tabs[(steps[event.key] + tabs.length) % tabs.length];
      choose(next);
      next.focus();
    });
  });
  if (tabs.length) choose(tabs[0]);

  // Lines that belong together: the user's line, and every emitted line that came from it.
  const panes = document.querySelector(".panes");
  if (panes) {
    const told = byId("source-readout");
    const emittedOf = new Map();
    panes.querySelectorAll(".emitted .linked").forEach((line) => {
      const same = emittedOf.get(line.dataset.link) || [];
      same.push(line);
      emittedOf.set(line.dataset.link, same);
    });
    const users = (line) => (line.closest(".user") ? line : byId(line.dataset.link));
    let held = null;
    const light = (line) => {
      panes.querySelectorAll(".hot").forEach((other) => other.classList.remove("hot"));
      if (!line) { told.textContent = "\u00a0"; return; }
      const origin = users(line);
      const emitted = emittedOf.get(origin.id) || [];
      [origin, ...emitted].forEach((other) => other.classList.add("hot"));
      const count = emitted.length === 1 ? "1 emitted line" : `${emitted.length} emitted lines`;
      told.textContent = `line ${origin.id.split("-").pop()} of the user's file: ${count}`;
    };
    const reveal = (line) => {
      const panel = line.closest(".code");
      const tab = tabs.find((one) => panelOf(one) === panel);
      if (tab) choose(tab);
      panel.scrollTop += line.getBoundingClientRect().top - panel.getBoundingClientRect().top - panel.clientHeight / 3;
      panel.scrollLeft = 0;
    };
    const follow = (line) => {
      held = line;
      light(line);
      if (line.closest(".emitted")) { reveal(users(line)); return; }
      const emitted = emittedOf.get(line.id) || [];
      const shown = emitted.find((other) => !other.closest(".code").hidden) || emitted[0];
      if (shown) reveal(shown);
    };
    const lineOf = (event) => event.target.closest && event.target.closest(".line.linked");
    panes.addEventListener("pointerover", (event) => {
      const line = lineOf(event);
      if (line) { light(line); return; }
      const plain = event.target.closest && event.target.closest(".emitted .line");
      light(held);
      if (plain && !held && plain.dataset.origin) told.textContent = plain.dataset.origin;
    });
    panes.addEventListener("pointerleave", () => light(held));
    panes.addEventListener("focusin", (event) => { const line = lineOf(event); if (line) light(line); });
    panes.addEventListener("click", (event) => {
      const line = lineOf(event);
      if (!line) { held = null; light(null); return; }
      event.preventDefault();
      follow(line);
    });
    panes.addEventListener("keydown", (event) => { if (event.key === "Escape") { held = null; light(null); } });
  }

  // The user's file opens at what was compiled.
  document.querySelectorAll(".user .code").forEach((panel) => {
    const first = panel.querySelector(".linked");
    if (!first) return;
    const below = first.getBoundingClientRect().top - panel.getBoundingClientRect().top;
    if (below > panel.clientHeight * 0.6) panel.scrollTop = below - 40;
  });

  // The section in view is marked in the list of sections.
  const links = new Map([...document.querySelectorAll(".contents a")].map((link) => [link.hash.slice(1), link]));
  const seen = new IntersectionObserver((entries) => entries.forEach((entry) => {
    if (!entry.isIntersecting) return;
    links.forEach((link) => link.removeAttribute("aria-current"));
    links.get(entry.target.id).setAttribute("aria-current", "true");
  }), { rootMargin: "-30% 0px -65% 0px" });
  links.forEach((_, id) => seen.observe(byId(id)));
})();
