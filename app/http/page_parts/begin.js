// The page's life: asks for figures again and again, and says since when there are none.

const EVERY_MS = 2000, OLD_MS = 2 * EVERY_MS + PATIENCE_MS;
let lastStats = null;
// Clock times, not timers: a tab in the background, or a machine that slept, counts few of those.
const silence = { figuresOf: null, begun: Date.now(), reason: "", asked: 0, timer: 0, wantsKey: false };

function showSummary(stats) {
  const isReady = stats.ready, state = byId("state");
  setText(state, isReady ? "ready" : "not ready");
  state.className = `state ${isReady ? "good" : "bad"}`;
  const listed = perSecond => Object.entries(perSecond).map(([name, value]) => `${words(name)} ${rate(value)}`).join(", ");
  const facts = [
    ["version", stats.version],
    ["up", span(1000 * stats.uptime_s)],
    ["open calls", stats.open_calls.toLocaleString("en")],
    ["in flight", bytes(stats.inflight_bytes)],
    ...(stats.waiting_to_decode ? [["to decode", stats.waiting_to_decode.toLocaleString("en")]] : []),
    ...stats.devices.map(one => [`${one.device} computes`, percent(one.utilisation)]),
    ...(Object.keys(stats.refused_per_s).length ? [["refused/s", listed(stats.refused_per_s)]] : []),
    ...(Object.keys(stats.calls_for_no_model_per_s).length ? [["for no model/s", listed(stats.calls_for_no_model_per_s)]] : []),
    ["as of", clock(silence.figuresOf)],
  ];
  byId("summary").replaceChildren(...facts.map(([name, value]) => element("div", {}, element("dt", {}, name), element("dd", {}, value))));
}

// With what is known already; `refresh` asks for more.
function repaint() {
  if (lastStats === null) return;
  showSummary(lastStats);
  showOverview(lastStats);
  offerModels(lastStats);
}

// How old what is shown is, whether or not anybody has come to look: said again every second.
function tell() {
  const since = silence.figuresOf ?? silence.begun, age = Date.now() - since;
  const isOld = !silence.wantsKey && (silence.reason !== "" || age > OLD_MS);
  byId("silence").hidden = !isOld;
  document.body.classList.toggle("old", isOld);
  document.title = isOld ? "No figures – Convoy" : "Convoy";
  const there = silence.figuresOf === null ? "There were none yet." : `What is shown is of ${clock(silence.figuresOf)}.`;
  setText(document.querySelector("#silence strong"), isOld ? silence.reason || "These figures are old; the server is being asked." : "");
  setText(byId("age"), isOld ? `No figures since ${clock(since)}, for ${span(age)}. ${there}` : "");
}

function wantKey(isWanted, told = "") {
  const form = byId("key"), isNew = isWanted && !silence.wantsKey;
  silence.wantsKey = isWanted;
  form.hidden = !isWanted;
  for (const part of [document.querySelector("main"), byId("state"), byId("summary")]) part.hidden = isWanted;
  // Without a field of their own these pages are a bare refusal where keys are set.
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
    if (!stats.models) [stats, reason] = [null, "The server answers without figures."];
  } catch (error) {
    if (error.status === 401) {
      wantKey(true, secrets.read("key") ? "The server does not know this key." : "");
      secrets.keep("key", "");
    }
    reason = error.status ? `The server answers ${error.status}: ${error.message}.` : "The server does not answer.";
  }
  if (asked !== silence.asked) return; // somebody has come back meanwhile and asked anew
  silence.reason = reason;
  if (stats !== null) {
    wantKey(false);
    silence.figuresOf = Date.now();
    const isFirst = lastStats === null, mode = store.changes;
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
