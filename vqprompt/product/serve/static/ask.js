// Ask: an image or the live camera in, the best classes out; and a way to say what it really is.

import { follow, send } from "./api.js";
import { complain, h, percent, plural, toast } from "./dom.js";
import { CameraTab, dropzone, isImage } from "./images.js";
import { state, refresh, undo } from "./model.js";

const BETWEEN_FRAMES = 150; // ms at least, between two camera frames

export const ask = (blob) =>
  send(`/models/${state.path}/predict?top=5&prompts=true`, blob, { headers: { "Content-Type": blob.type || "application/octet-stream" } });

/** The best classes as bars. The bars are reused, so that a live view does not flicker. */
export class Answers {
  constructor() {
    this.headline = h("p", { class: "headline" });
    this.bars = h("ul", { class: "bars" });
    this.prompts = h("div", { class: "prompts" });
    this.element = h("div", { class: "answers", "aria-live": "polite" }, this.headline, this.bars, this.prompts);
  }

  show(answer) {
    const names = answer.classes.slice(0, 3).map((c) => c.name).join(", ");
    this.headline.replaceChildren(
      answer.unknown
        ? h("span", {}, h("strong", { class: "unknown" }, "Unknown"), h("small", {}, `most similar: ${names}`))
        : h("span", {}, h("strong", {}, answer.name), h("small", {}, percent(answer.classes[0].probability))),
    );
    while (this.bars.children.length < answer.classes.length)
      this.bars.append(h("li", {}, h("span", { class: "name" }), h("span", { class: "bar" }, h("span", { class: "fill" })), h("span", { class: "share" })));
    while (this.bars.children.length > answer.classes.length) this.bars.lastChild.remove();
    answer.classes.forEach((c, number) => {
      const row = this.bars.children[number];
      row.querySelector(".name").textContent = c.name;
      row.querySelector(".fill").style.width = `${(c.probability * 100).toFixed(1)}%`;
      row.querySelector(".share").textContent = percent(c.probability);
    });
    this.bars.classList.toggle("faint", answer.unknown);
    this.showPrompts(answer.prompts);
  }

  showPrompts(prompts) {
    this.prompts.replaceChildren();
    if (!prompts?.length) return;
    this.prompts.append(
      h("h3", {}, "Prompts it used"),
      h("ul", { class: "chips" }, prompts.map((p) => h("li", {}, `block ${p.block + 1}, prompt ${p.prompt + 1}: ${percent(p.attention, 1)} of attention`))),
    );
  }

  clear() {
    this.headline.replaceChildren();
    this.bars.replaceChildren();
    this.prompts.replaceChildren();
  }
}

/** "Wrong? It is …": teaches one image. picture: a function that gives it, as a blob. */
export function correction(picture, done = () => {}) {
  const name = h("input", { type: "text", list: "classes", autocomplete: "off", maxlength: "200", "aria-label": "What it really is", placeholder: "its true name", class: "correct-name" });
  const button = h("button", { type: "submit" }, "Teach it");
  return h("form", {
    class: "correction",
    onsubmit: async (event) => {
      event.preventDefault();
      const label = name.value.trim();
      const image = await picture();
      if (!label || !image) return;
      const form = new FormData();
      form.append("label", label);
      form.append("files", image, image.name || "image.png");
      button.disabled = true;
      try {
        const result = await follow(await send(`/models/${state.path}/teach`, form));
        await refresh();
        if (result?.images) toast(`Learned: this is ${label}.`, { action: ["Undo", () => undo(1)] });
        else toast(result?.notes?.at(-1) || "Nothing new was learned.");
        name.value = "";
        done();
      } catch (error) {
        complain(error);
      }
      button.disabled = false;
    },
  }, h("span", {}, "Wrong? It is"), name, button);
}

export class Ask extends CameraTab {
  leave() {
    this.camera.close();
    this.preview.replaceChildren();
  }

  start() {
    this.answers = new Answers();
    this.image = null;
    this.preview = h("div", { class: "preview" });
    this.correction = correction(() => this.image, () => this.again());
    this.correction.hidden = true;
    this.place.replaceChildren(
      h("div", { class: "card" },
        h("h1", {}, "What is it?"),
        dropzone("Drop or paste an image here", ([first]) => this.take(first.file), {
          many: false,
          extra: [h("button", { type: "button", onclick: () => this.live() }, "Live camera")],
        }),
        h("div", { class: "split" }, this.preview, h("div", {}, this.answers.element, this.correction))),
    );
    document.addEventListener("paste", (event) => {
      const file = [...event.clipboardData.files].find(isImage);
      if (file && !this.place.hidden) this.take(file);
    });
  }

  async take(file) {
    this.camera.close();
    this.image = file;
    const shown = h("img", { src: URL.createObjectURL(file), alt: file.name || "your image" });
    shown.addEventListener("load", () => URL.revokeObjectURL(shown.src), { once: true });
    this.preview.replaceChildren(shown);
    await this.again();
  }

  async again() {
    try {
      this.answers.show(await ask(this.image));
      this.correction.hidden = false;
    } catch (error) {
      this.answers.clear();
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
    this.preview.replaceChildren(this.camera.video, h("button", { type: "button", class: "quiet", onclick: () => this.leave() }, "Stop the camera"));
    this.answers.element.setAttribute("aria-live", "off"); // a screen reader cannot read several answers per second
    while (this.camera.isOpen) {
      const began = performance.now();
      const frame = await this.camera.frame(448);
      if (frame && this.camera.isOpen) {
        this.image = new File([frame], "camera.jpg", { type: "image/jpeg" });
        try {
          this.answers.show(await ask(this.image));
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
