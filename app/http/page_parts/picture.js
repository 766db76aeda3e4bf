// Sends an image that is dropped, pasted or chosen, and shows the predictions and where the time went.

const picture = { file: null, url: "", asking: null };

// Keeps the choice while models come and go.
function offerModels(stats) {
  const select = byId("asked"), wanted = stats.models.filter(model => model.takes_images).map(model => `${model.name}/${model.version}`);
  const had = [...select.options].map(option => option.value);
  if (JSON.stringify(had) !== JSON.stringify(wanted)) {
    const before = select.value, [name] = before.split("/");
    select.replaceChildren(...wanted.map(value => element("option", { value }, value.replace(/\/(\d+)$/, ", version $1"))));
    select.value = wanted.includes(before) ? before : wanted.find(value => value.split("/")[0] === name) ?? wanted[0] ?? "";
  }
  byId("try").hidden = wanted.length === 0;
  showCurl();
}

const quoted = word => (/^[\w@%+=:,./-]+$/.test(word) ? word : `'${word.replaceAll("'", "'\\''")}'`);

function predictionPath(asked) {
  const [name, version] = asked.split("/");
  return `predictions/${encodeURIComponent(name)}/${version}`;
}

function showCurl() {
  const asked = byId("asked").value, key = secrets.read("key") ? '-H "Authorization: Bearer $CONVOY_API_KEY" ' : "";
  if (asked) setText(byId("curl"), `curl ${key}--data-binary ${quoted(`@${picture.file?.name || "image.jpg"}`)} ${quoted(new URL(predictionPath(asked), document.baseURI).href)}`);
}

// The clipboard interface of browsers works only over HTTPS and on localhost. This older command works everywhere.
function copyCurl({ target }) {
  getSelection().selectAllChildren(byId("curl"));
  setText(target, document.execCommand("copy") ? "Copied" : "Press Ctrl+C");
  setTimeout(() => setText(target, "Copy as curl"), 2000);
}

async function tryPicture(file) {
  if (!file) return;
  const answer = byId("answer"), asked = byId("asked").value;
  if (!asked) return;
  if (file !== picture.file) {
    URL.revokeObjectURL(picture.url);
    [picture.file, picture.url] = [file, URL.createObjectURL(file)];
  }
  showCurl();
  picture.asking?.abort();
  const { signal } = (picture.asking = new AbortController());
  const shown = showThumbnail(file), began = performance.now();
  answer.replaceChildren(shown.node);
  setText(shown.text, `waiting for ${asked} …`);
  try {
    const found = await ask(predictionPath(asked), { method: "POST", body: file, signal });
    showFound(found, shown, performance.now() - began);
  } catch (error) {
    if (signal.aborted) return;
    shown.text.replaceChildren(element("span", { className: "bad", role: "alert" }, error.message));
  }
}

function showThumbnail(file) {
  const image = element("img", { src: picture.url, alt: `Image ${file.name || "from the clipboard"}` });
  const frame = element("div", { className: "thumbnail" }, image), text = element("span");
  const node = element("div", { className: "shown" }, frame, text);
  image.addEventListener("load", () => frame.classList.toggle("small", image.naturalWidth <= 64));
  image.addEventListener("error", () => { frame.hidden = true; });
  return { node, frame, image, text };
}

function showFound(found, shown, tookMs) {
  const { detections, segmentation, predictions = [] } = found, classes = segmentation?.classes.map(one => ({ ...one, score: one.share }));
  const [best] = [...(detections ?? classes ?? predictions)].sort((one, other) => other.score - one.score);
  shown.text.replaceChildren(...(best ? [element("b", {}, nameOf(best)), element("small", {}, `${found.model}, version ${found.version}`)] : ["Nothing found."]));
  overlay.repaint = () => {};
  let what = null;
  if (detections?.length) what = boxesOver(detections, shown);
  else if (segmentation) what = mapOver(segmentation, shown);
  else if (predictions.length) what = topFive(predictions.map(one => [nameOf(one), one.score, one.score.toFixed(4)]), "Top five classes");
  const { total, ...stages } = found.timing_ms, split = timeSplit({ ...withRest(stages, total), way: Math.max(0, tookMs - total) });
  const heading = element("h3", {}, `${milliseconds(tookMs)} ms in total, ${milliseconds(total)} ms in the server`);
  byId("answer").append(...(what ? [what] : []), element("div", {}, heading, split));
}

function imageIn(transfer) {
  return [...(transfer?.files ?? [])].find(file => file.type.startsWith("image/")) ?? transfer?.files?.[0];
}

function takePictures() {
  byId("file").addEventListener("change", event => {
    tryPicture(event.target.files[0]);
    event.target.value = ""; // the same file can be chosen again
  });
  byId("asked").addEventListener("change", () => {
    showCurl();
    tryPicture(picture.file);
  });
  byId("copy-curl").addEventListener("click", copyCurl);
  dark.addEventListener("change", () => overlay.repaint());
  addEventListener("paste", event => {
    const file = imageIn(event.clipboardData);
    if (file) {
      event.preventDefault();
      tryPicture(file);
    }
  });
  addEventListener("dragover", event => {
    event.preventDefault();
    document.body.classList.add("dropping");
  });
  addEventListener("dragleave", event => { if (!event.relatedTarget) document.body.classList.remove("dropping"); });
  addEventListener("drop", event => {
    event.preventDefault();
    document.body.classList.remove("dropping");
    tryPicture(imageIn(event.dataTransfer));
  });
}
