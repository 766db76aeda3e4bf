// Creates and changes elements. Text is always set as text, never as HTML.

const byId = id => document.getElementById(id);

// element("p", { className: "why", title: "…" }, "text", child, …)
function element(tag, properties = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (name.includes("-") || name === "role" || name === "scope") made.setAttribute(name, value);
    else made[name] = value;
  }
  made.append(...children.filter(child => child !== null && child !== undefined));
  return made;
}

// Changes the text only if it differs, so that screen readers stay quiet and a selection is kept.
function setText(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

// Puts the children in this order. Those already in place stay there and keep the focus.
function arrange(parent, children) {
  for (const child of [...parent.children]) if (!children.includes(child)) child.remove();
  children.forEach((child, at) => {
    if (parent.children[at] !== child) parent.insertBefore(child, parent.children[at] ?? null);
  });
}

// One bar per row of [name, share of the bar, text].
function bars(rows) {
  const list = element("ul", { className: "bars" });
  for (const [name, share, text] of rows) {
    const fill = element("i");
    fill.style.width = `${100 * Math.min(1, Math.max(0, share))}%`;
    list.append(element("li", {}, element("span", { title: name }, name), element("div", { className: "track" }, fill), element("b", {}, text)));
  }
  return list;
}
