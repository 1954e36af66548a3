// The OpenAPI description as a page, without files from other servers.

import { get } from "./api.js";
import { byId, complain, h } from "./dom.js";

const resolve = (schema, all) => (schema?.$ref ? all[schema.$ref.split("/").at(-1)] : schema) ?? {};

function kind(schema) {
  if (schema.$ref) return schema.$ref.split("/").at(-1);
  if (schema.anyOf) return schema.anyOf.map(kind).join(" or ");
  if (schema.enum) return schema.enum.join(" | ");
  if (schema.type === "array") return `list of ${kind(schema.items ?? {})}`;
  return schema.format === "binary" ? "file" : (schema.type ?? "any");
}

function fields(schema, all) {
  const { properties = {}, required = [] } = resolve(schema, all);
  return h("ul", {}, Object.entries(properties).map(([name, field]) =>
    h("li", {}, h("code", {}, name), ` ${kind(field)}${required.includes(name) ? ", required" : ""}. ${field.description ?? ""}`)));
}

function example(method, path, body) {
  const where = `${location.origin}${path}`;
  const types = Object.keys(body?.content ?? {});
  if (types.includes("image/*")) return `curl --data-binary @photo.jpg -H "Content-Type: image/jpeg" "${where}"`;
  if (types.includes("multipart/form-data")) return `curl -F label=kestrel -F files=@a.jpg -F files=@b.jpg "${where}"`;
  if (types.includes("application/json")) return `curl -H "Content-Type: application/json" -d '{…}' "${where}"`;
  return method === "get" ? `curl "${where}"` : `curl -X ${method.toUpperCase()} "${where}"`;
}

function operation(method, path, about, all) {
  const body = about.requestBody;
  const answer = Object.entries(about.responses ?? {}).find(([status]) => status.startsWith("2"));
  const shape = answer?.[1].content?.["application/json"]?.schema;
  const parameters = about.parameters ?? [];
  return h("details", { class: "operation" },
    h("summary", {}, h("span", { class: "method" }, method.toUpperCase()), h("code", {}, path), h("span", { class: "hint" }, about.summary)),
    about.description && h("p", {}, about.description),
    parameters.length ? [h("h3", {}, "Parameters"), h("ul", {}, parameters.map((p) =>
      h("li", {}, h("code", {}, p.name), ` ${kind(p.schema)}, in the ${p.in}. ${p.schema.description ?? p.description ?? ""}`)))] : null,
    body ? Object.entries(body.content).map(([type, { schema }]) => [h("h3", {}, `Body: ${type}`), fields(schema, all)]) : null,
    shape ? [h("h3", {}, `Answer (${answer[0]})`), h("p", {}, kind(shape)), fields(shape.items ?? shape, all)] : null,
    h("pre", {}, example(method, path, body)));
}

async function start() {
  const { info, paths, components } = await get("/openapi.json");
  byId("about").textContent = info.description;
  const groups = new Map();
  for (const [path, methods] of Object.entries(paths))
    for (const [method, about] of Object.entries(methods)) {
      const group = about.tags?.[0] ?? "more";
      groups.set(group, [...(groups.get(group) ?? []), operation(method, path, about, components.schemas)]);
    }
  byId("main").append(...[...groups].map(([name, operations]) => h("div", { class: "card" }, h("h2", {}, name), operations)));
}

start().catch(complain);
