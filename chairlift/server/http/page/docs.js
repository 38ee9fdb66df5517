"use strict";

// Everything shown goes through textContent, so nothing in the description can become markup.
function make(tag, properties, ...children) {
  const node = Object.assign(document.createElement(tag), properties);
  node.append(...children);
  return node;
}

const byId = (id) => document.getElementById(id);
let api = {};

function resolve(schema) {
  return schema.$ref ? api.components.schemas[schema.$ref.split("/").pop()] : schema;
}

function typeOf(schema) {
  if (schema.$ref) return schema.$ref.split("/").pop();
  if (schema.anyOf) return schema.anyOf.map(typeOf).join(" | ");
  if (schema.enum) return schema.enum.map((value) => JSON.stringify(value)).join(" | ");
  if (schema.type === "array") return "list of " + (schema.items ? typeOf(schema.items) : "anything");
  if (schema.type === "object" && schema.additionalProperties) return "map of " + typeOf(schema.additionalProperties);
  return schema.type ? schema.format || schema.type : "anything";
}

function limits(schema) {
  const parts = [schema, ...(schema.anyOf || [])];
  const find = (name) => parts.map((part) => part[name]).find((value) => value !== undefined);
  const least = find("minimum"), most = find("maximum");
  return least === undefined && most === undefined ? "" : ` (${least ?? ""} to ${most ?? ""})`;
}

// All structs that a body is made of, each once.
function structs(schema, seen = new Map()) {
  if (schema.$ref) {
    const name = typeOf(schema);
    if (!seen.has(name)) {
      seen.set(name, resolve(schema));
      structs(resolve(schema), seen);
    }
  }
  for (const inner of [...(schema.anyOf || []), ...Object.values(schema.properties || {})]) structs(inner, seen);
  for (const inner of [schema.items, schema.additionalProperties]) if (inner) structs(inner, seen);
  return seen;
}

function fields(name, schema) {
  const required = new Set(schema.required);
  const rows = Object.entries(schema.properties || {})
    .sort(([first], [second]) => required.has(second) - required.has(first))
    .map(([field, kind]) => [field, typeOf(kind) + limits(kind),
      required.has(field) ? "required" : JSON.stringify(kind.default ?? null)]);
  return [make("h3", { textContent: name }), make("p", { textContent: schema.description || "" }),
    table(["field", "type", "default"], rows)];
}

function table(head, rows) {
  const line = (cells, tag) => make("tr", {}, ...cells.map((cell) => make(tag, { textContent: cell })));
  return make("table", {}, line(head, "th"), ...rows.map((row) => line(row, "td")));
}

function example(schema) {
  const whole = resolve(schema.anyOf ? schema.anyOf[0] : schema);
  if (whole.examples) return whole.examples[0];
  if (whole.default !== undefined) return whole.default;
  if (whole.enum) return whole.enum[0];
  if (whole.type === "array") return whole.items ? [example(whole.items)] : [];
  if (whole.type === "object")
    return Object.fromEntries((whole.required || []).map((name) => [name, example(whole.properties[name])]));
  return { string: "text", integer: 1, number: 1.0, boolean: false }[whole.type] ?? null;
}

function quoted(text) {
  return "'" + text.replaceAll("'", "'\\''") + "'";
}

function curl(method, path, media, body, keyed) {
  const lines = ["curl " + (method === "GET" ? "" : `-X ${method} `) + quoted(location.origin + path)];
  if (keyed) lines.push('-H "Authorization: Bearer $KEY"');
  if (media === "multipart/form-data") {
    for (const [name, value] of Object.entries(body)) lines.push("-F " + quoted(`${name}=${value}`));
  } else if (media) {
    lines.push("-H 'Content-Type: application/json'", "-d " + quoted(JSON.stringify(body)));
  }
  return lines.join(" \\\n  ");
}

// An answer is shown as it comes, and left when it goes on beyond this: some streams never end.
const MOST_SHOWN = 20000;

async function showText(answer, shown, signal) {
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let left = MOST_SHOWN;
  while (left > 0) {
    const { value, done } = await reader.read();
    signal.throwIfAborted();
    if (done) return;
    shown.append(value.slice(0, left));
    left -= value.length;
  }
  shown.append("…");
  await reader.cancel();
}

async function send(method, path, body, shown, signal) {
  const headers = byId("key").value ? { Authorization: "Bearer " + byId("key").value } : {};
  if (body !== undefined) headers["Content-Type"] = "application/json";
  shown.hidden = false;
  shown.textContent = "…";
  try {
    const answer = await fetch(path, { method, headers, body, signal });
    const isText = !answer.headers.get("content-type")?.includes("octet-stream");
    shown.textContent = `${answer.status}\n${isText ? "" : "(bytes)"}`;
    if (isText && answer.body) await showText(answer, shown, signal);
    else await answer.body?.cancel();
  } catch (error) {
    // Where it was given up for another, that one is shown.
    if (!signal.aborted) shown.append(`\n${error}`);
  }
}

function operation(method, path, about) {
  const content = about.requestBody?.content || {};
  const media = Object.keys(content)[0];
  const schema = media && content[media].schema;
  const body = schema && Object.assign(example(schema), media === "multipart/form-data" ? { file: "@FILE" } : {});
  const parts = [];
  if (about.parameters)
    parts.push(make("h3", { textContent: "Parameters" }), table(["name", "in", "type"],
      about.parameters.map((each) => [each.name, each.in, typeOf(each.schema) + limits(each.schema)])));
  if (schema) for (const [name, each] of structs(schema)) parts.push(...fields(name, each));
  parts.push(make("h3", { textContent: "Answers" }), table(["status", "what"],
    Object.entries(about.responses).map(([status, each]) => [status, each.description])));

  const command = make("pre", { textContent: curl(method, path, media, body, (about.security || api.security || []).length) });
  const copy = make("button", { type: "button", textContent: "Copy" });
  copy.onclick = () => navigator.clipboard.writeText(command.textContent);
  parts.push(make("h3", { textContent: "Example" }), command, copy);
  if (media !== "multipart/form-data") {
    const target = make("input", { value: path, size: 50, ariaLabel: "path" });
    const text = make("textarea", { value: JSON.stringify(body, null, 2), rows: 8, ariaLabel: "body" });
    const shown = make("pre", { hidden: true });
    const go = make("button", { type: "button", textContent: "Send" });
    let sent = new AbortController();
    go.onclick = () => {
      sent.abort();
      sent = new AbortController();
      return send(method, target.value, media && text.value, shown, sent.signal);
    };
    parts.push(make("h3", { textContent: "Try it" }), go, target, ...(media ? [text] : []), shown);
  }
  return parts;
}

function show() {
  byId("version").textContent = "version " + api.info.version;
  byId("ask").hidden = !api.security;
  const sections = new Map(api.tags.map((tag) => [tag.name, make("section", {}, make("h2", { textContent: tag.name }))]));
  for (const [path, methods] of Object.entries(api.paths)) {
    for (const [name, about] of Object.entries(methods)) {
      const method = name.toUpperCase();
      const head = make("summary", {}, make("code", { textContent: `${method} ${path}` }),
        make("span", { textContent: about.summary }));
      const entry = make("details", {}, head);
      entry.addEventListener("toggle", () => entry.append(...operation(method, path, about)), { once: true });
      sections.get(about.tags[0]).append(entry);
    }
  }
  byId("main").replaceChildren(...sections.values());
}

fetch("openapi.json")
  .then((answer) => answer.json())
  .then((found) => { api = found; show(); })
  .catch((error) => byId("main").replaceChildren(make("p", { className: "error", textContent: String(error) })));
