// The contents of the store, and loading and unloading models where the server allows it.

const store = {
  versions: new Map(), // ascending, by name
  isKnown: false, // whether the store has been read
  changes: "not_allowed", // as `/stats` says
  busy: new Map(), // the action in progress, by name
  said: new Map(), // its error message, by name

  get mayChange() {
    return this.changes === "without_token" || (this.changes === "with_token" && secrets.read("token") !== "");
  },

  // The route needs the admin token if the server has one, else the API key if there is one.
  get secret() {
    return this.changes === "with_token" ? "token" : "key";
  },

  async look() {
    if (this.changes === "not_allowed") return;
    try {
      const { models } = await ask("store", { signal: AbortSignal.timeout(4 * PATIENCE_MS) });
      this.versions = new Map(models.map(({ name, versions }) => [name, versions.map(Number)]));
      this.isKnown = true;
    } catch { /* the next call tries again */ }
  },

  // The highest version in the store that is lower than the one served.
  before(name, version) {
    return (this.versions.get(name) ?? []).filter(one => one < Number(version)).at(-1);
  },

  async change(name, doing, verb, body) {
    this.busy.set(name, doing);
    this.said.delete(name);
    repaint();
    try {
      const path = `v2/repository/models/${encodeURIComponent(name)}/${verb}`;
      // Loading has no time limit here, and continues if the page is closed.
      await ask(path, { method: "POST", body: JSON.stringify(body), secret: this.secret, signal: new AbortController().signal });
    } catch (error) {
      if (error.status === 401 && this.changes === "with_token") {
        secrets.keep("token", "");
        setText(byId("token").querySelector("[role=alert]"), "The server does not accept this token.");
      }
      this.said.set(name, error.message);
    }
    this.busy.delete(name);
    await this.look();
    await refresh();
  },

  load(name) {
    return this.change(name, "loading", "load", {});
  },

  rollBack(name, version) {
    const policy = { version_policy: { specific: { versions: [version] } } };
    return this.change(name, "rolling back", "load", { parameters: { config: JSON.stringify(policy) } });
  },

  unload(name) {
    return this.change(name, "unloading", "unload", {});
  },
};

// Asks for confirmation.
function sure(question, word) {
  const dialog = byId("sure"), [, yes] = dialog.querySelectorAll("button");
  setText(byId("sure-what"), question);
  setText(yes, word);
  dialog.returnValue = "no";
  dialog.showModal();
  return new Promise(resolve => dialog.addEventListener("close", () => resolve(dialog.returnValue === "yes"), { once: true }));
}

// The buttons of one model. They are replaced only when they change, so that the focus stays.
class Actions {
  constructor(name) {
    this.name = name;
    this.said = element("p", { className: "said bad", role: "status" });
    this.node = element("div", { className: "actions" });
  }

  update(servedVersion) {
    const { name } = this, busy = store.busy.get(name), before = store.before(name, servedVersion ?? 0);
    const newest = (store.versions.get(name) ?? []).at(-1), isServed = servedVersion !== null;
    setText(this.said, store.said.get(name) ?? "");
    const wanted = JSON.stringify([store.changes, store.mayChange, busy, before, newest, servedVersion]);
    if (wanted === this.shape) return;
    this.shape = wanted;
    const hadFocus = this.node.contains(document.activeElement);
    this.node.replaceChildren(...this.buttons({ busy, before, newest, isServed, servedVersion }), this.said);
    if (hadFocus) this.node.querySelector("button:enabled")?.focus();
  }

  buttons({ busy, before, newest, isServed, servedVersion }) {
    if (store.changes === "not_allowed") return [];
    if (busy) return [element("span", { className: "soft", role: "status" }, `${busy} …`)];
    if (!store.mayChange) return [element("button", { type: "button", onclick: () => byId("token-field").focus() }, "Enter the admin token to load or unload")];
    const { name } = this, found = [];
    const button = (text, onclick) => found.push(element("button", { type: "button", onclick }, text));
    const isOld = isServed && newest !== undefined && newest > Number(servedVersion);
    if (newest !== undefined || isServed) button(isOld ? `Load version ${newest}` : isServed ? "Load again" : "Load", () => store.load(name));
    if (isServed && before !== undefined) {
      button(`Roll back to version ${before}`, async () => {
        if (await sure(`Replace version ${servedVersion} of ${name} with version ${before}? No requests are lost.`, "Roll back")) store.rollBack(name, before);
      });
    }
    if (isServed) {
      button("Unload", async () => {
        if (await sure(`Unload ${name}? Accepted requests are finished. New requests get a 404.`, "Unload")) store.unload(name);
      });
    }
    return found;
  }
}
