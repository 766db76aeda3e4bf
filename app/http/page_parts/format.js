// Formats numbers and times.

const NOTHING = "–";

function rate(perSecond) {
  if (perSecond >= 100) return Math.round(perSecond).toLocaleString("en");
  return perSecond ? perSecond.toFixed(perSecond >= 10 ? 1 : 2) : "0";
}

function milliseconds(ms) {
  if (ms === null || ms === undefined) return NOTHING;
  return ms >= 1000 ? Math.round(ms).toLocaleString("en") : ms.toFixed(ms >= 100 ? 0 : ms >= 10 ? 1 : 2);
}

function percent(share) {
  return `${(100 * share).toFixed(share < 0.1 ? 1 : 0)} %`;
}

function bytes(amount) {
  return amount >= 1 << 30 ? `${(amount / (1 << 30)).toFixed(1)} GiB` : `${(amount / (1 << 20)).toFixed(1)} MiB`;
}

// 13:05:09, with the date if it is not today.
function clock(at) {
  const date = new Date(at), isToday = date.toDateString() === new Date().toDateString();
  const parts = [date.getHours(), date.getMinutes(), date.getSeconds()].map(part => String(part).padStart(2, "0"));
  return (isToday ? "" : `${date.toLocaleDateString()} `) + parts.join(":");
}

function span(ms) {
  const s = Math.max(0, Math.round(ms / 1000));
  if (s < 120) return `${s} s`;
  return s < 7200 ? `${Math.floor(s / 60)} min ${s % 60} s` : `${Math.floor(s / 3600)} h ${Math.floor((s % 3600) / 60)} min`;
}

function words(name) {
  return name.replaceAll("_", " ");
}
