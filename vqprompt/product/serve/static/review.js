// Review: the images of an upload before they are taught. What people decide is on the server, the same in all pages.

import { ended, get, patch, picture, post, remove } from "./api.js";
import { button, complain, fill, h, warnings } from "./dom.js";
import { Grid } from "./grid.js";
import { thumbnail } from "./images.js";
import { isActive, lookNow, state } from "./model.js";
import { T, first } from "./texts.js";

const ENOUGH = 4; // images per class, to train anything

export class Review {
  /** files: the images themselves, if they were sent from this page. back: called when the person wants them back. */
  constructor(upload, files, back) {
    Object.assign(this, { id: upload.upload, files, back, revision: null, worst: new Map(), images: [], seconds: null });
    this.path = `/models/${state.path}/uploads/${this.id}`;
    this.grid = new Grid(T.reviewTitle(1), {
      selected: (chosen, focused) => this.selected(chosen, focused),
      keys: { Delete: () => this.leaveOut(), Backspace: () => this.leaveOut(), m: () => this.label.focus() },
    });
    this.title = h("h2", {}, T.checking);
    this.order = h("select", { id: "order", onchange: () => this.arrange() }, h("option", { value: "doubt" }, T.byDoubt), h("option", { value: "class" }, T.byClass));
    this.count = h("span", { class: "count" });
    this.says = h("div", { class: "says-why", "aria-live": "polite" });
    this.label = h("input", { type: "text", list: "classes", autocomplete: "off", maxlength: "200", id: "move-to", "aria-label": T.move, placeholder: T.move });
    this.out = button(T.leaveOut, () => this.leaveOut(), { id: "leave-out" });
    this.efforts = h("fieldset", { class: "efforts" });
    this.preview = h("div", { class: "preview-of-change", "aria-live": "polite" });
    this.go = button("", () => this.teach(), { class: "primary", id: "teach" });
    this.doubtful = button(T.selectDoubtful, () => this.grid.select([...this.worst.keys()]), { class: "quiet" });
    this.tools = h("div", { class: "tools" }, this.count,
      this.doubtful,
      button(T.selectAll, () => this.grid.select(this.images.keys()), { class: "quiet" }),
      h("form", { class: "move", onsubmit: (event) => (event.preventDefault(), this.move()) }, this.label, h("button", { type: "submit", id: "move" }, T.moveGo)),
      this.out);
    this.element = h("div", { class: "card review", id: "findings", hidden: true },
      h("div", { class: "row wrap" }, this.title, h("label", {}, T.sort, " ", this.order)),
      h("p", { class: "hint" }, T.reviewHelp, h("span", { class: "keys" }, ` ${T.reviewKeys}`)),
      this.tools, this.grid.element, this.says, this.efforts, this.preview,
      h("div", { class: "actions" }, button(files ? T.back : T.discard, () => this.giveUp(), { class: "quiet" }),
        button(T.previewGo, () => this.showChanges(), { id: "preview" }), this.go));
  }

  /** What the server says about the upload now. */
  async update(upload) {
    const checked = state.jobs.find((job) => job.id === upload.check);
    const used = state.jobs.find((job) => job.id === upload.used_by);
    this.element.inert = Boolean(used && isActive(used));
    if (checked?.state !== "done" || this.loading || upload.revision === this.revision) return;
    this.loading = true;
    try {
      if (this.seconds === null) {
        const { findings, seconds } = (await get(`/jobs/${checked.id}`)).result;
        for (const finding of findings) if (!this.worst.has(finding.image)) this.worst.set(finding.image, finding); // most doubtful first
        this.seconds = seconds;
      }
      ({ images: this.images, revision: this.revision } = await get(this.path));
      this.arrange();
      const isNew = this.element.hidden;
      this.element.hidden = false;
      if (isNew && this.files && this.element.offsetParent) this.grid.cells[0].cell.focus();
    } catch (error) {
      complain(error);
    }
    this.loading = false;
  }

