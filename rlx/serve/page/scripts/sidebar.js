// The list of conversations, at the left: choose, rename, export, delete, search.

import { $, h, iconButton } from "./dom.js";

const DAY = 86_400_000;
const MANY = 8; // from this number of conversations on, there is a search box

export class Sidebar {
  /** `hooks`: open(c), rename(c, title), save(c), remove(c), running(c) -> whether an answer is being written. */
  constructor(hooks) {
    this.hooks = hooks;
    this.list = $("#conversations");
    this.search = $("#search");
    this.search.addEventListener("input", () => this.show(this.conversations, this.current));
  }

  show(conversations, current) {
    this.conversations = conversations;
    this.current = current;
    if (this.list.querySelector("input")) return; // a title is being written
    const focused = this.list.contains(document.activeElement) && document.activeElement.dataset.id;
    this.search.hidden = conversations.length < MANY && !this.search.value;
    const found = conversations.filter((conversation) => matches(conversation, this.search.value));
    let group = null;
    this.list.replaceChildren(...found.flatMap((conversation) => {
      const name = dayName(conversation.updated);
      const heading = name === group ? [] : [h("li", { class: "day" }, (group = name))];
      return [...heading, this.#item(conversation)];
    }));
    if (!found.length && this.search.value) this.list.append(h("li", { class: "note" }, "Nothing found."));
    if (focused) this.list.querySelector(`[data-id="${focused}"]`)?.focus();
  }

  #item(conversation) {
    const { id, title } = conversation;
    const shown = id === this.current.id;
    const open = h("button", { type: "button", class: "open", "data-id": id, "aria-current": shown ? "true" : null, title }, title || "New conversation");
    open.addEventListener("click", () => this.hooks.open(conversation));
    open.addEventListener("dblclick", () => this.#rename(item, conversation));
    open.addEventListener("keydown", (event) => {
      if (event.key === "F2") this.#rename(item, conversation);
      if (event.key === "Delete") this.hooks.remove(conversation);
    });
    const actions = h("span", { class: "actions" },
      iconButton("edit", `Rename ${title}`, () => this.#rename(item, conversation)),
      iconButton("save", `Export ${title}`, () => this.hooks.save(conversation)),
      iconButton("trash", `Delete ${title}`, () => this.hooks.remove(conversation)));
    const classes = ["conversation", shown && "shown", this.hooks.running(conversation) && "running"].filter(Boolean).join(" ");
    const item = h("li", { class: classes }, open, actions);
    return item;
  }

  #rename(item, conversation) {
    const input = h("input", { type: "text", value: conversation.title, "aria-label": "Title", maxlength: "200" });
    let open = true;
    const done = (keep) => {
      if (!open) return;
      open = false;
      input.remove();
      if (keep && input.value.trim()) this.hooks.rename(conversation, input.value.trim());
      this.show(this.conversations, this.current);
      this.list.querySelector(`[data-id="${conversation.id}"]`)?.focus();
    };
    input.addEventListener("blur", () => done(true));
    input.addEventListener("keydown", (event) => {
      if (event.key === "Enter") done(true);
      if (event.key === "Escape") (event.stopPropagation(), done(false));
    });
    item.replaceChildren(input);
    input.select();
  }
}

function matches(conversation, text) {
  const sought = text.trim().toLowerCase();
  if (!sought || conversation.title.toLowerCase().includes(sought)) return true;
  return Object.values(conversation.messages).some((message) => message.text.toLowerCase().includes(sought));
}

function dayName(time) {
  const days = Math.floor((new Date().setHours(24, 0, 0, 0) - time) / DAY);
  if (days < 1) return "Today";
  if (days < 2) return "Yesterday";
  return days < 7 ? "This week" : "Earlier";
}
