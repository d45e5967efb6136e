// What stays in this browser: conversations in IndexedDB, small choices in localStorage.

import { Conversation } from "./conversation.js";

const DATABASE = "rlx";
const TABLE = "conversations";

const settled = (request) =>
  new Promise((resolve, reject) => {
    request.onsuccess = () => resolve(request.result);
    request.onerror = () => reject(request.error);
  });

/** The conversations of this browser. Where it keeps none (some private windows), they live until the page closes. */
export class Store {
  #database = null;
  #channel = "BroadcastChannel" in window ? new BroadcastChannel(DATABASE) : null;

  /** Opens it; false if nothing can be kept. */
  async open() {
    try {
      const request = indexedDB.open(DATABASE, 1);
      request.onupgradeneeded = () => request.result.createObjectStore(TABLE, { keyPath: "id" });
      this.#database = await settled(request);
      return true;
    } catch {
      return false;
    }
  }

  #table(mode) {
    return this.#database.transaction(TABLE, mode).objectStore(TABLE);
  }

  /** All conversations, the newest first. A damaged one is left where it is, and out of the list. */
  async all() {
    if (!this.#database) return [];
    const records = await settled(this.#table("readonly").getAll());
    const conversations = records.flatMap((record) => {
      try {
        return [Conversation.from(record)];
      } catch {
        return [];
      }
    });
    return conversations.sort((a, b) => b.updated - a.updated);
  }

  /** Writes a conversation; throws the browser's error, say that the disk is full. */
  async save(conversation) {
    if (!this.#database) return;
    await settled(this.#table("readwrite").put({ ...conversation }));
    this.#channel?.postMessage(conversation.id);
  }

  async remove(conversation) {
    if (!this.#database) return;
    await settled(this.#table("readwrite").delete(conversation.id));
    this.#channel?.postMessage(conversation.id);
  }

  /** Calls back with the id of a conversation that another tab has changed. */
  onOtherTab(callback) {
    if (this.#channel) this.#channel.onmessage = (event) => callback(event.data);
  }

  async load(id) {
    const record = this.#database && (await settled(this.#table("readonly").get(id)));
    return record ? Conversation.from(record) : null;
  }
}

/** A small value in localStorage, by name. */
export function remembered(name, other) {
  try {
    return JSON.parse(localStorage.getItem(`rlx.${name}`)) ?? other;
  } catch {
    return other;
  }
}

export function remember(name, value) {
  try {
    localStorage.setItem(`rlx.${name}`, JSON.stringify(value));
  } catch {
    // storage is off: the choice holds until the page closes
  }
}
