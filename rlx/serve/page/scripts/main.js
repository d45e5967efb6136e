// The page: its state, and what happens when something is pressed.

import { apiKey } from "./api.js";
import { Composer } from "./composer.js";
import { Conversation, exportText, importText, noSettings, requestBody, SettingsError } from "./conversation.js";
import { $, $$, announce, download, h, icon, iconButton, toast } from "./dom.js";
import { Generation, newAnswer } from "./generation.js";
import { AnswerView, QuestionView } from "./message_view.js";
import { server } from "./server.js";
import { SettingsPanel } from "./settings_panel.js";
import { Sidebar } from "./sidebar.js";
import { remember, remembered, Store } from "./store.js";
import { showWelcome } from "./welcome.js";

const store = new Store();
const running = new Map(); // conversation id -> Generation
let conversations = []; // that have messages, the newest first
let current = new Conversation(remembered("settings", noSettings()));
let views = new Map(); // message id -> view, of the messages shown

// ------------------------------------------------------------------------------------------------------------ saving

let storageWorks = true;

async function save(conversation) {
  if (!conversations.includes(conversation)) return;
  try {
    await store.save(conversation);
  } catch (error) {
    if (storageWorks) toast(`This browser cannot keep the conversation: ${error.message}`);
    storageWorks = false;
  }
}

function keep(conversation) {
  if (!conversations.includes(conversation)) conversations.unshift(conversation);
  conversations.sort((a, b) => b.updated - a.updated);
  return save(conversation);
}

// ------------------------------------------------------------------------------------------------------------ showing

function showAll() {
  sessionStorage.setItem("rlx.current", current.id);
  $("#title").textContent = current.title || "New conversation";
  document.title = current.title ? `${current.title} – rlx` : "rlx";
  showSidebar();
  showMessages();
  showComposer();
  if (!$("#settings").hidden) settingsPanel.show(current.settings);
}

const showSidebar = () => sidebar.show(conversations, current);

function showMessages() {
  const path = current.path();
  const kept = views;
  views = new Map();
  for (const message of path) {
    const view = kept.get(message.id) ?? new (message.role === "user" ? QuestionView : AnswerView)(message, actions);
    views.set(message.id, view);
    showMessage(message);
  }
  $("#messages").replaceChildren(...[...views.values()].map((view) => view.element));
  $("#welcome").hidden = path.length > 0;
  if (!path.length) showWelcome(send);
  follow(true);
}

function showMessage(message) {
  const generation = running.get(current.id);
  views.get(message.id)?.show(current.siblings(message), generation?.message === message ? generation : null);
}

function showComposer() {
  composer.setWriting(running.has(current.id));
  composer.setSees(server.sees);
  const { thinking, format } = current.settings;
  showChip("#thinking", server.thinks && `Thinking: ${{ default: "auto", on: "on", off: "off" }[thinking]}`, thinking === "on");
  showChip("#format", format !== "text" && (format === "json" ? "JSON object" : "JSON schema"), true);
  const last = current.path().findLast((message) => message.stats?.prompt !== undefined);
  const used = last ? last.stats.prompt + (last.stats.tokens ?? 0) : 0;
  $("#context").hidden = !used || !server.context;
  if (!used || !server.context) return;
  const [tokens, limit] = [used.toLocaleString("en"), server.context.toLocaleString("en")];
  $("#context").replaceChildren(`${tokens} / ${limit}`, h("span", { class: "unseen" }, " tokens of the context"));
  $("#context").title = `${tokens} of the ${limit} tokens of the context`;
  $("#context").classList.toggle("full", used > 0.85 * server.context);
}

function showChip(selector, text, on) {
  $(selector).hidden = !text;
  $(selector).textContent = text || "";
  $(selector).classList.toggle("on", on);
}

// A view of what is written follows the end, unless the user has scrolled away from it.

const scroller = $("#scroller");
const isAtEnd = () => scroller.scrollHeight - scroller.scrollTop - scroller.clientHeight < 48;
let following = true;

