// The first view: what a step costs, where its time goes, and what could be saved.

import { bar, card, h, table } from "./dom.js";
import { brief, bytes, grouped, many, percent, placed, plural, rate, time, total } from "./format.js";
import { bandwidth, operations, readRate, regionCost, state } from "./store.js";
import { kernelLink, passLink, valueLink } from "./links.js";

/** Kinds of a budget's parts: name, and what they are. */
const PARTS = {
  memory: ["reading memory", "weights and caches, at the full bandwidth of the machine"],
  arithmetic: ["arithmetic", "multiplying and adding, at the machine's peak"],
  beyond: ["slower than the limit", "regions that take longer than memory or arithmetic alone would"],
  short: ["short work", "regions with too little work to reach a limit: small values, the start of a kernel"],
  waits: ["waiting", "workers at the end of a region, until the last of them is done"],
  outside: ["outside of the program", "Python, copying of inputs and results, waking the workers"],
};

const unit = (program) => (program.rows[1] === 1 ? "One token" : `A call with ${plural(program.extents?.SEQ ?? program.rows[1], "row")}`);

export function summaryView() {
  const { subject } = state.data;
  const program = state.program;
  const children = [problemCard(subject.problem)];
  if (program) children.push(problemCard(program.problem));
  if (program?.regions) {
    children.push(lead(program), tiles(program), program.budget ? budgetCard(program) : measureCard(subject));
    children.push(savings(program), topKernels(program));
  }
  children.push(h("div", { class: "pair" }, factsCard(subject, program), program?.regions && bytesCard(program)));
  return h("div", { class: "column" }, children);
}

function problemCard(problem) {
  if (!problem) return null;
  const where = problem.stage === "open" ? "The model could not be opened" : `The compile ended at ${problem.stage}`;
  return h("section", { class: "card problem", role: "alert" }, h("h2", {}, `${where}: ${problem.kind}`), h("p", {}, problem.message));
}

/** The answer in one paragraph. */
function lead(program) {
  const count = program.regions.of.length;
  const words = [h("strong", {}, unit(program)), ` of ${program.phase} reads `, h("strong", {}, bytes(program.stored)), ` of weights and caches, and computes ${many(operations(program))} operations in ${plural(count, "region")}`];
  const past = program.extents?.PAST_SEQ;
  if (past) words.push(`, after ${grouped(past)} others`);
  words.push(". ");
  if (program.times) {
    const seconds = program.times.seconds;
    const reached = program.stored / seconds;
    const parts = Object.fromEntries(program.budget.map((part) => [part.kind, part.seconds]));
    const atLimit = (parts.memory + parts.arithmetic) / seconds;
    words.push("It takes ", h("strong", {}, time(seconds)), program.rows[1] === 1 ? ` (${rate(1 / seconds)} tokens a second). ` : ". ");
    if (parts.memory >= parts.arithmetic) words.push(`That is ${rate(reached / 1e9)} GB/s, `, h("strong", {}, reached > bandwidth() ? "more than" : `${percent(reached / bandwidth())} of`), ` the ${rate(bandwidth() / 1e9)} GB/s that its ${plural(state.data.subject.machine.workers, "worker")} reach when they only read as many bytes. `, reached > bandwidth() ? "Other programs slowed that measurement; repeat it on an idle machine. " : "");
    else words.push(h("strong", {}, `${percent(atLimit)} of the time`), " is spent at a limit of the machine, mostly arithmetic. ");
    const rest = program.budget.filter((part) => !["memory", "arithmetic"].includes(part.kind) && part.seconds > 0.005 * seconds).sort((a, b) => b.seconds - a.seconds);
    if (rest.length) words.push("The rest: ", ...rest.flatMap((part, at) => [at ? (at === rest.length - 1 ? " and " : ", ") : "", `${percent(part.seconds / seconds)} ${PARTS[part.kind][0]}`]), ".");
  }
  return h("p", { class: "lead" }, words);
}

function tile(value, small, note) {
  return h("div", { class: "tile" }, h("div", { class: "value" }, value, " ", h("small", {}, small)), h("div", { class: "note" }, note));
}

