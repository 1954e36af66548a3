// Teach: gather images, name the class, see what is doubtful, teach, see what changed.

import { cancel, follow, post, remove, send } from "./api.js";
import { complain, duration, h, percent, plural, progressBar, toast } from "./dom.js";
import { CameraTab, dropzone, isImage, thumbnail } from "./images.js";
import { state, refresh, undo } from "./model.js";

const SHOWN = 60; // thumbnails of what was gathered

export class Teach extends CameraTab {
  leave() {
    this.camera.close();
    this.cameraBox?.replaceChildren();
  }

  start() {
    this.images = []; // {file, label}; label: null if the person names the class
    this.name = h("input", {
      id: "class-name", type: "text", list: "classes", autocomplete: "off", maxlength: "200", placeholder: "kestrel",
      oninput: () => this.update(),
    });
    this.cameraBox = h("div", { class: "camera-box" });
    this.tray = h("div", { class: "tray", "aria-live": "polite" });
    this.next = h("button", { type: "button", class: "primary", id: "look-through", onclick: () => this.lookThrough() }, "Look through");
    this.effort = h("select", { id: "effort" });
    const efforts = Object.entries(state.efforts);
    this.effort.append(...efforts.map(([name, says]) => h("option", { value: name }, `${name}: ${says}`)));
    this.stage = h("div", { class: "stage" });
    const zone = dropzone("Drop images or a folder here", (found) => this.take(found), {
      folder: true,
      extra: [h("button", { type: "button", onclick: () => this.openCamera() }, "Use the camera")],
    });
    this.gather = h(
      "div",
      { class: "card" },
      h("h1", {}, "Teach a class"),
      h("p", { class: "lead" }, "A few images are enough to start: five work well, twenty are better. Known classes get better, new ones are added."),
      zone,
      this.cameraBox,
      this.tray,
      h("div", { class: "form-row" },
        h("label", { for: "class-name" }, "What do they show?"), this.name,
        efforts.length > 1 && [h("label", { for: "effort" }, "Effort"), this.effort],
        this.next),
    );
    this.place.replaceChildren(this.gather, this.stage);
    this.update();
  }

  take(found) {
    const images = found.filter(({ file }) => isImage(file));
    if (!images.length) return toast("There is no image among these files.", { bad: true });
    if (images.length < found.length) toast(`${plural(found.length - images.length, "file")} left out: not images.`);
    const inside = new Set(images.map(({ folders }) => folders.at(-1) ?? ""));
    const byFolder = inside.size > 1 && !inside.has(""); // a folder of folders: they name the classes
    this.images.push(...images.map(({ file, folders }) => ({ file, label: byFolder ? folders.at(-1) : null })));
    const [only] = inside;
    if (inside.size === 1 && only && !this.name.value) this.name.value = only;
    this.update();
  }

  async openCamera() {
    if (this.camera.isOpen) return;
    try {
      await this.camera.open();
    } catch (error) {
      return complain(error);
    }
    const close = () => this.leave();
    const shoot = async () => {
      const frame = await this.camera.frame();
      if (frame) this.images.push({ file: new File([frame], `camera ${this.images.length + 1}.jpg`, { type: "image/jpeg" }), label: null });
      this.update();
    };
    const button = h("button", { type: "button", class: "primary", onclick: shoot }, "Take a picture");
    this.cameraBox.replaceChildren(
      this.camera.video,
      h("div", { class: "actions" }, button, h("button", { type: "button", class: "quiet", onclick: close }, "Close the camera")),
    );
    button.focus();
  }

  update() {
    this.stage.replaceChildren();
    const { images } = this;
    this.tray.replaceChildren();
    if (images.length) {
      const labels = new Set(images.map((i) => i.label).filter(Boolean));
      const classes = labels.size ? ` · ${plural(labels.size, "class", "classes")} from folders` : "";
      this.tray.append(
        h("div", { class: "row" },
          h("strong", {}, plural(images.length, "image") + classes),
          h("button", { type: "button", class: "quiet", onclick: () => ((this.images = []), this.update()) }, "Clear")),
        h("ul", { class: "thumbs" },
          images.slice(0, SHOWN).map((image, number) =>
            h("li", {},
              thumbnail(image.file, image.file.name),
              h("button", {
                type: "button", class: "close", "aria-label": `Take out ${image.file.name}`,
                onclick: () => (images.splice(number, 1), this.update()),
              }, "×"))),
          images.length > SHOWN && h("li", { class: "more" }, `+ ${images.length - SHOWN}`)),
      );
    }
    this.next.disabled = !images.length || (images.some((i) => !i.label) && !this.name.value.trim());
  }

  // ------------------------------------------------------------------ look through

  async lookThrough() {
    const label = this.name.value.trim();
    const form = new FormData();
    form.append("labels", JSON.stringify(this.images.map((image) => image.label ?? label)));
    for (const { file } of this.images) form.append("files", file, file.name);
    this.next.disabled = true;
    let job = null;
    const bar = progressBar(() => job && cancel(job).catch(complain));
    this.stage.replaceChildren(h("div", { class: "card" }, bar.element));
    try {
      const answer = await send(`/models/${state.path}/uploads`, form);
      ({ job } = answer);
      const found = await follow(job, bar.show);
      if (found === null) {
        await remove(`/models/${state.path}/uploads/${answer.upload}`).catch(() => {});
        this.update();
        return toast("Cancelled.");
      }
      this.showFindings(answer, found);
    } catch (error) {
      complain(error);
      this.update();
    }
  }

