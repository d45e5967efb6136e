// A conversation: a tree of messages, of which one path is shown. To edit a message or to ask again adds a branch beside
// the old one, so nothing is lost. Pure data: no elements, no requests.

const MAX_TITLE = 60;

/** What a conversation may ask of a model, as the server names it, and the limits of each value. `absent` is shown where
 *  neither the user nor the server has a value. */
export const NUMBERS = {
  temperature: { label: "Temperature", min: 0, max: 5, step: 0.05, hint: "0 always takes the likeliest token; higher values vary more" },
  top_p: { label: "Top p", min: 0, max: 1, step: 0.01, hint: "Only the likeliest tokens that together have this probability" },
  top_k: { label: "Top k", min: 0, max: 100000, step: 1, hint: "Only this many of the likeliest tokens; 0 for all" },
  min_p: { label: "Min p", min: 0, max: 1, step: 0.01, hint: "Only tokens at least this likely, relative to the likeliest" },
  seed: { label: "Seed", absent: "random", min: 0, max: 2 ** 53 - 1, step: 1, hint: "The same seed and messages give the same answer" },
  max_tokens: { label: "Max tokens", absent: "no limit", min: 1, max: 1e9, step: 1, hint: "The longest answer" },
};

export const newId = () => Array.from(crypto.getRandomValues(new Uint8Array(12)), (byte) => byte.toString(16).padStart(2, "0")).join("");

export const noSettings = () => ({ system: "", sampling: {}, thinking: "default", format: "text", schema: "", tools: "" });

export class Conversation {
  constructor(settings = noSettings()) {
    const now = Date.now();
    Object.assign(this, { id: newId(), title: "", named: false, created: now, updated: now, messages: {}, first: [], chosen: null });
    this.settings = structuredClone(settings);
  }

  /** From what `JSON.stringify` wrote, or a foreign file: only known fields of the right type are taken. Throws TypeError. */
  static from(data) {
    return Object.assign(new Conversation(), checkedConversation(data));
  }

  /** The messages shown, from the first to the last. */
  path() {
    const path = [];
    for (let id = this.chosen; id !== null; id = this.messages[id].chosen) path.push(this.messages[id]);
    return path;
  }

  get(id) {
    return this.messages[id];
  }

  /** The messages that stand at this one's place: itself, and what it was before edits or other answers. */
  siblings(message) {
    return message.parent === null ? this.first : this.messages[message.parent].children;
  }

  /** Adds a message below `parent` (null: at the beginning) and shows it. The first one that is `typed` is the title. */
  add(parent, fields, typed = fields.text) {
    const message = { id: newId(), parent, children: [], chosen: null, created: Date.now(), ...fields };
    this.messages[message.id] = message;
    (parent === null ? this.first : this.messages[parent].children).push(message.id);
    this.choose(message);
    if (!this.named && parent === null && message.role === "user") this.title = titleOf(typed.trim() || message.text.trim(), message.images);
    this.updated = Date.now();
    return message;
  }

  choose(message) {
    if (message.parent === null) this.chosen = message.id;
    else this.messages[message.parent].chosen = message.id;
  }

  isEmpty() {
    return this.first.length === 0;
  }
}

function titleOf(text, images) {
  const line = text.split("\n")[0].replace(/\s+/g, " ") || (images.length ? "Image" : "Conversation");
  return line.length > MAX_TITLE ? `${line.slice(0, MAX_TITLE - 1)}…` : line;
}

// ---------------------------------------------------------------------------------------------------------- request

/** The messages of a path as the server takes them. An answer's thinking goes back only with its tool calls. */
export function requestMessages(path, system) {
  const messages = system.trim() ? [{ role: "system", content: system }] : [];
  for (const message of path) {
    if (message.role === "user") messages.push({ role: "user", content: userContent(message) });
    else messages.push(...answerMessages(message));
  }
  return messages;
}

function userContent(message) {
  if (!message.images.length) return message.text;
  const images = message.images.map((url) => ({ type: "image_url", image_url: { url } }));
  return message.text ? [...images, { type: "text", text: message.text }] : images;
}

function answerMessages(message) {
  const answer = { role: "assistant", content: message.text };
  if (!message.calls.length) return [answer];
  answer.tool_calls = message.calls.map(({ id, name, arguments: text }) => ({ id, type: "function", function: { name, arguments: text } }));
  if (message.thinking) answer.reasoning_content = message.thinking;
  return [answer, ...message.calls.map((call) => ({ role: "tool", tool_call_id: call.id, content: call.result ?? "" }))];
}

/** The body of a request for the next answer, or for the rest of the last one. Throws SettingsError if a box of the
 *  settings holds no valid JSON. */
export function requestBody(path, settings, model) {
  const body = { model, messages: requestMessages(path, settings.system), stream: true };
  Object.assign(body, { stream_options: { include_usage: true }, return_progress: true });
  if (path.at(-1)?.role === "assistant" && !path.at(-1).calls.length) body.continue_final_message = true;
  for (const name of Object.keys(NUMBERS)) {
    if (settings.sampling[name] !== undefined) body[name] = settings.sampling[name];
  }
  if (settings.thinking !== "default") body.chat_template_kwargs = { enable_thinking: settings.thinking === "on" };
  if (settings.format === "json") body.response_format = { type: "json_object" };
  if (settings.format === "schema") {
    body.response_format = { type: "json_schema", json_schema: { name: "answer", schema: parseSchema(settings.schema), strict: true } };
  }
  const tools = parseTools(settings.tools);
  if (tools.length) body.tools = tools;
  return body;
}

