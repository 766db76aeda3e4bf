// Fetches the statistics every two seconds, and says so when they are out of date.

const EVERY_MS = 2000, OLD_MS = 2 * EVERY_MS + PATIENCE_MS;
let lastStats = null;
// `from` is the reading that the next CPU use is measured from, `use` the last one as [host, server].
const cpu = { from: null, use: null };
// Clock times, not counted timers: a background tab runs few timers, and a machine that sleeps runs none.
const silence = { figuresOf: null, begun: Date.now(), reason: "", asked: 0, timer: 0, wantsKey: false };

function showSummary(stats) {
  const isReady = stats.ready, state = byId("state");
  setText(state, isReady ? "ready" : "not ready");
  state.className = `state ${isReady ? "good" : "bad"}`;
  const listed = perSecond => Object.entries(perSecond).map(([name, value]) => `${words(name)} ${rate(value)}`).join(", ");
  const facts = [
    ["version", stats.version],
    ["uptime", span(1000 * stats.uptime_s)],
    ["requests in flight", stats.open_calls.toLocaleString("en")],
    ["request memory", bytes(stats.inflight_bytes)],
    ...(stats.waiting_to_decode ? [["waiting to decode", stats.waiting_to_decode.toLocaleString("en")]] : []),
    ...stats.devices.map(one => [`${one.device} engine busy`, percent(one.utilisation)]),
    ...hostFacts(stats.host),
    ...(Object.keys(stats.refused_per_s).length ? [["refused/s", listed(stats.refused_per_s)]] : []),
    ...(Object.keys(stats.calls_for_no_model_per_s).length ? [["unknown model/s", listed(stats.calls_for_no_model_per_s)]] : []),
    ["updated", clock(silence.figuresOf)],
  ];
  byId("summary").replaceChildren(...facts.map(([name, value]) => element("div", {}, element("dt", {}, name), element("dd", {}, value))));
}

// The host is null where the server's system does not tell.
function hostFacts(host) {
  if (!host) return [];
  const used = cpu.use ? [["server CPU", percent(cpu.use[1])], ["host CPU", percent(cpu.use[0])]] : [];
  return [...used, ["server memory", bytes(host.process_memory_bytes)], ["host memory", `${bytes(host.memory_used_bytes)} of ${bytes(host.memory_bytes)}`]];
}

// From the difference of two readings, at least a second of CPU time apart.
function measureCpu(host) {
  const passed = host && cpu.from ? host.cpu_s - cpu.from.cpu_s : 0;
  if (cpu.from && passed >= 0 && passed < 1) return;
  cpu.use = passed > 0 ? ["cpu_busy_s", "process_cpu_s"].map(name => Math.max(0, (host[name] - cpu.from[name]) / passed)) : null;
  cpu.from = host;
}

// Shows what is known already; `refresh` fetches more.
function repaint() {
  if (lastStats === null) return;
  showSummary(lastStats);
  showOverview(lastStats);
  offerModels(lastStats);
}

// Says how old the figures are. Runs every second.
function tell() {
  const since = silence.figuresOf ?? silence.begun, age = Date.now() - since;
  const isOld = !silence.wantsKey && (silence.reason !== "" || age > OLD_MS);
  byId("silence").hidden = !isOld;
  document.body.classList.toggle("old", isOld);
  document.title = isOld ? "No data – Convoy" : "Convoy";
  const there = silence.figuresOf === null ? "There is no data yet." : `The page shows data from ${clock(silence.figuresOf)}.`;
  setText(document.querySelector("#silence strong"), isOld ? silence.reason || "This data is out of date. Waiting for the server." : "");
  setText(byId("age"), isOld ? `No update since ${clock(since)}, for ${span(age)}. ${there}` : "");
}

function wantKey(isWanted, told = "") {
  const form = byId("key"), isNew = isWanted && !silence.wantsKey;
  silence.wantsKey = isWanted;
  form.hidden = !isWanted;
  for (const part of [document.querySelector("main"), byId("state"), byId("summary")]) part.hidden = isWanted;
  // A link cannot send the key, so these pages would only show an error.
  document.querySelector("header nav").hidden = isWanted || secrets.read("key") !== "";
  byId("forget-key").hidden = isWanted || secrets.read("key") === "";
  if (told) setText(form.querySelector("[role=alert]"), told);
  if (isNew) byId("key-field").focus();
}

async function refresh() {
  const asked = ++silence.asked;
  clearTimeout(silence.timer);
  const names = new Set([...rows.values()].filter(row => row.opened).map(row => row.name));
  const query = [...names].map(name => `history=${encodeURIComponent(name)}`).join("&");
  let stats = null, reason = "";
  try {
    stats = await ask(query ? `stats?${query}` : "stats");
    if (!stats.models) [stats, reason] = [null, "The response of the server has no statistics."];
  } catch (error) {
    if (error.status === 401) {
      wantKey(true, secrets.read("key") ? "The server does not accept this key." : "");
      secrets.keep("key", "");
    }
    reason = error.status ? `The server responded with ${error.status}: ${error.message}.` : "The server does not respond.";
  }
  if (asked !== silence.asked) return; // a newer refresh has started
  silence.reason = reason;
  if (stats !== null) {
    wantKey(false);
    silence.figuresOf = Date.now();
    const isFirst = lastStats === null, mode = store.changes;
    measureCpu(stats.host);
    [lastStats, store.changes] = [stats, stats.changes];
    if (isFirst || mode !== stats.changes) store.look().then(repaint);
    repaint();
  }
  tell();
  if (!silence.wantsKey) silence.timer = setTimeout(refresh, EVERY_MS);
}

function refreshNow() {
  if (document.hidden || silence.wantsKey) return;
  tell();
  refresh();
}

askForSecret(byId("key"), "key", refresh);
askForSecret(byId("token"), "token", repaint);
byId("forget-key").addEventListener("click", () => {
  secrets.keep("key", "");
  location.reload();
});
takePictures();
refresh();
setInterval(tell, 1000);
setInterval(() => { if (!document.hidden && lastStats !== null && !silence.reason) store.look(); }, 5 * EVERY_MS);
dark.addEventListener("change", repaint);
document.addEventListener("visibilitychange", refreshNow);
for (const returned of ["pageshow", "online"]) addEventListener(returned, event => { if (returned === "online" || event.persisted) refreshNow(); });
