// Where the time goes: one bar in parts, and a list that says the same in words.

const STAGES = ["decode_wait", "decode", "queue", "copy_in", "compute", "copy_out", "encode"];
const STAGE_WORDS = {
  decode_wait: "waits for a decoder", decode: "decoding", queue: "queue", copy_in: "copy in", compute: "compute",
  copy_out: "copy out", encode: "encoding", rest: "receiving and the rest", way: "network and browser",
};

// `ms` by stage, in the order of the bar; what took nothing is left out.
function timeSplit(ms) {
  const parts = Object.entries(ms).filter(([, took]) => took > 0);
  const all = parts.reduce((sum, [, took]) => sum + took, 0);
  const bar = element("div", { className: "bar", role: "img" }), list = element("ul");
  for (const [stage, took] of parts) {
    const part = element("i", { className: stage, title: `${STAGE_WORDS[stage]} ${milliseconds(took)} ms` });
    part.style.flex = `${took} 0 0`;
    bar.append(part);
    list.append(element("li", { className: stage }, element("span", {}, STAGE_WORDS[stage]), element("b", {}, `${milliseconds(took)} ms`), element("small", {}, percent(took / all))));
  }
  bar.setAttribute("aria-label", `Where ${milliseconds(all)} ms go: ${parts.map(([stage, took]) => `${STAGE_WORDS[stage]} ${percent(took / all)}`).join(", ")}`);
  return element("div", { className: "split" }, bar, list);
}

// The stages, and what of `total` is in none of them.
function withRest(stages, total) {
  const known = Object.values(stages).reduce((sum, took) => sum + (took ?? 0), 0);
  return { ...stages, rest: Math.max(0, (total ?? 0) - known) };
}
