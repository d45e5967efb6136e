// The graph as a drawing: to pan, to zoom, and to walk through with the arrow keys.

import { h, s } from "./dom.js";
import { actions } from "./links.js";
import { drawingOf, state } from "./store.js";

const LEAST = 0.05;
const MOST = 4;
const LINE = 15;

/** The stage that is drawn, and how it was last looked at. */
const view = { stage: null, program: null, drawing: null, x: 0, y: 0, zoom: 1 };
let canvas = null;
let root = null;
let boxes = [];

const KINDS = [[/linear|matmul|expert|embedding/, "linear"], [/attention/, "attention"], [/norm|quantize|softmax/, "norm"], [/rope/, "rope"], [/write|conv|delta/, "state"]];
const kindOf = (op) => KINDS.find(([pattern]) => pattern.test(op))?.[1] ?? "other";

export function graphView() {
  const program = state.program;
  const stages = program.stages.filter((stage) => stage.drawing !== null);
  if (!stages.length) return h("p", { class: "waiting" }, "There is no graph: the model could not be opened.");
  if (view.program !== program || !stages.some((stage) => stage.name === view.stage)) (view.stage = stages.at(-1).name), (view.drawing = null);
  const drawing = drawingOf(program, view.stage);
  const fresh = view.drawing !== drawing;
  Object.assign(view, { program, drawing });
  const choose = h("select", { "aria-label": "Stage", on: { change(event) {
    view.stage = event.target.value;
    actions.go("graph");
  } } }, stages.map((stage) => h("option", { value: stage.name, selected: stage.name === view.stage }, stage.name === "graph" ? "as built" : `after ${stage.name}`)));
  const button = (text, label, run) => h("button", { type: "button", "aria-label": label, title: label, on: { click: run } }, text);
  const steps = drawing.boxes.length;
  const tools = h("div", { class: "tools" }, h("label", {}, "Graph", choose), h("span", { class: "note" }, `${steps} values drawn`), h("span", { class: "space" }),
    button("−", "Smaller", () => zoomBy(1 / 1.3)), button("+", "Larger", () => zoomBy(1.3)), button("Fit", "Fit the whole graph", fit), button("Read", "Zoom to a readable size", readable));
  canvas = h("div", { class: "canvas" });
  canvas.append(picture(drawing));
  listen(canvas);
  requestAnimationFrame(() => {
    if (fresh) readable();
    else place();
    showSelected(true);
  });
  return h("div", { class: "graph" }, tools, canvas);
}

function picture(drawing) {
  root = s("g");
  for (const frame of drawing.frames) {
    const [x, y, width, height] = frame.at;
    root.append(s("g", { class: "frame" }, s("rect", { x, y, width, height, rx: 14 }), s("text", { x: x + 14, y: y + 22 }, frame.title)));
  }
  for (const [from, to, route] of drawing.edges) root.append(s("path", { class: "wire", d: path(route), "data-from": from, "data-to": to }));
  boxes = drawing.boxes.map((box, at) => boxOf(box, at, drawing));
  root.append(...boxes);
  for (const [name, at] of drawing.outputs) root.append(output(name, drawing.boxes[at]));
  if (boxes.length) boxes[0].setAttribute("tabindex", "0");
  return s("svg", { role: "group", "aria-label": "Graph; arrow keys move between values, Enter shows one" }, root);
}

function path(route) {
  let d = `M${route[0][0]} ${route[0][1]}`;
  for (let i = 1; i < route.length; i++) {
    const [[x0, y0], [x1, y1]] = [route[i - 1], route[i]];
    const middle = (y0 + y1) / 2;
    if (x0 === x1) d += ` L${x1} ${y1}`;
    else d += ` C${x0} ${middle} ${x1} ${middle} ${x1} ${y1}`;
  }
  return d;
}