function tiles(program) {
  const missed = total(program.passes.map((pass) => pass.missed.length));
  const found = [tile(...bytes(program.stored).split(" "), "of weights and caches read by a step")];
  if (program.times) {
    found.push(tile(...time(program.times.seconds).split(" "), program.rows[1] === 1 ? `${rate(1 / program.times.seconds)} tokens a second` : "a step"));
    const waits = program.budget.find((part) => part.kind === "waits").seconds;
    found.push(tile(percent(waits / program.times.seconds), "waiting", `${time(regionCost(program))} at the end of a region`));
  }
  found.push(tile(grouped(program.regions.of.length), "regions", `${plural(program.regions.groups.length, "kind")}, a wait after each`));
  found.push(tile(grouped(program.kernels.length), "kernels", program.stats.object_bytes ? `${bytes(program.stats.object_bytes)} of code for ${program.target}` : program.target));
  found.push(tile(...bytes(program.memory.arena).split(" "), "memory of values"));
  found.push(tile(grouped(missed), "missed", "fusions and prologues that a condition prevents"));
  return h("div", { class: "tiles" }, found);
}

function budgetCard(program) {
  const all = program.times.seconds;
  const parts = program.budget.filter((part) => part.seconds > 0.0005 * all);
  const strip = parts.map((part) => h("div", { class: `p-${part.kind}`, css: { flex: `${(100 * part.seconds) / all} 0 0` }, title: `${PARTS[part.kind][0]}: ${time(part.seconds)}` }));
  const rows = parts.map((part) => h("li", {},
    h("span", { class: `swatch p-${part.kind}` }), h("span", { class: "amount" }, time(part.seconds)), h("span", { class: "share" }, percent(part.seconds / all)),
    h("div", {}, h("strong", {}, PARTS[part.kind][0]), h("span", { class: "note" }, ` ${PARTS[part.kind][1]}`), largest(part, all))));
  return card("Where the time goes",
    h("p", { class: "note" }, `Medians of ${plural(program.times.repeats, "step")}. A part counts the mean over the workers.`),
    h("div", { class: "budget", role: "img", "aria-label": parts.map((part) => `${PARTS[part.kind][0]} ${percent(part.seconds / all)}`).join(", ") }, strip),
    h("ul", { class: "legend" }, rows));
}

function largest(part, all) {
  const rows = part.of.filter(([, seconds]) => seconds > 0.003 * all).slice(0, 4);
  if (rows.length < 1) return null;
  return h("div", { class: "note" }, rows.map(([label, seconds], at) => [at ? " · " : "", h("span", { class: "name" }, label), ` ${time(seconds)}`]));
}

function measureCard(subject) {
  return card("Where the time goes", h("p", {}, "This report was made without a measurement. "),
    subject.command && h("p", {}, "To see times, the roofline of the machine and where workers wait: ", h("code", {}, subject.command)));
}

/** What the groups of rules save, and what near misses would. */
function savings(program) {
  const each = regionCost(program);
  const seconds = program.times?.seconds;
  const gain = (regions, moved) => {
    const spared = regions * each + (bandwidth() ? moved / bandwidth() : 0);
    if (spared <= 0) return moved && !bandwidth() ? "–" : "nothing";
    return [`about ${time(spared)}`, seconds ? h("span", { class: "note" }, ` ${percent(spared / seconds)}`) : ""];
  };
  const groups = table([
    { head: "group", cell: (row) => [h("span", { class: `chip ${row.on ? "rule" : "warn"}` }, row.group), row.on ? "" : h("span", { class: "note" }, " off"), h("div", { class: "note" }, row.meaning)] },
    { head: "regions", number: true, cell: (row) => difference(row.without.regions - row.with.regions, grouped) },
    { head: "bytes", number: true, cell: (row) => difference(row.without.bytes - row.with.bytes, bytes) },
    { head: "time", number: true, cell: (row) => gain(row.without.regions - row.with.regions, row.without.bytes - row.with.bytes) },
  ], program.groups ?? [], { label: "What groups of fusions save" });
  const missed = program.passes.flatMap((pass) => pass.missed.map((miss) => ({ ...miss, pass: pass.name })))
    .sort((a, b) => (b.regions ?? 0) * each + (b.bytes ?? 0) / 1e10 - (a.regions ?? 0) * each - (a.bytes ?? 0) / 1e10);
  const misses = missed.length ? table([
    { head: "rule", cell: (row) => [passLink(row.pass, row.rule, "warn"), h("div", { class: "note" }, row.pass)] },
    { head: "at", cell: (row) => [valueLink(row.n, row.layers), row.count > 1 ? h("span", { class: "note" }, ` ×${row.count}`) : ""] },
    { head: "why not", cell: (row) => h("span", { class: "note" }, placed(row.why, [])) },
    { head: "would save at most", number: true, cell: (row) => (row.value === undefined ? "–" : row.regions || row.bytes
      ? [[row.regions ? plural(row.regions, "region") : "", row.bytes ? bytes(row.bytes) : ""].filter(Boolean).join(", "), h("div", {}, gain(row.regions, row.bytes))] : h("span", { class: "note" }, "nothing: its region and its memory stay")) },
  ], missed, { label: "Missed fusions" }) : h("p", { class: "note" }, "No rule was stopped by a condition.");
  const note = program.times ? `A region costs ${time(each)} here: what its workers wait for, on average.` : "Times assume 4 µs for a region; a report with --measure has the machine's own.";
  return [
    program.groups?.length ? card("What fusions save", h("p", { class: "note" }, "The passes ran again without each group of rules, so the figures are those of a whole program. ", note), groups) : null,
    card("Missed fusions", h("p", { class: "note" }, "The operations of a rule's pattern are there, but a condition fails. The saving is an estimate: the value between them would not be written and read, and its region would not be waited for."), misses),
  ];
}

