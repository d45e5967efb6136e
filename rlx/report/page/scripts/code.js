// Shows a large text: Python, LLVM, assembly or IR, with colours where it is not too long for them.

import { announce, h, icon } from "./dom.js";

const MOST_COLOURED = 120_000; // characters
const TOKENS = {
  python: /(#.*)|("(?:[^"\\\n]|\\.)*"|'(?:[^'\\\n]|\\.)*')|\b(def|for|in|if|else|elif|return|range|while|and|or|not|import|from|as|None|True|False|lambda|with|class)\b|\b(\d[\w.]*)\b/g,
  llvm: /(;.*)|("(?:[^"\\\n]|\\.)*")|\b(define|declare|ret|br|load|store|call|phi|add|mul|sub|fadd|fmul|fsub|getelementptr|icmp|fcmp|select|switch|ptr|i1|i8|i16|i32|i64|float|double|half|bfloat|void|label|inbounds|nuw|nsw|align|private|internal)\b|\b(\d[\w.+-]*)\b/g,
  asm: /(#.*|\/\/.*)|("(?:[^"\\\n]|\\.)*")|^\s+([a-z][\w.]*)|(\$-?\w+|\b0x[\da-f]+\b)/gm,
  ir: /(^\s*(?:region|load|views|graph|program|bound|output).*)|("(?:[^"\\\n]|\\.)*")|= (\w+)|\b(\d[\w.e-]*)\b/gm,
};
const CLASSES = ["t-c", "t-s", "t-k", "t-n"];

function coloured(source, language) {
  if (source.length > MOST_COLOURED) return [source];
  const parts = [];
  let end = 0;
  for (const match of source.matchAll(TOKENS[language])) {
    const at = match.slice(1).findIndex((group) => group !== undefined);
    const word = match[at + 1];
    const start = match.index + match[0].indexOf(word);
    parts.push(source.slice(end, start), h("span", { class: CLASSES[at] }, word));
    end = start + word.length;
  }
  return [...parts, source.slice(end)];
}

/** A text with a title. `forms`: [[label, language, text]], of which one is shown; empty texts are left out. */
export function codeView(title, forms, first = null) {
  const found = forms.filter(([, , source]) => source);
  const pre = h("pre", { tabindex: "0", role: "tabpanel", "aria-label": title });
  const buttons = found.map(([label, language, source]) => h("button", { type: "button", role: "tab", on: { click: () => show(label, language, source) } }, label));
  let shown = "";
  function show(label, language, source) {
    shown = source;
    buttons.forEach((button) => button.setAttribute("aria-selected", button.textContent === label));
    pre.replaceChildren(...coloured(source, language));
    pre.scrollTop = 0;
  }
  async function copy() {
    try {
      await navigator.clipboard.writeText(shown);
      announce("Copied");
    } catch {
      getSelection().selectAllChildren(pre);
      announce("Selected: copy it with the keys of your system");
    }
  }
  if (found.length) show(...(found.find(([label]) => label === first) ?? found[0]));
  else pre.append("There is no text.");
  const tabs = found.length > 1 && h("div", { class: "tabs", role: "tablist", "aria-label": "Form" }, buttons);
  const copying = h("button", { type: "button", class: "quiet", "aria-label": "Copy the text", title: "Copy", on: { click: copy } }, icon("copy"));
  return h("section", { class: "code", "aria-label": title }, h("header", {}, h("h2", {}, title), tabs, copying), pre);
}
