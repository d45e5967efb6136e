// Elements, without HTML from strings: text is always text, so an answer of a model cannot become markup.

const SVG = "http://www.w3.org/2000/svg";

/** An element: `h("a", {class: "x", href: url, on: {click: f}}, "text", other, ...)`. null and false are left out. */
export function h(tag, properties = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (value === null || value === undefined || value === false) continue;
    if (name === "on") {
      for (const [event, listener] of Object.entries(value)) element.addEventListener(event, listener);
    } else if ((name === "value" && tag !== "progress") || name === "checked" || name === "disabled") {
      element[name] = value;
    } else {
      element.setAttribute(name, value === true ? "" : value);
    }
  }
  element.append(...children.flat().filter((child) => child !== null && child !== undefined && child !== false));
  return element;
}

export const $ = (selector, root = document) => root.querySelector(selector);
export const $$ = (selector, root = document) => [...root.querySelectorAll(selector)];

/** Outlines on a 24 x 24 grid, drawn with a stroke. */
const ICONS = {
  menu: "M4 7h16M4 12h16M4 17h10",
  plus: "M12 5v14M5 12h14",
  send: "M12 19V5M6 11l6-6 6 6",
  stop: "M7 7h10v10H7z",
  copy: "M9 9h10v10H9zM15 9V5H5v10h4",
  check: "M5 13l4 4L19 7",
  edit: "M4 20h4L19 9l-4-4L4 16zM13.5 6.5l4 4",
  redo: "M20 5v5h-5M20 10a8 8 0 1 0 .6 5",
  trash: "M5 7h14M10 7V4h4v3M7 7l1 13h8l1-13",
  save: "M12 4v11M7 11l5 5 5-5M5 20h14",
  open: "M12 16V5M7 9l5-5 5 5M5 20h14",
  attach: "M20 11.5l-8 8a5.2 5.2 0 0 1-7.4-7.4l8.2-8.2a3.5 3.5 0 0 1 5 5l-8.2 8.1a1.7 1.7 0 0 1-2.5-2.4l7.5-7.4",
  sliders: "M4 8h9M19 8h1M4 16h2M12 16h8M16 5.5v5M9 13.5v5",
  sun: "M12 8a4 4 0 1 0 0 8 4 4 0 0 0 0-8zM12 2v2M12 20v2M4.9 4.9l1.4 1.4M17.7 17.7l1.4 1.4M2 12h2M20 12h2M4.9 19.1l1.4-1.4M17.7 6.3l1.4-1.4",
  moon: "M20 14.5A8.5 8.5 0 1 1 9.5 4a7 7 0 0 0 10.5 10.5z",
  auto: "M12 4a8 8 0 1 0 0 16zM12 4a8 8 0 0 1 0 16",
  close: "M6 6l12 12M18 6L6 18",
  down: "M12 5v14M6 13l6 6 6-6",
  left: "M14 6l-6 6 6 6",
  right: "M10 6l6 6-6 6",
  key: "M14.5 9.5a4.5 4.5 0 1 0-3.2 4.3L13 15.5h2v2h2v2h3v-3.2l-5.8-5.8M8.5 8.5h.01",
  keyboard: "M3 7h18v10H3zM7 10.5h.01M10.5 10.5h.01M14 10.5h.01M17.5 10.5h.01M8 14h8",
  tool: "M14.5 6.5a4 4 0 0 0-5 5L4 17l3 3 5.5-5.5a4 4 0 0 0 5-5L15 12l-3-3z",
  warning: "M12 4l9 16H3zM12 10v4M12 17h.01",
  play: "M8 5l11 7-11 7z",
};

export function icon(name) {
  const svg = document.createElementNS(SVG, "svg");
  svg.setAttribute("viewBox", "0 0 24 24");
  svg.setAttribute("class", "icon");
  svg.setAttribute("aria-hidden", "true");
  const path = document.createElementNS(SVG, "path");
  path.setAttribute("d", ICONS[name]);
  svg.append(path);
  return svg;
}

/** A button that shows an icon; its label is read out and shown on hover. */
export function iconButton(name, label, click, properties = {}) {
  return h("button", { type: "button", class: "quiet", "aria-label": label, title: label, on: { click }, ...properties }, icon(name));
}

/** Copies text, and shows for a moment on the button that it did. */
export async function copyFrom(button, text) {
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    copyBySelection(text); // a page on plain http of another machine has no clipboard API
  }
  const before = [...button.childNodes];
  button.replaceChildren(icon("check"), ...(before.length > 1 ? ["Copied"] : []));
  announce("Copied");
  setTimeout(() => button.replaceChildren(...before), 1500);
}

function copyBySelection(text) {
  const area = h("textarea", { class: "unseen", value: text });
  const focused = document.activeElement;
  document.body.append(area);
  area.select();
  document.execCommand("copy");
  area.remove();
  focused?.focus();
}

/** Says a short text to screen readers, after what they are reading now. */
export function announce(text) {
  const region = $("#announcements");
  region.append(h("p", {}, text));
  while (region.childNodes.length > 30) region.firstChild.remove();
}

/** A message at the edge of the window that goes by itself, with one action at most: {label, run}. */
export function toast(text, action = null) {
  const close = () => note.remove();
  const note = h("div", { class: "toast" }, h("span", {}, text));
  if (action) {
    const run = () => (close(), action.run());
    note.append(h("button", { type: "button", class: "link", on: { click: run } }, action.label));
  }
  note.append(iconButton("close", "Close the message", close));
  $("#toasts").append(note);
  const wait = () => setTimeout(() => (note.matches(":hover, :focus-within") ? wait() : close()), 8000);
  wait();
}

/** Offers a text as a file. */
export function download(name, text) {
  const address = URL.createObjectURL(new Blob([text], { type: "application/json" }));
  const link = h("a", { href: address, download: name });
  document.body.append(link);
  link.click();
  link.remove();
  setTimeout(() => URL.revokeObjectURL(address), 10_000);
}
