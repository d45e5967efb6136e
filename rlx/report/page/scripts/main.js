// The page: its views, the search, the keys, and where it is, which the address remembers.

import { $, $$, announce, h, icon } from "./dom.js";
import { placed, plural, total } from "./format.js";
import { graphKey, graphView, showSelected } from "./graph.js";
import { kernelsView } from "./kernels.js";
import { actions } from "./links.js";
import { memoryView } from "./memory.js";
import { search } from "./names.js";
import { showPanel } from "./panel.js";
import { passesView } from "./passes.js";
import { scheduleView } from "./schedule.js";
import { speedView } from "./speed.js";
import { read, state } from "./store.js";
import { summaryView } from "./summary.js";

const VIEWS = { summary: ["Summary", summaryView], graph: ["Graph", graphView], passes: ["Passes", passesView], schedule: ["Schedule", scheduleView], kernels: ["Kernels", kernelsView], memory: ["Memory", memoryView], speed: ["Speed", speedView] };
const KEYS = [["1 – 7", "the parts of the report"], ["/", "search"], ["p", "the next program"], ["Arrow keys", "in the graph: to the value that reads, or is read"], ["+  -  0", "in the graph: larger, smaller, the whole"], ["Enter", "select a value: find it in every stage"], ["Escape", "close what is open"], ["t", "light, dark, as the system"], ["?", "these keys"]];
const THEMES = ["auto", "light", "dark"];

// -- where it is

function address() {
  const parts = [state.view, state.program?.name ?? "", state.selected ?? "", state.layer ?? "", state.detail ?? ""].map((part) => encodeURIComponent(part));
  return `#${parts.join("/").replace(/\/+$/, "")}`;
}

function follow() {
  const [view, program, selected, layer, detail] = location.hash.slice(1).split("/").map(decodeURIComponent);
  state.view = view in VIEWS ? view : "summary";
  state.program = state.data.programs.find((each) => each.name === program) ?? state.data.programs[0] ?? null;
  state.selected = selected || null;
  state.layer = layer ? Number(layer) : null;
  state.detail = detail || null;
  show();
}

function remember(replace = false) {
  if (address() === location.hash) return;
  history[replace ? "replaceState" : "pushState"](null, "", address());
}

actions.go = (view, detail = null, keep = false) => {
  state.view = view;
  state.detail = detail;
  remember();
  show();
  if (!keep) $("#view").focus({ preventScroll: true });
};

actions.select = (name, layer = null) => {
  const closing = name === null;
  state.selected = name;
  state.layer = layer;
  remember(true);
  showPanel();
  showSelected();
  if (closing) $("#view").focus({ preventScroll: true });
  else announce(`Selected ${name}`);
};

// -- what is shown

function show() {
  const main = $("#view");
  main.classList.toggle("full", state.view === "graph" && state.program !== null);
  const make = state.program === null ? summaryView : VIEWS[state.view][1];
  main.replaceChildren(h("h1", { class: "unseen" }, `${VIEWS[state.view][0]} of ${state.program?.name ?? state.data.subject.title}`), make());
  main.scrollTop = 0;
  main.setAttribute("aria-label", VIEWS[state.view][0]);
  navigation();
  const { subject } = state.data;
  $("#program").value = state.program?.name ?? "";
  const said = [state.program?.target, state.program && `precision ${state.program.precision}`, subject.machine && plural(subject.machine.workers, "worker")];
  $("#subtitle").textContent = said.filter(Boolean).join(" · ");
  showPanel();
}

function navigation() {
  const program = state.program;
  const missed = program ? total(program.passes.map((pass) => pass.missed.length)) : 0;
  const failed = state.data.subject.problem || program?.problem;
  $("#views").replaceChildren(...Object.entries(VIEWS).map(([view, [title]], at) => h("button", { type: "button", "data-view": view, disabled: program === null && view !== "summary", "aria-current": view === state.view ? "page" : null, title: `${title} (${at + 1})`, on: { click: () => actions.go(view) } }, title,
    view === "passes" && missed ? h("span", { class: "count", title: "missed fusions" }, missed) : null, view === "summary" && failed ? h("span", { class: "count bad" }, "error") : null)));
}

// -- search

const box = { found: [], at: -1 };

function find() {
  box.found = search($("#search").value);
  box.at = box.found.length ? 0 : -1;
  const list = $("#found");
  const empty = $("#search").value.trim() && !box.found.length;
  list.replaceChildren(...box.found.map((each, at) => h("li", { role: "option", id: `found-${at}`, "aria-selected": at === box.at, on: { mousedown: (event) => (event.preventDefault(), choose(at)) } },
    h("span", {}, each.layer === null ? placed(each.name, each.layers) : each.name.replace("*", each.layer)), h("span", {}, each.kind === "value" ? each.op ?? "value" : each.kind))), ...(empty ? [h("li", { role: "option", "aria-disabled": "true" }, h("span", {}, "Nothing has this name."))] : []));
  list.hidden = !list.childElementCount;
  $("#search").setAttribute("aria-expanded", String(!list.hidden));
  mark();
}

