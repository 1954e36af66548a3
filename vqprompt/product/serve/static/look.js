// Look: what the model knows, what it confuses, its history and versions; rename, forget, download.

import { cancel, follow, get, picture, post, request } from "./api.js";
import { complain, h, megabytes, percent, plural, progressBar, question, saveAs, toast } from "./dom.js";
import { state, change, undo } from "./model.js";

const MOST_CLASSES = 120; // in the confusion matrix

export class Look {
  constructor(place) {
    this.place = place;
    this.shown = null;
  }

  async show() {
    if (state.about.prompt_use || state.about.effort !== "instant") state.about = await get(`/models/${state.path}`);
    const about = state.about;
    const version = `${state.name} ${about.version} ${about.prompt_use?.images}`;
    if (this.shown === version) return;
    this.shown = version;
    this.work = h("div");
    this.confusion = h("div", { class: "card", id: "confusion" }, h("p", { class: "hint" }, "Finding out what it confuses …"));
    this.place.replaceChildren(
      this.summary(about), this.work,
      about.classes.length ? this.classes(about) : h("div", { class: "card" }, h("p", {}, "It knows nothing yet. Teach it a class.")),
      about.classes.length > 1 ? this.confusion : "",
      about.prompt_use ? promptUse(about.prompt_use) : "",
      this.history(about),
    );
    if (about.classes.length > 1) this.showConfusion().catch(complain);
  }

  leave() {}

  summary(about) {
    const figure = (name, value) => h("div", { class: "figure" }, h("span", {}, name), h("strong", {}, value));
    const empty = !about.classes.length;
    const save = async (what, name) => saveAs(await (await request(`/models/${state.path}/${what}`)).blob(), name);
    return h("div", { class: "card" },
      h("h1", {}, state.name),
      h("div", { class: "figures" },
        figure("Classes", about.classes.length), figure("Images", about.images),
        figure("Accuracy", percent(about.accuracy, 1)), figure("Size", megabytes(about.bytes)), figure("Version", about.version)),
      about.backbone && h("p", { class: "hint" }, `Backbone ${about.backbone.name}, ${about.backbone.size} px. Accuracy is measured on images left out one at a time.`),
      h("div", { class: "actions" },
        h("button", { type: "button", disabled: empty, onclick: () => save("file", `${state.name}.vqp`).catch(complain) }, "Download the model"),
        h("button", { type: "button", disabled: empty, onclick: () => this.onnx() }, "ONNX"),
        h("button", { type: "button", disabled: empty, onclick: () => save("card", `${state.name}.md`).catch(complain) }, "Card")));
  }

  async onnx() {
    let job = null;
    const bar = progressBar(() => job && cancel(job).catch(complain));
    this.work.replaceChildren(h("div", { class: "card" }, h("h2", {}, "Making the ONNX file"), bar.element));
    try {
      job = await post(`/models/${state.path}/onnx`, {});
      if (await follow(job, bar.show)) saveAs(await (await request(`/models/${state.path}/onnx`)).blob(), `${state.name}.onnx`);
    } catch (error) {
      complain(error);
    }
    this.work.replaceChildren();
  }

  // ------------------------------------------------------------------ classes

  classes(about) {
    const filter = h("input", { type: "search", placeholder: "Find a class", "aria-label": "Find a class" });
    const rows = about.classes.map((c) =>
      h("tr", { "data-class": c.name },
        h("th", { scope: "row" }, c.name), h("td", { class: "number" }, c.images),
        h("td", { class: "number" }, c.accuracy === null ? "–" : meter(c.accuracy)),
        h("td", { class: "buttons" },
          h("button", { type: "button", class: "quiet rename", "aria-label": `Rename ${c.name}`, onclick: () => rename(c.name) }, "Rename"),
          h("button", { type: "button", class: "quiet forget", "aria-label": `Forget ${c.name}`, onclick: () => forget(c.name) }, "Forget"))));
    filter.addEventListener("input", () => {
      for (const row of rows) row.hidden = !row.dataset.class.toLowerCase().includes(filter.value.toLowerCase());
    });
    return h("div", { class: "card" },
      h("div", { class: "row" }, h("h2", {}, "Classes"), about.classes.length > 8 ? filter : null),
      h("div", { class: "scroll" },
        h("table", { class: "classes" },
          h("thead", {}, h("tr", {}, h("th", {}, "Class"), h("th", { class: "number" }, "Images"), h("th", { class: "number" }, "Recognized"), h("th", {}, h("span", { class: "visually-hidden" }, "Change")))),
          h("tbody", {}, rows))));
  }

  // ------------------------------------------------------------------ confusion

  async showConfusion() {
    const { classes, cells, tested } = await get(`/models/${state.path}/confusion`);
    const totals = new Array(classes.length).fill(0);
    for (const [a, , n] of cells) totals[a] += n;
    const wrong = cells.filter(([a, b]) => a !== b).sort((x, y) => y[2] - x[2]);
    this.images = h("div", { class: "cell-images", "aria-live": "polite" });
    this.confusion.replaceChildren(
      h("h2", {}, "What it confuses"),
      h("p", { class: "lead" }, tested ? `${plural(tested, "image")}, each left out in turn and asked about. A row is what an image shows, a column is what it was taken for.` : "There are too few images to tell."),
      classes.length <= MOST_CLASSES ? this.matrix(classes, cells, totals) : null,
      wrong.length ? h("h3", {}, "Most often") : null,
      h("ul", { class: "chips" }, wrong.slice(0, 10).map(([a, b, n]) =>
        h("li", {}, h("button", { type: "button", onclick: () => this.showCell(classes[a], classes[b]) }, `${classes[a]} → ${classes[b]} (${n})`)))),
      this.images,
    );
  }

