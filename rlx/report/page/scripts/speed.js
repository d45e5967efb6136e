// Measured: the kernels on the roofline of the machine, and where the workers wait.

import { bar, card, h, s, table } from "./dom.js";
import { brief, grouped, percent, plural, rate, time, total } from "./format.js";
import { actions, kernelLink, regionLink, valueLink } from "./links.js";
import { limitOf, operations, readRate, state } from "./store.js";

export function speedView() {
  const program = state.program;
  const { machine, command } = state.data.subject;
  if (!program.times || !machine) {
    return h("div", { class: "column" }, card("Not measured", h("p", {}, "This program was not measured. ", command ? ["A report with times and the roofline of the machine: ", h("code", {}, command)] : "")));
  }
  return h("div", { class: "column" },
    card("Roofline", h("p", { class: "note" }, "Each point is a kernel; its size is the time that it takes. A point on the slope is limited by memory, a point on a flat line by arithmetic. Far below both: too little work, or waiting. Bytes are those of weights and caches; values between kernels stay in the processor's caches, so kernels that read nothing else are not drawn. Above the slope: a cache held the weights too, or other programs slowed the measurement of the bandwidth."), roofline(program, machine)),
    card("Kernels", kernels(program)), waits(program));
}

function kernels(program) {
  const all = total(program.kernels.map((kernel) => kernel.seconds)) || 1;
  const near = (row) => (row.seconds && (row.stored || operations(row)) ? limitOf(row) : [0, "memory"]);
  const named = (row) => (near(row)[1] === "memory" && near(row)[0] > row.seconds ? "cache" : `${near(row)[1]} ${percent(near(row)[0] / row.seconds)}`);
  return table([
    { head: "kernel", cell: (row) => kernelLink(row.symbol), sort: (row) => row.symbol },
    { head: "calls", number: true, cell: (row) => grouped(row.calls), sort: (row) => row.calls },
    { head: "time", number: true, cell: (row) => time(row.seconds), sort: (row) => row.seconds },
    { head: "share", cell: (row) => [bar(row.seconds / all), h("span", { class: "note" }, percent(row.seconds / all))], sort: (row) => row.seconds },
    { head: "GB/s", number: true, cell: readRate, sort: (row) => row.stored / (row.seconds || 1e9) },
    { head: "GFLOP/s", number: true, cell: (row) => (row.seconds ? rate(operations(row) / row.seconds / 1e9) : "–"), sort: (row) => operations(row) / (row.seconds || 1e9) },
    { head: "near", cell: (row) => (row.seconds ? named(row) : "–"), sort: (row) => near(row)[0] / (row.seconds || 1e9) },
  ], program.kernels.filter((row) => row.calls), { label: "Measured kernels" });
}

