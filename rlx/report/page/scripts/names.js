// Values, kernels, rules and ops by name: what the search finds.

import { placed, template } from "./format.js";
import { state } from "./store.js";

const indexes = new Map();

/** Everything of a program that has a name: {name, kind, layers, ...}. */
function index(program) {
  if (indexes.has(program)) return indexes.get(program);
  const found = new Map();
  const add = (kind, name, more = {}) => {
    const key = `${kind} ${name}`;
    const known = found.get(key);
    if (!known) found.set(key, { kind, name, layers: [], ...more });
    if (more.layers) found.get(key).layers = [...new Set([...found.get(key).layers, ...more.layers])].sort((a, b) => a - b);
  };
  for (const drawing of program.drawings) {
    for (const box of drawing.boxes) {
      const layers = box.n.includes("*") && box.g >= 0 ? drawing.frames[box.g]?.layers ?? [] : [];
      add("value", box.n, { op: box.op, layers });
      for (const leaf of box.leaves) add("value", leaf.n, { op: leaf.kind, layers: leaf.n.includes("*") ? layers : [] });
    }
  }
  for (const pass of program.passes) {
    for (const event of pass.done) add("rule", event.rule, { pass: pass.name });
    for (const event of pass.missed) add("missed", event.rule, { pass: pass.name });
    for (const change of pass.changes) add("value", change.n, { layers: change.l ?? [] });
  }
  for (const kernel of program.kernels ?? []) add("kernel", kernel.symbol, { op: kernel.op });
  indexes.set(program, [...found.values()]);
  return indexes.get(program);
}

/** What fits the words of a query, the best first; at most 40. */
export function search(query) {
  const program = state.program;
  const wanted = query.trim().toLowerCase().replace(/^%/, "");
  if (!program || !wanted) return [];
  const [pattern, layer] = template(wanted);
  const rows = [];
  for (const each of index(program)) {
    const name = each.name.toLowerCase();
    const numbered = layer !== null && each.layers.includes(layer) && name.includes(pattern);
    const direct = name.includes(wanted) || (each.op ?? "").includes(wanted) || placed(each.name, each.layers).includes(wanted);
    if (!numbered && !direct) continue;
    const exact = name === wanted || (numbered && name === pattern);
    const starts = name.split(".").at(-1).startsWith(wanted.split(".").at(-1));
    rows.push([(exact ? 0 : 4) + (each.kind === "value" ? 0 : 2) + (starts ? 0 : 1), { ...each, layer: numbered ? layer : null }]);
  }
  return rows.sort((a, b) => a[0] - b[0] || a[1].name.length - b[1].name.length).slice(0, 40).map(([, row]) => row);
}

/** The numbers of the layers in which a value is. */
export function layersOf(name) {
  return index(state.program).find((each) => each.kind === "value" && each.name === name)?.layers ?? [];
}

/** The name of a value with the number of one layer. */
export function concrete(name, layer) {
  return name.includes("*") ? name.replace("*", layer ?? layersOf(name)[0] ?? 0) : name;
}
