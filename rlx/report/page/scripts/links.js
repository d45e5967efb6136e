// Buttons that lead from one view to another. `main.js` says what they do.

import { h } from "./dom.js";
import { placed } from "./format.js";

/** Set by `main.js`: select(name, layer), go(view, detail). */
export const actions = { select: null, go: null };

export function valueLink(name, layers = [], text = null) {
  return h("button", { type: "button", class: "link name", title: "Show this value", on: { click: () => actions.select(name, layers.length ? layers[0] : null) } }, text ?? placed(name, layers));
}

export function kernelLink(symbol, text = null) {
  return h("button", { type: "button", class: "link name", title: "Show the kernel", on: { click: () => actions.go("kernels", symbol) } }, text ?? symbol);
}

export function passLink(pass, text, kind = "rule") {
  return h("button", { type: "button", class: `link name chip ${kind}`, title: `Show the pass ${pass}`, on: { click: () => actions.go("passes", pass) } }, text);
}

export function regionLink(number, text = null) {
  return h("button", { type: "button", class: "link", title: "Show the region", on: { click: () => actions.go("schedule", String(number)) } }, text ?? `region ${number}`);
}