/** A box of the settings holds something that cannot be sent: `field` names it. */
export class SettingsError extends Error {
  constructor(field, message) {
    super(message);
    this.field = field;
  }
}

export function parseSchema(text) {
  const schema = parseJson("schema", text, "The JSON schema");
  if (typeof schema === "boolean" || isObject(schema)) return schema;
  throw new SettingsError("schema", "The JSON schema must be an object, such as {\"type\": \"object\"}.");
}

/** Tools as OpenAI writes them: a list of {type: "function", function: {...}}; a list of the functions alone is taken, too. */
export function parseTools(text) {
  if (!text.trim()) return [];
  const tools = parseJson("tools", text, "The list of tools");
  const list = Array.isArray(tools) ? tools : [tools];
  return list.map((tool, index) => {
    const named = isObject(tool) && (isObject(tool.function) ? tool.function : tool);
    if (!named || typeof named.name !== "string") throw new SettingsError("tools", `Tool ${index + 1} has no name.`);
    return tool.function ? tool : { type: "function", function: tool };
  });
}

function parseJson(field, text, what) {
  if (!text.trim()) throw new SettingsError(field, `${what} is empty.`);
  try {
    return JSON.parse(text);
  } catch (error) {
    throw new SettingsError(field, `${what} is not JSON: ${error.message}`);
  }
}

// ------------------------------------------------------------------------------------------------------------- files

const FILE_FORMAT = "rlx-conversations";

export const exportText = (conversations) => JSON.stringify({ format: FILE_FORMAT, version: 1, conversations }, null, 1);

/** The conversations of an exported file. Throws TypeError with a reason. */
export function importText(text) {
  let file;
  try {
    file = JSON.parse(text);
  } catch {
    throw new TypeError("the file is not JSON");
  }
  if (!isObject(file) || file.format !== FILE_FORMAT) throw new TypeError("the file holds no conversations of this page");
  if (file.version !== 1) throw new TypeError(`the file has version ${file.version}; this page reads version 1`);
  return check(Array.isArray(file.conversations), "the list of conversations is missing") && file.conversations.map((data) => Conversation.from(data));
}

const isObject = (value) => typeof value === "object" && value !== null && !Array.isArray(value);
const textOf = (value) => (typeof value === "string" ? value : "");
const numberOr = (value, other) => (Number.isFinite(value) ? value : other);

function check(condition, reason) {
  if (!condition) throw new TypeError(reason);
  return true;
}

function checkedConversation(data) {
  check(isObject(data) && isObject(data.messages), "a conversation has no messages");
  const messages = {};
  for (const [id, message] of Object.entries(data.messages)) messages[id] = checkedMessage(id, message);
  const first = checkedIds(data.first, messages, null);
  let reached = 0;
  const pending = [...first];
  while (pending.length) {
    const message = messages[pending.pop()];
    reached += 1;
    check(reached <= Object.keys(messages).length, "messages stand below themselves");
    message.children = checkedIds(message.children, messages, message.id);
    message.chosen = chosenOf(message.chosen, message.children);
    pending.push(...message.children);
  }
  check(reached === Object.keys(messages).length, "a message has no place");
  return {
    ...(/^[\da-f]{24}$/.test(data.id) && { id: data.id }), title: textOf(data.title).slice(0, 200), named: data.named === true,
    created: numberOr(data.created, Date.now()), updated: numberOr(data.updated, Date.now()),
    messages, first, chosen: chosenOf(data.chosen, first), settings: checkedSettings(data.settings),
  };
}

const chosenOf = (id, ids) => (ids.includes(id) ? id : (ids.at(-1) ?? null));

function checkedIds(ids, messages, parent) {
  check(Array.isArray(ids) && ids.every((id) => Object.hasOwn(messages, id) && messages[id].parent === parent), "a message is missing");
  return ids;
}

function checkedMessage(id, data) {
  check(isObject(data) && (data.role === "user" || data.role === "assistant"), "a message has neither the role user nor assistant");
  const message = { id, parent: typeof data.parent === "string" ? data.parent : null, children: data.children, chosen: data.chosen ?? null };
  Object.assign(message, { created: numberOr(data.created, Date.now()), role: data.role, text: textOf(data.text) });
  const list = (value) => (Array.isArray(value) ? value : []);
  if (data.role === "user") {
    message.images = list(data.images).filter((url) => /^data:image\/[\w.+-]+;base64,[\w+/=]+$/.test(url));
    return message;
  }
  const calls = list(data.calls).filter(isObject);
  message.calls = calls.map((call) => ({
    id: textOf(call.id), name: textOf(call.name), arguments: textOf(call.arguments),
    ...(typeof call.result === "string" && { result: call.result }),
  }));
  const stats = isObject(data.stats) ? Object.entries(data.stats).filter(([, value]) => Number.isFinite(value)) : [];
  return Object.assign(message, {
    thinking: textOf(data.thinking), model: textOf(data.model), finish: textOf(data.finish) || "broken", problem: textOf(data.problem),
    json: data.json === true, stats: Object.fromEntries(stats),
  });
}

function checkedSettings(data) {
  const settings = noSettings();
  if (!isObject(data)) return settings;
  for (const name of ["system", "schema", "tools"]) settings[name] = textOf(data[name]);
  if (["default", "on", "off"].includes(data.thinking)) settings.thinking = data.thinking;
  if (["text", "json", "schema"].includes(data.format)) settings.format = data.format;
  for (const name of Object.keys(NUMBERS)) {
    if (Number.isFinite(data.sampling?.[name])) settings.sampling[name] = data.sampling[name];
  }
  return settings;
}