  arrange() {
    const doubt = (n) => (this.worst.has(n) ? 1 + this.worst.get(n).doubt : 0);
    const order = [...this.images.keys()].sort((a, b) =>
      this.order.value === "doubt" ? doubt(b) - doubt(a) || a - b : this.images[a].label.localeCompare(this.images[b].label) || a - b);
    this.title.textContent = T.reviewTitle(this.worst.size);
    this.doubtful.hidden = !this.worst.size;
    this.grid.show(order.map((n) => {
      const image = this.images[n], finding = this.worst.get(n);
      return {
        key: n, label: T.imageLabel(image, finding), image: () => this.picture(n),
        class: `${finding ? "doubtful" : ""} ${image.left_out ? "left-out" : ""}`,
        caption: [h("b", {}, image.label), finding && h("i", {}, finding.title), image.left_out && h("i", {}, T.leftOut)],
      };
    }));
    const left = this.images.filter((image) => !image.left_out).length;
    this.go.textContent = left ? T.teachGo(left) : T.teachNone;
    this.go.disabled = !left;
    this.showEfforts();
  }

  picture(n) {
    return this.files ? thumbnail(this.files[n], "") : picture(`${this.path}/images/${n}`, "");
  }

  showEfforts() {
    const taught = this.images.filter((image) => !image.left_out), labels = new Set(taught.map((image) => image.label));
    const trains = labels.size > 1 && taught.length >= ENOUGH * labels.size;
    const now = this.element.querySelector("[name=effort]:checked")?.value ?? "instant";
    fill(this.efforts, h("legend", {}, T.thoroughness), Object.entries(state.efforts).map(([name, { passes }]) => {
      const [title, says] = T.efforts[name] ?? [name, state.efforts[name].says], decides = name === "auto";
      const possible = passes === 1 || trains || decides, each = this.seconds / Math.max(1, this.images.length);
      const time = (decides && trains ? T.atMost : T.about)(each * taught.length * (trains ? passes : 1));
      return h("label", { class: "effort" }, h("input", { type: "radio", name: "effort", value: name, checked: possible && name === now, disabled: !possible }),
        h("span", {}, h("b", {}, title), ` ${possible ? time : T.needsMore}`, h("small", {}, says)));
    }));
    if (!this.efforts.querySelector(":checked")) this.efforts.querySelector("input").checked = true;
  }

  selected(chosen, focused) {
    this.count.textContent = T.selected(chosen.length);
    const finding = this.worst.get(focused), some = chosen.length ? chosen : focused === null ? [] : [focused];
    this.out.textContent = some.length && some.every((n) => this.images[n]?.left_out) ? T.takeIn : T.leaveOut;
    if (finding?.likelier && chosen.length < 2) this.label.value = finding.likelier;
    fill(this.says, finding && [h("strong", {}, first(finding.title)), ` · ${this.images[focused].name}`, h("p", {}, finding.says),
      Number.isInteger(finding.other) && h("span", { class: "pair" }, this.picture(focused), this.picture(finding.other))]);
  }

  /** What a decision is about: the selected images, or the one that has the focus. */
  get meant() {
    return this.grid.chosen.size ? [...this.grid.chosen] : this.grid.focused === null ? [] : [this.grid.focused];
  }

  async decide(decision) {
    if (!this.meant.length) return;
    try {
      await patch(this.path, { images: this.meant, ...decision });
      this.grid.select([]);
      await lookNow();
    } catch (error) {
      complain(error);
    }
  }

  leaveOut() {
    const readable = this.meant.some((n) => !this.images[n].left_out);
    this.decide({ left_out: readable });
  }

  async move() {
    if (!this.label.value.trim()) return;
    await this.decide({ label: this.label.value.trim(), left_out: false });
    this.label.value = "";
  }

  get asked() {
    const leaveOut = [...this.images.keys()].filter((n) => this.images[n].left_out);
    return { upload: this.id, leave_out: leaveOut, effort: this.element.querySelector("[name=effort]:checked").value };
  }

  async showChanges() {
    try {
      fill(this.preview, h("p", {}, T.previewing));
      const result = await ended(await post(`/models/${state.path}/teach`, { ...this.asked, preview: true }));
      fill(this.preview, result && whatChanges(result));
    } catch (error) {
      fill(this.preview);
      complain(error);
    }
  }

  async teach() {
    try {
      await post(`/models/${state.path}/teach`, this.asked);
      await lookNow();
    } catch (error) {
      complain(error);
    }
  }

  giveUp() {
    remove(this.path).then(lookNow).catch(complain);
    this.back?.();
  }
}

/** What a change would do to answers, in words. */
export const whatChanges = ({ changes, ...result }) => [
  h("p", {}, T.changes(changes)),
  changes.examples.length > 0 && h("ul", { class: "chips" }, changes.examples.slice(0, 6).map((c) => h("li", {}, T.example(c)))),
  warnings(result),
];
