// Ask: an image or the live camera in, the best classes out; and a way to say what it really is.

import { ended, post, send } from "./api.js";
import { button, complain, fill, h, toast } from "./dom.js";
import { Camera, View, cameraButton, chooser, isImage, takesDrops } from "./images.js";
import { CHANGED, address, changed, lookNow, state } from "./model.js";
import { T, percent } from "./texts.js";

const BETWEEN_FRAMES = 100; // ms at least, between two camera frames

const typed = (blob) => ({ headers: { "Content-Type": blob.type || "application/octet-stream" } });

export const ask = (blob) => send(`/models/${state.path}/predict?top=5`, blob, typed(blob));

/** The best classes as bars. The bars are reused, so that a live view does not flicker. */
export class Answers {
  constructor() {
    this.headline = h("p", { class: "headline" });
    this.bars = h("ul", { class: "bars" });
    this.element = h("div", { class: "answers", "aria-live": "polite" }, this.headline, this.bars);
  }

  show(answer) {
    const names = answer.classes.map((c) => c.name), note = answer.note ?? "", sure = answer.classes[0].probability !== null;
    fill(this.headline,
      h("strong", { class: answer.unknown ? "unknown" : null }, answer.unknown ? T.unknown : answer.name),
      h("small", {}, answer.unknown ? T.mostLike(names.slice(0, 3)) : note || percent(answer.classes[0].probability)));
    const rows = sure ? answer.classes : [];
    while (this.bars.children.length < rows.length)
      this.bars.append(h("li", {}, h("span", { class: "name" }), h("span", { class: "bar" }, h("span", { class: "fill" })), h("span", { class: "share" })));
    while (this.bars.children.length > rows.length) this.bars.lastChild.remove();
    rows.forEach((c, number) => {
      const row = this.bars.children[number];
      row.querySelector(".name").textContent = c.name;
      row.querySelector(".fill").style.width = `${(c.probability * 100).toFixed(1)}%`;
      row.querySelector(".share").textContent = percent(c.probability);
    });
  }

  clear(says = "") {
    fill(this.headline, says && h("span", { class: "lead" }, says));
    fill(this.bars);
  }
}

/** The name of an image by its content, as the server knows it; null where browsers do not compute hashes (plain http). */
async function contentId(image) {
  if (!crypto.subtle) return null;
  const digest = new Uint8Array(await crypto.subtle.digest("SHA-256", await image.arrayBuffer()));
  return [...digest.slice(0, 8)].reverse().map((byte) => byte.toString(16).padStart(2, "0")).join("");
}

/** Teach an image; one that was taught as another class moves. Returns the result, or null if it was cancelled. */
async function teachOne(image, label) {
  const form = new FormData();
  form.append("files", image, image.name || "image.png");
  if (label === null) form.append("as_unknown", "true");
  else form.append("label", label);
  try {
    return await ended(await send(`/models/${state.path}/teach`, form));
  } catch (error) {
    const id = await contentId(image);
    if (id === null) throw error;
    const moved = await post(`/models/${state.path}/relabel`, { images: [id], label: label ?? "unknown" });
    return ended(moved).catch(() => { throw error; }); // it was not taught before
  }
}

/** "Wrong? It is …": teaches one image. picture: a function that gives it, as a file. */
export function correction(picture, done = () => {}) {
  const name = h("input", { type: "text", list: "classes", autocomplete: "off", maxlength: "200", "aria-label": T.trueName, placeholder: T.trueExample, class: "correct-name" });
  const teach = async (label) => {
    const image = await picture();
    if (!image) return;
    element.inert = true;
    const isNew = label !== null && !state.about.classes.some((c) => c.name === label);
    try {
      const result = await teachOne(image, label);
      await lookNow();
      if (result && Object.keys(result.classes).length) changed(label === null ? T.thisIsNone : T.thisIs(label), result, isNew ? result.notes.slice(0, 1) : []);
      else toast(result?.notes.at(-1) ?? T.cancelled);
      name.value = "";
      done();
    } catch (error) {
      complain(error);
    }
    element.inert = false;
  };
  const element = h("form", {
    class: "correction", hidden: true,
    onsubmit: (event) => {
      event.preventDefault();
      if (name.value.trim()) teach(name.value.trim());
    },
  }, h("span", {}, T.wrong), name, h("button", { type: "submit" }, T.teachIt),
  button(T.none, () => teach(null), { class: "quiet none" }));
  return element;
}