  matrix(classes, cells, totals) {
    const table = h("table", { class: classes.length > 20 ? "matrix dense" : "matrix" });
    const counts = new Map(cells.map(([a, b, n]) => [a * classes.length + b, n]));
    table.append(
      h("caption", { class: "visually-hidden" }, "Confusion matrix"),
      h("thead", {}, h("tr", {}, h("td"), classes.map((c) => h("th", { scope: "col", title: c }, h("span", {}, c))))),
      h("tbody", {}, classes.map((c, a) =>
        h("tr", {}, h("th", { scope: "row", title: c }, c), classes.map((d, b) => {
          const n = counts.get(a * classes.length + b);
          if (!n) return h("td");
          const button = h("button", {
            type: "button", class: a === b ? "right" : "wrong", title: `${c} taken for ${d}: ${n} of ${totals[a]}`,
            "aria-label": `${c} taken for ${d}: ${n} of ${totals[a]}`, onclick: () => this.showCell(c, d),
          }, String(n));
          button.style.setProperty("--share", n / totals[a]);
          return h("td", {}, button);
        })))),
    );
    return h("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "Confusion matrix" }, table);
  }

  async showCell(label, answer) {
    const query = new URLSearchParams({ label, answer });
    try {
      const { images, total } = await get(`/models/${state.path}/confusion/images?${query}`);
      const title = label === answer ? `${label}, recognized` : `${label}, taken for ${answer}`;
      const missing = total - images.length;
      this.images.replaceChildren(
        h("h3", {}, `${title}: ${plural(total, "image")}`),
        h("ul", { class: "thumbs" }, images.map((image) => h("li", {}, picture(`/models/${state.path}/thumbnails/${image}`, label)))),
        missing ? h("p", { class: "hint" }, `${images.length ? `${missing} more` : plural(missing, "image")} cannot be shown: a model keeps no images, and the server keeps only small pictures of what it was taught since it started.`) : "",
      );
      this.images.scrollIntoView({ block: "nearest", behavior: "smooth" });
    } catch (error) {
      complain(error);
    }
  }

  // ------------------------------------------------------------------ history

  history(about) {
    const events = about.history.map((event, number) => ({ event, steps: about.history.length - number })).reverse();
    return h("div", { class: "card" },
      h("h2", {}, "History"),
      events.length ? h("ol", { class: "history", id: "history" }, events.map(({ event, steps }) =>
        h("li", {},
          h("time", { datetime: event.date }, new Date(event.date).toLocaleString([], { dateStyle: "medium", timeStyle: "short" })),
          h("span", { class: "grow" }, says(event)),
          steps <= about.can_undo && h("button", { type: "button", class: "quiet", onclick: () => undo(steps) }, steps === 1 ? "Undo" : `Undo back to before this (${steps} changes)`)))) : h("p", {}, "Nothing has happened yet."),
      about.versions.length > 1 ? [
        h("h3", {}, "Other versions"),
        h("p", { class: "hint" }, "The model keeps ten versions, also of what was undone. Returning to one is a change like others: it can be undone."),
        h("ul", { class: "chips" }, about.versions.filter((v) => v.number !== about.version).reverse().map((version) =>
          h("li", {}, h("button", { type: "button", onclick: () => returnTo(version.number) }, `Version ${version.number}: ${version.description}`)))),
      ] : null);
  }
}

function says(event) {
  if (event.what === "learned") {
    const names = Object.keys(event.classes);
    return `Learned ${plural(event.images, "image")} of ${names.slice(0, 3).join(", ")}${names.length > 3 ? ` and ${names.length - 3} more` : ""}`;
  }
  return `${event.what[0].toUpperCase()}${event.what.slice(1)} ${event.detail ?? ""}`;
}

function meter(share) {
  const fill = h("span", { class: "fill" });
  fill.style.width = `${share * 100}%`;
  return h("span", { class: "meter" }, h("span", { class: "bar" }, fill), h("span", {}, percent(share)));
}

function promptUse({ images, prompts }) {
  const most = Math.max(...prompts.map((p) => p.attention));
  return h("div", { class: "card" },
    h("h2", {}, "Prompts in use"),
    h("p", { class: "lead" }, `How much attention each prompt gets, over ${plural(images, "image")} asked on this page.`),
    h("ul", { class: "bars" }, prompts.map((p) => {
      const fill = h("span", { class: "fill" });
      fill.style.width = `${(p.attention / most) * 100}%`;
      return h("li", {}, h("span", { class: "name" }, `block ${p.block + 1}, prompt ${p.prompt + 1}`), h("span", { class: "bar" }, fill), h("span", { class: "share" }, percent(p.attention, 1)));
    })));
}

async function rename(old) {
  const input = h("input", { type: "text", value: old, required: true, maxlength: "200", "aria-label": "New name", id: "new-name" });
  if (!(await question(`Rename ${old}`, [input], "Rename"))) return;
  const name = input.value.trim();
  if (name && name !== old) await change("rename", { old, new: name }, `${old} is now called ${name}.`);
}

async function forget(name) {
  const box = h("input", { type: "checkbox" });
  const fields = [
    h("p", {}, "The model will be as if it had never learned this class."),
    h("label", { class: "check" }, box, "For good: also delete everything that is kept of it. This cannot be undone."),
  ];
  if (!(await question(`Forget ${name}?`, fields, "Forget", true))) return;
  await change("forget", { name, for_good: box.checked }, `${name} is forgotten.`, !box.checked);
}

async function returnTo(version) {
  if (!(await question(`Return to version ${version}?`, [h("p", {}, "This can be undone.")], "Return"))) return;
  await change("return", { version }, `Back at version ${version}.`);
}