function boxOf(box, at, drawing) {
  const [x, y, width, height] = box.at;
  const room = Math.floor((width - 20) / 6.7);
  const cut = (text) => (text.length > room ? `${text.slice(0, room - 1)}…` : text);
  const lines = [box.s, `${box.op} ${box.type}`, ...box.leaves.map((leaf) => `${leaf.short} ${leaf.type}`)];
  const group = s("g", {
    class: "box", transform: `translate(${x} ${y})`, role: "button", tabindex: "-1", "data-name": box.n, "data-at": at,
    "aria-label": `${box.s}: ${box.op}, ${box.type}`,
    on: { click: () => actions.select(box.n, layerFor(box, drawing)), keydown: (event) => walk(event, at), focus: () => focused(at) },
  },
  s("rect", { width, height, rx: 8 }), s("rect", { class: `band o-${kindOf(box.op)}`, width: 5, height, rx: 2.5 }),
  lines.map((line, i) => s("text", { x: 14, y: 20 + i * LINE }, i ? cut(line) : line)), s("title", {}, [box.n, ...lines.slice(1)].join("\n")));
  return group;
}

const layerFor = (box, drawing) => (box.n.includes("*") ? drawing.frames[box.g]?.layers[0] ?? null : null);

function output(name, box) {
  const [x, y, width, height] = box.at;
  return s("g", { class: "end" }, s("text", { x: x + width / 2, y: y + height + 18, "text-anchor": "middle" }, `output ${name}`));
}

// -- moving about

function place() {
  root.setAttribute("transform", `translate(${view.x} ${view.y}) scale(${view.zoom})`);
  canvas.style.backgroundPosition = `${view.x}px ${view.y}px`;
}

function zoomBy(factor, x = canvas.clientWidth / 2, y = canvas.clientHeight / 2) {
  const zoom = Math.min(MOST, Math.max(LEAST, view.zoom * factor));
  view.x = x - ((x - view.x) * zoom) / view.zoom;
  view.y = y - ((y - view.y) * zoom) / view.zoom;
  view.zoom = zoom;
  place();
}

function fit() {
  const [width, height] = view.drawing.size;
  view.zoom = Math.max(LEAST, Math.min(1.2, (canvas.clientWidth - 24) / width, (canvas.clientHeight - 24) / height));
  view.x = (canvas.clientWidth - width * view.zoom) / 2;
  view.y = (canvas.clientHeight - height * view.zoom) / 2;
  place();
}

/** The whole width, but not so small that it cannot be read. */
function readable() {
  const [width] = view.drawing.size;
  view.zoom = Math.min(1, Math.max(0.72, (canvas.clientWidth - 24) / width));
  const [first] = view.drawing.frames;
  const middle = first && width * view.zoom > canvas.clientWidth ? first.at[0] + first.at[2] / 2 : width / 2;
  view.x = canvas.clientWidth / 2 - middle * view.zoom;
  view.y = 12;
  place();
}

function centre(box) {
  const [x, y, width, height] = box.at;
  view.zoom = Math.max(view.zoom, 0.8);
  view.x = canvas.clientWidth / 2 - (x + width / 2) * view.zoom;
  view.y = canvas.clientHeight * 0.4 - (y + height / 2) * view.zoom;
  place();
}

