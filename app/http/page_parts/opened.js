// The details of one model: its engine and accuracy, charts of five minutes, and where the time goes.

const OUTCOMES = [["answered", "k2"], ["refused", "k1"], ["failed", "bad"], ["late", "k3"], ["invalid", "k5"], ["unauthorised", "k4"], ["cancelled", "k6"]];
const REASON_COLOURS = ["k1", "k3", "k0", "k4", "k5", "k7", "k2", "k6", "bad"];

class Opened {
  constructor(name) {
    const group = `model ${name}`;
    this.lead = element("dl");
    this.objections = element("div");
    this.actions = new Actions(name);
    this.charts = {
      rate: new Chart("Requests per second, by outcome", rate, group),
      latency: new Chart("Latency (ms)", milliseconds, group),
      refusals: new Chart("Refused per second, by reason", rate, group),
      batches: new Chart("Batch size", value => String(+value.toFixed(1)), group),
    };
    this.facts = element("div", { className: "facts" });
    this.node = element("div", {}, element("div", { className: "lead" }, this.lead, this.actions.node), this.objections,
      element("div", { className: "charts" }, ...Object.values(this.charts).map(chart => chart.node)), this.facts);
    this.chartsBox = this.node.querySelector(".charts");
  }

  // `model` is null if no version is served. `troubles` are the versions that are not served.
  update(model, stats, name, troubles) {
    this.actions.update(model === null ? null : model.version);
    const objections = model?.published_although ?? [];
    this.objections.replaceChildren(...objections.map(one => element("p", { className: "objection" }, `Published despite: ${one}`)));
    this.chartsBox.hidden = this.facts.hidden = model === null;
    this.showLead(model === null
      ? [["State", troubles.map(troubleText).join("; ") || "In the store, not loaded."]]
      : [["Why this engine", model.why], ["Accuracy", accuracyText(model), ...(model.has_report ? [model] : [])]]);
    if (model === null) return;
    if (model.history) this.draw(model.history);
    this.facts.replaceChildren(...this.factsOf(model, stats, troubles));
  }

  // Rows of [name, text] and, where there is a report, its model. Replaced only if they differ, so that the link keeps the focus.
  showLead(lines) {
    const shape = JSON.stringify(lines.map(([name, text, model]) => [name, text, model?.version]));
    if (shape === this.leadShape) return;
    this.leadShape = shape;
    this.lead.replaceChildren(...lines.flatMap(([name, text, model]) => [element("dt", {}, name), element("dd", {}, text, ...(model ? [" ", reportLink(model)] : []))]));
  }

  draw(history) {
    const length = history.mean_batch.length, missing = Math.max(0, FIVE_MINUTES_S / history.period_s - length);
    const until = Date.now() / 1000 - history.until_s_ago, count = missing + length;
    const times = Array.from({ length: count }, (_, at) => until - (count - 1 - at) * history.period_s);
    const padded = values => [...Array(missing).fill(null), ...values];
    const line = (name, colourName, values, more = {}) => ({ name, colour: colourName, values: padded(values), ...more });
    const nothing = Array(length).fill(0);
    const outcomes = OUTCOMES.filter(([name]) => name === "answered" || history.calls_per_s[name]);
    const none = missing >= 1 ? "no requests yet" : "no requests in the last five minutes";
    this.charts.rate.update(times, outcomes.map(([name, own]) => line(name, own, history.calls_per_s[name] ?? nothing, { fill: name === "answered" })), none);
    this.charts.latency.update(times, [["p50", "k0"], ["p95", "k3"], ["p99", "k1"]].map(([name, own]) => line(name, own, history.total[`${name}_ms`])), none);
    const reasons = Object.entries(history.refused_per_s);
    const refusals = reasons.map(([reason, values], at) => line(words(reason), REASON_COLOURS[at % REASON_COLOURS.length], values, { fill: reasons.length === 1 }));
    this.charts.refusals.update(times, refusals, "none");
    this.charts.batches.update(times, [line("mean", "k0", history.mean_batch), line("largest", "k6", history.largest_batch, { dash: [4, 4] })], none);
  }

  factsOf(model, stats, troubles) {
    const fact = (title, className, ...children) => element("section", { className }, element("h3", {}, title), ...children);
    const found = [];
    const { total, ...spent } = model.mean_ms, stages = Object.fromEntries(STAGES.map(stage => [stage, spent[stage]]));
    found.push(fact("Where the time goes, mean per request in the last minute", "wide",
      total === null ? element("p", { className: "soft" }, "no requests in the last minute") : timeSplit(withRest(stages, total))));
    if (model.plan_build) found.push(fact("Plan", "plan", ...planBuild(model.plan_build)));
    if (total !== null) found.push(fact("Latency by stage, last minute (ms)", "", stageTable(model.stages)));
    const sizes = model.history ? sizeBars(model.history.batch_sizes) : [];
    if (sizes.length) found.push(fact("Batch sizes, last five minutes", "", bars(sizes)));
    found.push(fact("Devices", "devices", ...model.engines.map(engine => deviceFact(engine, stats))));
    if (troubles.length) found.push(fact("Other versions", "why wide", element("ul", {}, ...troubles.map(one => element("li", {}, troubleText(one))))));
    found.push(fact("Why not another engine or variant", "why wide", model.why_not_others.length
      ? element("ul", {}, ...model.why_not_others.map(reason => element("li", {}, reason)))
      : element("p", { className: "soft" }, "There is no other.")));
    return found;
  }