const difference = (value, format) => (value === 0 ? "0" : `${value > 0 ? "−" : "+"}${format(Math.abs(value))}`);

function topKernels(program) {
  const all = total(program.kernels.map((kernel) => kernel.seconds ?? kernel.bytes)) || 1;
  const columns = [
    { head: "kernel", cell: (row) => [kernelLink(row.symbol), h("div", { class: "note" }, row.where.slice(0, 3).map(([name]) => brief(name)).join(", "))] },
    { head: "calls", number: true, cell: (row) => grouped(row.calls + row.own) },
    { head: "bytes", number: true, cell: (row) => bytes(row.bytes) },
  ];
  if (program.times) columns.push({ head: "time", number: true, cell: (row) => time(row.seconds) }, { head: "GB/s", number: true, cell: readRate });
  columns.push({ head: "share", cell: (row) => bar((row.seconds ?? row.bytes) / all) });
  return card(program.times ? "Kernels that take the time" : "Kernels that move the bytes", table(columns, program.kernels.slice(0, 6), { label: "Kernels" }));
}

function factsCard(subject, program) {
  const rows = [...subject.facts];
  if (program) {
    rows.push(["program", `${program.name}, precision ${program.precision}`]);
    if (program.stats.seconds) rows.push(["compiled in", Object.entries(program.stats.seconds).map(([stage, seconds]) => `${stage} ${time(seconds)}`).join(", ")]);
    if (program.stats.digest) rows.push(["compile key", h("code", {}, program.stats.digest.slice(0, 12))]);
  }
  if (subject.machine) {
    rows.push(["bandwidth", `${rate(subject.machine.bandwidth)} GB/s when ${plural(subject.machine.workers, "worker")} read as many bytes as a step`]);
    rows.push(["peaks", Object.entries(subject.machine.peaks).map(([kind, value]) => `${kind} ${grouped(Math.round(value))} GOP/s`).join(", ")]);
  }
  rows.push(["rlx", subject.version ?? state.data.subject.version]);
  return card(subject.title, h("dl", { class: "facts" }, rows.map(([name, value]) => [h("dt", {}, name), h("dd", {}, value)])));
}

function bytesCard(program) {
  const all = total(program.leaves.map((leaf) => leaf.bytes)) || 1;
  return card("Weights and states", table([
    { head: "type", cell: (row) => [h("span", { class: "name" }, row.dtype), h("span", { class: "note" }, ` ${row.kind}s`)] },
    { head: "count", number: true, cell: (row) => grouped(row.count) },
    { head: "bytes", number: true, cell: (row) => bytes(row.bytes) },
    { head: "share", cell: (row) => bar(row.bytes / all) },
  ], [...program.leaves].sort((a, b) => b.bytes - a.bytes), { label: "Weights and states" }));
}
