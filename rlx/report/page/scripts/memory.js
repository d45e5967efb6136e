// The arena over time: which bytes each value takes, and from which region to which.

import { card, h, table } from "./dom.js";
import { brief, bytes, grouped, plural, template, total } from "./format.js";
import { actions, valueLink } from "./links.js";
import { state } from "./store.js";

export function memoryView() {
  const program = state.program;
  if (!program.memory) return h("p", { class: "waiting" }, "There is no plan of the memory: the compile ended before.");
  const { arena, values_end: end, private: own, values } = program.memory;
  const canvas = h("canvas", { class: "memory", role: "img", tabindex: "-1", "aria-label": "Values in the arena, over the regions of a step; the table below has them all" });
  const hint = h("p", { class: "hint" }, "Point at a value to see it.");
  const shared = total(values.map((value) => value[2]));
  const largest = [...values].sort((a, b) => b[2] * (b[4] - b[3] + 1) - a[2] * (a[4] - a[3] + 1)).slice(0, 40);
  requestAnimationFrame(() => chart(canvas, hint, program));
  return h("div", { class: "column" },
    h("p", { class: "lead" }, `The ${plural(values.length, "value")} of a step take ${bytes(shared)} one after the other, and share an arena of `, h("strong", {}, bytes(end)), `. ${arena > end ? `Scratch memory of kernels makes it ${bytes(arena)}. ` : ""}Each worker has ${bytes(own)} of its own, for what it computes for itself.`),
    card("The arena over time", h("p", { class: "note" }, `From left to right the ${plural(program.regions.of.length, "region")} of a step, from top to bottom the bytes of the arena, large values compressed.`), canvas, hint),
    card("Values that take most of it", table([
      { head: "value", cell: (row) => link(row[0]), sort: (row) => row[0] },
      { head: "bytes", number: true, cell: (row) => bytes(row[2]), sort: (row) => row[2] },
      { head: "at", number: true, cell: (row) => grouped(row[1]), sort: (row) => row[1] },
      { head: "regions", number: true, cell: (row) => life(row), sort: (row) => row[3] },
    ], largest, { label: "Values in the arena" })));
}

function link(name) {
  const [pattern, layer] = template(name);
  return valueLink(pattern, layer === null ? [] : [layer], name);
}

const life = ([, , , from, to]) => `${from < 0 ? "input" : from} – ${to >= state.program.regions.of.length ? "end" : to}`;

function chart(canvas, hint, program) {
  const { values } = program.memory;
  const count = program.regions.of.length;
  const down = scaleOf(values);
  let pointed = null;
  const paint = () => {
    const scale = devicePixelRatio || 1;
    const [width, height] = [canvas.clientWidth, canvas.clientHeight];
    if (!width) return;
    canvas.width = width * scale;
    canvas.height = height * scale;
    const pen = canvas.getContext("2d");
    pen.scale(scale, scale);
    pen.font = "11px sans-serif";
    const ground = resolved(canvas, "--ground");
    const colours = ["memory", "arithmetic", "beyond", "short", "waits", "outside"].map((kind) => resolved(canvas, `--p-${kind}`));
    const column = width / (count + 1);
    for (const value of values) {
      const [x, w] = [(value[3] + 1) * column, (Math.min(value[4], count) - value[3]) * column];
      const y = down(value[1]) * height;
      const tall = Math.max(1, down(value[1] + value[2]) * height - y);
      pen.globalAlpha = pointed === null ? 0.72 : pointed === value ? 1 : 0.3;
      pen.fillStyle = colours[hash(template(value[0])[0]) % colours.length];
      pen.fillRect(x + 0.25, y + 0.25, Math.max(1, w - 0.5), Math.max(0.75, tall - 0.5));
      const name = brief(template(value[0])[0]);
      if (tall > 13 && w > 7 * name.length) {
        pen.globalAlpha = 1;
        pen.fillStyle = ground;
        pen.fillText(name, x + 5, y + Math.min(tall / 2 + 4, 15));
      }
    }
    pen.globalAlpha = 1;
  };
  const at = (event) => {
    const box = canvas.getBoundingClientRect();
    const region = ((event.clientX - box.left) / box.width) * (count + 1) - 1;
    const place = (event.clientY - box.top) / box.height;
    return values.find((value) => value[3] <= region && region <= Math.min(value[4], count) && down(value[1]) <= place && place < down(value[1] + value[2])) ?? null;
  };
  canvas.addEventListener("pointermove", (event) => {
    const found = at(event);
    if (found === pointed) return;
    pointed = found;
    hint.textContent = found ? `${found[0]}: ${bytes(found[2])} at ${grouped(found[1])}, regions ${life(found)}` : "Point at a value to see it.";
    paint();
  });
  canvas.addEventListener("pointerleave", () => ((pointed = null), paint()));
  canvas.addEventListener("click", (event) => {
    const found = at(event);
    if (found) actions.select(...template(found[0]));
  });
  new ResizeObserver(paint).observe(canvas);
  document.addEventListener("themechange", paint);
}

/**
 * Where a byte of the arena lies, from 0 to 1. Between two neighbouring ends of values the height follows the square
 * root of the bytes, so that small values are seen beside large ones.
 */
function scaleOf(values) {
  const ends = [...new Set(values.flatMap((value) => [value[1], value[1] + value[2]]))].sort((a, b) => a - b);
  const heights = ends.map((end, at) => (at ? Math.sqrt(end - ends[at - 1]) : 0));
  const all = total(heights) || 1;
  const places = new Map();
  heights.reduce((sum, height, at) => (places.set(ends[at], (sum + height) / all), sum + height), 0);
  return (offset) => places.get(offset) ?? 0;
}

/** A colour of the style sheet as the canvas takes it. */
function resolved(element, name) {
  const probe = h("span", { css: { color: `var(${name})` }, hidden: true });
  element.parentElement.append(probe);
  const colour = getComputedStyle(probe).color;
  probe.remove();
  return colour;
}

function hash(text) {
  let value = 7;
  for (const char of text) value = (value * 31 + char.codePointAt(0)) >>> 0;
  return value;
}
