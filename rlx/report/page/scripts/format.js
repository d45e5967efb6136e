// Numbers and names as text.

function scaled(value, units, base = 1000) {
  let at = 0;
  while (Math.abs(value) >= base * 0.9995 && at < units.length - 1) (value /= base), at++;
  return [value, units[at]];
}

const digits = (value) => (Math.abs(value) >= 100 || Number.isInteger(value) ? value.toFixed(0) : value.toPrecision(3));

/** 639 MB. */
export function bytes(value) {
  const [number, unit] = scaled(value, ["B", "kB", "MB", "GB", "TB"]);
  return `${digits(number)} ${unit}`;
}

/** 26.5 ms. */
export function time(seconds) {
  if (seconds === 0) return "0";
  if (Math.abs(seconds) >= 1) return `${digits(seconds)} s`;
  if (Math.abs(seconds) >= 1e-3) return `${digits(seconds * 1e3)} ms`;
  return Math.abs(seconds) >= 1e-6 ? `${digits(seconds * 1e6)} µs` : `${digits(seconds * 1e9)} ns`;
}

/** 1.2 G, of operations. */
export function many(value) {
  const [number, unit] = scaled(value, ["", " k", " M", " G", " T"]);
  return `${digits(number)}${unit}`;
}

export const percent = (share) => (share > 0 && share < 0.001 ? "<0.1%" : `${(share * 100).toFixed(share < 0.0995 ? 1 : 0)}%`);
export const grouped = (value) => value.toLocaleString("en-US");
export const rate = (value) => (value >= 1000 ? grouped(Math.round(value)) : digits(value));
export const plural = (count, what, more = `${what}s`) => `${grouped(count)} ${count === 1 ? what : more}`;
export const total = (values) => values.reduce((sum, value) => sum + value, 0);

/** [0, 1, 2, 5] -> "0-2, 5". */
export function ranges(numbers) {
  const parts = [];
  for (const number of numbers) {
    const last = parts.at(-1);
    if (last && number === last[1] + 1) last[1] = number;
    else parts.push([number, number]);
  }
  return parts.map(([a, b]) => (a === b ? `${a}` : `${a}–${b}`)).join(", ");
}

/** "blk.*.attn_q", [0, 1] -> "blk.{0–1}.attn_q". */
export function placed(name, layers = []) {
  return layers.length ? name.replace("*", layers.length > 1 ? `{${ranges(layers)}}` : layers[0]) : name;
}

/** "blk.*.attn_q" -> "attn_q", "k.*.write" -> "k.write". */
export const brief = (name) => name.replace(/^blk\.\*\./, "").replace(".*", "");

/** "blk.3.attn_q" -> ["blk.*.attn_q", 3]; the second is null without a number. */
export function template(name) {
  const found = /(?<=\.|^)\d{1,9}(?=\.|$)/.exec(name);
  return found ? [name.slice(0, found.index) + "*" + name.slice(found.index + found[0].length), Number(found[0])] : [name, null];
}