  showFindings(upload, found) {
    const worst = new Map(); // one finding per image, the most doubtful
    for (const finding of found.findings) if (!worst.has(finding.image)) worst.set(finding.image, finding);
    const choices = new Map();
    const teach = h("button", { type: "button", class: "primary", id: "teach", onclick: () => this.teach(upload, leftOut()) });
    const leftOut = () => [...choices].filter(([, box]) => box.checked).map(([image]) => image);
    const count = () => {
      const left = upload.images.length - leftOut().length;
      teach.textContent = `Teach ${plural(left, "image")}`;
      teach.disabled = !left;
    };
    const rows = [...worst.values()].map((finding) => {
      const broken = finding.kind === "unreadable";
      const image = upload.images[finding.image];
      const box = h("input", { type: "checkbox", checked: finding.leave_out, disabled: broken, onchange: count });
      choices.set(finding.image, box);
      return h("li", { class: "finding" },
        thumbnail(this.images[finding.image].file, image.name),
        finding.other === null || finding.other === undefined ? null : thumbnail(this.images[finding.other].file, "the other image"),
        h("div", { class: "grow" },
          h("strong", {}, `${finding.title[0].toUpperCase()}${finding.title.slice(1)}`),
          h("span", { class: "file" }, image.name),
          h("p", {}, finding.says)),
        h("label", { class: "check" }, box, "Leave it out"));
    });
    const good = upload.images.length - rows.length;
    this.stage.replaceChildren(
      h("div", { class: "card", id: "findings" },
        h("h2", {}, rows.length ? `${plural(rows.length, "image")} to look at` : "All images look good"),
        rows.length ? h("p", { class: "lead" }, `${good} of ${upload.images.length} look good. Choose what to do with the others.`) : null,
        h("ul", { class: "findings" }, rows),
        h("div", { class: "actions" },
          h("button", { type: "button", class: "quiet", onclick: () => this.giveUp(upload) }, "Back"),
          teach)),
    );
    count();
    teach.focus();
  }

  giveUp(upload) {
    remove(`/models/${state.path}/uploads/${upload.upload}`).catch(() => {});
    this.update();
  }

  // ------------------------------------------------------------------ teach

  async teach(upload, leaveOut) {
    let job = null;
    const bar = progressBar(() => job && cancel(job).catch(complain));
    this.stage.replaceChildren(h("div", { class: "card" }, h("h2", {}, "Learning"), bar.element));
    try {
      job = await post(`/models/${state.path}/teach`, { upload: upload.upload, leave_out: leaveOut, effort: this.effort.value || "instant" });
      const result = await follow(job, bar.show);
      if (result === null) {
        this.giveUp(upload);
        return toast("Cancelled. The model is as it was.");
      }
      this.images = [];
      this.name.value = "";
      this.leave();
      await refresh();
      this.update();
      this.stage.replaceChildren(taught(result));
    } catch (error) {
      complain(error);
      this.update();
    }
  }
}

/** What a teaching changed, in a card. */
function taught(result) {
  const names = result.classes.map((c) => c.name), fresh = result.classes.filter((c) => c.new).map((c) => c.name);
  const before = result.accuracy_before, now = result.accuracy;
  const notes = [
    ...result.notes,
    result.known_images ? `${plural(result.known_images, "image was", "images were")} already known.` : null,
    result.copies ? `${plural(result.copies, "copy was", "copies were")} counted once.` : null,
    result.broken.length ? `${plural(result.broken.length, "image")} could not be read.` : null,
  ].filter(Boolean);
  return h("div", { class: "card result", id: "taught", tabindex: "-1" },
    h("h2", {}, result.images ? `Learned ${plural(result.images, "image")} of ${names.slice(0, 3).join(", ")}${names.length > 3 ? " …" : ""}` : "Nothing new was learned"),
    h("p", { class: "lead" }, `In ${duration(result.seconds)}. ${fresh.length ? `New: ${fresh.slice(0, 5).join(", ")}.` : ""}`),
    now !== null && h("div", { class: "figures" },
      h("div", { class: "figure" }, h("span", {}, "Accuracy before"), h("strong", {}, percent(before, 1))),
      h("div", { class: "arrow", "aria-hidden": "true" }, "→"),
      h("div", { class: "figure" }, h("span", {}, "Accuracy now"), h("strong", {}, percent(now, 1)))),
    now !== null && h("p", { class: "hint" }, "Measured by leaving out each image in turn and asking about it."),
    result.suffering.length ? [
      h("h3", {}, "Classes that are recognized less often"),
      h("ul", {}, result.suffering.slice(0, 8).map((c) => h("li", {}, `${c.name}: ${percent(c.before)} → ${percent(c.now)}`))),
    ] : now !== null && before !== null && h("p", {}, "No class got worse."),
    notes.length ? h("ul", { class: "hint" }, notes.map((note) => h("li", {}, note))) : null,
    result.images ? h("div", { class: "actions" }, h("button", { type: "button", onclick: () => undo(1) }, "Undo this teaching")) : null,
  );
}
