// Asking the server: with the key or the token where they were given, and with patience that ends.

const PATIENCE_MS = 5000;

// Secrets stay in the tab. Where a browser keeps nothing they are forgotten with the page.
const secrets = {
  read(name) {
    try { return sessionStorage.getItem(`convoy.${name}`) ?? ""; } catch { return this[name] ?? ""; }
  },
  keep(name, value) {
    this[name] = value;
    try { sessionStorage.setItem(`convoy.${name}`, value); } catch { /* kept above */ }
  },
};

class Refusal extends Error {
  constructor(status, message) {
    super(message);
    this.status = status; // 0: no answer at all
  }
}

// The document that the server answers with. Raises Refusal. `secret` is the name of what is sent as a bearer token.
async function ask(path, { secret = "key", signal = AbortSignal.timeout(PATIENCE_MS), ...options } = {}) {
  const held = secrets.read(secret), headers = held ? { Authorization: `Bearer ${held}` } : {};
  let response, text;
  try {
    response = await fetch(path, { cache: "no-store", ...options, signal, headers });
    text = await response.text();
  } catch (error) {
    if (signal.aborted && error.name === "AbortError") throw error; // somebody has changed their mind
    throw new Refusal(0, "The server does not answer");
  }
  let found = null;
  try { found = text === "" ? {} : JSON.parse(text); } catch { /* not ours: a balancer's page, perhaps */ }
  if (!response.ok || found === null) throw new Refusal(response.status, found?.error ?? `The server answers ${response.status}`);
  return found;
}

// Lets a form ask for a secret; `onGiven` is called when there is one. What no header can carry is not sent.
function askForSecret(form, name, onGiven) {
  const [field, told] = [form.querySelector("input"), form.querySelector("[role=alert]")];
  form.addEventListener("submit", event => {
    event.preventDefault();
    const value = field.value.trim();
    if (!/^[\x21-\x7e]+$/.test(value)) {
      setText(told, "It has letters, digits and signs of ASCII, and no spaces.");
      return;
    }
    setText(told, "");
    field.value = "";
    secrets.keep(name, value);
    onGiven();
  });
}
