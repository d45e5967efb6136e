// The settings of a conversation, at the right: system prompt, sampling, thinking, form of the answer, tools, key.

import { apiKey } from "./api.js";
import { NUMBERS, noSettings, parseSchema, parseTools, SettingsError } from "./conversation.js";
import { $, h, iconButton } from "./dom.js";
import { server } from "./server.js";

const FORMATS = { text: "Text", json: "JSON object", schema: "JSON schema" };
const THINKING = { default: "As the model does", on: "On", off: "Off" };
const SCHEMA_EXAMPLE = '{\n  "type": "object",\n  "properties": {\n    "name": {"type": "string"}\n  },\n  "required": ["name"]\n}';
const TOOLS_EXAMPLE = '[{\n  "name": "weather",\n  "description": "The weather of a city",\n  "parameters": {\n    "type": "object",\n    "properties": {"city": {"type": "string"}}\n  }\n}]';

export class SettingsPanel {
  /** `hooks`: changed(settings), close(), askKey(). */
  constructor(hooks) {
    this.hooks = hooks;
    this.element = $("#settings");
  }

  /** Draws the panel for these settings, which it then changes. */
  show(settings) {
    this.settings = settings;
    const reset = h("button", { type: "button", class: "link", on: { click: () => this.#reset() } }, "Reset all");
    this.element.replaceChildren(
      h("header", {}, h("h2", {}, "Settings"), reset, iconButton("close", "Close the settings", () => this.hooks.close())),
      h("div", { class: "panel" },
        h("p", { class: "note" }, "For this conversation; the next one begins with the same."),
        this.#text("system", "System prompt", "Instructions that stand before the conversation", 4),
        h("fieldset", {}, h("legend", {}, "Sampling"), h("div", { class: "numbers" }, Object.keys(NUMBERS).map((name) => this.#number(name)))),
        server.thinks && this.#select("thinking", "Thinking", THINKING),
        this.#format(),
        this.#tools(),
        this.#server()),
    );
  }

  #change() {
    this.hooks.changed(this.settings);
  }

  #reset() {
    Object.assign(this.settings, noSettings());
    this.#change();
    this.show(this.settings);
    this.element.querySelector("textarea").focus();
  }

  #text(name, label, placeholder, rows, error = null) {
    const id = `set-${name}`;
    const described = error ? { "aria-describedby": error.id } : {};
    const area = h("textarea", { id, rows, placeholder, value: this.settings[name], spellcheck: name === "system" ? "true" : "false", class: error ? "source" : null, ...described });
    area.addEventListener("input", () => {
      this.settings[name] = area.value;
      this.#change();
    });
    return h("div", { class: "field" }, h("label", { for: id }, label), area, error);
  }

  #number(name) {
    const { label, hint, min, max, step, absent = "default" } = NUMBERS[name];
    const id = `set-${name}`;
    const standard = server.defaults[name];
    const placeholder = typeof standard === "number" ? String(+standard.toFixed(3)) : absent;
    const input = h("input", { id, type: "number", min, max, step: step < 1 ? "any" : step, placeholder, inputmode: "decimal", value: this.settings.sampling[name] ?? "", "aria-describedby": `${id}-hint` });
    const note = h("span", { id: `${id}-hint`, class: "unseen" }, hint);
    input.addEventListener("input", () => {
      const valid = input.checkValidity();
      input.setAttribute("aria-invalid", !valid);
      note.textContent = valid ? hint : input.validationMessage;
      note.className = valid ? "unseen" : "error";
      if (!valid) return;
      if (input.value === "") delete this.settings.sampling[name];
      else this.settings.sampling[name] = Number(input.value);
      this.#change();
    });
    return h("div", { class: "field", title: hint }, h("label", { for: id }, label), input, note);
  }

  #select(name, label, choices) {
    const id = `set-${name}`;
    const options = Object.entries(choices).map(([value, text]) => h("option", { value, selected: this.settings[name] === value }, text));
    const select = h("select", { id }, options);
    select.addEventListener("change", () => {
      this.settings[name] = select.value;
      this.#change();
    });
    return h("div", { class: "field" }, h("label", { for: id }, label), select);
  }

  #format() {
    const error = h("p", { id: "schema-error", class: "error", role: "status" });
    const box = this.#text("schema", "JSON schema", SCHEMA_EXAMPLE, 8, error);
    const refresh = () => {
      box.hidden = this.settings.format !== "schema";
      showError(error, box, this.settings.schema, parseSchema);
    };
    box.addEventListener("input", refresh);
    const choices = Object.entries(FORMATS).map(([value, text]) => {
      const input = h("input", { type: "radio", name: "format", value, checked: this.settings.format === value });
      input.addEventListener("change", () => {
        this.settings.format = value;
        refresh();
        this.#change();
      });
      return h("label", {}, input, h("span", {}, text));
    });
    refresh();
    return h("fieldset", {}, h("legend", {}, "Form of the answer"), h("div", { class: "choices" }, choices), box);
  }

  #tools() {
    const error = h("p", { id: "tools-error", class: "error", role: "status" });
    const box = this.#text("tools", "Functions that the model may call, as JSON", TOOLS_EXAMPLE, 8, error);
    const refresh = () => showError(error, box, this.settings.tools, parseTools);
    box.addEventListener("input", refresh);
    refresh();
    const hint = h("p", { class: "note" }, "This page calls nothing: it shows the call, and you write its result.");
    return h("details", { class: "more", open: Boolean(this.settings.tools.trim()) }, h("summary", {}, "Tools"), box, hint);
  }

  #server() {
    const rows = Object.entries(server.facts).filter(([, value]) => value).map(([name, value]) => h("div", {}, h("dt", {}, name), h("dd", {}, value)));
    const key = apiKey.get() && h("button", { type: "button", class: "link", on: { click: () => this.hooks.askKey() } }, "Change the API key");
    return h("section", { "aria-label": "Server", class: "facts" }, h("dl", {}, rows), key);
  }
}

function showError(error, box, text, parse) {
  error.textContent = "";
  try {
    if (text.trim()) parse(text);
  } catch (problem) {
    if (!(problem instanceof SettingsError)) throw problem;
    error.textContent = problem.message;
  }
  box.querySelector("textarea").setAttribute("aria-invalid", error.textContent !== "");
}
