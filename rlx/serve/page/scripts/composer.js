// The box where a message is written: text, images, text files, send and stop.

import { $, h, icon, iconButton, toast } from "./dom.js";
import { imageItem } from "./message_view.js";
import { remember, remembered } from "./store.js";

const MAX_IMAGES = 16;
const MAX_SIDE = 2048; // pixels; vision towers take less, and requests and the browser's storage stay small
const MAX_TEXT = 1 << 18; // bytes of a text file; a context holds less
const AS_THEY_ARE = ["image/png", "image/jpeg", "image/webp", "image/gif"];

export class Composer {
  /** `hooks`: send(text, images, typed), stop(), editLast(), sees() -> whether the model takes images. */
  constructor(hooks) {
    this.hooks = hooks;
    this.images = [];
    this.files = []; // texts: name, text
    this.area = $("#message");
    this.button = $("#send");
    this.area.value = remembered("draft", "");
    this.area.addEventListener("input", () => this.#changed());
    this.area.addEventListener("keydown", (event) => this.#key(event));
    this.area.addEventListener("paste", (event) => this.#take(event, event.clipboardData));
    $("#composer").addEventListener("submit", (event) => (event.preventDefault(), this.#submit()));
    $("#attach").append(icon("attach"));
    $("#attach").addEventListener("click", () => $("#attach-file").click());
    $("#attach-file").addEventListener("change", (event) => {
      this.addFiles([...event.target.files]);
      event.target.value = "";
    });
    this.#watchDrops();
    this.setWriting(false);
    this.#changed();
  }

  focus() {
    this.area.focus();
  }

  setText(text, images = []) {
    this.area.value = text;
    this.images = images;
    this.files = [];
    this.#drawAttached();
    this.#changed();
  }

  /** While an answer is written, the button stops it. */
  setWriting(writing) {
    this.writing = writing;
    const label = writing ? "Stop the answer" : "Send the message";
    this.button.replaceChildren(icon(writing ? "stop" : "send"));
    this.button.setAttribute("aria-label", label);
    this.button.title = writing ? "Stop (Esc)" : "Send (Enter)";
    this.button.classList.toggle("stop", writing);
    this.#changed();
  }

  setSees(sees) {
    const label = sees ? "Add an image or a text file" : "Add a text file";
    $("#attach").hidden = false;
    $("#attach").title = `${label} (or paste, or drop one)`;
    $("#attach").setAttribute("aria-label", label);
  }

  #submit() {
    if (this.writing) {
      this.hooks.stop();
      return;
    }
    const text = [...this.files.map(fenced), this.area.value].filter((part) => part.trim()).join("\n\n");
    if (!text && !this.images.length) return;
    if (this.hooks.send(text, this.images, this.area.value)) this.setText("");
  }

  #key(event) {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
      event.preventDefault();
      if (!this.writing) this.#submit();
    } else if (event.key === "ArrowUp" && !this.area.value && !this.writing && this.hooks.editLast()) {
      event.preventDefault();
    }
  }

  #changed() {
    this.area.style.height = "auto";
    this.area.style.height = `${Math.min(this.area.scrollHeight, innerHeight * 0.4)}px`;
    this.button.disabled = !this.writing && !this.area.value.trim() && !this.images.length && !this.files.length;
    remember("draft", this.area.value);
  }

  // ---------------------------------------------------------------------------------------------------------- images

  #watchDrops() {
    const hasFiles = (event) => event.dataTransfer?.types.includes("Files");
    document.addEventListener("dragover", (event) => {
      if (!hasFiles(event)) return;
      event.preventDefault();
      document.body.classList.add("dropping");
    });
    document.addEventListener("dragleave", (event) => {
      if (!event.relatedTarget) document.body.classList.remove("dropping");
    });
    document.addEventListener("drop", (event) => {
      document.body.classList.remove("dropping");
      if (hasFiles(event)) this.#take(event, event.dataTransfer, true);
    });
  }

  #take(event, data, always = false) {
    const files = [...(data?.files ?? [])];
    if (files.length || always) event.preventDefault(); // a file that is dropped would replace the page
    if (files.length) this.addFiles(files);
  }

  async addFiles(files) {
    for (const file of files) {
      const isImage = file.type.startsWith("image/") && file.type !== "image/svg+xml";
      const problem = isImage ? await this.#addImage(file) : await this.#addText(file);
      if (problem) toast(problem);
    }
    this.#attachedChanged();
  }

  async #addImage(file) {
    if (!this.hooks.sees()) return "This model takes no images.";
    if (this.images.length >= MAX_IMAGES) return `A message takes at most ${MAX_IMAGES} images.`;
    try {
      this.images.push(await imageAddress(file));
    } catch {
      return `${file.name} cannot be read as an image.`;
    }
  }

  async #addText(file) {
    if (file.size > MAX_TEXT) return `${file.name} is too large: a text file has at most ${MAX_TEXT >> 10} KiB.`;
    try {
      const text = new TextDecoder("utf-8", { fatal: true }).decode(await file.arrayBuffer());
      if (text.includes("\0")) throw new Error("a zero byte");
      this.files.push({ name: file.name, text });
    } catch {
      return `${file.name} is no text file.`;
    }
  }

  #attachedChanged() {
    this.#drawAttached();
    this.#changed();
    this.focus();
  }

  #drawAttached() {
    const images = this.images.map((url, index) => imageItem(url, index, () => this.#remove("images", index)));
    const files = this.files.map((file, index) => this.#fileItem(file, index));
    $("#attachments").replaceChildren(...images, ...files);
  }

  #fileItem(file, index) {
    const remove = iconButton("close", `Remove ${file.name}`, () => this.#remove("files", index));
    return h("li", { class: "file" }, file.name, remove);
  }

  #remove(kind, index) {
    this[kind] = this[kind].filter((_, other) => other !== index);
    this.#attachedChanged();
  }
}

/** A text file in a message: its name, and its text in a fence that does not stand in it. */
function fenced({ name, text }) {
  const ticks = Math.max(2, ...(text.match(/`+/g) ?? []).map((run) => run.length)) + 1;
  const language = /\.(\w{1,12})$/.exec(name)?.[1] ?? "";
  return `${name}:\n${"`".repeat(ticks)}${language}\n${text.replace(/\n$/, "")}\n${"`".repeat(ticks)}`;
}

/** A file as a data address: unchanged, unless it is large or of a type that servers do not read. */
async function imageAddress(file) {
  const bitmap = await createImageBitmap(file);
  const scale = Math.min(1, MAX_SIDE / Math.max(bitmap.width, bitmap.height));
  if (scale === 1 && AS_THEY_ARE.includes(file.type)) return readAddress(file);
  const canvas = new OffscreenCanvas(Math.max(1, Math.round(bitmap.width * scale)), Math.max(1, Math.round(bitmap.height * scale)));
  canvas.getContext("2d").drawImage(bitmap, 0, 0, canvas.width, canvas.height);
  const type = file.type === "image/jpeg" ? "image/jpeg" : "image/png";
  return readAddress(await canvas.convertToBlob({ type, quality: 0.92 }));
}

export const readAddress = (blob) =>
  new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(reader.result);
    reader.onerror = () => reject(reader.error);
    reader.readAsDataURL(blob);
  });
