// The data of the report, and what is chosen in it.

import { $ } from "./dom.js";
import { rate } from "./format.js";

let stored = null;
const unpacked = new Map();

/** What the page shows now: `data`, the `program`, the view, and the selected value {name, layer}. */
export const state = { data: null, program: null, view: "summary", detail: null, selected: null, layer: null };

async function unpack(packed) {
  const binary = Uint8Array.from(atob(packed), (char) => char.charCodeAt(0));
  return new Response(new Blob([binary]).stream().pipeThrough(new DecompressionStream("gzip"))).text();
}

/** Reads the data that are part of the page. */
export async function read() {
  stored = JSON.parse($("#data").textContent);
  state.data = JSON.parse(await unpack(stored.data));
  state.program = state.data.programs[0] ?? null;
}

/** A large text by its key; "" if the report has none. */
export function text(key) {
  if (!(key in stored.texts)) return Promise.resolve("");
  if (!unpacked.has(key)) unpacked.set(key, unpack(stored.texts[key]));
  return unpacked.get(key);
}

export const has = (key) => key in stored.texts;

/** The drawing of a stage, or of the last one that has a drawing. */
export function drawingOf(program, stage = null) {
  const found = program.stages.filter((each) => each.drawing !== null);
  const chosen = found.find((each) => each.name === stage) ?? found.at(-1);
  return chosen ? program.drawings[chosen.drawing] : null;
}

/** Seconds that a region costs beside its work: what workers wait for it on average; 4 µs where nothing was measured. */
export function regionCost(program) {
  const waits = program.times?.wait;
  return waits ? waits.reduce((sum, each) => sum + each, 0) / waits.length / 1e9 : 4e-6;
}

/** Bytes a second at which the workers read as many bytes as a step does; null where nothing was measured. */
export function bandwidth() {
  const machine = state.data.subject.machine;
  return machine ? machine.bandwidth * 1e9 : null;
}

const peakUnits = { int8: ["int8", "f32"], bf16: ["amx-bf16", "bf16", "f32"], f32: ["f32"] };

/** The rate in operations a second of the units that compute a kind of arithmetic. */
export function peakOf(kind) {
  const peaks = state.data.subject.machine.peaks;
  return peaks[peakUnits[kind].find((unit) => unit in peaks)] * 1e9;
}

/** The least time of some work, and the limit that says so: [seconds, "memory" or "arithmetic"]. */
export function limitOf(work) {
  const moving = work.stored / bandwidth();
  const computing = Object.entries(work.operations).reduce((sum, [kind, count]) => sum + count / peakOf(kind), 0);
  return moving >= computing ? [moving, "memory"] : [computing, "arithmetic"];
}

/** The rate at which a measured kernel reads weights and caches, as text. */
export const readRate = (row) => (row.seconds && row.stored ? rate(row.stored / row.seconds / 1e9) : "–");

export const operations = (work) => Object.values(work.operations).reduce((sum, count) => sum + count, 0);
