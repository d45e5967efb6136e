// The kernels of a program: what they compute, and their source, LLVM module and assembly.

import { codeView } from "./code.js";
import { card, h, table } from "./dom.js";
import { brief, bytes, grouped, many, plural, time } from "./format.js";
import { kernelLink, valueLink } from "./links.js";
import { operations, readRate, state, text } from "./store.js";

export function kernelsView() {
  const program = state.program;
  if (!program.kernels) return h("p", { class: "waiting" }, "There are no kernels: the compile ended before.");
  const names = { program: "program", ...Object.fromEntries(program.texts.map((key) => [key.split("/").at(-1), key])) };
  const chosen = state.detail in names ? state.detail : program.kernels[0]?.symbol;
  const columns = [
    { head: "kernel", cell: (row) => [kernelLink(row.symbol), h("div", { class: "note" }, row.where.slice(0, 4).map(([name, layers], at) => [at ? ", " : "", valueLink(name, layers, brief(name))]), row.where.length > 4 ? ` and ${row.where.length - 4} more` : "")], sort: (row) => row.symbol },
    { head: "calls", number: true, cell: (row) => [grouped(row.calls), row.own ? h("div", { class: "note" }, `${row.own} by each worker`) : ""], sort: (row) => row.calls },
    { head: "bytes", number: true, cell: (row) => bytes(row.bytes), sort: (row) => row.bytes },
    { head: "operations", number: true, cell: (row) => many(operations(row)), sort: operations },
  ];
  if (program.times) columns.push({ head: "time", number: true, cell: (row) => time(row.seconds), sort: (row) => row.seconds }, { head: "GB/s", number: true, cell: readRate, sort: (row) => row.stored / (row.seconds || 1e9) });
  const others = program.texts.filter((key) => !key.startsWith("kernels/"));
  const holder = h("div", { id: "code" });
  if (chosen) showCode(holder, names[chosen], chosen);
  return h("div", { class: "column" },
    h("p", { class: "lead" }, `${plural(program.kernels.length, "kernel")} compute a step. A loop kernel is Python that Numba lowers; of a tile kernel, which controls registers, the source is an outline. The assembly is exactly that of the stored code.`),
    holder, card("Kernels", table(columns, program.kernels, { chosen: (row) => row.symbol === chosen, label: "Kernels" })),
    others.length ? card("Code around them", h("p", { class: "note" }, "A region is a function of its buffers, which equal layers share. program is the step: a loop over the table of regions."), h("ul", {}, others.map((key) => h("li", {}, kernelLink(key.split("/").at(-1)))))) : null);
}

async function showCode(holder, key, symbol) {
  const found = await text(`code/${key}`);
  const forms = found ? JSON.parse(found) : { source: "", llvm: "", asm: "" };
  const python = /^\s*(def|@|import|from) /m.test(forms.source);
  holder.replaceChildren(codeView(symbol, [[python ? "Python" : "Outline", "python", forms.source], ["LLVM", "llvm", forms.llvm], ["Assembly", "asm", forms.asm]]));
}

