// Making and changing elements. Text is only ever set as text.

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

// Only what differs, so that nothing is read aloud, or loses its selection, for nothing.
function setText(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

// Puts children in this order; those that are there already stay where they are and keep their focus.
function arrange(parent, children) {
  for (const child of [...parent.children]) if (!children.includes(child)) child.remove();
  children.forEach((child, at) => {
    if (parent.children[at] !== child) parent.insertBefore(child, parent.children[at] ?? null);
  });
}

// A bar for each row of [name, share of the whole bar, text].
function bars(rows) {
  const list = element("ul", { className: "bars" });
  for (const [name, share, text] of rows) {
    const fill = element("i");
    fill.style.width = `${100 * Math.min(1, Math.max(0, share))}%`;
    list.append(element("li", {}, element("span", { title: name }, name), element("div", { className: "track" }, fill), element("b", {}, text)));
  }
  return list;
}