function listen(element) {
  const fingers = new Map();
  let moved = 0;
  element.addEventListener("wheel", (event) => {
    event.preventDefault();
    const at = element.getBoundingClientRect();
    if (event.ctrlKey || event.metaKey || !event.shiftKey && Math.abs(event.deltaY) >= Math.abs(event.deltaX) && !event.altKey) zoomBy(Math.exp(-event.deltaY * (event.ctrlKey ? 0.01 : 0.0015)), event.clientX - at.left, event.clientY - at.top);
    else (view.x -= event.deltaX || event.deltaY), place();
  }, { passive: false });
  element.addEventListener("pointerdown", (event) => {
    fingers.set(event.pointerId, [event.clientX, event.clientY]);
    moved = 0;
  });
  element.addEventListener("pointermove", (event) => {
    const last = fingers.get(event.pointerId);
    if (!last) return;
    const [dx, dy] = [event.clientX - last[0], event.clientY - last[1]];
    moved += Math.abs(dx) + Math.abs(dy);
    if (moved > 4 && !element.hasPointerCapture(event.pointerId)) element.setPointerCapture(event.pointerId), element.classList.add("held");
    if (fingers.size === 2) {
      const other = [...fingers].find(([id]) => id !== event.pointerId)[1];
      const at = element.getBoundingClientRect();
      const before = Math.hypot(last[0] - other[0], last[1] - other[1]);
      const after = Math.hypot(event.clientX - other[0], event.clientY - other[1]);
      zoomBy(after / Math.max(1, before), (event.clientX + other[0]) / 2 - at.left, (event.clientY + other[1]) / 2 - at.top);
    } else if (fingers.size === 1) (view.x += dx), (view.y += dy), place();
    fingers.set(event.pointerId, [event.clientX, event.clientY]);
  });
  const end = (event) => (fingers.delete(event.pointerId), element.classList.remove("held"));
  element.addEventListener("pointerup", end);
  element.addEventListener("pointercancel", end);
}

/** Keys of the drawing that hold wherever its focus is. */
export function graphKey(event) {
  if (!canvas?.isConnected) return false;
  if (event.key === "+" || event.key === "=") zoomBy(1.3);
  else if (event.key === "-") zoomBy(1 / 1.3);
  else if (event.key === "0") fit();
  else return false;
  return true;
}

function walk(event, at) {
  if (event.key === "Enter" || event.key === " ") {
    event.preventDefault();
    return boxes[at].dispatchEvent(new MouseEvent("click", { bubbles: true }));
  }
  const next = neighbour(event.key, at);
  if (next === null) return;
  event.preventDefault();
  if (next >= 0) boxes[next].focus({ preventScroll: true });
}

/** The box that an arrow key leads to: along an edge up and down, to the nearest beside it; -1 for none. */
function neighbour(key, at) {
  const { edges, boxes: all } = view.drawing;
  const [x, y, width] = all[at].at;
  const middle = x + width / 2;
  const distance = (i) => Math.abs(all[i].at[0] + all[i].at[2] / 2 - middle);
  const nearest = (found) => (found.length ? found.reduce((a, b) => (distance(a) <= distance(b) ? a : b)) : -1);
  if (key === "ArrowDown") return nearest(edges.filter(([from]) => from === at).map(([, to]) => to));
  if (key === "ArrowUp") return nearest(edges.filter(([, to]) => to === at).map(([from]) => from));
  const beside = all.map((_, i) => i).filter((i) => Math.abs(all[i].at[1] - y) < 1 && i !== at);
  if (key === "ArrowRight") return nearest(beside.filter((i) => all[i].at[0] > x));
  if (key === "ArrowLeft") return nearest(beside.filter((i) => all[i].at[0] < x));
  return null;
}

function focused(at) {
  boxes.forEach((box, i) => box.setAttribute("tabindex", i === at ? "0" : "-1"));
  const [x, y, width, height] = view.drawing.boxes[at].at;
  const [left, top] = [x * view.zoom + view.x, y * view.zoom + view.y];
  if (left < 0 || top < 0 || left + width * view.zoom > canvas.clientWidth || top + height * view.zoom > canvas.clientHeight) centre(view.drawing.boxes[at]);
}

/** Marks the selected value and its edges; `move` also brings it into view. */
export function showSelected(move = false) {
  if (!canvas?.isConnected) return;
  const name = state.selected;
  const found = view.drawing.boxes.findIndex((box) => box.n === name || box.leaves.some((leaf) => leaf.n === name));
  boxes.forEach((box, i) => box.classList.toggle("on", i === found));
  for (const wire of root.querySelectorAll(".wire")) wire.classList.toggle("on", found >= 0 && [wire.dataset.from, wire.dataset.to].includes(String(found)));
  if (found >= 0 && move) centre(view.drawing.boxes[found]);
}

/** Draws the stage of this name next. */
export function chooseStage(name) {
  view.stage = name;
}
