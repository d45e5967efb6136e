// The tree of a Markdown text -> elements.

import { copyFrom, h, icon } from "./dom.js";
import { highlight } from "./highlight.js";
import { parseMath } from "./math.js";
import { parseMarkdown, plainText, safeAddress } from "./markdown.js";

/** Shows a text that grows: blocks that are unchanged keep their elements, so that a selection in them survives. */
export class MarkdownView {
  constructor() {
    this.element = h("div", { class: "prose" });
    this.sources = [];
    this.blocks = [];
  }

  show(text) {
    this.blocks = parseMarkdown(text);
    const headings = this.blocks.filter((block) => block.type === "heading");
    for (const block of headings) block.depth = Math.max(0, block.level - headings[0].level);
    let same = 0;
    while (same < this.blocks.length && this.sources[same] === this.blocks[same].source) same += 1;
    const changed = this.blocks.slice(same);
    const held = this.element.children[same];
    if (changed.length === 1 && changed[0].type === "code" && held && growCode(held, changed[0])) {
      same += 1;
    } else {
      while (this.element.children.length > same) this.element.lastChild.remove();
      this.element.append(...changed.map(blockElement));
    }
    this.sources = this.blocks.map((block) => block.source);
  }

  /** What the blocks from `start` to `end` say, for screen readers. */
  spoken(start, end) {
    return this.blocks.slice(start, end).map((block) => (block.type === "code" ? "Code." : plainText([block]))).join("\n");
  }
}

const CELL_ALIGN = { right: "to-right", center: "to-center", left: null };

function blockElement(block) {
  switch (block.type) {
    case "heading":
      // The page and its messages have the first three levels; an answer may begin with any.
      return h(`h${Math.min(4 + (block.depth ?? 0), 6)}`, { class: `level-${block.level}` }, spanNodes(block.spans));
    case "paragraph":
      return h("p", {}, spanNodes(block.spans));
    case "quote":
      return h("blockquote", {}, block.children.map(blockElement));
    case "rule":
      return h("hr");
    case "math":
      return mathElement(block.text) ?? h("pre", { class: "math" }, block.text);
    case "list":
      return listElement(block);
    case "table":
      return tableElement(block);
    case "code":
      return codeBlock(block.text, block.language);
  }
  throw new Error(block.type);
}

function listElement(block) {
  const items = block.items.map((item) => {
    const box = item.task === null ? null : h("input", { type: "checkbox", checked: item.task, disabled: true, "aria-label": item.task ? "Done" : "To do" });
    return h("li", { class: box ? "task" : null }, box, item.children.map(blockElement));
  });
  const start = block.ordered && block.start !== 1 ? block.start : null;
  return h(block.ordered ? "ol" : "ul", { start, class: block.loose ? "loose" : null }, items);
}

function tableElement(block) {
  const row = (cells, tag) =>
    h("tr", {}, cells.map((cell, column) => h(tag, { class: CELL_ALIGN[block.align[column]], scope: tag === "th" ? "col" : null }, spanNodes(cell))));
  const table = h("table", {}, h("thead", {}, row(block.header, "th")), h("tbody", {}, block.rows.map((cells) => row(cells, "td"))));
  return h("div", { class: "table", tabindex: "0", role: "region", "aria-label": "Table" }, table);
}

/** A block of code with its language and a copy button. */
export function codeBlock(text, language) {
  const code = h("code", {}, codeNodes(text, language));
  const copy = h("button", { type: "button", class: "link" }, icon("copy"), "Copy");
  copy.addEventListener("click", () => copyFrom(copy, code.textContent));
  const bar = h("div", { class: "bar" }, h("span", { class: "language" }, language || "text"), copy);
  return h("div", { class: "code", "data-language": language }, bar, h("pre", { tabindex: "0" }, code));
}

/** Fills an element of `codeBlock` with what its block has become; false if it is another kind of element. */
function growCode(element, block) {
  if (!element.classList.contains("code") || element.dataset.language !== block.language) return false;
  element.querySelector("code").replaceChildren(...codeNodes(block.text, block.language));
  return true;
}

const codeNodes = (text, language) =>
  highlight(text, language).map((token) => (token.kind ? h("span", { class: `c-${token.kind}` }, token.text) : token.text));

const SPAN_TAGS = { strong: "strong", em: "em", del: "del" };

function spanNodes(spans) {
  return spans.map((span) => {
    if (span.type === "text") return span.text;
    if (span.type === "break") return h("br");
    if (span.type === "code") return h("code", {}, span.text);
    if (span.type === "math") return mathElement(span.text) ?? h("span", { class: "math" }, span.text);
    if (span.type === "link") return linkElement(span);
    return h(SPAN_TAGS[span.type], {}, spanNodes(span.children));
  });
}

/** A formula as the browser draws it; null if it is not understood. */
function mathElement(source) {
  const tree = parseMath(source);
  if (!tree) return null;
  const element = mathNode(tree);
  element.setAttribute("title", source);
  return element;
}

function mathNode(tree) {
  if (typeof tree === "string") return document.createTextNode(tree);
  const element = document.createElementNS("http://www.w3.org/1998/Math/MathML", tree.tag);
  for (const [name, value] of Object.entries(tree.attributes)) element.setAttribute(name, value);
  element.append(...tree.children.map(mathNode));
  return element;
}

function linkElement(span) {
  const address = safeAddress(span.address);
  if (!address) return h("span", {}, spanNodes(span.children));
  return h("a", { href: address, target: "_blank", rel: "noopener noreferrer nofollow", title: address }, spanNodes(span.children));
}
