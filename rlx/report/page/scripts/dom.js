// Elements, without HTML from strings: text is always text, so a name in a model file cannot become markup.

const SVG = "http://www.w3.org/2000/svg";

function fill(element, properties, children) {
  for (const [name, value] of Object.entries(properties)) {
    if (value === null || value === undefined || value === false) continue;
    if (name === "on") for (const [event, listener] of Object.entries(value)) element.addEventListener(event, listener);
    else if (name === "css") Object.assign(element.style, value);
    else if (name === "value" || name === "open") element[name] = value;
    else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.flat(2).filter((child) => child !== null && child !== undefined && child !== false));
  return element;
}

/** An element: `h("a", {class: "x", href: url, on: {click: f}}, "text", other, ...)`. null and false are left out. */
export function h(tag, properties = {}, ...children) {
  return fill(document.createElement(tag), properties, children);
}

/** An element of a drawing. */
export function s(tag, properties = {}, ...children) {
  return fill(document.createElementNS(SVG, tag), properties, children);
}

export const $ = (selector, root = document) => root.querySelector(selector);
export const $$ = (selector, root = document) => [...root.querySelectorAll(selector)];

/** Outlines on a 24 x 24 grid, drawn with a stroke. */
const ICONS = {
  sun: "M12 8a4 4 0 1 0 0 8 4 4 0 0 0 0-8zM12 2v2M12 20v2M4.9 4.9l1.4 1.4M17.7 17.7l1.4 1.4M2 12h2M20 12h2M4.9 19.1l1.4-1.4M17.7 6.3l1.4-1.4",
  moon: "M20 14.5A8.5 8.5 0 1 1 9.5 4a7 7 0 0 0 10.5 10.5z",
  auto: "M12 4a8 8 0 1 0 0 16zM12 4a8 8 0 0 1 0 16",
  close: "M6 6l12 12M18 6L6 18",
  keyboard: "M3 7h18v10H3zM7 10.5h.01M10.5 10.5h.01M14 10.5h.01M17.5 10.5h.01M8 14h8",
  copy: "M9 9h10v10H9zM15 9V5H5v10h4",
};

export function icon(name) {
  return s("svg", { viewBox: "0 0 24 24", class: "icon", "aria-hidden": "true" }, s("path", { d: ICONS[name] }));
}

/** Says a short text to screen readers. */
export function announce(text) {
  $("#announcements").replaceChildren(h("p", {}, text));
}

/** A card with a heading. */
export function card(title, ...children) {
  return h("section", { class: "card" }, title && h("h2", {}, title), ...children);
}

/** A table. Columns: [{head, number, cell(row), sort(row)}]; a column with `sort` can be clicked. */
export function table(columns, rows, { chosen = () => false, label = "" } = {}) {
  const body = h("tbody");
  const heads = columns.map((column) => h("th", { class: column.number ? "number" : null, scope: "col" }));
  const show = (sorted) => body.replaceChildren(...sorted.map((row) => h("tr", { class: chosen(row) ? "chosen" : null },
    columns.map((column) => h("td", { class: column.number ? "number" : null }, column.cell(row))))));
  columns.forEach((column, at) => {
    if (!column.sort) return heads[at].append(column.head);
    heads[at].append(h("button", { type: "button", on: { click() {
      const down = heads[at].getAttribute("aria-sort") !== "descending";
      for (const head of heads) head.removeAttribute("aria-sort");
      heads[at].setAttribute("aria-sort", down ? "descending" : "ascending");
      const compare = (a, b) => (typeof a === "string" ? a.localeCompare(b) : a - b);
      show([...rows].sort((a, b) => (down ? -1 : 1) * compare(column.sort(a), column.sort(b))));
    } } }, column.head));
  });
  show(rows);
  return h("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": label || "Table" }, h("table", {}, h("thead", {}, h("tr", {}, heads)), body));
}

/** A bar for a share between 0 and 1. */
export function bar(share, kind = "") {
  return h("div", { class: "track" }, h("span", { class: `bar ${kind}`, css: { width: `${Math.max(0, Math.min(1, share)) * 100}%` } }));
}
