// Small helpers to build the page. Text always goes in as text, never as HTML: a class called <script> is just a name.

import { T } from "./texts.js";

const present = (children) => children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false);

/** An element: h("button", {class: "quiet", onclick: …}, "Cancel"). Children: elements, texts, lists, null. */
export function h(name, attributes = {}, ...children) {
  const element = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (key.startsWith("on")) element.addEventListener(key.slice(2), value);
    else if (key in element && typeof value !== "string") element[key] = value;
    else element.setAttribute(key, value === true ? "" : value);
  }
  return fill(element, ...children);
}

/** Exchange the children of an element. */
export function fill(element, ...children) {
  element.replaceChildren(...present(children));
  return element;
}

export const button = (text, onclick, attributes = {}) => h("button", { type: "button", onclick, ...attributes }, text);

export const byId = (id) => document.getElementById(id);

/** A short message above the page, where nothing else is; screen readers say it. action: [text, function]. stays: until
 * it is closed. */
export function toast(text, { bad = false, action = null, stays = false } = {}) {
  const note = h("div", { class: bad ? "toast bad" : "toast", role: bad ? "alert" : null },
    h("div", {}, text),
    action && button(action[0], () => (note.remove(), action[1]())),
    button("×", () => note.remove(), { class: "close", "aria-label": T.close }));
  fill(byId("toasts"), note);
  if (!stays) setTimeout(() => note.remove(), bad ? 15000 : 8000);
  return note;
}

/** Answers that a change takes away from other classes or from "unknown"; nothing if there are none. */
export const warnings = ({ warnings: lost = [] }) => lost.length > 0 && h("ul", { class: "warnings" }, lost.slice(0, 5).map((w) => h("li", {}, w.text)));

/** A number with its title. interval: text, where it is, 19 times in 20. */
export const figure = (title, value, interval = null) => h("div", { class: "figure" }, h("span", {}, title), h("strong", {}, value), interval && h("small", {}, ` ${interval}`));

export const complain = (error) => toast(error.message || String(error), { bad: true });

/** A bar that fills, with what is being done and the time that remains. */
export function progressBar(title, cancel) {
  const bar = h("progress", { "aria-label": T.progress });
  const says = h("span", { class: "says" }, T.starting);
  const stop = button(T.cancel, () => ((stop.disabled = true), cancel()), { class: "quiet" });
  const element = h("div", { class: "progress" }, h("div", { class: "row" }, h("span", {}, h("strong", {}, title), " ", says), stop), bar);
  return {
    element,
    show(job) {
      if (job.total) Object.assign(bar, { max: job.total, value: job.done });
      else bar.removeAttribute("value");
      says.textContent = T.jobSays(job);
    },
  };
}

/** Ask a question in a dialog. fields: elements. Resolves to true if the person says yes. */
export function question(title, fields, yes, { danger = false, no = T.cancel } = {}) {
  const dialog = byId("dialog");
  return new Promise((resolve) => {
    fill(dialog, h("form", { onsubmit: (event) => (event.preventDefault(), dialog.close("yes")) },
      h("h2", { id: "dialog-title" }, title),
      fields,
      h("div", { class: "actions" },
        no && button(no, () => dialog.close("no"), { class: "quiet" }),
        h("button", { type: "submit", class: danger ? "danger" : "primary" }, yes))));
    dialog.setAttribute("aria-labelledby", "dialog-title");
    dialog.returnValue = "no";
    dialog.onclose = () => resolve(dialog.returnValue === "yes");
    dialog.showModal();
  });
}

/** Save something that was fetched as a file. */
export function saveAs(blob, name) {
  const link = h("a", { href: URL.createObjectURL(blob), download: name });
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10000);
}
