// Markdown -> a tree of blocks and spans. It makes no elements and knows no HTML: what looks like a tag stays text.
// CommonMark and the tables, tasks and strikes of GitHub, with what chats need: a line's end is a line break, a fence may
// be indented anywhere, and a block that is still being written counts as complete. Left out: indented code, underlined
// headings, reference links.

const MAX_DEPTH = 12; // of quotes and lists in one another

const FENCE = /^\s*(`{3,}|~{3,})([^`]*)$/;
const HEADING = /^\s{0,3}(#{1,6})(?:\s+(.*))?$/;
const RULE = /^\s{0,3}(?:(?:\*\s*){3,}|(?:-\s*){3,}|(?:_\s*){3,})$/;
const QUOTE = /^\s{0,3}>\s?/;
const ITEM = /^(\s*)([-*+]|(\d{1,9})[.)])(?:\s+(.*)|)$/;
const MATH = /^\s*(\$\$|\\\[)/;

/** The blocks of a text. Each has its `source`, by which a view knows that it is unchanged. */
export function parseMarkdown(text) {
  return blocksOf(text.replace(/\r\n?/g, "\n").split("\n"), 0);
}

function blocksOf(lines, depth) {
  const blocks = [];
  for (let at = 0; at < lines.length; ) {
    if (!lines[at].trim()) {
      at += 1;
      continue;
    }
    const [block, end] = blockAt(lines, at, depth);
    block.source = `${block.type} ${lines.slice(at, end).join("\n")}`;
    blocks.push(block);
    at = end;
  }
  return blocks;
}

function blockAt(lines, at, depth) {
  const line = lines[at];
  if (FENCE.test(line)) return fenceAt(lines, at);
  const math = MATH.test(line) && mathAt(lines, at);
  if (math) return math;
  const heading = HEADING.exec(line);
  if (heading) {
    const text = (heading[2] ?? "").replace(/\s#+\s*$/, "").trim();
    return [{ type: "heading", level: heading[1].length, spans: parseSpans(text) }, at + 1];
  }
  if (RULE.test(line)) return [{ type: "rule" }, at + 1];
  if (depth < MAX_DEPTH) {
    if (QUOTE.test(line)) return quoteAt(lines, at, depth);
    if (ITEM.test(line)) return listAt(lines, at, depth);
  }
  return tableAt(lines, at) ?? paragraphAt(lines, at);
}

/** Whether this line ends a paragraph that stands before it. */
function interrupts(lines, at) {
  const line = lines[at];
  if (!line.trim() || FENCE.test(line) || MATH.test(line) || HEADING.test(line) || RULE.test(line)) return true;
  const item = ITEM.exec(line);
  if (item && item[4]) return item[3] === undefined || item[3] === "1"; // "1984. A year" in a text begins no list
  return QUOTE.test(line) || isTable(lines, at);
}

function paragraphAt(lines, at) {
  let end = at + 1;
  while (end < lines.length && !interrupts(lines, end)) end += 1;
  const text = lines.slice(at, end).map((line) => line.trimStart()).join("\n");
  return [{ type: "paragraph", spans: parseSpans(text.trimEnd()) }, end];
}

function fenceEnd(lines, at) {
  const mark = FENCE.exec(lines[at])[1];
  for (let end = at + 1; end < lines.length; end += 1) {
    const line = lines[end].trim();
    if (line.length >= mark.length && line === mark[0].repeat(line.length)) return end;
  }
  return lines.length;
}

function fenceAt(lines, at) {
  const end = fenceEnd(lines, at);
  const indent = indentOf(lines[at]);
  const code = lines.slice(at + 1, end).map((line) => line.slice(Math.min(indent, indentOf(line)))).join("\n");
  const language = FENCE.exec(lines[at])[2].trim().split(/[\s{]/)[0];
  return [{ type: "code", language, text: code, open: end === lines.length }, Math.min(end + 1, lines.length)];
}

/** From "$$" or "\[" to the line that ends with its partner; null if a text only begins like that. */
function mathAt(lines, at) {
  const opening = MATH.exec(lines[at])[1];
  const closing = opening === "$$" ? "$$" : "\\]";
  let end = at;
  let rest = lines[at].trim().slice(opening.length);
  while (!rest.includes(closing) && end + 1 < lines.length && lines[end + 1].trim()) rest = lines[(end += 1)].trim();
  if (rest.includes(closing) ? !rest.endsWith(closing) : end + 1 < lines.length) return null;
  return [{ type: "math", text: lines.slice(at, end + 1).join("\n") }, end + 1];
}

function quoteAt(lines, at, depth) {
  let end = at + 1;
  const inner = [lines[at].replace(QUOTE, "")];
  while (end < lines.length && (QUOTE.test(lines[end]) || (inner.at(-1).trim() && !interrupts(lines, end)))) {
    inner.push(lines[end].replace(QUOTE, ""));
    end += 1;
  }
  return [{ type: "quote", children: blocksOf(inner, depth + 1) }, end];
}

const indentOf = (line) => line.length - line.trimStart().length;

function listAt(lines, at, depth) {
  const first = ITEM.exec(lines[at]);
  const ordered = first[3] !== undefined;
  const list = { type: "list", ordered, start: ordered ? Number(first[3]) : 1, loose: false, items: [] };
  let end = at;
  while (end < lines.length) {
    const item = ITEM.exec(lines[end]);
    if (!item || (item[3] !== undefined) !== ordered || RULE.test(lines[end])) break;
    if (!ordered && item[2] !== first[2]) break;
    if (item[1].length >= first[1].length + 2 || item[1].length + 2 <= first[1].length) break;
    const [inner, next, blank] = itemLines(lines, end, item);
    const made = itemOf(inner, depth);
    list.items.push(made);
    list.loose ||= made.children.filter((child) => child.type === "paragraph").length > 1;
    const more = next < lines.length && ITEM.test(lines[next]);
    list.loose ||= blank && more;
    end = next;
    if (blank && !more) break;
  }
  return [list, end];
}

/** The lines of an item without their indent, where the next item or block begins, and whether blank lines are between. */
function itemLines(lines, at, item) {
  const base = item[1].length;
  const offset = lines[at].length - (item[4] ?? "").length;
  const inner = [item[4] ?? ""];
  let end = at + 1;
  if (FENCE.test(inner[0])) end = takeFence(lines, at, end, inner, offset);
  while (end < lines.length) {
    const line = lines[end];
    if (!line.trim()) {
      let next = end;
      while (next < lines.length && !lines[next].trim()) next += 1;
      if (next === lines.length || indentOf(lines[next]) < base + 2) return [inner, next, true];
      inner.push("");
      end = next;
      continue;
    }
    const indent = indentOf(line);
    if (indent < base + 2 && (ITEM.test(line) || interrupts(lines, end) || !inner.at(-1).trim())) break;
    const start = end;
    inner.push(line.slice(Math.min(indent, offset)));
    end += 1;
    if (FENCE.test(line)) end = takeFence(lines, start, end, inner, offset);
  }
  return [inner, end, false];
}

/** A fence inside an item goes to its end, whatever the indent of its lines. */
function takeFence(lines, at, end, inner, offset) {
  const opening = [...lines];
  opening[at] = inner.at(-1);
  const close = Math.min(fenceEnd(opening, at) + 1, lines.length);
  for (; end < close; end += 1) inner.push(lines[end].slice(Math.min(indentOf(lines[end]), offset)));
  return end;
}

function itemOf(inner, depth) {
  const task = /^\[([ xX])\]\s+/.exec(inner[0]);
  if (task) inner[0] = inner[0].slice(task[0].length);
  return { task: task ? task[1] !== " " : null, children: blocksOf(inner, depth + 1) };
}

function cellsOf(line) {
  const cells = [""];
  const row = line.trim().replace(/^\|/, "");
  for (let at = 0; at < row.length; at += 1) {
    if (row[at] === "\\" && row[at + 1] === "|") {
      cells[cells.length - 1] += "|";
      at += 1;
    } else if (row[at] === "|") {
      if (at < row.length - 1) cells.push("");
    } else {
      cells[cells.length - 1] += row[at];
    }
  }
  return cells.map((cell) => cell.trim());
}

function isTable(lines, at) {
  if (at + 1 >= lines.length || !lines[at].includes("|") || !/^[\s|:-]*-[\s|:-]*$/.test(lines[at + 1])) return false;
  const marks = cellsOf(lines[at + 1]);
  return marks.length === cellsOf(lines[at]).length && marks.every((mark) => /^:?-+:?$/.test(mark));
}

function tableAt(lines, at) {
  if (!isTable(lines, at)) return null;
  const align = cellsOf(lines[at + 1]).map((mark) => {
    if (mark.endsWith(":")) return mark.startsWith(":") ? "center" : "right";
    return "left";
  });
  const row = (line) => {
    const cells = cellsOf(line);
    return align.map((_, column) => parseSpans(cells[column] ?? ""));
  };
  let end = at + 2;
  while (end < lines.length && lines[end].includes("|")) end += 1;
  return [{ type: "table", align, header: row(lines[at]), rows: lines.slice(at + 2, end).map(row) }, end];
}

// ------------------------------------------------------------------------------------------------------------ spans

const PUNCTUATION = /[!-/:-@[-`{-~\p{P}\p{S}]/u;
const ADDRESS = /https?:\/\/[^\s<>"`]{1,2000}/y;
const ANGLE = /<(https?:\/\/[^\s<>]+|[\w.+-]+@[\w-]+\.[\w.-]+)>/y;
const ENTITY = /&(?:#(\d{1,7})|#[xX]([\da-fA-F]{1,6})|(amp|lt|gt|quot|apos|nbsp));/y;
const ENTITIES = { amp: "&", lt: "<", gt: ">", quot: '"', apos: "'", nbsp: "\u00a0" };
const BREAK = /<br\s*\/?>/iy;

/** The spans of a paragraph: text, code, math, strong, em, del, link, break. */
export function parseSpans(text) {
  return new SpanParser(text).parse();
}

/** Addresses that a link may have. A browser runs `javascript:` and shows `data:` as a page of its own. */
export function safeAddress(address) {
  return /^(https?:\/\/|mailto:)[^\s\p{Cc}]+$/iu.test(address) ? address : null;
}

/** One pass over the text, then the emphasis: the algorithm of https://spec.commonmark.org/0.31.2/#phase-2-inline-structure
 *  The spans so far stand in a list with links in both directions; a run of "*" stands there as text until it is matched. */
class SpanParser {
  constructor(text) {
    this.text = text;
    this.at = 0;
    this.head = { type: "head", next: null };
    this.last = this.head;
    this.brackets = [];
    this.unmatched = new Set(); // lengths of runs of "`" that close nowhere
  }

  parse() {
    while (this.at < this.text.length) this.step();
    this.matchEmphasis(this.head, null);
    return spansBetween(this.head, null);
  }

  add(span) {
    span.previous = this.last;
    span.next = null;
    this.last.next = span;
    this.last = span;
    return span;
  }

  addText(text) {
    if (this.last.type === "text" && !this.last.run) this.last.text += text;
    else this.add({ type: "text", text });
  }

  step() {
    const char = this.text[this.at];
    const reader = READERS[char];
    if (reader && reader.call(this)) return;
    const end = reader ? this.at + 1 : this.plainEnd();
    this.addText(this.text.slice(this.at, end));
    this.at = end;
  }

  /** Where the next character that may mean something stands. */
  plainEnd() {
    SPECIAL.lastIndex = this.at + 1;
    return SPECIAL.exec(this.text)?.index ?? this.text.length;
  }

  readEscape() {
    const next = this.text[this.at + 1];
    if (next === "(" && this.readMath("\\(", "\\)")) return true;
    if (next === "\n") {
      this.add({ type: "break" });
    } else if (next !== undefined && /[!-/:-@[-`{-~]/.test(next)) {
      this.addText(next);
    } else {
      return false;
    }
    this.at += 2;
    return true;
  }

  readCode() {
    const run = /`+/y;
    run.lastIndex = this.at;
    const length = run.exec(this.text)[0].length;
    if (!this.unmatched.has(length)) {
      const closing = new RegExp(`(?<!\`)\`{${length}}(?!\`)`, "g");
      closing.lastIndex = this.at + length;
      const match = closing.exec(this.text);
      if (match) {
        const code = this.text.slice(this.at + length, match.index).replace(/\n/g, " ");
        this.add({ type: "code", text: /^ .*\S.* $/.test(code) ? code.slice(1, -1) : code });
        this.at = match.index + length;
        return true;
      }
      this.unmatched.add(length);
    }
    this.addText("`".repeat(length));
    this.at += length;
    return true;
  }

  readMath(opening, closing) {
    const start = this.at + opening.length;
    const end = start + this.text.slice(start, start + 500).indexOf(closing);
    if (end <= start) return false;
    this.add({ type: "math", text: this.text.slice(this.at, end + closing.length) });
    this.at = end + closing.length;
    return true;
  }

  readDollar() {
    const math = /\$\$[^$]{1,500}\$\$|\$(?!\s)[^$\n]{1,200}(?<!\s)\$(?!\d)/y;
    math.lastIndex = this.at;
    const match = math.exec(this.text);
    if (!match || !/[\\^_={}]/.test(match[0])) return false; // "$5 and $6" are prices
    this.add({ type: "math", text: match[0] });
    this.at += match[0].length;
    return true;
  }

  readBreak() {
    if (this.last.type === "text" && !this.last.run) this.last.text = this.last.text.trimEnd();
    this.add({ type: "break" });
    this.at += 1;
    return true;
  }

  readEntity() {
    ENTITY.lastIndex = this.at;
    const match = ENTITY.exec(this.text);
    if (!match) return false;
    const code = match[1] ? Number(match[1]) : parseInt(match[2], 16);
    const valid = code > 0 && code < 0x110000 && (code < 0xd800 || code > 0xdfff);
    this.addText(ENTITIES[match[3]] ?? (valid ? String.fromCodePoint(code) : "\ufffd"));
    this.at += match[0].length;
    return true;
  }

  readAngle() {
    BREAK.lastIndex = ANGLE.lastIndex = this.at;
    const line = BREAK.exec(this.text);
    const match = line ?? ANGLE.exec(this.text);
    if (!match) return false;
    if (line) this.add({ type: "break" });
    else this.addLink(match[1].includes("://") ? match[1] : `mailto:${match[1]}`, [{ type: "text", text: match[1] }]);
    this.at += match[0].length;
    return true;
  }

  readAddress() {
    if (/\w/.test(this.text[this.at - 1] ?? " ") || this.brackets.some((bracket) => bracket.active)) return false;
    ADDRESS.lastIndex = this.at;
    const match = ADDRESS.exec(this.text);
    if (!match) return false;
    let address = match[0].replace(/[.,:;!?'*_~]+$/, "");
    while (address.endsWith(")") && count(address, ")") > count(address, "(")) address = address.slice(0, -1);
    this.addLink(address, [{ type: "text", text: address }]);
    this.at += address.length;
    return true;
  }

  addLink(address, children) {
    if (safeAddress(address)) this.add({ type: "link", address, children });
    else this.addText(plainText(children));
  }

  readRun() {
    const char = this.text[this.at];
    let end = this.at;
    while (this.text[end] === char) end += 1;
    const before = this.text[this.at - 1] ?? " ";
    const after = this.text[end] ?? " ";
    const [spaceBefore, spaceAfter] = [/\s/.test(before), /\s/.test(after)];
    const [markBefore, markAfter] = [PUNCTUATION.test(before), PUNCTUATION.test(after)];
    const left = !spaceAfter && (!markAfter || spaceBefore || markBefore);
    const right = !spaceBefore && (!markBefore || spaceAfter || markAfter);
    const opens = char === "_" ? left && (!right || markBefore) : left;
    const closes = char === "_" ? right && (!left || markAfter) : right;
    const length = end - this.at;
    const run = char === "~" && length !== 2 ? null : { char, length, original: length, opens, closes };
    if (run) this.add({ type: "text", text: this.text.slice(this.at, end), run });
    else this.addText(this.text.slice(this.at, end));
    this.at = end;
    return true;
  }

  openBracket() {
    const image = this.text[this.at] === "!";
    if (image && this.text[this.at + 1] !== "[") return false;
    const span = this.add({ type: "text", text: image ? "![" : "[", run: null, bracket: true });
    this.brackets.push({ span, image, active: true });
    this.at += image ? 2 : 1;
    this.add({ type: "text", text: "" }); // what follows is not joined to the bracket
    return true;
  }

  closeBracket() {
    const bracket = this.brackets.pop();
    if (!bracket || !bracket.active) return false;
    const target = this.text[this.at + 1] === "(" ? readTarget(this.text, this.at + 1) : null;
    if (!target || !safeAddress(target.address)) return false; // the source stays visible as it was written
    this.matchEmphasis(bracket.span, null);
    const children = spansBetween(bracket.span, null);
    this.last = bracket.span.previous;
    this.last.next = null;
    const label = bracket.image ? [{ type: "text", text: `Image: ${plainText(children) || target.address}` }] : children;
    this.addLink(target.address, label.length ? label : [{ type: "text", text: target.address }]);
    if (!bracket.image) for (const outer of this.brackets) outer.active &&= outer.image; // no link in a link
    this.at = target.end;
    return true;
  }

  /** Turns pairs of runs after `start` into strong, em and del. */
  matchEmphasis(start, end) {
    const bottoms = new Map(); // by kind of closing run: below this span no opening run was found
    for (let closer = start.next; closer && closer !== end; ) {
      if (!closer.run?.closes || !closer.run.length) {
        closer = closer.next;
        continue;
      }
      const kind = `${closer.run.char}${closer.run.opens}${closer.run.original % 3}`;
      const bottom = bottoms.get(kind) ?? start;
      let opener = closer.previous;
      while (opener !== bottom && opener !== start && !pairs(opener, closer)) opener = opener.previous;
      if (opener === bottom || opener === start) {
        bottoms.set(kind, closer.previous);
        if (!closer.run.opens) closer.run.closes = false;
        closer = closer.next;
        continue;
      }
      this.wrap(opener, closer);
      if (!closer.run.length) closer = closer.next;
    }
  }

  wrap(opener, closer) {
    const strike = closer.run.char === "~";
    const length = opener.run.length >= 2 && closer.run.length >= 2 ? 2 : 1;
    const span = { type: strike ? "del" : length === 2 ? "strong" : "em" };
    span.children = spansBetween(opener, closer);
    opener.next = span;
    span.previous = opener;
    span.next = closer;
    closer.previous = span;
    for (const side of [opener, closer]) {
      side.run.length -= length;
      side.text = side.text.slice(length);
    }
  }
}

function pairs(opener, closer) {
  const [a, b] = [opener.run, closer.run];
  if (!a?.opens || !a.length || a.char !== b.char) return false;
  return !((a.closes || b.opens) && (a.original + b.original) % 3 === 0 && (a.original % 3 || b.original % 3));
}

function spansBetween(start, end) {
  const spans = [];
  for (let span = start.next; span && span !== end; span = span.next) {
    if (span.type === "text" && !span.text) continue;
    if (span.type === "text" && spans.at(-1)?.type === "text") spans.at(-1).text += span.text;
    else if (span.type === "text") spans.push({ type: "text", text: span.text });
    else spans.push({ type: span.type, text: span.text, address: span.address, children: span.children });
  }
  return spans;
}

/** `(address "title")` at `at`: {address, end}, or null. An address has at most 2,000 characters. */
function readTarget(text, at) {
  const pointed = /\(\s*<([^<>\n]{0,2000})>/y;
  pointed.lastIndex = at;
  let address = pointed.exec(text)?.[1];
  let end = pointed.lastIndex;
  if (address === undefined) {
    const start = at + 1 + /^\s*/.exec(text.slice(at + 1, at + 100))[0].length;
    let depth = 0;
    for (end = start; end < Math.min(text.length, start + 2000) && !/\s/.test(text[end]); end += 1) {
      if (text[end] === "(") depth += 1;
      if (text[end] === ")" && (depth -= 1) < 0) break;
    }
    address = text.slice(start, end);
  }
  const closing = /\s{0,9}(?:"[^"]{0,999}"|'[^']{0,999}')?\s{0,9}\)/y;
  closing.lastIndex = end;
  return closing.test(text) ? { address, end: closing.lastIndex } : null;
}

const count = (text, char) => text.split(char).length - 1;

/** The text of spans or blocks without their marks, as a screen reader says it. */
export function plainText(nodes) {
  return nodes.map((node) => {
    if (node.type === "break") return "\n";
    if (node.spans) return plainText(node.spans);
    if (node.items) return node.items.map((item) => plainText(item.children)).join("\n");
    if (node.rows) return [node.header, ...node.rows].map((row) => row.map(plainText).join(", ")).join("\n");
    return node.children ? plainText(node.children) : (node.text ?? "");
  }).join("");
}

const SPECIAL = /[\\`$*_~[\]!<&\n]|https?:\/\//g;
const READERS = {
  "\\": SpanParser.prototype.readEscape,
  "`": SpanParser.prototype.readCode,
  "$": SpanParser.prototype.readDollar,
  "*": SpanParser.prototype.readRun,
  "_": SpanParser.prototype.readRun,
  "~": SpanParser.prototype.readRun,
  "[": SpanParser.prototype.openBracket,
  "!": SpanParser.prototype.openBracket,
  "]": SpanParser.prototype.closeBracket,
  "<": SpanParser.prototype.readAngle,
  "&": SpanParser.prototype.readEntity,
  "h": SpanParser.prototype.readAddress,
  "\n": SpanParser.prototype.readBreak,
};
