// The table: one row per model version, in the server's order, then the models that are not served.

const FIVE_MINUTES_S = 300;
const rows = new Map();
let hasShownModels = false;
// The columns after model, state and engine: the title, and how to read the value from a model of `/stats`.
const FIGURES = [
  ["Requests/s", model => rate(Object.values(model.calls_per_s).reduce((sum, each) => sum + each, 0))],
  ["Refused/s", model => rate(model.calls_per_s.refused ?? 0), "warn"],
  ["Failed/s", model => rate((model.calls_per_s.failed ?? 0) + (model.calls_per_s.late ?? 0)), "bad"],
  ["p50 ms", model => milliseconds(model.stages.total.p50_ms)],
  ["p99 ms", model => milliseconds(model.stages.total.p99_ms)],
  ["In flight", model => model.open_calls.toLocaleString("en")],
  ["Queued", model => model.waiting_samples.toLocaleString("en")],
  ["Batch size", model => meanBatch(model.batch_sizes)],
];

function meanBatch(sizes) {
  const pairs = Object.entries(sizes).map(([size, times]) => [Number(size), times]);
  const batches = pairs.reduce((sum, [, times]) => sum + times, 0);
  return batches ? (pairs.reduce((sum, [size, times]) => sum + size * times, 0) / batches).toFixed(1) : NOTHING;
}

class Row {
  constructor(name) {
    this.name = name;
    this.opened = null;
    this.title = element("span");
    this.button = element("button", { type: "button", "aria-expanded": "false" }, this.title);
    this.state = element("span", { className: "state" });
    this.note = element("small");
    this.engine = element("span");
    this.trouble = element("small");
    this.figures = FIGURES.map(([label]) => element("td", { role: "cell", "data-label": label }));
    this.head = element("tr", { className: "model", role: "row" },
      element("th", { scope: "row", role: "rowheader" }, this.button),
      element("td", { role: "cell" }, this.state, this.note), element("td", { role: "cell" }, this.engine, this.trouble), ...this.figures);
    this.node = element("tbody", { role: "rowgroup" }, this.head);
    this.head.addEventListener("click", () => { if (!String(getSelection())) this.toggle(); });
    this.button.addEventListener("keydown", event => this.keyPressed(event));
  }

  update(entry, stats) {
    this.entry = entry;
    const { model, name, troubles } = entry;
    if (this.version !== entry.version) {
      this.version = entry.version;
      this.title.replaceChildren(element("b", {}, name), ...(entry.version === null ? [] : [" ", element("small", {}, `v${entry.version}`)]));
      this.title.title = name;
    }
    this.head.classList.toggle("absent", model === null);
    const [word, className] = stateOf(entry), refused = troubles.find(one => one.state === "UNAVAILABLE");
    setText(this.state, store.busy.get(name) ?? word);
    this.state.className = `state ${store.busy.has(name) ? "warn" : className}`;
    const build = model?.plan_build;
    setText(this.note, build?.state === "building" ? `plan ${build.total ? percent(build.step / build.total) : "being built"}` : "");
    this.note.hidden = this.note.textContent === "";
    setText(this.engine, model ? `${model.engine} ${model.precision} on ${model.device_id}${model.engines.length > 1 ? ` and ${model.engines.length - 1} more` : ""}` : NOTHING);
    const objection = model?.published_although[0];
    this.engine.title = model?.why ?? "";
    setText(this.trouble, objection ? `published despite: ${objection}` : refused && model ? `version ${refused.version} refused: ${refused.reason}` : model ? "" : troubles[0]?.reason || "not loaded");
    this.trouble.className = objection ? "bad" : refused && (model || refused.reason !== "unloaded") ? "warn" : "";
    FIGURES.forEach(([, read, raised], at) => {
      const cell = this.figures[at], text = model ? read(model) : NOTHING, isZero = text === "0" || text === NOTHING;
      setText(cell, text);
      cell.className = isZero ? "zero" : raised ? `raised ${raised}` : "";
    });
    this.opened?.update(model, stats, name, troubles);
  }

