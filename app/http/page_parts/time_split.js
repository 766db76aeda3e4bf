// Where the time went: one bar in parts, and the same as a list.

const STAGES = ["decode_wait", "decode", "queue", "copy_in", "compute", "copy_out", "encode"];
const stageName = stage => ({ rest: "receive and other", way: "network and browser" })[stage] ?? words(stage);

// `ms` by stage, in the order of the bar. Stages that took no time are left out.
function timeSplit(ms) {
  const parts = Object.entries(ms).filter(([, took]) => took > 0);
  const all = parts.reduce((sum, [, took]) => sum + took, 0);
  const bar = element("div", { className: "bar", role: "img" }), list = element("ul");
  for (const [stage, took] of parts) {
    const part = element("i", { className: stage, title: `${stageName(stage)} ${milliseconds(took)} ms` });
    part.style.flex = `${took} 0 0`;
    bar.append(part);
    list.append(element("li", { className: stage }, element("span", {}, stageName(stage)), element("b", {}, `${milliseconds(took)} ms`), element("small", {}, percent(took / all))));
  }
  bar.setAttribute("aria-label", `${milliseconds(all)} ms by stage: ${parts.map(([stage, took]) => `${stageName(stage)} ${percent(took / all)}`).join(", ")}`);
  return element("div", { className: "split" }, bar, list);
}

// The stages, and the rest of `total`.
function withRest(stages, total) {
  const known = Object.values(stages).reduce((sum, took) => sum + (took ?? 0), 0);
  return { ...stages, rest: Math.max(0, (total ?? 0) - known) };
}
