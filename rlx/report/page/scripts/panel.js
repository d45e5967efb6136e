// The selected value in every stage: its lines, the rules that changed it, its region, kernel and memory.

import { $, h, icon } from "./dom.js";
import { bytes, grouped, percent, plural, ranges, template, time, total } from "./format.js";
import { actions, kernelLink, passLink, regionLink } from "./links.js";
import { concrete, layersOf } from "./names.js";
import { regionsOf } from "./schedule.js";
import { bandwidth, regionCost, state, text } from "./store.js";

/** Shows the panel for the selected value, or hides it. */
export async function showPanel() {
  const panel = $("#panel");
  const name = state.selected;
  panel.hidden = name === null;
  if (name === null) return panel.replaceChildren();
  const layers = layersOf(name);
  const shown = concrete(name, state.layer);
  const head = h("header", {}, h("h2", {}, `%${shown}`), h("button", { type: "button", class: "quiet", "aria-label": "Close (Escape)", title: "Close", on: { click: () => actions.select(null) } }, icon("close")));
  const parts = [head];
  if (layers.length > 1) {
    const choose = h("select", { "aria-label": "Layer", on: { change: (event) => actions.select(name, Number(event.target.value)) } }, layers.map((layer) => h("option", { value: layer, selected: layer === Number(state.layer ?? layers[0]) }, `layer ${layer}`)));
    parts.push(h("p", { class: "note" }, `In ${plural(layers.length, "layer")}: ${ranges(layers)}. `), choose);
  }
  const facts = factsOf(name, shown);
  if (facts.length) parts.push(h("h3", {}, "In the program"), h("dl", { class: "facts" }, facts.map(([what, value]) => [h("dt", {}, what), h("dd", {}, value)])));
  const show = h("button", { type: "button", class: "more", on: { click: () => actions.go("graph", null, true) } }, "Show it in the graph");
  const journey = h("ol", { class: "journey" });
  parts.push(h("h3", {}, "From stage to stage"), journey, h("p", {}, show));
  panel.replaceChildren(...parts);
  panel.scrollTop = 0;
  journey.replaceChildren(...(await stages(name, shown)));
}

function factsOf(name, shown) {
  const program = state.program;
  const rows = [];
  for (const found of regionsOf(program, name, state.layer)) {
    rows.push([found.own ? "each worker, in" : "region", regionLink(found.number)]);
    rows.push(["kernel", kernelLink(found.kernel)]);
    if (found.units) rows.push(["units", `${plural(found.units[0], "unit")}, ${grouped(found.units[1])} at a time`]);
    if (program.times && !found.own) rows.push(["region's time", `${time(program.times.regions[found.number] / 1e9)}, of which workers wait ${time(program.times.wait[found.number] / 1e9)}`]);
  }
  const value = program.memory?.values.find(([each]) => each === shown);
  if (value) rows.push(["memory", `${bytes(value[2])} at ${grouped(value[1])} of the arena, regions ${value[3] < 0 ? "start" : value[3]} to ${Math.min(value[4], program.regions.of.length - 1)}`]);
  const own = program.memory?.own.find(([each]) => each === shown);
  if (own) rows.push(["memory", `${bytes(own[2])}, private of each worker`]);
  if (value) rows.push(["fused away", saving(program, name, value)]);
  else if (own) rows.push(["fused away", "would save nothing: it never leaves the cache of its worker"]);
  return rows;
}

/** What it would bring if the values of this name became a part of what reads them; an upper limit. */
function saving(program, name, value) {
  const groups = program.regions.groups.filter((group) => group.calls.some((call) => call.n === name));
  const alone = groups.filter((group) => group.calls.every((call) => call.n === name));
  const regions = total(alone.map((group) => group.ids.length));
  const count = total(groups.map((group) => group.ids.length));
  const moved = 2 * value[2] * count;
  const seconds = regions * regionCost(program) + (bandwidth() ? moved / bandwidth() : 0);
  const share = program.times ? `, ${percent(seconds / program.times.seconds)} of a step` : "";
  return `would save at most ${bytes(moved)}${regions ? ` and ${plural(regions, "region")}` : ""}${count > 1 ? ` in all ${count} places` : ""}: about ${time(seconds)}${share}`;
}

/** A row for each stage: the lines of the value, or what it became a part of. */
async function stages(name, shown) {
  const program = state.program;
  const rows = [];
  let [current, layer] = [shown, state.layer ?? layersOf(name)[0] ?? null];
  let last = "";
  for (const stage of program.stages) {
    const pass = program.passes.find((each) => each.name === stage.name);
    const lines = (await text(stage.text)).split("\n");
    let found = linesOf(lines, current);
    let note = null;
    const rules = pass ? rulesFor(pass, current, layer) : [];
    if (!found.length && pass) {
      const taken = pass.changes.find((change) => change.b.some((line) => line.startsWith(`%${template(current)[0]} = `)) && (!change.l || change.l.includes(layer)));
      if (taken && taken.a.length) {
        current = taken.n.includes("*") ? taken.n.replace("*", layer ?? taken.l?.[0] ?? 0) : taken.n;
        found = linesOf(lines, current);
        note = `became a part of %${current}`;
        rules.push(...(taken.r ?? []));
      } else if (last) note = "is gone";
    }
    const line = found.join("\n").trim();
    const changed = line !== last && (line || note);
    if (!line && !note) continue;
    const words = [h("strong", { class: "name" }, stage.name === "graph" ? "as built" : stage.name), " ", ...new Set(rules)].map((part) => (typeof part === "string" && part.trim() ? [passLink(stage.name, part), " "] : part));
    rows.push(h("li", { class: changed ? "changed" : null }, words, note ? h("div", { class: "note" }, note) : null, changed && line ? h("div", { class: "ir" }, line) : !note ? h("span", { class: "note" }, last ? "unchanged" : "") : null));
    last = line;
    if (note === "is gone") break;
  }
  return rows.length ? rows : [h("li", {}, "No stage has a value of this name.")];
}

/** The lines that compute a value, with the region they are in. */
function linesOf(lines, name) {
  const found = [];
  let region = "";
  for (const line of lines) {
    if (/^(region|load|views)/.test(line)) region = line.replace(/:$/, "");
    if (line.trimStart().startsWith(`%${name} = `)) found.push(`${region ? `${region}: ` : ""}${line.trim()}`);
  }
  return found;
}

function rulesFor(pass, name, layer) {
  const [pattern] = template(name);
  const fits = (row) => row.n === name || (row.n === pattern && (!row.layers.length || row.layers.includes(layer)));
  return pass.done.filter(fits).map((event) => event.rule);
}
