// The program as regions: what every worker computes for itself, the units of work, and where workers wait.

import { card, h, table } from "./dom.js";
import { bytes, grouped, many, percent, placed, plural, ranges, time, total } from "./format.js";
import { actions, kernelLink, valueLink } from "./links.js";
import { limitOf, operations, state } from "./store.js";

export function scheduleView() {
  const program = state.program;
  if (!program.regions) return h("p", { class: "waiting" }, "There is no schedule: the compile ended before.");
  const chosen = /^\d+$/.test(state.detail ?? "") ? Number(state.detail) : null;
  const { groups, of } = program.regions;
  const seconds = program.times?.regions;
  const rows = groups.map((group, at) => ({ ...group, at, time: seconds ? total(group.ids.map((id) => seconds[id])) / 1e9 : 0, wait: seconds ? total(group.ids.map((id) => program.times.wait[id])) / 1e9 : 0 }));
  const all = seconds ? total(seconds) / 1e9 : 1;
  const columns = [
    { head: "regions", cell: (row) => [h("button", { type: "button", class: "link", on: { click: () => actions.go("schedule", String(row.ids[0])) } }, compact(row.ids)), row.ids.length > 1 ? h("div", { class: "note" }, `×${row.ids.length}`) : ""], sort: (row) => row.ids[0] },
    { head: "each worker", cell: (row) => list(row.own, row.layers) },
    { head: "units of work", cell: (row) => list(row.calls, row.layers) },
    { head: "bytes each", number: true, cell: (row) => bytes(row.bytes), sort: (row) => row.bytes },
  ];
  if (seconds) columns.push({ head: "time", number: true, cell: (row) => [time(row.time), h("div", { class: "note" }, percent(row.time / all))], sort: (row) => row.time }, { head: "waiting", number: true, cell: (row) => [time(row.wait), h("div", { class: "note" }, percent(row.wait / (row.time || 1)))], sort: (row) => row.wait });
  const shown = chosen !== null && chosen < of.length ? region(program, chosen) : null;
  if (shown) requestAnimationFrame(() => shown.scrollIntoView({ block: "nearest" }));
  return h("div", { class: "column" },
    h("p", { class: "lead" }, `A step runs ${plural(of.length, "region")} in order. The workers share the units of a region, and wait for one another at its end. Small work before the units, such as norms, is computed by every worker for itself.`),
    card(seconds ? "A step over time" : "A step, region by region", h("p", { class: "note" }, seconds ? "The width of a bar is the time of a region, its colour how much of it the workers wait." : "The height of a bar is the number of bytes that a region moves."), strip(program, chosen)),
    shown, card("Kinds of regions", table(columns, rows, { chosen: (row) => chosen !== null && row.ids.includes(chosen), label: "Kinds of regions" })));
}

const compact = (ids) => (ids.length > 4 ? `${ids.slice(0, 3).join(", ")} … ${ids.at(-1)}` : ranges(ids));

function list(calls, layers) {
  return calls.length ? h("ul", {}, calls.map((call) => h("li", {}, valueLink(call.n, call.n.includes("*") ? layers : []), h("span", { class: "note" }, ` ${call.op}${call.u ? `, ${plural(call.u[0], "unit")}` : ""}`)))) : h("span", { class: "note" }, "–");
}

