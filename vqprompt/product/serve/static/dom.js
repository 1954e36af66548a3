// Small helpers to build the page. Text always goes in as text, never as HTML: a class called <script> is just a name.

/** An element: h("button", {class: "quiet", onclick: …}, "Cancel"). Children: elements, texts, lists, null. */
export function h(name, attributes = {}, ...children) {
  const element = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (key.startsWith("on")) element.addEventListener(key.slice(2), value);
    else if (key in element && typeof value !== "string") element[key] = value;
    else element.setAttribute(key, value === true ? "" : value);
  }
  element.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false));
  return element;
}

export const byId = (id) => document.getElementById(id);

export const percent = (share, digits = 0) => (share === null || share === undefined ? "–" : `${(share * 100).toFixed(digits)} %`);

export const plural = (count, one, many = `${one}s`) => `${count} ${count === 1 ? one : many}`;

export function duration(seconds) {
  if (seconds < 60) return `${Math.max(1, Math.round(seconds))} s`;
  const minutes = Math.round(seconds / 60);
  return minutes < 60 ? `${minutes} min` : `${Math.floor(minutes / 60)} h ${minutes % 60} min`;
}

export function megabytes(bytes) {
  return bytes === null || bytes === undefined ? "–" : `${(bytes / 1e6).toFixed(1)} MB`;
}

/** A short message at the bottom of the page; screen readers say it. action: [text, function]. */
export function toast(text, { bad = false, action = null } = {}) {
  const note = h("div", { class: bad ? "toast bad" : "toast", role: bad ? "alert" : null }, h("span", {}, text));
  if (action) note.append(h("button", { type: "button", onclick: () => (note.remove(), action[1]()) }, action[0]));
  note.append(h("button", { type: "button", class: "close", "aria-label": "Close", onclick: () => note.remove() }, "×"));
  byId("toasts").append(note);
  setTimeout(() => note.remove(), bad ? 15000 : 8000);
}

export const complain = (error) => toast(error.message || String(error), { bad: true });

/** A bar that fills, with what is being done and the time that remains. */
export function progressBar(cancel) {
  const bar = h("progress", { "aria-label": "Progress" });
  const says = h("span", { class: "says" }, "starting …");
  const button = h("button", { type: "button", class: "quiet", onclick: () => ((button.disabled = true), cancel()) }, "Cancel");
  const element = h("div", { class: "progress" }, h("div", { class: "row" }, says, button), bar);
  return {
    element,
    show(job) {
      if (job.total) {
        bar.max = job.total;
        bar.value = job.done;
      } else bar.removeAttribute("value");
      const count = job.total > 1 ? ` · ${job.done} of ${job.total}` : "";
      const left = job.remaining > 0.5 ? ` · ${duration(job.remaining)} remaining` : "";
      const what = job.state === "queued" ? "waiting for its turn" : job.stage;
      says.textContent = `${what[0].toUpperCase()}${what.slice(1)}${count}${left}`;
    },
  };
}

/** Ask a question in a dialog. fields: elements. Resolves to true if the person says yes. */
export function question(title, fields, yes, danger = false) {
  const dialog = byId("dialog");
  return new Promise((resolve) => {
    const form = h(
      "form",
      { onsubmit: (event) => (event.preventDefault(), dialog.close("yes")) },
      h("h2", { id: "dialog-title" }, title),
      fields,
      h(
        "div",
        { class: "actions" },
        h("button", { type: "button", class: "quiet", onclick: () => dialog.close("no") }, "Cancel"),
        h("button", { type: "submit", class: danger ? "danger" : "primary" }, yes),
      ),
    );
    dialog.replaceChildren(form);
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