function follow(always = false) {
  if (always) following = true;
  if (following) scroller.scrollTop = scroller.scrollHeight;
  $("#to-end").hidden = following || isAtEnd();
}

scroller.addEventListener("scroll", () => {
  following = isAtEnd();
  $("#to-end").hidden = following;
}, { passive: true });

// ---------------------------------------------------------------------------------------------------------- answering

/** Sends a message; `typed` is its text without that of files. */
function send(text, images, typed = text) {
  if (!server.ready) return toast("The server does not answer yet.") ?? false;
  if (running.has(current.id) || !settingsAreValid()) return false;
  const last = current.path().at(-1) ?? null;
  answer(current.add(last?.id ?? null, { role: "user", text, images }, typed));
  return true;
}

function settingsAreValid() {
  try {
    requestBody([], current.settings, server.model);
    return true;
  } catch (error) {
    if (!(error instanceof SettingsError)) throw error;
    toast(error.message);
    openSettings(true);
    const box = $(`#set-${error.field}`);
    const fold = box.closest("details");
    if (fold) fold.open = true;
    box.focus();
    return false;
  }
}

/** Lets the model answer below a message, or go on with `begun`, an answer that ended too early, as a version beside it. */
async function answer(parent, begun = null) {
  const conversation = current;
  const path = conversation.path().slice(0, conversation.path().indexOf(parent) + 1);
  if (begun) path.push(begun);
  const written = begun && { text: begun.text, thinking: begun.thinking };
  const message = conversation.add(parent.id, { ...newAnswer(conversation.settings, server.model), ...written });
  const generation = new Generation(conversation, message, { changed: draw, needsKey: askKey });
  running.set(conversation.id, generation);
  keep(conversation);
  showAll();
  announce("Answering.");
  await generation.run(path, server.model);
  running.delete(conversation.id);
  if (generation.failure?.kind === "network" || generation.failure?.status === 404) connect(); // it may have another model now
  conversation.updated = Date.now();
  await keep(conversation);
  drawNow(generation);
  showSidebar();
  showComposer();
  if (conversation === current) views.get(message.id)?.announceEnd();
}

let frame = 0;
let saving = 0;

/** Draws what has arrived, once for each frame of the screen, and saves it, once a second. */
function draw(generation) {
  saving ||= setTimeout(() => {
    saving = 0;
    running.forEach((each) => save(each.conversation));
  }, 1000);
  frame ||= requestAnimationFrame(() => {
    frame = 0;
    running.forEach(drawNow);
  });
}

function drawNow(generation) {
  if (generation.conversation !== current) return;
  showMessage(generation.message);
  follow();
}

const actions = {
  edit(message, text, images) {
    if (running.has(current.id)) return toast("An answer is being written: stop it first.");
    const fields = message.role === "user" ? { role: "user", text, images } : { ...structuredClone(message), text, finish: "stop", problem: "", stats: {} };
    for (const name of ["id", "parent", "children", "chosen", "created"]) delete fields[name];
    const edited = current.add(message.parent, fields);
    if (message.role === "user") return answer(edited);
    keep(current);
    return showAll();
  },
  retry(message) {
    if (running.has(current.id)) return toast("An answer is being written: stop it first.");
    if (settingsAreValid()) answer(current.get(message.parent));
  },
  goOn(message) {
    if (running.has(current.id)) return toast("An answer is being written: stop it first.");
    if (settingsAreValid()) answer(current.get(message.parent), message);
  },
  choose(id) {
    if (running.has(current.id)) return toast("An answer is being written: stop it first.");
    current.choose(current.get(id));
    keep(current);
    showAll();
    views.get(id)?.article.focus();
  },
  sendResults: (message) => settingsAreValid() && answer(message),
  newConversation: () => newConversation(),
};

function stop() {
  running.get(current.id)?.stop();
}

// ------------------------------------------------------------------------------------------------------ conversations

