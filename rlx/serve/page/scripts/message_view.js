// One message on the page: a question or an answer, with what can be done with it.

import { announce, copyFrom, h, icon, iconButton } from "./dom.js";
import { codeBlock, MarkdownView } from "./markdown_view.js";
import { server } from "./server.js";

/** Shows a message of a conversation. `actions` are edit, retry, goOn, choose, sendResults, newConversation, close. */
export class MessageView {
  constructor(message, actions) {
    this.message = message;
    this.actions = actions;
    this.article = h("article", { tabindex: "-1" });
    this.element = h("li", { class: `message ${message.role}`, "data-id": message.id }, this.article);
  }

  /** The versions of this message and the buttons below it. */
  footer(siblings, buttons) {
    const { message } = this;
    const place = siblings.indexOf(message.id);
    const step = (by) => () => this.actions.choose(siblings[place + by]);
    const versions = siblings.length > 1 && h("span", { class: "versions", role: "group", "aria-label": "Versions" },
      iconButton("left", "Version before", step(-1), { disabled: place === 0 }),
      h("span", {}, `${place + 1} / ${siblings.length}`),
      iconButton("right", "Next version", step(1), { disabled: place === siblings.length - 1 }));
    return h("footer", {}, versions, buttons);
  }

  /** Opens a form in place of the text. `save(text, images)` takes the new version. */
  editForm(label, save, render) {
    const { message } = this;
    const area = h("textarea", { "aria-label": "Edit the message", value: message.text });
    let images = [...(message.images ?? [])];
    const pictures = h("ul", { class: "attachments" });
    const drawImages = () => pictures.replaceChildren(...images.map((url, index) => imageItem(url, index, () => {
      images = images.filter((_, other) => other !== index);
      drawImages();
    })));
    drawImages();
    const close = () => (render(), this.article.querySelector("[data-action=edit]")?.focus());
    const submit = (event) => {
      event.preventDefault();
      if (area.value.trim() || images.length) save(area.value, images);
    };
    const keys = (event) => {
      if (event.key === "Escape") (event.stopPropagation(), close());
      if (event.key === "Enter" && !event.shiftKey && !event.isComposing && message.role === "user") submit(event);
    };
    const buttons = h("div", { class: "buttons" },
      h("button", { type: "button", on: { click: close } }, "Cancel"), h("button", { type: "submit", class: "primary" }, label));
    const fit = () => {
      area.style.height = "auto";
      area.style.height = `${Math.min(area.scrollHeight + 2, innerHeight / 2)}px`;
    };
    area.addEventListener("input", fit);
    this.article.replaceChildren(h("form", { class: "edit", on: { submit, keydown: keys } }, pictures, area, buttons));
    this.element.classList.add("editing");
    fit();
    area.focus();
  }
}

/** A small picture with a button that takes it away. */
export function imageItem(url, index, remove) {
  const label = `Image ${index + 1}`;
  return h("li", {}, h("img", { src: url, alt: label }), iconButton("close", `Remove image ${index + 1}`, remove));
}

export class QuestionView extends MessageView {
  show(siblings) {
    const { message } = this;
    const images = message.images.map((url, index) => h("img", { src: url, alt: `Image ${index + 1} of the message` }));
    const copy = iconButton("copy", "Copy the message", () => copyFrom(copy, message.text));
    const edit = () => this.editForm("Send", (text, kept) => this.actions.edit(message, text, kept), () => this.show(siblings));
    this.element.classList.remove("editing");
    this.article.replaceChildren(
      h("h3", { class: "unseen" }, "You"),
      images.length ? h("div", { class: "images" }, images) : "",
      message.text ? h("div", { class: "bubble" }, message.text) : "",
      this.footer(siblings, [copy, iconButton("edit", "Edit and ask again", edit, { "data-action": "edit" })]),
    );
  }
}

export class AnswerView extends MessageView {
  constructor(message, actions) {
    super(message, actions);
    this.thinking = new MarkdownView();
    this.prose = new MarkdownView();
    this.prose.element.classList.add("answer");
    this.announced = 0;
    this.calls = h("div", { class: "calls" });
    this.status = h("div", { class: "status" });
    this.foot = h("div");
    this.summary = h("summary");
    this.fold = h("details", { class: "thinking", hidden: true }, this.summary, this.thinking.element);
  }

