// Look: what the model knows, what it mixes up, its history and versions; one class with its images; corrections.

import { ended, get, picture, post, request } from "./api.js";
import { button, complain, figure, fill, h, saveAs } from "./dom.js";
import { forget, merge, relabel, rename, returnTo, unlearn } from "./corrections.js";
import { Grid } from "./grid.js";
import { View } from "./images.js";
import { address, change, state, undo } from "./model.js";
import { T, percent } from "./texts.js";

const MOST_CLASSES = 120; // in the confusion matrix

export class Look extends View {
  /** name: the class to look at; null: all of them. */
  show(name = null) {
    const about = state.about;
    const shown = `${state.name} ${about.version} ${name}`;
    if (this.shown === shown) return;
    this.shown = shown;
    const one = about.classes.find((c) => c.name === name);
    if (one) this.showClass(one).catch(complain);
    else this.showAll(about);
  }

  forget() {
    super.forget();
    this.shown = null;
  }

  showAll(about) {
    this.confusion = h("div", { class: "card", id: "confusion" }, h("p", { class: "hint" }, T.confusionWait));
    fill(this.place,
      this.summary(about),
      about.classes.length > 0 && this.classes(about),
      about.classes.length > 1 && this.confusion,
      about.history.length > 0 && this.history(about));
    if (about.classes.length > 1) this.showConfusion().catch(complain);
  }

  summary(about) {
    if (!about.classes.length)
      return h("div", { class: "card empty" }, h("h1", {}, state.name), h("p", {}, T.lookEmpty), button(T.teachFirst, () => (location.hash = address("teach")), { class: "primary" }));
    const save = async (what, name) => saveAs(await (await request(`/models/${state.path}/${what}`)).blob(), name);
    return h("div", { class: "card" },
      h("h1", {}, state.name),
      h("div", { class: "figures" },
        figure(T.classCount, about.classes.length), figure(T.imageCount, about.images),
        figure(T.accuracy, percent(about.accuracy, 1), T.interval(about.accuracy_interval)), figure(T.size, T.megabytes(about.bytes)), figure(T.version, about.version)),
      h("p", { class: "hint" }, T.measured(about.images), " ", about.backbone && T.technical(about.backbone)),
      about.counterexamples > 0 && h("p", {}, T.counterexamples(about.counterexamples), " ",
        button(T.dropCounterexamples, () => change("forget", { name: "unknown" }, T.forgotten(T.none)), { class: "quiet" })),
      h("div", { class: "actions" },
        button(T.download, () => save("file", `${state.name}.vqp`).catch(complain)),
        button(T.onnx, () => onnx().catch(complain)),
        button(T.card, () => save("card", `${state.name}.md`).catch(complain))));
  }

  // ------------------------------------------------------------------ classes

  classes(about) {
    const filter = h("input", { type: "search", placeholder: T.find, "aria-label": T.find });
    const rows = about.classes.map((c) =>
      h("tr", { "data-class": c.name },
        h("th", { scope: "row" }, h("a", { href: address("look", c.name) }, c.name)), h("td", { class: "number" }, c.images),
        h("td", { class: "number" }, c.accuracy === null ? "–" : meter(c.accuracy)),
        h("td", { class: "buttons" }, this.buttons(c.name))));
    filter.addEventListener("input", () => {
      for (const row of rows) row.hidden = !row.dataset.class.toLowerCase().includes(filter.value.toLowerCase());
    });
    return h("div", { class: "card" },
      h("div", { class: "row" }, h("h2", {}, T.classCount), about.classes.length > 8 && filter),
      h("div", { class: "scroll" },
        h("table", { class: "classes" },
          h("thead", {}, h("tr", {}, h("th", {}, T.class), h("th", { class: "number" }, T.imageCount), h("th", { class: "number" }, T.recognized), h("th", {}, h("span", { class: "visually-hidden" }, T.change)))),
          h("tbody", {}, rows))));
  }

  buttons(name) {
    const one = (text, what, kind) => button(text, () => what(name), { class: `quiet ${kind}`, "aria-label": `${text} ${name}` });
    return [one(T.rename, rename, "rename"), state.about.classes.length > 1 && one(T.merge, merge, "merge"), one(T.forget, forget, "forget")];
  }