/** Operations a byte across, operations a second up, both logarithmic. S. Williams et al., 2009, doi 10.1145/1498765.1498785. */
function roofline(program, machine) {
  const points = program.kernels.filter((kernel) => kernel.seconds > 0 && operations(kernel) > 0 && kernel.stored > 0)
    .map((kernel) => ({ kernel, x: operations(kernel) / kernel.stored, y: operations(kernel) / kernel.seconds / 1e9, seconds: kernel.seconds }));
  if (!points.length) return h("p", { class: "note" }, "No kernel reads weights or caches.");
  const [width, height, left, bottom, top, right] = [960, 420, 58, 42, 14, 20];
  const peaks = Object.entries(machine.peaks);
  const highest = Math.max(...peaks.map(([, value]) => value));
  const x0 = Math.min(0.05, ...points.map((p) => p.x)) * 0.8;
  const x1 = Math.max((highest / machine.bandwidth) * 4, ...points.map((p) => p.x * 1.5));
  const y0 = Math.min(machine.bandwidth * x0 * 4, ...points.map((p) => p.y)) * 0.6;
  const y1 = highest * 2;
  const across = (v) => left + ((Math.log10(v) - Math.log10(x0)) / (Math.log10(x1) - Math.log10(x0))) * (width - left - right);
  const up = (v) => height - bottom - ((Math.log10(v) - Math.log10(y0)) / (Math.log10(y1) - Math.log10(y0))) * (height - bottom - top);
  const decades = (a, b) => Array.from({ length: Math.floor(Math.log10(b)) - Math.ceil(Math.log10(a)) + 1 }, (_, i) => 10 ** (Math.ceil(Math.log10(a)) + i));
  const parts = [];
  for (const v of decades(x0, x1)) parts.push(s("line", { class: "grid", x1: across(v), x2: across(v), y1: top, y2: height - bottom }), s("text", { x: across(v), y: height - bottom + 18, "text-anchor": "middle" }, label(v)));
  for (const v of decades(y0, y1)) parts.push(s("line", { class: "grid", x1: left, x2: width - right, y1: up(v), y2: up(v) }), s("text", { x: left - 8, y: up(v) + 4, "text-anchor": "end" }, label(v)));
  parts.push(s("text", { x: (left + width) / 2, y: height - 4, "text-anchor": "middle" }, "operations a byte"), s("text", { x: left + 6, y: top + 10 }, "GFLOP/s"));
  let above = null; // the last label, to which a peak of nearly the same height is added
  for (const [kind, value] of peaks.sort((a, b) => b[1] - a[1])) {
    const knee = value / machine.bandwidth;
    const said = `${kind} ${grouped(Math.round(value))}`;
    parts.push(s("path", { class: `roof${value < highest ? " other" : ""}`, d: `M${across(Math.max(knee, x0))} ${up(value)} H${width - right}` }));
    if (above && up(value) - above.y < 16) above.text.textContent = above.text.textContent.replace(" GOP/s", `, ${said} GOP/s`);
    else {
      above = { y: up(value), text: s("text", { class: "strong", x: width - right, y: up(value) - 6, "text-anchor": "end" }, `${said} GOP/s`) };
      parts.push(above.text);
    }
  }
  parts.push(s("path", { class: "roof", d: `M${across(x0)} ${up(Math.max(y0, machine.bandwidth * x0))} L${across(highest / machine.bandwidth)} ${up(highest)}` }));
  const middle = Math.sqrt(x0 * (highest / machine.bandwidth));
  const slope = (Math.atan2(up(machine.bandwidth * middle * 2) - up(machine.bandwidth * middle), across(middle * 2) - across(middle)) * 180) / Math.PI;
  const labels = []; // above the points
  labels.push(s("text", { class: "strong", transform: `translate(${across(middle)} ${up(machine.bandwidth * middle) - 8}) rotate(${slope})`, "text-anchor": "middle" }, `memory: ${rate(machine.bandwidth)} GB/s`));
  const most = Math.max(...points.map((p) => p.seconds));
  const named = [];
  for (const p of points) {
    const said = `${p.kernel.symbol} (${p.kernel.where.map(([name]) => brief(name)).join(", ")}): ${time(p.seconds)}, ${rate(p.kernel.stored / p.seconds / 1e9)} GB/s, ${rate(p.y)} GFLOP/s`;
    const open = () => actions.go("kernels", p.kernel.symbol);
    parts.push(s("circle", { class: "point", cx: across(p.x), cy: up(p.y), r: 4 + 12 * Math.sqrt(p.seconds / most), tabindex: "0", role: "button", "aria-label": said, on: { click: open, keydown: (event) => event.key === "Enter" && open() } }, s("title", {}, said)));
    const [x, y] = [across(p.x), up(p.y) - 9 - 12 * Math.sqrt(p.seconds / most)];
    if (p.seconds < 0.1 * most || named.some(([a, b]) => Math.abs(a - x) < 110 && Math.abs(b - y) < 14)) continue;
    named.push([x, y]);
    labels.push(s("text", { x, y, "text-anchor": "middle" }, p.kernel.where.slice(0, 2).map(([name]) => brief(name)).join(", ")));
  }
  return h("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "Roofline" }, s("svg", { class: "chart", viewBox: `0 0 ${width} ${height}`, role: "group", "aria-label": "Kernels on the roofline of the machine" }, parts, labels));
}

const label = (value) => (value >= 1 ? grouped(value) : String(value));

function waits(program) {
  const { regions, wait, seconds } = program.times;
  const groups = program.regions.groups.map((group) => ({ ...group, time: total(group.ids.map((id) => regions[id])) / 1e9, wait: total(group.ids.map((id) => wait[id])) / 1e9 }));
  const all = total(wait) / 1e9;
  const busy = program.times.waits.map((row, worker) => ({ worker, waited: total(row.filter((each) => each !== null)) / 1e9, absent: row.filter((each) => each === null).length, units: total(program.times.units[worker]) }));
  const columns = [
    { head: "region", cell: (row) => [regionLink(row.ids[0], row.ids.length > 1 ? `${row.ids[0]} and ${row.ids.length - 1} like it` : `region ${row.ids[0]}`)], sort: (row) => row.ids[0] },
    { head: "computes", cell: (row) => row.calls.slice(0, 3).map((call, at) => [at ? ", " : "", valueLink(call.n, row.layers.slice(0, 1), brief(call.n))]) },
    { head: "time", number: true, cell: (row) => time(row.time), sort: (row) => row.time },
    { head: "waiting", number: true, cell: (row) => time(row.wait), sort: (row) => row.wait },
    { head: "of its time", number: true, cell: (row) => percent(row.wait / (row.time || 1)), sort: (row) => row.wait / (row.time || 1) },
    { head: "share of all waiting", cell: (row) => bar(row.wait / (all || 1), "p-waits"), sort: (row) => row.wait },
  ];
  const byWorker = table([
    { head: "worker", cell: (row) => String(row.worker) }, { head: "units of work", number: true, cell: (row) => grouped(row.units) },
    { head: "waited", number: true, cell: (row) => [time(row.waited), " ", h("span", { class: "note" }, percent(row.waited / seconds))] },
    { head: "too late for", number: true, cell: (row) => (row.absent ? plural(row.absent, "region") : "–") },
  ], busy, { label: "Workers" });
  return [card("Where workers wait", h("p", { class: "note" }, `Together ${time(all)} of a step of ${time(seconds)}, the mean over ${plural(busy.length, "worker")}.`), table(columns, groups.sort((a, b) => b.wait - a.wait), { label: "Waits of regions" })), card("Workers", byWorker)];
}