  /** Draws the message; `generation` is what writes it, or null. */
  show(siblings, generation) {
    const { message } = this;
    if (!this.prose.element.isConnected || this.element.classList.contains("editing")) {
      const heading = h("h3", { class: "unseen" }, `Answer of ${message.model || "the model"}`);
      this.article.replaceChildren(heading, this.fold, this.prose.element, this.calls, this.status, this.foot);
      this.element.classList.remove("editing");
    }
    this.element.classList.toggle("writing", generation !== null);
    this.article.setAttribute("aria-busy", generation !== null);
    this.#showThinking(generation);
    if (message.json) this.#showJson(generation);
    else this.prose.show(message.text);
    this.#showCalls(generation);
    this.#showStatus(generation);
    if (generation) this.foot.replaceChildren(h("footer", {}, h("span", { class: "stats" }, liveText(generation))));
    else this.foot.replaceChildren(this.#finalFooter(siblings));
    if (generation) this.#announceUntil(this.prose.blocks.length - 1);
  }

  /** Says the end of the answer to screen readers. */
  announceEnd() {
    this.#announceUntil(this.prose.blocks.length);
    announce({ stopped: "Stopped.", broken: this.message.problem, failed: this.message.problem }[this.message.finish] ?? "The answer is complete.");
  }

  #announceUntil(end) {
    if (end > this.announced) announce(this.prose.spoken(this.announced, end));
    this.announced = Math.max(this.announced, end);
  }

  #showThinking(generation) {
    const { message } = this;
    this.fold.hidden = !message.thinking;
    if (!message.thinking) return;
    const busy = generation !== null && !message.text && !message.calls.length;
    const seconds = message.stats.thinkingMs / 1000;
    this.summary.textContent = busy ? "Thinking…" : seconds >= 1 ? `Thought for ${Math.round(seconds)} s` : "Thought";
    this.summary.className = busy ? "busy" : "";
    this.thinking.show(message.thinking);
  }

  #showJson(generation) {
    let text = this.message.text;
    if (!generation) {
      try {
        text = JSON.stringify(JSON.parse(text), null, 2);
      } catch {
        // cut off: it is shown as it came
      }
    }
    this.prose.show(text ? "`".repeat(8) + `json\n${text}\n` + "`".repeat(8) : "");
  }

  #showCalls(generation) {
    const { message } = this;
    const waiting = !generation && message.children.length === 0; // for the results that the user writes
    const state = JSON.stringify([waiting, message.calls.map((call) => call.arguments.length)]);
    if (this.calls.dataset.state === state) return;
    this.calls.dataset.state = state;
    this.calls.replaceChildren(...message.calls.map((call) => callElement(call, waiting)));
    if (!waiting || !message.calls.length) return;
    const send = h("button", { type: "button", class: "primary", on: { click: () => this.actions.sendResults(message) } }, "Send the results");
    this.calls.append(h("div", { class: "buttons" }, send));
  }

  #showStatus(generation) {
    const { message } = this;
    const notes = [];
    if (generation) {
      const quiet = !message.text && !message.thinking && !message.calls.length;
      if (generation.waiting) notes.push(h("p", { class: "note" }, generation.waiting));
      else if (quiet && generation.progress > 0 && generation.progress < 1) notes.push(progressNote(generation.progress));
      else if (quiet) notes.push(h("p", { class: "dots", role: "img", "aria-label": "Waiting for the first word" }, h("i"), h("i"), h("i")));
    } else {
      const again = (label) => h("button", { type: "button", class: "link", on: { click: () => this.actions.retry(message) } }, label);
      const more = message.text && !message.json && !message.calls.length && h("button", { type: "button", class: "link", on: { click: () => this.actions.goOn(message) } }, "Continue");
      if (message.problem) notes.push(problemNote(message.problem, [again("Try again"), message.finish === "broken" && more, this.#wayOut()]));
      else if (message.finish === "broken") notes.push(problemNote("This answer was cut off: the page was closed.", [again("Ask again"), more]));
      else if (message.finish === "length") notes.push(h("p", { class: "note" }, "The answer reached its greatest length. ", more));
      else if (message.finish === "stopped") notes.push(h("p", { class: "note" }, "Stopped. ", more));
      else if (!message.text && !message.calls.length) notes.push(h("p", { class: "note" }, "The model gave an empty answer."));
    }
    this.status.replaceChildren(...notes);
  }

  #wayOut() {
    if (!/^This conversation has/.test(this.message.problem)) return null;
    return h("button", { type: "button", class: "link", on: { click: () => this.actions.newConversation() } }, "New conversation");
  }

  #finalFooter(siblings) {
    const { message } = this;
    const copy = iconButton("copy", "Copy the answer", () => copyFrom(copy, message.text));
    const save = (text) => this.actions.edit(message, text, []);
    const edit = () => this.editForm("Save", save, () => this.show(siblings, null));
    const again = iconButton("redo", "Answer again", () => this.actions.retry(message));
    const change = iconButton("edit", "Edit the answer", edit, { "data-action": "edit" });
    const asks = message.problem || message.finish === "broken"; // the note has a button for it
    const buttons = [message.text && copy, !asks && again, message.text && change].filter(Boolean);
    const footer = this.footer(siblings, buttons);
    const parts = [server.models.length > 1 && message.model, ...statsParts(message.stats)].filter(Boolean);
    footer.append(h("span", { class: "stats", title: statsTitle(message.stats) }, parts.join(" · ")));
    return footer;
  }
}

