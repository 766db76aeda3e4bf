// What was found, drawn over the picture: boxes with their masks or keypoints and a threshold, or a class map with an
// opacity. Both sliders work on
// the response that is there already, without another request.

const MOST_BOXES = 300, MOST_MAP_PX = 1024, HIGHEST_PX = 420, COLOURS = 8, LEAST_POINT = 0.5, MASK_OPACITY = 0.5;
// What people have chosen stays for the next picture; `repaint` draws the shown class map in the colours of the theme.
const overlay = { least: null, opacity: 0.6, repaint: () => {} };

const nameOf = one => one.label ?? `class ${one.class_id}`;
const colourOf = number => `var(--k${number % COLOURS})`;

// As wide as there is room, so that small objects can be seen. Calls `onSize` when the size of the picture is known.
function enlarge({ node, frame, image }, onSize) {
  const show = () => {
    const { naturalWidth: width, naturalHeight: height } = image;
    node.classList.add("large");
    Object.assign(frame.style, { aspectRatio: `${width} / ${height}`, width: `min(100%, ${Math.ceil((HIGHEST_PX * width) / height)}px)` });
    onSize(width, height);
  };
  if (image.complete && image.naturalWidth) show();
  else image.addEventListener("load", show, { once: true });
}

function slider(label, properties, onInput) {
  const field = element("input", { type: "range", ...properties }), output = element("output");
  const show = () => setText(output, onInput(Number(field.value)));
  field.addEventListener("input", show);
  return { node: element("label", { className: "slider" }, label, field, output), show };
}

// The best five with bars in their colours.
function topFive(rows, label) {
  const list = bars(rows.slice(0, 5).map(([name, share, text]) => [name, share, text]));
  list.classList.add("top");
  list.setAttribute("aria-label", label);
  list.querySelectorAll(".track i").forEach((fill, at) => { fill.style.background = rows[at][3] ?? ""; });
  return list;
}

function boxesOver(detections, shown) {
  const layer = element("div", { className: "layer" }), list = element("div"), canvas = element("canvas", { className: "layer" });
  const hasShapes = detections.some(one => one.mask || one.keypoints);
  const scores = detections.map(one => one.score), lowest = Math.floor(100 * Math.min(...scores)) / 100;
  const highest = Math.max(...scores), usual = highest >= 0.3 ? Math.max(0.3, lowest) : lowest;
  const range = { min: lowest, max: Math.max(1, highest), step: 0.01, value: overlay.least ?? usual };
  let size = null;
  const { node, show } = slider("Score at least", range, least => {
    const enough = detections.filter(one => one.score >= least);
    if (size && hasShapes) paintShapes(canvas, size, enough.slice(0, MOST_BOXES));
    if (size) layer.replaceChildren(...enough.slice(0, MOST_BOXES).reverse().map(one => boxOn(size, one)));
    list.replaceChildren(topFive(enough.map(one => [nameOf(one), one.score, one.score.toFixed(4), colourOf(one.class_id)]), "Top five boxes"));
    return `${least.toFixed(2)}: ${enough.length} of ${detections.length} boxes`;
  });
  node.querySelector("input").addEventListener("input", event => { overlay.least = Number(event.target.value); });
  shown.frame.append(...(hasShapes ? [canvas] : []), layer);
  if (hasShapes) overlay.repaint = show;
  enlarge(shown, (width, height) => {
    size = { width, height };
    show();
  });
  show();
  // Only the slider's own output is read out, not each change of the list.
  return element("div", { className: "overlaid", "aria-live": "off" }, node, list);
}

function boxOn({ width, height }, one) {
  const { x1, y1, x2, y2 } = one.box, share = (part, whole) => `${(100 * part) / whole}%`;
  const node = element("i", { title: `${nameOf(one)} ${one.score.toFixed(4)}` }, element("b", {}, `${nameOf(one)} ${one.score.toFixed(2)}`));
  node.classList.toggle("high", y1 < 0.1 * height);
  node.classList.toggle("right", x1 > 0.5 * width);
  Object.assign(node.style, { left: share(x1, width), top: share(y1, height), width: share(x2 - x1, width), height: share(y2 - y1, height) });
  node.style.setProperty("--colour", colourOf(one.class_id));
  return node;
}

