// Every pass as a step: what its rules did and missed, and the lines that changed.

import { codeView } from "./code.js";
import { h, table } from "./dom.js";
import { bytes, grouped, plural, time, total } from "./format.js";
import { actions, valueLink } from "./links.js";
import { chooseStage } from "./graph.js";
import { state, text } from "./store.js";

const FIRST = 30; // changes that are shown at once

export function passesView() {
  const program = state.program;
  const steps = program.passes.map((pass, at) => step(program, pass, at));
  if (program.problem && !program.regions) steps.push(h("section", { class: "card problem", role: "alert" }, h("h2", {}, `${program.problem.stage}: ${program.problem.kind}`), h("p", {}, program.problem.message)));
  const open = h("button", { type: "button", class: "more", on: { click: () => steps.forEach((each) => (each.open = true)) } }, "Open all");
  return h("div", { class: "column" }, h("p", { class: "lead" }, `The graph goes through ${plural(program.passes.length, "pass", "passes")}. Each shows what it changed and the rule that did it. `, "A name with braces stands for equal layers."), open, h("div", { class: "steps" }, steps));
}

function step(program, pass, at) {
  const details = h("details", { class: "step", id: `pass-${pass.name}` });
  const rewritten = total(pass.done.map((event) => event.count));
  const said = [pass.changed === false ? "no change" : "", pass.note ?? ""];
  if (pass.nodes && pass.nodes[0] !== pass.nodes[1]) said.push(`${pass.nodes[0]} → ${pass.nodes[1]} nodes`);
  if (rewritten) said.push(`${plural(rewritten, "value")} by ${plural(new Set(pass.done.map((event) => event.rule)).size, "rule")}`);
  for (const [name, value] of Object.entries(pass.facts ?? {})) said.push(`${name} ${name.startsWith("bytes") ? bytes(value) : grouped(value)}`);
  details.append(h("summary", {}, h("h2", {}, pass.name), h("span", { class: "note" }, said.filter(Boolean).join(" · ")),
    pass.missed.length ? h("span", { class: "chip warn" }, `${pass.missed.length} missed`) : null, pass.seconds ? h("span", { class: "note time" }, time(pass.seconds)) : null));
  details.addEventListener("toggle", () => {
    if (details.open && details.childElementCount === 1) details.append(inside(program, pass, at));
  });
  if (state.detail === pass.name) {
    details.open = true;
    requestAnimationFrame(() => details.scrollIntoView({ block: "start" }));
  }
  return details;
}

function inside(program, pass, at) {
  const parts = [];
  if (pass.done.length) parts.push(events("What the rules did", pass.done, "rule", (row) => row.detail));
  if (pass.missed.length) parts.push(events("Missed, and why", pass.missed, "warn", (row) => row.why));
  if (pass.changes.length) parts.push(changed(pass));
  const stage = program.stages.find((each) => each.name === pass.name);
  const holder = h("div");
  const show = async (event) => {
    event.target.remove();
    holder.append(codeView(`IR after ${pass.name}`, [["IR", "ir", await text(stage.text)]]));
  };
  const buttons = [];
  if (stage) buttons.push(h("button", { type: "button", class: "more", on: { click: show } }, `Whole IR after ${pass.name} (${grouped(stage.lines)} lines)`));
  if (stage && stage.drawing !== null) buttons.push(" ", h("button", { type: "button", class: "more", on: { click: () => (chooseStage(pass.name), actions.go("graph")) } }, "Draw it"));
  if (pass.name === "schedule") buttons.push(" ", h("button", { type: "button", class: "more", on: { click: () => actions.go("schedule") } }, "Show the regions"));
  if (pass.name === "memory") buttons.push(" ", h("button", { type: "button", class: "more", on: { click: () => actions.go("memory") } }, "Show the memory"));
  return h("div", { class: "inside" }, parts, h("div", {}, buttons), holder);
}

function events(title, rows, kind, detail) {
  return h("section", {}, h("h3", {}, title), table([
    { head: "rule", cell: (row) => h("span", { class: `chip ${kind}` }, row.rule) },
    { head: "value", cell: (row) => valueLink(row.n, row.layers) },
    { head: "count", number: true, cell: (row) => grouped(row.count) },
    { head: "", cell: (row) => h("span", { class: "note" }, detail(row)) },
  ], rows, { label: title }));
}

function changed(pass) {
  // What a rule did comes first, then values whose operands have other names now.
  const sorted = [...pass.changes.filter((change) => change.r), ...pass.changes.filter((change) => !change.r)];
  const list = h("div", { class: "changes" }, sorted.slice(0, FIRST).map(change));
  const rest = sorted.slice(FIRST);
  const more = rest.length ? h("button", { type: "button", class: "more", on: { click(event) {
    event.target.remove();
    list.append(...rest.map(change));
  } } }, `Show ${grouped(rest.length)} more`) : null;
  return h("section", {}, h("h3", {}, `Changed lines (${plural(sorted.length, "place")})`), list, more);
}

function change(each) {
  const layers = each.l ?? [];
  const rules = (each.r ?? []).map((rule) => h("span", { class: "chip rule" }, rule));
  const gone = !each.a.length ? h("span", { class: "chip bad" }, "removed") : !each.b.length && !rules.length ? h("span", { class: "chip" }, "new") : null;
  return h("article", { class: "change" }, h("header", {}, valueLink(each.n, layers), layers.length > 1 ? h("span", { class: "note" }, `×${layers.length}`) : null, rules, gone),
    h("pre", { tabindex: "0", "aria-label": "Lines before and after" }, each.b.map((line) => h("span", { class: "minus" }, `- ${line}`)), each.a.map((line) => h("span", { class: "plus" }, ["+ ", ...emphasized(line, each.b.at(-1) ?? "")]))));
}

/** The words of a line that the other one does not have, in bold. */
function emphasized(line, other) {
  const known = new Set(other.split(/[\s(){},]+/));
  return line.split(/([\s(){},]+)/).map((word) => (word && !known.has(word) && !/^[\s(){},]+$/.test(word) && other ? h("b", {}, word) : word));
}