  close() {
    for (const chart of Object.values(this.charts)) chart.close();
  }
}

function troubleText({ version, reason, state }) {
  return `${version === null ? "" : `Version ${version}: `}${reason || words(state.toLowerCase())}`;
}

function accuracyText({ accuracy, takes_images }) {
  if (!accuracy) return "not measured";
  return `${accuracy.score} ${accuracy.metric} on ${accuracy.samples.toLocaleString("en")} ${takes_images ? "images" : "samples"}`;
}

function reportLink({ name, version }) {
  const path = `reports/${encodeURIComponent(name)}/${version}`, link = element("a", { href: path, target: "_blank" }, "export report");
  link.addEventListener("click", event => {
    if (!secrets.read("key")) return;
    event.preventDefault();
    saveFile(path, `${name}-${version}.html`);
  });
  return link;
}

// A link cannot send the key. The file is saved because a page opened from its bytes would get this page's policy.
async function saveFile(path, file) {
  const response = await fetch(path, { headers: authorization("key") });
  if (!response.ok) return;
  const href = URL.createObjectURL(await response.blob());
  element("a", { href, download: file }).click();
  setTimeout(() => URL.revokeObjectURL(href), 60_000);
}

function planBuild(build) {
  const text = { waiting: "is queued", building: "is being built", built: "is built", failed: "could not be built" }[build.state] ?? build.state;
  const found = [element("p", {}, `${build.file || "A plan"} ${text}${build.elapsed_s ? `, ${span(1000 * build.elapsed_s)}` : ""}`)];
  if (build.state === "building") {
    const bar = element("progress", { "aria-label": "Building the plan" });
    if (build.total) Object.assign(bar, { max: build.total, value: build.step });
    found.push(bar, element("p", { className: "soft" }, `${build.phase}${build.total ? `, ${build.step} of ${build.total}` : ""}`));
  }
  if (build.reason) found.push(element("p", { className: "soft" }, build.reason));
  return found;
}

function stageTable(stages) {
  const table = element("table", { className: "stages" }), head = table.createTHead().insertRow(), body = table.createTBody();
  for (const title of ["stage", "p50", "p95", "p99"]) head.append(element("th", { scope: "col" }, title));
  for (const stage of [...STAGES, "total"]) {
    const row = body.insertRow();
    row.append(element("th", { scope: "row" }, stageName(stage)), ...["p50_ms", "p95_ms", "p99_ms"].map(key => element("td", {}, milliseconds(stages[stage][key]))));
  }
  return table;
}

// Sizes are grouped by powers of two, so that there are few bars.
function sizeBars(sizes) {
  const counts = new Map();
  let all = 0;
  for (const [size, times] of Object.entries(sizes)) {
    const high = 2 ** Math.ceil(Math.log2(Number(size)));
    counts.set(high, (counts.get(high) ?? 0) + times);
    all += times;
  }
  const name = high => (high <= 2 ? String(high) : `${high / 2 + 1} to ${high}`);
  return [...counts].sort(([one], [other]) => one - other).map(([high, times]) => [name(high), times / all, percent(times / all)]);
}

function deviceFact(engine, stats) {
  const device = stats.devices.find(one => one.device === engine.device_id), gpu = stats.gpus.find(one => one.device === engine.device_id);
  const rows = [["engine busy", device?.utilisation ?? 0, percent(device?.utilisation ?? 0)]];
  if (gpu?.busy_ratio != null) rows.push(["GPU busy", gpu.busy_ratio, percent(gpu.busy_ratio)]);
  if (gpu?.memory_used_bytes != null) rows.push(["GPU memory", gpu.memory_used_bytes / gpu.memory_total_bytes, bytes(gpu.memory_used_bytes)]);
  const more = gpu ? [gpu.power_w != null ? `${Math.round(gpu.power_w)} W` : "", gpu.temperature_c != null ? `${Math.round(gpu.temperature_c)} °C` : ""].filter(Boolean).join(", ") : "";
  return element("div", {}, element("p", {}, element("b", {}, engine.device_id), ` ${engine.engine} ${engine.precision}`), element("p", { className: "soft" }, engine.device), bars(rows), more ? element("p", { className: "soft" }, more) : null);
}
