// What the store holds, and loading and unloading it, where the server lets whoever asks.

const store = {
  versions: new Map(), // ascending, by name
  isKnown: false, // whether anybody has looked
  changes: "not_allowed", // as `/stats` says
  busy: new Map(), // what is being done, by name
  said: new Map(), // what became of it

  get mayChange() {
    return this.changes === "without_token" || (this.changes === "with_token" && secrets.read("token") !== "");
  },

  // The route wants the token where the server has one, and else whatever key there is.
  get secret() {
    return this.changes === "with_token" ? "token" : "key";
  },

  async look() {
    if (this.changes === "not_allowed") return;
    try {
      const { models } = await ask("store", { signal: AbortSignal.timeout(4 * PATIENCE_MS) });
      this.versions = new Map(models.map(({ name, versions }) => [name, versions.map(Number)]));
      this.isKnown = true;
    } catch { /* the next look tells */ }
  },

  // The highest version in the store that is lower than what is served.
  before(name, version) {
    return (this.versions.get(name) ?? []).filter(one => one < Number(version)).at(-1);
  },

  async change(name, doing, verb, body) {
    this.busy.set(name, doing);
    this.said.delete(name);
    repaint();
    try {
      const path = `v2/repository/models/${encodeURIComponent(name)}/${verb}`;
      // A load takes as long as it takes, and goes on without us.
      await ask(path, { method: "POST", body: JSON.stringify(body), secret: this.secret, signal: new AbortController().signal });
    } catch (error) {
      if (error.status === 401 && this.changes === "with_token") {
        secrets.keep("token", "");
        setText(byId("token").querySelector("[role=alert]"), "The server does not know this token.");
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

// Whether somebody really wants it.
function sure(question, word) {
  const dialog = byId("sure"), [, yes] = dialog.querySelectorAll("button");
  setText(byId("sure-what"), question);
  setText(yes, word);
  dialog.returnValue = "no";
  dialog.showModal();
  return new Promise(resolve => dialog.addEventListener("close", () => resolve(dialog.returnValue === "yes"), { once: true }));
}

// The buttons of one model. They are made anew only when others are due, so that the focus stays.
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
    if (!store.mayChange) return [element("button", { type: "button", onclick: () => byId("token-field").focus() }, "Give the admin token to change this")];
    const { name } = this, found = [];
    const button = (text, onclick) => found.push(element("button", { type: "button", onclick }, text));
    const isOld = isServed && newest !== undefined && newest > Number(servedVersion);
    if (newest !== undefined || isServed) button(isOld ? `Load version ${newest}` : isServed ? "Load again" : "Load", () => store.load(name));
    if (isServed && before !== undefined) {
      button(`Roll back to version ${before}`, async () => {
        if (await sure(`Serve version ${before} of ${name} in the place of version ${servedVersion}? No request is lost.`, "Roll back")) store.rollBack(name, before);
      });
    }
    if (isServed) {
      button("Unload", async () => {
        if (await sure(`Unload ${name}? What was accepted is answered; after that requests for it get 404.`, "Unload")) store.unload(name);
      });
    }
    return found;
  }
}