// Masks and keypoints, the best on top.
function paintShapes(canvas, { width, height }, detections) {
  const scale = Math.min(1, MOST_MAP_PX / Math.max(width, height)), context = canvas.getContext("2d");
  Object.assign(canvas, { width: Math.max(1, Math.round(scale * width)), height: Math.max(1, Math.round(scale * height)) });
  const theme = getComputedStyle(document.documentElement);
  for (const { class_id, mask, keypoints } of [...detections].reverse()) {
    context.fillStyle = theme.getPropertyValue(`--k${class_id % COLOURS}`).trim();
    context.globalAlpha = MASK_OPACITY;
    if (mask) columnsOf(mask, (column, top, rows) => context.fillRect(column * scale, top * scale, Math.max(1, scale), rows * scale));
    context.globalAlpha = 1;
    for (const { x, y, score } of keypoints ?? []) {
      if (score !== undefined && score < LEAST_POINT) continue;
      context.beginPath();
      context.arc(x * scale, y * scale, Math.max(2, canvas.width / 200), 0, 2 * Math.PI);
      context.fill();
    }
  }
}

// Calls `onRun(column, top, rows)` for each part of a mask in a column. COCO's compressed run lengths are differences
// from the last but one, in digits of five bits.
function columnsOf({ size: [height], counts }, onRun) {
  const runs = [];
  for (let at = 0; at < counts.length;) {
    let count = 0, bits = 0, digit;
    do {
      digit = counts.charCodeAt(at++) - 48;
      count += (digit & 31) * 2 ** bits;
      bits += 5;
    } while (digit & 32);
    if (digit & 16) count -= 2 ** bits;
    runs.push(runs.length > 2 ? count + runs.at(-2) : count);
  }
  let start = 0;
  runs.forEach((count, turn) => {
    const end = start + count;
    for (let from = start; turn % 2 && from < end;) {
      const column = Math.floor(from / height), to = Math.min(end, (column + 1) * height);
      onRun(column, from - column * height, to - from);
      from = to;
    }
    start = end;
  });
}

function mapOver({ height, width, classes }, shown) {
  const scale = Math.min(1, MOST_MAP_PX / Math.max(width, height));
  const canvas = element("canvas", { className: "layer", width: Math.max(1, Math.round(scale * width)), height: Math.max(1, Math.round(scale * height)) });
  canvas.setAttribute("role", "img");
  canvas.setAttribute("aria-label", `Class map: ${classes.map(nameOf).join(", ")}`);
  const places = placesOf(width, height, classes);
  overlay.repaint = () => paintMap(canvas, places, { width, height }, classes);
  overlay.repaint();
  const { node, show } = slider("Overlay", { min: 0, max: 1, step: 0.05, value: overlay.opacity }, opacity => {
    overlay.opacity = opacity;
    canvas.style.opacity = opacity;
    return `${Math.round(100 * opacity)} %`;
  });
  show();
  shown.frame.append(canvas);
  enlarge(shown, () => {});
  const rows = classes.map((one, place) => [nameOf(one), one.share, `${(100 * one.share).toFixed(1)} %`, isBackground(one) ? null : colourOf(place)]);
  const mostFirst = rows.sort((one, other) => other[1] - one[1]);
  return element("div", { className: "overlaid", "aria-live": "off" }, node, topFive(mostFirst, "Top five classes"));
}

const isBackground = one => one.label === "background" || (one.label === null && one.class_id === 0);

// The place of each pixel's class in `classes`, column by column as in COCO's run lengths; 255 for none.
function placesOf(width, height, classes) {
  const places = new Uint8Array(width * height).fill(255);
  classes.forEach(({ rle }, place) => {
    let at = 0;
    rle.counts.forEach((count, turn) => {
      if (turn % 2) places.fill(place, at, at + count);
      at += count;
    });
  });
  return places;
}

function paintMap(canvas, places, { width, height }, classes) {
  const context = canvas.getContext("2d"), pixels = context.createImageData(canvas.width, canvas.height);
  const theme = getComputedStyle(document.documentElement);
  const colours = classes.map((one, place) => {
    if (isBackground(one)) return [0, 0, 0, 0];
    const hex = theme.getPropertyValue(`--k${place % COLOURS}`).trim();
    return [1, 3, 5].map(at => parseInt(hex.slice(at, at + 2), 16)).concat(255);
  });
  for (let row = 0, to = 0; row < canvas.height; row++) {
    const fromRow = Math.floor(((row + 0.5) * height) / canvas.height);
    for (let column = 0; column < canvas.width; column++, to += 4) {
      const colour = colours[places[Math.floor(((column + 0.5) * width) / canvas.width) * height + fromRow]];
      if (colour) pixels.data.set(colour, to);
    }
  }
  context.putImageData(pixels, 0, 0);
}