function progressNote(part) {
  const percent = Math.round(100 * part);
  return h("p", { class: "note" }, h("progress", { max: 100, value: percent, "aria-label": "Prompt read" }), ` Reading the prompt: ${percent}%`);
}

function problemNote(text, buttons) {
  return h("div", { class: "problem" }, icon("warning"), h("div", {}, h("p", {}, text), h("div", { class: "buttons" }, buttons)));
}

function callElement(call, waiting) {
  let text = call.arguments;
  try {
    text = JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    // still being written
  }
  const area = h("textarea", { rows: "2", "aria-label": `Result of ${call.name}`, placeholder: "What the tool answers", value: call.result ?? "" });
  area.addEventListener("input", () => (call.result = area.value));
  const result = waiting
    ? h("label", {}, h("span", {}, "Result"), area)
    : call.result !== undefined && h("div", {}, h("p", { class: "note" }, "Result"), h("pre", { class: "result", tabindex: "0" }, call.result));
  return h("div", { class: "call" }, h("p", { class: "name" }, icon("tool"), "Calls ", h("code", {}, call.name)), codeBlock(text, "json"), result);
}

const round = (number, digits = 1) => number.toLocaleString("en", { maximumFractionDigits: digits, minimumFractionDigits: digits });
const whole = (number) => Math.round(number).toLocaleString("en");
const plural = (number, word) => `${whole(number)} ${word}${number === 1 ? "" : "s"}`;
const seconds = (ms) => (ms < 995 ? `${whole(ms)} ms` : `${round(ms / 1000)} s`);

function liveText(generation) {
  const speed = generation.speed();
  return speed ? `about ${round(speed)} tokens/s` : "";
}

function statsParts(stats) {
  const parts = [];
  if (stats.speed) parts.push(`${round(stats.speed)} tokens/s`);
  if (stats.tokens !== undefined) parts.push(plural(stats.tokens, "token"));
  if (stats.prompt !== undefined) parts.push(`prompt ${whole(stats.prompt)}${stats.cached ? `, ${whole(stats.cached)} cached` : ""}`);
  return parts;
}

function statsTitle(stats) {
  const parts = [];
  if (stats.firstMs !== undefined) parts.push(`First token after ${seconds(stats.firstMs)}`);
  if (stats.promptSpeed) parts.push(`prompt read at ${round(stats.promptSpeed)} tokens/s`);
  return parts.join(", ");
}
