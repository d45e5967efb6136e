// The box where a message is written: text, images, send and stop.

import { $, icon, toast } from "./dom.js";
import { imageItem } from "./message_view.js";
import { remember, remembered } from "./store.js";

const MAX_IMAGES = 16;
const MAX_SIDE = 2048; // pixels; vision towers take less, and requests and the browser's storage stay small
const AS_THEY_ARE = ["image/png", "image/jpeg", "image/webp", "image/gif"];

export class Composer {
  /** `hooks`: send(text, images), stop(), editLast(), sees() -> whether the model takes images. */
  constructor(hooks) {
    this.hooks = hooks;
    this.images = [];
    this.area = $("#message");
    this.button = $("#send");
    this.area.value = remembered("draft", "");
    this.area.addEventListener("input", () => this.#changed());
    this.area.addEventListener("keydown", (event) => this.#key(event));
    this.area.addEventListener("paste", (event) => this.#take(event, event.clipboardData));
    $("#composer").addEventListener("submit", (event) => (event.preventDefault(), this.#submit()));
    $("#attach").append(icon("image"));
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
    this.#drawImages();
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
    const label = "Add an image";
    $("#attach").hidden = !sees;
    $("#attach").title = "Add an image (or paste, or drop one)";
    $("#attach").setAttribute("aria-label", label);
  }

  #submit() {
    if (this.writing) {
      this.hooks.stop();
      return;
    }
    const text = this.area.value;
    if (!text.trim() && !this.images.length) return;
    if (this.hooks.send(text, this.images)) this.setText("");
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
    this.button.disabled = !this.writing && !this.area.value.trim() && !this.images.length;
    remember("draft", this.area.value);
  }

  // ---------------------------------------------------------------------------------------------------------- images

  #watchDrops() {
    const hasFiles = (event) => event.dataTransfer?.types.includes("Files");
    document.addEventListener("dragover", (event) => {
      if (!hasFiles(event)) return;
      event.preventDefault();
      document.body.classList.toggle("dropping", this.hooks.sees());
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
    const images = files.filter((file) => file.type.startsWith("image/"));
    if (!images.length) return toast("Only images can be added.");
    if (!this.hooks.sees()) return toast("This model takes no images.");
    for (const file of images) {
      if (this.images.length >= MAX_IMAGES) return toast(`A message takes at most ${MAX_IMAGES} images.`);
      try {
        this.images.push(await imageAddress(file));
      } catch {
        toast(`${file.name} cannot be read as an image.`);
      }
    }
    this.#drawImages();
    this.#changed();
    this.focus();
  }

  #drawImages() {
    $("#attachments").replaceChildren(...this.images.map((url, index) => imageItem(url, index, () => {
      this.images = this.images.filter((_, other) => other !== index);
      this.#drawImages();
      this.#changed();
      this.focus();
    })));
  }
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