  toggle(isOpen = this.opened === null) {
    if (isOpen === (this.opened !== null)) return;
    this.button.setAttribute("aria-expanded", String(isOpen));
    this.node.classList.toggle("opened", isOpen);
    if (isOpen) {
      this.opened = new Opened(this.name);
      this.more = element("tr", { className: "more", role: "row", id: `more-${nextNumber()}` }, element("td", { role: "cell", colSpan: 3 + FIGURES.length }, this.opened.node));
      this.node.append(this.more);
      this.button.setAttribute("aria-controls", this.more.id);
      this.opened.update(this.entry.model, lastStats, this.name, this.entry.troubles);
      store.look().then(refresh); // with the history of this model
    } else {
      this.opened.close();
      this.opened = null;
      this.more.remove();
      this.button.removeAttribute("aria-controls");
    }
  }

  keyPressed(event) {
    const all = [...rows.values()], steps = { ArrowDown: 1, ArrowUp: -1 }, step = steps[event.key];
    if (step) {
      event.preventDefault();
      const buttons = [...document.querySelectorAll(".model button")];
      buttons[buttons.indexOf(this.button) + step]?.focus();
    } else if (event.key === "Escape") {
      all.forEach(row => row.toggle(false));
    }
  }

  remove() {
    this.opened?.close();
    this.node.remove();
  }
}

let numbers = 0;
function nextNumber() {
  return ++numbers;
}

function stateOf({ model, troubles }) {
  if (model) return model.ready ? ["ready", "good"] : ["not ready", "bad"];
  const [first] = troubles;
  if (!first || first.reason === "unloaded") return [first ? "unloaded" : "not loaded", "unknown"];
  return first.state === "UNAVAILABLE" ? ["refused", "bad"] : [first.state.toLowerCase(), "warn"];
}

// One entry per served version, then one per name without a served version.
function entriesOf(stats) {
  const others = new Map(), mayBeLoaded = stats.changes !== "not_allowed";
  for (const one of [...stats.on_the_way, ...stats.refused]) {
    const isGone = one.reason === "unloaded" && mayBeLoaded && store.isKnown && !store.versions.get(one.name)?.includes(Number(one.version));
    if (!isGone) others.set(one.name, [...(others.get(one.name) ?? []), one]);
  }
  const highest = new Map(stats.models.map(model => [model.name, model.version]));
  const entries = stats.models.map(model => {
    const isHighest = highest.get(model.name) === model.version;
    // An older version that this one replaced is no trouble.
    const troubles = isHighest ? (others.get(model.name) ?? []).filter(one => one.reason !== "unloaded") : [];
    return { id: `${model.name}/${model.version}`, name: model.name, version: model.version, model, troubles };
  });
  const rest = [...others].filter(([name]) => !highest.has(name));
  for (const [name, troubles] of rest) {
    troubles.sort((one, other) => Number(other.version) - Number(one.version));
    entries.push({ id: `${name}/`, name, version: troubles[0].version, model: null, troubles });
  }
  const listed = new Set(entries.map(entry => entry.name));
  for (const [name, versions] of mayBeLoaded ? store.versions : []) {
    if (!listed.has(name) && versions.length) entries.push({ id: `${name}/`, name, version: String(versions.at(-1)), model: null, troubles: [] });
  }
  return entries;
}

// A model keeps its row, with its focus and open or closed, through a new version, a roll back and an unload.
function adopt(entry, kept) {
  if (rows.has(entry.id)) return rows.get(entry.id);
  const left = [...rows].find(([id, row]) => row.name === entry.name && !kept.has(id));
  const row = left ? left[1] : new Row(entry.name);
  if (left) rows.delete(left[0]);
  rows.set(entry.id, row);
  return row;
}

function showOverview(stats) {
  const entries = entriesOf(stats), kept = new Set(entries.map(entry => entry.id));
  const wanted = entries.map(entry => {
    const row = adopt(entry, kept);
    row.update(entry, stats);
    return row.node;
  });
  for (const [id, row] of rows) {
    if (!kept.has(id)) {
      row.remove();
      rows.delete(id);
    }
  }
  const table = document.querySelector("#models > table");
  arrange(table, [...[...table.children].filter(child => child.tagName !== "TBODY"), ...wanted]);
  if (!hasShownModels && stats.models.length) {
    hasShownModels = true;
    if (entries.length === 1) rows.get(entries[0].id).toggle(true);
  }
  byId("none").hidden = entries.length > 0;
  byId("token").hidden = stats.changes !== "with_token" || store.mayChange;
}