function open(conversation) {
  current = conversation;
  views = new Map();
  closeSidebarIfOver();
  showAll();
  composer.focus();
}

function newConversation() {
  open(current.isEmpty() ? current : new Conversation(current.settings));
}

async function remove(conversation) {
  running.get(conversation.id)?.stop();
  conversations = conversations.filter((other) => other !== conversation);
  await store.remove(conversation);
  if (conversation === current) open(conversations[0] ?? new Conversation(current.settings));
  showSidebar();
  const back = () => {
    keep(conversation);
    open(conversation);
  };
  toast(`Deleted “${conversation.title}”.`, { label: "Undo", run: back });
}

const fileName = (title) => `${title.toLowerCase().replace(/[^\p{L}\p{N}]+/gu, "-").replace(/^-|-$/g, "").slice(0, 40) || "conversation"}.json`;

async function importFile(file) {
  try {
    const imported = importText(await file.text());
    for (const conversation of imported) {
      conversations = conversations.filter((other) => other.id !== conversation.id);
      await keep(conversation);
    }
    toast(`Imported ${imported.length} conversation${imported.length === 1 ? "" : "s"}.`);
    if (imported.length) open(imported[0]);
  } catch (error) {
    if (!(error instanceof TypeError)) throw error;
    toast(`Cannot import ${file.name}: ${error.message}.`);
  }
}

// --------------------------------------------------------------------------------------------------- panels, dialogs

const isNarrow = matchMedia("(max-width: 860px)");

function setSidebar(shown) {
  document.body.classList.toggle("sidebar-off", !shown);
  $("#sidebar").inert = !shown;
  $("#sidebar-toggle").setAttribute("aria-expanded", shown);
  if (!isNarrow.matches) remember("sidebar", shown);
  setVeil();
}

const sidebarShown = () => !document.body.classList.contains("sidebar-off");

function closeSidebarIfOver() {
  if (isNarrow.matches && sidebarShown()) setSidebar(false);
}

function openSettings(shown) {
  const panel = $("#settings");
  if (shown && panel.hidden) settingsPanel.show(current.settings);
  const held = panel.contains(document.activeElement);
  panel.hidden = !shown;
  document.body.classList.toggle("settings-on", shown);
  $("#settings-toggle").setAttribute("aria-expanded", shown);
  if (shown && isNarrow.matches) setSidebar(false);
  if (shown) panel.querySelector("textarea").focus({ preventScroll: true });
  else if (held) $("#settings-toggle").focus();
  setVeil();
}

/** On a narrow window a panel lies over the conversation, which is then out of reach. */
function setVeil() {
  const covered = isNarrow.matches && (sidebarShown() || !$("#settings").hidden);
  $("#chat").inert = covered;
  document.body.classList.toggle("covered", covered);
}

const THEMES = { auto: ["auto", "Theme: as the system"], light: ["sun", "Theme: light"], dark: ["moon", "Theme: dark"] };

function setTheme(theme) {
  document.documentElement.dataset.theme = theme;
  remember("theme", theme);
  const [name, label] = THEMES[theme];
  const button = $("#theme");
  button.replaceChildren(icon(name));
  button.setAttribute("aria-label", label);
  button.title = label;
}

function nextTheme() {
  const names = Object.keys(THEMES);
  setTheme(names[(names.indexOf(document.documentElement.dataset.theme) + 1) % names.length]);
  announce(THEMES[document.documentElement.dataset.theme][1]);
}

let keyAsked = null; // one dialog for all requests that wait for a key

/** Asks for the API key; true when the user gave one. */
function askKey() {
  keyAsked ??= keyDialog().finally(() => (keyAsked = null));
  return keyAsked;
}

