import { followed, typeOf } from "./schema.js";

const find = (id) => document.getElementById(id);

/** An element; text is always text. */
function element(tag, className, ...children) {
  const made = document.createElement(tag);
  if (className) made.className = className;
  made.append(...children);
  return made;
}

function table(heads, rows) {
  const head = element("tr", "", ...heads.map((text) => element("th", "", text)));
  const body = rows.map((cells) => element("tr", "", ...cells.map((cell) => element("td", "", cell))));
  return element("div", "scroll", element("table", "", element("thead", "", head), element("tbody", "", ...body)));
}

function fields(schema, api) {
  const found = followed(schema, api);
  const required = new Set(found.required ?? []);
  const rows = Object.entries(found.properties ?? {}).map(([name, each]) => [
    element("code", "", name),
    element("span", "type", typeOf(each, api)),
    required.has(name) ? "required" : "",
  ]);
  if (rows.length) return table(["field", "type", ""], rows);
  return element("p", "type", typeOf(schema, api));
}

function schemaOf(content) {
  return Object.values(content ?? {})[0]?.schema;
}

function operation(method, path, spec, api) {
  const inside = element("div", "inside");
  const parameters = spec.parameters ?? [];
  const description = (spec.description ?? "").replaceAll("`", "");
  const [about] = description.split(/(?<=\.)\s/); // its first sentence
  if (description !== about) inside.append(element("p", "", description));
  if (parameters.length) {
    const rows = parameters.map((each) => [element("code", "", each.name), typeOf(each.schema, api), each.in]);
    inside.append(element("h3", "", "Parameters"), table(["name", "type", "in"], rows));
  }
  const body = schemaOf(spec.requestBody?.content);
  if (body) inside.append(element("h3", "", "Body"), fields(body, api));
  inside.append(element("h3", "", "Answers"));
  const answers = Object.entries(spec.responses ?? {});
  inside.append(table(["status", "when"], answers.map(([status, each]) => [element("code", "", status), each.description ?? ""])));
  const good = schemaOf(spec.responses?.["200"]?.content);
  if (good && Object.keys(followed(good, api)).length) inside.append(element("h3", "", "Fields of the answer"), fields(good, api));
  const head = element("summary", "", element("span", "method", method.toUpperCase()), " ", element("code", "", path), " ", element("span", "soft about", about));
  const shown = element("details", "", head, inside);
  shown.dataset.words = inside.textContent.toLowerCase() + path.toLowerCase();
  return shown;
}

function draw(api) {
  const groups = new Map();
  for (const [path, methods] of Object.entries(api.paths)) {
    for (const [method, spec] of Object.entries(methods)) {
      const tag = spec.tags?.[0] ?? "other";
      groups.set(tag, [...(groups.get(tag) ?? []), operation(method, path, spec, api)]);
    }
  }
  find("version").textContent = api.info.version;
  find("paths").replaceChildren(
    ...[...groups].map(([tag, operations]) => element("section", "", element("h2", "", tag), ...operations)),
  );
}

function search() {
  const words = find("search").value.toLowerCase().split(/\s+/).filter(Boolean);
  for (const section of find("paths").children) {
    const operations = [...section.querySelectorAll("details")];
    for (const each of operations) each.hidden = !words.every((word) => each.dataset.words.includes(word));
    section.hidden = operations.every((each) => each.hidden);
  }
}

async function load(key) {
  const answer = await fetch("openapi.json", { headers: key ? { Authorization: `Bearer ${key}` } : {} });
  find("key-form").hidden = answer.status !== 401;
  const problem = answer.ok || (answer.status === 401 && !key) ? "" : `The server answers ${answer.status}.`;
  find("problem").textContent = problem;
  find("problem").hidden = !problem;
  if (answer.ok) draw(await answer.json());
}

find("search").addEventListener("input", search);
find("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  load(find("key").value);
});
load("");