function mark() {
  $$("#found li").forEach((row, at) => row.setAttribute("aria-selected", String(at === box.at)));
  if (box.at >= 0) {
    $("#search").setAttribute("aria-activedescendant", `found-${box.at}`);
    $(`#found-${box.at}`)?.scrollIntoView({ block: "nearest" });
  } else $("#search").removeAttribute("aria-activedescendant");
}

function choose(at) {
  const row = box.found[at];
  if (!row) return;
  $("#found").hidden = true;
  $("#search").setAttribute("aria-expanded", "false");
  if (row.kind === "kernel") actions.go("kernels", row.name);
  else if (row.kind === "value") {
    actions.select(row.name, row.layer ?? (row.layers.length ? row.layers[0] : null));
    if (state.view === "graph") showSelected(true);
    else actions.go("graph", null, true);
  } else actions.go("passes", row.pass);
}

function searchKeys(event) {
  const step = { ArrowDown: 1, ArrowUp: -1 }[event.key];
  if (step && box.found.length) {
    event.preventDefault();
    box.at = (box.at + step + box.found.length) % box.found.length;
    mark();
  } else if (event.key === "Enter") choose(box.at);
  else if (event.key === "Escape" && !$("#found").hidden) {
    event.stopPropagation();
    $("#found").hidden = true;
  }
}

// -- keys and colours

function keys(event) {
  if (event.ctrlKey || event.metaKey || event.altKey || $("#keyboard").open) return;
  if (event.key === "Escape") {
    if (state.selected !== null) actions.select(null);
    return;
  }
  if (event.target.matches("input, select, textarea")) return;
  const number = Number(event.key);
  if (state.view === "graph" && graphKey(event)) event.preventDefault();
  else if (number >= 1 && number <= 7 && state.program) actions.go(Object.keys(VIEWS)[number - 1]);
  else if (event.key === "/") event.preventDefault(), $("#search").focus(), $("#search").select();
  else if (event.key === "p") nextProgram();
  else if (event.key === "t") nextTheme();
  else if (event.key === "?") $("#keyboard").showModal();
}

function nextProgram() {
  const { programs } = state.data;
  if (programs.length > 1) takeProgram(programs[(programs.indexOf(state.program) + 1) % programs.length].name);
}

function takeProgram(name) {
  state.program = state.data.programs.find((each) => each.name === name);
  state.detail = null;
  remember();
  show();
  announce(`Program ${name}`);
}

function kept(value = null) {
  try {
    if (value !== null) localStorage.setItem("rlx-report-theme", value);
    return localStorage.getItem("rlx-report-theme");
  } catch {
    return value; // a file may have no storage
  }
}

function nextTheme() {
  setTheme(THEMES[(THEMES.indexOf(document.documentElement.dataset.theme ?? "auto") + 1) % 3]);
}

function setTheme(theme) {
  const root = document.documentElement;
  if (theme === "auto") delete root.dataset.theme;
  else root.dataset.theme = theme;
  kept(theme);
  const said = { auto: "as the system", light: "light", dark: "dark" }[theme];
  const button = $("#theme");
  button.replaceChildren(icon({ auto: "auto", light: "sun", dark: "moon" }[theme]));
  button.setAttribute("aria-label", `Colours: ${said}`);
  button.title = `Colours: ${said} (t)`;
  document.dispatchEvent(new Event("themechange"));
}

async function start() {
  await read();
  const { subject, programs } = state.data;
  $("#title").textContent = subject.title;
  $("#program").append(...programs.map((program) => h("option", { value: program.name }, program.problem ? `${program.name} (error)` : program.name)));
  $(".program").hidden = programs.length < 2;
  $("#program").addEventListener("change", (event) => takeProgram(event.target.value));
  $("#keys").append(icon("keyboard"));
  $("#keys").addEventListener("click", () => $("#keyboard").showModal());
  $("#theme").addEventListener("click", nextTheme);
  $("#keyboard").append(h("h2", { id: "keyboard-title" }, "Keyboard"), h("dl", {}, KEYS.map(([key, what]) => [h("dt", {}, h("kbd", {}, key)), h("dd", {}, what)])), h("p", {}, h("button", { type: "button", class: "more", on: { click: () => $("#keyboard").close() } }, "Close")));
  const field = $("#search");
  field.addEventListener("input", find);
  field.addEventListener("focus", () => field.value && find());
  field.addEventListener("blur", () => ($("#found").hidden = true));
  field.addEventListener("keydown", searchKeys);
  document.addEventListener("keydown", keys);
  addEventListener("popstate", follow);
  addEventListener("hashchange", follow);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => document.dispatchEvent(new Event("themechange")));
  setTheme(THEMES.includes(kept()) ? kept() : "auto");
  follow();
  document.documentElement.dataset.ready = "yes";
}

start().catch((error) => {
  $("#view").replaceChildren(h("p", { class: "waiting" }, `The report cannot be read: ${error.message}`));
  throw error;
});