function keyDialog() {
  const dialog = $("#key");
  const had = apiKey.get() !== "";
  const input = h("input", { id: "key-value", type: "password", autocomplete: "off", required: true, pattern: "[!-~]+" });
  const stay = h("input", { type: "checkbox" });
  const form = h("form", { method: "dialog" },
    h("h2", {}, icon("key"), "API key"),
    h("p", { id: "key-note" }, had ? "The server does not take the key that this page has." : "This server answers only with a key."),
    h("label", { for: "key-value" }, "Key"), input,
    h("label", { class: "line" }, stay, "Remember it in this browser"),
    h("div", { class: "buttons" }, h("button", { type: "button", on: { click: () => dialog.close("") } }, "Cancel"),
      h("button", { type: "submit", class: "primary", value: "ok" }, "Use this key")));
  dialog.replaceChildren(form);
  dialog.returnValue = "";
  dialog.showModal();
  input.focus();
  return new Promise((resolve) => {
    dialog.addEventListener("close", () => {
      const given = dialog.returnValue === "ok";
      if (given) apiKey.set(input.value.trim(), stay.checked);
      resolve(given);
    }, { once: true });
  });
}

const SHORTCUTS = [
  ["Enter", "Send the message"], ["Shift+Enter", "Begin a new line"], ["Esc", "Stop the answer, or close what is open"],
  ["↑", "In an empty message box: edit the last message"], ["Alt+N", "New conversation"], ["Alt+I", "Go to the message box"],
  ["Alt+R", "Answer again"], ["Alt+S", "Settings"], ["Alt+L", "List of conversations"], ["Alt+T", "Theme: system, light or dark"],
  ["Alt+K", "These shortcuts"], ["F2, Delete", "In the list: rename or delete a conversation"],
];

function showShortcuts() {
  const dialog = $("#shortcuts");
  if (dialog.open) return dialog.close();
  const keys = (text) => text.split(", ").flatMap((chord, index) => [index ? " " : "", ...chord.split("+").flatMap((key, at) => [at ? " + " : "", h("kbd", {}, key)])]);
  dialog.replaceChildren(
    h("h2", {}, "Keyboard"), iconButton("close", "Close", () => dialog.close(), { class: "quiet corner" }),
    h("dl", {}, SHORTCUTS.map(([chord, text]) => h("div", {}, h("dt", {}, keys(chord)), h("dd", {}, text)))));
  return dialog.showModal();
}

function editLast() {
  const last = current.path().findLast((message) => message.role === "user");
  if (last) views.get(last.id).element.querySelector("[data-action=edit]").click();
  return Boolean(last);
}

function retryLast() {
  const last = current.path().at(-1);
  if (last?.role === "assistant") actions.retry(last);
}

const ALT_KEYS = {
  KeyN: newConversation, KeyI: () => composer.focus(), KeyR: retryLast, KeyT: nextTheme, KeyK: showShortcuts,
  KeyS: () => openSettings($("#settings").hidden), KeyL: () => toggleSidebar(),
};

function toggleSidebar() {
  setSidebar(!sidebarShown());
  if (sidebarShown() && isNarrow.matches) $("#new").focus();
}

document.addEventListener("keydown", (event) => {
  if (event.altKey && !event.ctrlKey && !event.metaKey && ALT_KEYS[event.code]) {
    event.preventDefault();
    ALT_KEYS[event.code]();
  } else if (event.key === "Escape" && !$("dialog[open]")) {
    if (isNarrow.matches && sidebarShown()) (setSidebar(false), $("#sidebar-toggle").focus());
    else if (!$("#settings").hidden && (isNarrow.matches || $("#settings").contains(document.activeElement))) openSettings(false);
    else stop();
  }
});

// -------------------------------------------------------------------------------------------------------------- start

const composer = new Composer({ send, stop, editLast, sees: () => server.sees });
const sidebar = new Sidebar({
  open,
  remove,
  running: (conversation) => running.has(conversation.id),
  save: (conversation) => download(fileName(conversation.title), exportText([conversation])),
  rename(conversation, title) {
    Object.assign(conversation, { title, named: true });
    keep(conversation);
    showAll();
  },
});
const settingsPanel = new SettingsPanel({
  askKey,
  close: () => openSettings(false),
  changed(settings) {
    remember("settings", settings);
    if (!current.isEmpty()) save(current);
    showComposer();
  },
});

