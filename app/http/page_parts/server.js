// Requests to the server, with the key or the admin token if there is one, and with a timeout.

const PATIENCE_MS = 5000;

// Secrets stay in this tab. If the browser has no storage, they last until the page is closed.
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
    this.status = status; // 0: no response
  }
}

// The headers of a request; `secret` names the secret to send as a bearer token.
function authorization(secret) {
  const held = secrets.read(secret);
  return held ? { Authorization: `Bearer ${held}` } : {};
}

// The JSON of the response. Throws Refusal.
async function ask(path, { secret = "key", signal = AbortSignal.timeout(PATIENCE_MS), ...options } = {}) {
  let response, text;
  try {
    response = await fetch(path, { cache: "no-store", ...options, signal, headers: authorization(secret) });
    text = await response.text();
  } catch (error) {
    if (signal.aborted && error.name === "AbortError") throw error; // the page cancelled it
    throw new Refusal(0, "The server does not respond");
  }
  let found = null;
  try { found = text === "" ? {} : JSON.parse(text); } catch { /* perhaps the page of a load balancer */ }
  if (!response.ok || found === null) throw new Refusal(response.status, found?.error ?? `The server responded with ${response.status}`);
  return found;
}

// Lets a form ask for a secret and calls `onGiven` with it stored. Characters that a header cannot carry are rejected.
function askForSecret(form, name, onGiven) {
  const [field, told] = [form.querySelector("input"), form.querySelector("[role=alert]")];
  form.addEventListener("submit", event => {
    event.preventDefault();
    const value = field.value.trim();
    if (!/^[\x21-\x7e]+$/.test(value)) {
      setText(told, "Use ASCII letters, digits and symbols, without spaces.");
      return;
    }
    setText(told, "");
    field.value = "";
    secrets.keep(name, value);
    onGiven();
  });
}
