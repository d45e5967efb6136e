// Types of a JSON schema as short words.

/** The schema that a reference names. */
export function followed(schema, document) {
  const path = schema?.$ref?.replace("#/", "").split("/");
  return path ? path.reduce((found, name) => found?.[name], document) ?? {} : schema ?? {};
}

function limits(schema) {
  const most = schema.maximum ?? schema.exclusiveMaximum;
  const least = schema.minimum ?? schema.exclusiveMinimum;
  return [
    least !== undefined ? `from ${least}` : "",
    most !== undefined ? `to ${most}` : "",
    schema.maxItems !== undefined ? `at most ${schema.maxItems}` : "",
    schema.maxProperties !== undefined ? `at most ${schema.maxProperties}` : "",
  ].filter(Boolean).join(" ");
}

/** Such as `text | list of integer`; null is left out, because every field that is not required may be null. */
export function typeOf(schema, document, depth = 0) {
  const found = followed(schema, document);
  if (found.enum) return found.enum.map((value) => JSON.stringify(value)).join(" | ");
  if (found.const !== undefined) return JSON.stringify(found.const);
  const parts = found.anyOf ?? found.oneOf;
  if (parts) {
    const names = parts.map((part) => typeOf(part, document, depth)).filter((name) => name !== "null");
    return [...new Set(names)].join(" | ");
  }
  if (found.type === "array") {
    const inner = found.items && depth < 4 ? ` of ${typeOf(found.items, document, depth + 1)}` : "";
    return [`list${inner}`, limits(found)].filter(Boolean).join(", ");
  }
  const name = { string: "text", boolean: "true or false" }[found.type] ?? found.type ?? "anything";
  return [name, limits(found)].filter(Boolean).join(" ");
}