function wireButtons() {
  const on = (selector, run) => $(selector).addEventListener("click", run);
  const label = (selector, name, text) => {
    $(selector).append(icon(name));
    $(selector).setAttribute("aria-label", text);
    $(selector).title = text;
  };
  label("#sidebar-toggle", "menu", "Conversations (Alt+L)");
  label("#settings-toggle", "sliders", "Settings (Alt+S)");
  label("#to-end", "down", "Go to the end");
  $("#new").append(icon("plus"), "New conversation");
  on("#new", newConversation);
  on("#sidebar-toggle", toggleSidebar);
  on("#settings-toggle", () => openSettings($("#settings").hidden));
  on("#theme", nextTheme);
  on("#to-end", () => follow(true));
  on("#shortcuts-open", showShortcuts);
  on("#format", () => openSettings(true));
  on("#thinking", () => {
    const names = ["default", "on", "off"];
    current.settings.thinking = names[(names.indexOf(current.settings.thinking) + 1) % 3];
    settingsPanel.hooks.changed(current.settings);
    if (!$("#settings").hidden) settingsPanel.show(current.settings);
  });
  on("#veil", () => (setSidebar(false), openSettings(false)));
  on("#export", () => (conversations.length ? download("rlx-conversations.json", exportText(conversations)) : toast("There is nothing to export yet.")));
  on("#import", () => $("#import-file").click());
  $("#import-file").addEventListener("change", (event) => {
    if (event.target.files.length) importFile(event.target.files[0]);
    event.target.value = "";
  });
  for (const dialog of $$("dialog")) dialog.addEventListener("click", (event) => event.target === dialog && dialog.close(""));
}

let connecting = false;

/** Asks the server what it is, until it answers. */
async function connect() {
  server.ready = false;
  if (connecting) return;
  connecting = true;
  for (let wait = 1; !server.ready; wait = Math.min(2 * wait, 10)) {
    try {
      await server.load();
    } catch (failure) {
      $("#model").textContent = failure.kind === "key" ? "An API key is needed." : failure.message;
      if (failure.kind === "key" && (await askKey())) continue;
      await new Promise((resolve) => setTimeout(resolve, 1000 * wait));
    }
  }
  connecting = false;
  showModel();
  if (current.isEmpty()) showWelcome(send);
  showComposer();
  if (!$("#settings").hidden) settingsPanel.show(current.settings);
}

/** The model's name; of several models a list to choose from. */
function showModel() {
  const held = $("#model").contains(document.activeElement);
  const names = server.models.map((name) => h("option", { value: name, selected: name === server.model }, name));
  const list = h("select", { "aria-label": "Model", on: { change: () => (server.choose(list.value), connect()) } }, names);
  $("#model").replaceChildren(names.length > 1 ? list : server.model);
  if (held) list.focus();
}

async function start() {
  setTheme(remembered("theme", "auto"));
  wireButtons();
  setSidebar(!isNarrow.matches && remembered("sidebar", true));
  isNarrow.addEventListener("change", () => setSidebar(!isNarrow.matches));
  if (!(await store.open())) toast("This browser keeps nothing here: conversations are lost when the page closes.");
  conversations = await store.all();
  current = conversations.find((conversation) => conversation.id === sessionStorage.getItem("rlx.current")) ?? current;
  store.onOtherTab(async (id) => {
    if (running.has(id)) return;
    const changed = await store.load(id);
    conversations = [...conversations.filter((other) => other.id !== id), ...(changed ? [changed] : [])].sort((a, b) => b.updated - a.updated);
    if (current.id === id && changed) [current, views] = [changed, new Map()];
    showAll();
  });
  addEventListener("pagehide", () => running.forEach((generation) => save(generation.conversation)));
  showAll();
  if (!isNarrow.matches) composer.focus();
  await connect();
  current.path().forEach(showMessage); // answers name their model if there are several
}

start();
