// What an empty conversation shows: the model's name, and a few messages to begin with.

import { $, h } from "./dom.js";
import { server } from "./server.js";

const DEMO = ["Tell me a story about a brave fox.", "What is 27 + 45?", "Write a poem about the sea.", "Extract the name and age as JSON: Mira is 12 years old and lives in Rome."];
const GENERAL = ["Explain how a language model chooses its next word.", "Write a Python function that finds the longest word of a text.", "Compare tea and coffee in a table.", "What are three good questions to ask before buying a bicycle?"];
const SHAPES = ["What is in the picture?", "What colour is the circle?"];

/** Draws it; `begin(text, images)` sends a message. */
export function showWelcome(begin) {
  const demo = /^demo\b/.test(server.model);
  const items = [];
  if (server.sees) items.push(...SHAPES.map((text) => suggestion(text, begin, drawing())));
  if (!server.sees || !demo) items.push(...(demo ? DEMO : GENERAL).slice(0, 4 - items.length).map((text) => suggestion(text, begin, null)));
  const note = demo ? "This is a tiny demo model. It knows a small world of its own." : "The conversations stay in this browser.";
  $("#welcome").replaceChildren(
    h("p", { class: "hello" }, server.ready ? "What would you like to know?" : "Looking for the model…"),
    h("p", { class: "note" }, server.ready ? note : ""),
    server.ready ? h("ul", { class: "suggestions" }, items.map((item) => h("li", {}, item))) : "",
  );
}

function suggestion(text, begin, image) {
  const picture = image && h("img", { src: image, alt: "With a drawing: " });
  return h("button", { type: "button", on: { click: () => begin(text, image ? [image] : []) && $("#message").focus() } }, picture, h("span", {}, text));
}

/** A drawing of shapes on a dark ground, such as the embedded model that sees was taught. */
function drawing() {
  const canvas = document.createElement("canvas");
  canvas.width = canvas.height = 96;
  const pen = canvas.getContext("2d");
  pen.fillStyle = "#101418";
  pen.fillRect(0, 0, 96, 96);
  pen.fillStyle = "#dc3232";
  pen.beginPath();
  pen.arc(30, 30, 15, 0, 7);
  pen.fill();
  pen.fillStyle = "#3c5ae6";
  pen.fillRect(53, 53, 27, 27);
  return canvas.toDataURL("image/png");
}
