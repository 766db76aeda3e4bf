// What a row opens: five minutes of one model, where its time goes, what it runs on and why.

const OUTCOMES = [["answered", "k2"], ["refused", "k1"], ["failed", "bad"], ["late", "k3"], ["invalid", "k5"], ["unauthorised", "k4"], ["cancelled", "k6"]];
const REASON_COLOURS = ["k1", "k3", "k0", "k4", "k5", "k7", "k2", "k6", "bad"];

class Opened {
  constructor(name) {
    const group = `model ${name}`;
    this.lead = element("p");
    this.objections = element("div");
    this.actions = new Actions(name);
    this.charts = {
      rate: new Chart("Calls a second, by how they ended", rate, group),
      latency: new Chart("Latency of answers, ms", milliseconds, group),
      refusals: new Chart("Refused a second, by reason", rate, group),
      batches: new Chart("Batch size", value => String(+value.toFixed(1)), group),
    };
    this.facts = element("div", { className: "facts" });
    this.node = element("div", {}, element("div", { className: "lead" }, this.lead, this.actions.node), this.objections,
      element("div", { className: "charts" }, ...Object.values(this.charts).map(chart => chart.node)), this.facts);
    this.chartsBox = this.node.querySelector(".charts");
  }

  // `model` is null where nothing of that name is served; `troubles` are the versions that are not.
  update(model, stats, name, troubles) {
    this.actions.update(model === null ? null : model.version);
    const objections = model?.published_although ?? [];
    this.objections.replaceChildren(...objections.map(one => element("p", { className: "objection" }, `Published although: ${one}`)));
    this.chartsBox.hidden = this.facts.hidden = model === null;
    if (model === null) {
      setText(this.lead, troubles.map(one => `${one.version === null ? "" : `Version ${one.version}: `}${one.reason || words(one.state.toLowerCase())}`).join("; ") || "In the store, and not loaded.");
      return;
    }
    setText(this.lead, `${model.engine} ${model.precision} on ${model.device}: ${model.why}`);
    if (model.history) this.draw(model.history);
    this.facts.replaceChildren(...this.factsOf(model, stats, troubles));
  }

  draw(history) {
    const length = history.mean_batch.length, missing = Math.max(0, FIVE_MINUTES_S / history.period_s - length);
    const until = Date.now() / 1000 - history.until_s_ago, count = missing + length;
    const times = Array.from({ length: count }, (_, at) => until - (count - 1 - at) * history.period_s);
    const padded = values => [...Array(missing).fill(null), ...values];
    const line = (name, colourName, values, more = {}) => ({ name, colour: colourName, values: padded(values), ...more });
    const nothing = Array(length).fill(0);
    const outcomes = OUTCOMES.filter(([name]) => name === "answered" || history.calls_per_s[name]);
    this.charts.rate.update(times, outcomes.map(([name, own]) => line(name, own, history.calls_per_s[name] ?? nothing, { fill: name === "answered" })));
    this.charts.latency.update(times, [["p50", "k0"], ["p95", "k3"], ["p99", "k1"]].map(([name, own]) => line(name, own, history.total[`${name}_ms`])));
    const reasons = Object.entries(history.refused_per_s);
    this.charts.refusals.update(times, reasons.length
      ? reasons.map(([reason, values], at) => line(words(reason), REASON_COLOURS[at % REASON_COLOURS.length], values, { fill: reasons.length === 1 }))
      : [line("none", "k6", nothing)]);
    this.charts.batches.update(times, [line("mean", "k0", history.mean_batch), line("largest", "k6", history.largest_batch, { dash: [4, 4] })]);
  }

  factsOf(model, stats, troubles) {
    const fact = (title, className, ...children) => element("section", { className }, element("h3", {}, title), ...children);
    const found = [];
    const { total, ...spent } = model.mean_ms, stages = Object.fromEntries(STAGES.map(stage => [stage, spent[stage]]));
    found.push(fact("Where the time of an answer goes, mean of the last minute", "wide",
      total === null ? element("p", { className: "soft" }, "Nothing was answered in the last minute.") : timeSplit(withRest(stages, total))));
    if (model.plan_build) found.push(fact("Plan", "plan", ...planBuild(model.plan_build)));
    found.push(fact("Stages, last minute, ms", "", stageTable(model.stages)));
    const sizes = model.history ? sizeBars(model.history.batch_sizes) : [];
    found.push(fact("Batches by size, five minutes", "", sizes.length ? bars(sizes) : element("p", { className: "soft" }, "No batch ran.")));
    found.push(fact("Devices", "devices", ...model.engines.map(engine => deviceFact(engine, stats))));
    if (troubles.length) found.push(fact("Other versions", "why wide", element("ul", {}, ...troubles.map(one => element("li", {}, `${one.version === null ? "" : `Version ${one.version}: `}${one.reason || words(one.state.toLowerCase())}`)))));
    found.push(fact("Why no other engine or variant", "why wide", model.why_not_others.length
      ? element("ul", {}, ...model.why_not_others.map(reason => element("li", {}, reason)))
      : element("p", { className: "soft" }, "There is none.")));
    return found;
  }

  close() {
    for (const chart of Object.values(this.charts)) chart.close();
  }
}

function planBuild(build) {
  const text = { waiting: "waits to be built", building: "is being built", built: "is built", failed: "could not be built" }[build.state] ?? build.state;
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
    row.append(element("th", { scope: "row" }, words(stage)), ...["p50_ms", "p95_ms", "p99_ms"].map(key => element("td", {}, milliseconds(stages[stage][key]))));
  }
  return table;
}

// Powers of two, so that many sizes are few bars.
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
  const rows = [["computes", device?.utilisation ?? 0, percent(device?.utilisation ?? 0)]];
  if (gpu?.busy_ratio != null) rows.push(["GPU busy", gpu.busy_ratio, percent(gpu.busy_ratio)]);
  if (gpu?.memory_used_bytes != null) rows.push(["memory", gpu.memory_used_bytes / gpu.memory_total_bytes, bytes(gpu.memory_used_bytes)]);
  const more = gpu ? [gpu.power_w != null ? `${Math.round(gpu.power_w)} W` : "", gpu.temperature_c != null ? `${Math.round(gpu.temperature_c)} °C` : ""].filter(Boolean).join(", ") : "";
  return element("div", {}, element("p", {}, element("b", {}, engine.device_id), ` ${engine.engine} ${engine.precision}`), element("p", { className: "soft" }, engine.device), bars(rows), more ? element("p", { className: "soft" }, more) : null);
}