/** A picture's shade: dark where the network does not look. It covers the picture exactly, as both are fitted alike. */
function shade(picture, { patches, box: [left, top, right, bottom] }) {
  const scale = Math.min(1, 512 / Math.max(picture.naturalWidth, picture.naturalHeight));
  const [width, height] = [picture.naturalWidth * scale, picture.naturalHeight * scale];
  const sorted = patches.flat().sort((a, b) => a - b);
  const most = sorted[Math.floor(sorted.length * 0.95)] || 1; // a few patches may take much more than all others
  const small = h("canvas", { width: patches[0].length, height: patches.length });
  const points = new ImageData(small.width, small.height);
  patches.flat().forEach((share, n) => points.data.set([8, 10, 24, 200 * (1 - Math.min(1, share / most))], 4 * n));
  small.getContext("2d").putImageData(points, 0, 0);
  const canvas = h("canvas", { width, height, class: "shade", role: "img", "aria-label": T.attention });
  const brush = canvas.getContext("2d");
  brush.fillStyle = "rgb(8 10 24 / 78%)"; // what the network does not see at all
  brush.fillRect(0, 0, width, height);
  const place = [left * width, top * height, (right - left) * width, (bottom - top) * height];
  brush.clearRect(...place);
  brush.imageSmoothingQuality = "high";
  brush.drawImage(small, ...place);
  return canvas;
}

export class Ask extends View {
  constructor(place) {
    super(place);
    this.camera = new Camera();
    document.addEventListener(CHANGED, () => this.started && this.showEmpty());
    document.addEventListener("paste", (event) => {
      const file = [...event.clipboardData.files].find(isImage);
      if (file && !this.place.hidden) this.take(file);
    });
  }

  leave() {
    if (!this.camera.isOpen) return;
    this.camera.close();
    fill(this.preview);
    this.attention.hidden = true;
  }

  start() {
    this.answers = new Answers();
    this.image = null;
    this.preview = h("div", { class: "preview" });
    this.correction = correction(() => this.image, () => this.again());
    this.looks = h("input", { type: "checkbox", role: "switch", id: "attention", onchange: () => this.showAttention() });
    this.attentionSays = h("p", { class: "hint", role: "status" });
    this.attention = h("div", { hidden: true }, h("label", { class: "switch" }, this.looks, T.attention), this.attentionSays);
    this.empty = h("div", { class: "empty" }, h("p", {}, T.askEmpty), button(T.teachFirst, () => (location.hash = address("teach")), { class: "primary" }));
    this.zone = takesDrops(h("div", { class: "dropzone" }, h("p", { class: "big" }, T.dropOne),
      h("div", { class: "actions" }, chooser(T.chooseImage, ([one]) => this.take(one.file)), cameraButton(T.live, () => this.live()))),
    ([one]) => one && this.take(one.file));
    fill(this.place, h("div", { class: "card" }, h("h1", {}, T.askTitle), this.empty, this.zone,
      h("div", { class: "split" }, this.preview, h("div", {}, this.answers.element, this.correction, this.attention))));
    this.showEmpty();
  }

  showEmpty() {
    this.zone.hidden = !state.about.classes.length;
    this.empty.hidden = !this.zone.hidden;
  }

  async take(file) {
    this.leave();
    this.image = file;
    this.correction.hidden = this.attention.hidden = true;
    const shown = h("img", { src: URL.createObjectURL(file), alt: file.name || T.yourImage });
    shown.addEventListener("load", () => URL.revokeObjectURL(shown.src), { once: true });
    shown.addEventListener("error", () => fill(this.preview, h("p", { class: "hint" }, T.cannotShow)), { once: true });
    fill(this.preview, h("div", { class: "picture" }, shown));
    await this.again();
  }

  async again() {
    try {
      this.answers.show(await ask(this.image));
      this.correction.hidden = false;
      this.attention.hidden = !state.about.attention;
      await this.showAttention();
    } catch (error) {
      this.correction.hidden = this.attention.hidden = true;
      this.answers.clear(error.message);
    }
  }

  async showAttention() {
    this.preview.querySelector(".shade")?.remove();
    fill(this.attentionSays);
    const image = this.image, picture = this.preview.querySelector("img");
    if (!this.looks.checked || this.attention.hidden || !picture) return;
    this.attentionSays.textContent = T.looking;
    try {
      const seen = await send(`/models/${state.path}/attention`, image, typed(image));
      if (image !== this.image || !this.looks.checked) return;
      picture.after(shade(picture, seen));
      this.attentionSays.textContent = T.attentionSays(seen.prompt);
    } catch (error) {
      fill(this.attentionSays);
      complain(error);
    }
  }

  async live() {
    if (this.camera.isOpen) return;
    try {
      await this.camera.open();
    } catch (error) {
      return complain(error);
    }
    fill(this.preview, this.camera.video, button(T.stopCamera, () => this.leave(), { class: "quiet" }));
    this.answers.element.setAttribute("aria-live", "off"); // a screen reader cannot read several answers per second
    const side = Math.max(224, 2 * (state.about.backbone?.size ?? 0)); // smaller frames are read faster
    while (this.camera.isOpen) {
      const began = performance.now();
      const frame = await this.camera.frame(side);
      if (frame && this.camera.isOpen) {
        this.image = frame;
        try {
          this.answers.show(await ask(frame));
          this.correction.hidden = false;
        } catch (error) {
          complain(error);
          this.leave();
        }
      }
      await new Promise((resolve) => setTimeout(resolve, Math.max(0, BETWEEN_FRAMES - (performance.now() - began))));
    }
    this.answers.element.setAttribute("aria-live", "polite");
  }
}