function strip(program, chosen) {
  const { groups, of } = program.regions;
  const seconds = program.times?.regions;
  const most = Math.max(...groups.map((group) => group.bytes), 1);
  const bars = of.map((at, number) => {
    const group = groups[at];
    const wait = seconds ? program.times.wait[number] / Math.max(1, seconds[number]) : 0;
    const title = `region ${number}: ${group.calls.map((call) => call.n).join(", ")}${seconds ? `, ${time(seconds[number] / 1e9)}, ${percent(wait)} waiting` : `, ${bytes(group.bytes)}`}`;
    const css = seconds ? { flexGrow: seconds[number], background: `color-mix(in oklab, var(--p-waits) ${Math.round(wait * 100)}%, var(--p-memory))` } : { height: `${8 + 92 * Math.sqrt(group.bytes / most)}%` };
    return h("div", { role: "option", "aria-selected": String(number === chosen), tabindex: number === (chosen ?? 0) ? "0" : "-1", class: number === chosen ? "on" : null, title, "aria-label": title, css, on: { click: () => actions.go("schedule", String(number)) } });
  });
  const element = h("div", { class: "strip", role: "listbox", "aria-orientation": "horizontal", "aria-label": "Regions; arrow keys move between them" }, bars);
  element.addEventListener("keydown", (event) => {
    const at = bars.indexOf(document.activeElement);
    if (event.key === "Enter" || event.key === " ") event.preventDefault(), bars[at]?.click();
    const next = { ArrowRight: at + 1, ArrowLeft: at - 1, Home: 0, End: bars.length - 1 }[event.key];
    if (next === undefined || !bars[next]) return;
    event.preventDefault();
    bars[at]?.setAttribute("tabindex", "-1");
    bars[next].setAttribute("tabindex", "0");
    bars[next].focus();
  });
  return element;
}

/** One region: its calls with kernels, its limit, and what each worker did. */
function region(program, number) {
  const group = program.regions.groups[program.regions.of[number]];
  const layer = group.layers.length ? [group.layers[group.ids.indexOf(number)] ?? group.layers[0]] : [];
  const one = (call) => h("li", {}, valueLink(call.n, call.n.includes("*") ? layer : []), h("span", { class: "note" }, ` ${call.op} by `), kernelLink(call.k), call.u ? h("span", { class: "note" }, ` ${plural(call.u[0], "unit")}, ${grouped(call.u[1])} at a time`) : null);
  const parts = [];
  if (group.own.length) parts.push(h("h3", {}, "Each worker, for itself"), h("ul", {}, group.own.map(one)));
  parts.push(h("h3", {}, "Units of work, shared"), h("ul", {}, group.calls.map(one)));
  const words = [`${bytes(group.bytes)}, ${many(operations(group))} operations`];
  if (program.times) {
    const seconds = program.times.regions[number] / 1e9;
    words.push(`${time(seconds)}`);
    if (state.data.subject.machine) {
      const [least, limit] = limitOf(group);
      words.push(`at the limit of ${limit} it would take ${time(least)} (${percent(least / seconds)} of its time)`);
    }
    parts.push(workers(program, number));
  }
  if (group.function && program.texts.includes(`regions/${group.function}`)) parts.push(h("p", {}, h("span", { class: "note" }, "code of the region: "), kernelLink(group.function)));
  return card(`Region ${number}`, h("p", { class: "note" }, words.join(" · ")), ...parts);
}

function workers(program, number) {
  const all = program.times.regions[number];
  const rows = program.times.waits.slice(0, 64).map((waits, worker) => {
    const wait = waits[number];
    const units = program.times.units[worker][number];
    const said = wait === null ? "was not there" : `${plural(units, "unit")}, waited ${time(wait / 1e9)}`;
    return h("div", { title: said }, h("span", { class: "note" }, `worker ${worker}`), h("span", { class: "run" }, wait === null ? null : [h("i", { css: { width: `${(100 * (all - wait)) / Math.max(1, all)}%` } }), h("i", { css: { width: `${(100 * wait) / Math.max(1, all)}%` } })]), h("span", { class: "note" }, wait === null ? "absent" : plural(units, "unit")));
  });
  return h("div", { class: "workers", role: "img", "aria-label": "How long each worker worked and waited" }, rows);
}

/** Where a value is computed: [region, whether each worker computes it], for the panel. */
export function regionsOf(program, name, layer) {
  const found = [];
  for (const group of program.regions?.groups ?? []) {
    const calls = group.calls.find((call) => call.n === name);
    const own = group.own.find((call) => call.n === name);
    if (!calls && !own) continue;
    const at = name.includes("*") && layer !== null ? group.layers.indexOf(layer) : 0;
    if (at >= 0) found.push({ number: group.ids[Math.min(at, group.ids.length - 1)], kernel: (calls ?? own).k, own: !calls, units: calls?.u, label: placed(name, []) });
  }
  return found;
}