  async showClass(one) {
    const label = h("input", { type: "text", list: "classes", autocomplete: "off", maxlength: "200", "aria-label": T.relabel, placeholder: T.relabel, id: "relabel" });
    const count = h("span", { class: "count" });
    const tools = h("div", { class: "tools", hidden: true });
    const grid = new Grid(T.itsImages, { selected: (chosen) => ((tools.hidden = !chosen.length), (count.textContent = T.selected(chosen.length))) });
    fill(tools, count,
      h("form", { class: "move", onsubmit: (event) => (event.preventDefault(), label.value.trim() && relabel([...grid.chosen], label.value.trim())) }, label, h("button", { type: "submit", id: "correct" }, T.relabelGo)),
      button(T.none, () => relabel([...grid.chosen], "unknown"), { class: "none" }),
      button(T.unlearn, () => unlearn([...grid.chosen]), { id: "unlearn" }));
    const says = h("p", { class: "hint" }), confused = h("ul", { class: "chips" });
    fill(this.place, h("div", { class: "card", id: "class" },
      h("p", {}, h("a", { href: address("look") }, `← ${T.allClasses}`)),
      h("h1", {}, one.name),
      h("div", { class: "figures" },
        figure(T.imageCount, one.images), figure(T.recognized, percent(one.accuracy))),
      confused,
      h("div", { class: "actions" }, this.buttons(one.name)),
      h("h2", {}, T.itsImages), says, tools, grid.element));
    const [{ images, total }, { classes, cells }] = await Promise.all([
      get(`/models/${state.path}/images?${new URLSearchParams({ label: one.name })}`), get(`/models/${state.path}/confusion`)]);
    says.textContent = images.length ? `${T.correctHelp} ${total > images.length ? T.notShown(total - images.length, images.length) : ""}` : T.noPictures;
    grid.show(images.map((image, n) => ({ key: image, label: `${one.name} ${n + 1}`, image: () => picture(`/models/${state.path}/thumbnails/${image}`, "") })));
    fill(confused, cells.filter(([a, b]) => classes[a] === one.name && a !== b).sort((x, y) => y[2] - x[2]).map(([a, b, n]) =>
      h("li", {}, h("a", { href: address("look", classes[b]) }, T.pair(classes[a], classes[b], n)))));
  }

  // ------------------------------------------------------------------ confusion

  async showConfusion() {
    const { classes, cells, tested } = await get(`/models/${state.path}/confusion`);
    const totals = new Array(classes.length).fill(0);
    for (const [a, , n] of cells) totals[a] += n;
    const wrong = cells.filter(([a, b]) => a !== b).sort((x, y) => y[2] - x[2]);
    this.images = h("div", { class: "cell-images", "aria-live": "polite" });
    fill(this.confusion,
      h("h2", {}, T.confusionTitle),
      h("p", { class: "lead" }, T.confusionHelp(tested)),
      classes.length <= MOST_CLASSES && this.matrix(classes, cells, totals),
      wrong.length ? h("h3", {}, T.mostOften) : tested > 0 && h("p", {}, T.nothingConfused),
      h("ul", { class: "chips" }, wrong.slice(0, 10).map(([a, b, n]) =>
        h("li", {}, button(T.pair(classes[a], classes[b], n), () => this.showCell(classes[a], classes[b]))))),
      this.images,
    );
  }

  matrix(classes, cells, totals) {
    const table = h("table", { class: classes.length > 20 ? "matrix dense" : "matrix" });
    const counts = new Map(cells.map(([a, b, n]) => [a * classes.length + b, n]));
    table.append(
      h("caption", { class: "visually-hidden" }, T.matrix),
      h("thead", {}, h("tr", {}, h("td"), classes.map((c) => h("th", { scope: "col", title: c }, h("span", {}, c))))),
      h("tbody", {}, classes.map((c, a) =>
        h("tr", {}, h("th", { scope: "row", title: c }, c), classes.map((d, b) => {
          const n = counts.get(a * classes.length + b);
          if (!n) return h("td");
          const title = T.cell(c, d, n, totals[a]);
          const cell = button(String(n), () => this.showCell(c, d), { class: a === b ? "right" : "wrong", title, "aria-label": title });
          cell.style.setProperty("--share", n / totals[a]);
          return h("td", {}, cell);
        })))),
    );
    return h("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": T.matrix }, table);
  }

  async showCell(label, answer) {
    try {
      const { images, total } = await get(`/models/${state.path}/confusion/images?${new URLSearchParams({ label, answer })}`);
      const missing = total - images.length;
      fill(this.images,
        h("h3", {}, T.cellTitle(T.taken(label, answer), total)),
        h("ul", { class: "thumbs" }, images.map((image) => h("li", {}, picture(`/models/${state.path}/thumbnails/${image}`, label)))),
        missing > 0 && h("p", { class: "hint" }, T.notShown(missing, images.length)));
      this.images.scrollIntoView({ block: "nearest", behavior: "smooth" });
    } catch (error) {
      complain(error);
    }
  }

  // ------------------------------------------------------------------ history

  history(about) {
    const events = about.history.map((event, number) => ({ event, steps: about.history.length - number })).reverse();
    return h("div", { class: "card" },
      h("h2", {}, T.historyTitle),
      h("ol", { class: "history", id: "history" }, events.map(({ event, steps }) =>
        h("li", {},
          h("time", { datetime: event.date }, new Date(event.date).toLocaleString([], { dateStyle: "medium", timeStyle: "short" })),
          h("span", { class: "grow" }, T.event(event)),
          steps <= about.can_undo && button(T.undoTo(steps), () => undo(steps), { class: "quiet" })))),
      about.versions.length > 1 && [
        h("h3", {}, T.otherVersions),
        h("p", { class: "hint" }, T.versionsHelp),
        h("ul", { class: "chips" }, about.versions.filter((v) => v.number !== about.version).reverse().map((version) =>
          h("li", {}, button(T.versionSays(version), () => returnTo(version.number))))),
      ]);
  }
}

async function onnx() {
  if (await ended(await post(`/models/${state.path}/onnx`, {}))) saveAs(await (await request(`/models/${state.path}/onnx`)).blob(), `${state.name}.onnx`);
}

function meter(share) {
  const filled = h("span", { class: "fill" });
  filled.style.width = `${share * 100}%`;
  return h("span", { class: "meter" }, h("span", { class: "bar" }, filled), h("span", {}, percent(share)));
}
