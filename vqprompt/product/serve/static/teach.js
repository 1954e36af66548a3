// Teach: gather images class by class, review them, teach, see what changed.

import { get, send } from "./api.js";
import { button, complain, figure, fill, h, toast, warnings } from "./dom.js";
import { Camera, View, cameraButton, chooser, isImage, takesDrops, thumbnail } from "./images.js";
import { CHANGED, NOW, address, isActive, lookNow, state, undo } from "./model.js";
import { Review } from "./review.js";
import { T, percent } from "./texts.js";

const SHOWN = 24; // thumbnails per class
const CLOSED = "vqprompt-closed"; // the result that this page does not want to see any more

export class Teach extends View {
  constructor(place) {
    super(place);
    this.camera = new Camera();
    document.addEventListener(NOW, () => this.started && this.showNow().catch(complain));
    document.addEventListener(CHANGED, () => this.started && this.update());
  }

  leave() {
    this.camera.close();
    fill(this.cameraBox);
    this.update();
  }

  start() {
    this.buckets = []; // {name: input, images: [file], element, body}: a class to be
    this.reviews = new Map();
    this.sent = null; // the id of the upload that has the images of this page
    this.result = null;
    this.cameraBox = h("div", { class: "camera-box" });
    this.more = button(T.addClass, () => this.addBucket().name.focus(), { class: "add-class", id: "add-class" });
    this.row = h("div", { class: "buckets" }, this.more);
    this.next = button("", () => this.send(), { class: "primary", id: "look-through" });
    this.why = h("span", { class: "hint" });
    this.intro = h("p", { class: "lead" });
    this.stage = h("div", { class: "stage" });
    this.results = h("div", { class: "stage", "aria-live": "polite" });
    this.gather = h("div", { class: "card gather" },
      h("h1", {}, T.teachTitle), this.intro,
      h("div", { class: "actions" }, chooser(T.chooseFolder, (files) => this.take(files), { webkitdirectory: true, accept: null }),
        cameraButton(T.openCamera, () => this.openCamera()), h("span", { class: "hint" }, T.folderHelp)),
      this.cameraBox, this.row,
      h("div", { class: "actions end" }, this.why, this.next));
    fill(this.place, this.results, this.stage, this.gather);
    for (let n = state.about.classes.length ? 1 : 2; n; n--) this.addBucket();
    this.showNow().catch(complain);
  }

  // ------------------------------------------------------------------ gather

  addBucket(name = "") {
    const bucket = { images: [], body: h("div"), record: h("span") };
    bucket.name = h("input", { type: "text", class: "class-name", list: "classes", autocomplete: "off", maxlength: "200", placeholder: T.classExample, value: name, oninput: () => this.update() });
    const close = button("×", () => this.removeBucket(bucket), { class: "close", "aria-label": T.removeClass("") });
    bucket.element = takesDrops(h("div", { class: "bucket dropzone" },
      h("label", {}, h("span", {}, T.className), bucket.name), close,
      h("div", { class: "actions" }, chooser(T.chooseImages, (files) => this.take(files, bucket), { multiple: true }), bucket.record),
      h("p", { class: "hint" }, T.drop), bucket.body), (files) => this.take(files, bucket));
    this.buckets.push(bucket);
    this.more.before(bucket.element);
    this.update();
    return bucket;
  }

  removeBucket(bucket) {
    this.buckets = this.buckets.filter((b) => b !== bucket);
    bucket.element.remove();
    if (this.buckets.length) this.update();
    else this.addBucket();
  }

  /** Files with the folders they were in. A folder of folders becomes one class per inner folder. */
  take(given, bucket = null) {
    const files = given.filter(({ file }) => isImage(file));
    if (!files.length) return toast(T.noImages, { bad: true });
    if (files.length < given.length) toast(T.notImages(given.length - files.length));
    const byFolder = new Map();
    for (const { file, folders } of files) byFolder.set(folders.at(-1) ?? "", [...(byFolder.get(folders.at(-1) ?? "") ?? []), file]);
    for (const [folder, inside] of byFolder) {
      const empty = this.buckets.find((b) => !b.images.length && !b.name.value.trim());
      const same = folder && this.buckets.find((b) => b.name.value.trim() === folder);
      const target = same || (byFolder.size === 1 && bucket) || empty || this.addBucket();
      if (folder && !target.name.value.trim()) target.name.value = folder;
      target.images.push(...inside);
    }
    this.update();
  }

  async openCamera() {
    if (this.camera.isOpen) return;
    try {
      await this.camera.open();
    } catch (error) {
      return complain(error);
    }
    fill(this.cameraBox, this.camera.video, h("div", { class: "actions" }, button(T.closeCamera, () => this.leave(), { class: "quiet" })));
    this.update();
  }

  update() {
    if (!this.started && !this.buckets) return;
    this.intro.textContent = state.about.classes.length ? T.teachHelp : T.firstTime;
    const recording = this.camera.video.isConnected; // with its picture above the buttons, which do not move any more
    for (const bucket of this.buckets) {
      const { images } = bucket;
      bucket.element.querySelector(".close").hidden = this.buckets.length === 1 && !images.length;
      if (recording !== Boolean(bucket.record.firstChild))
        fill(bucket.record, recording && this.camera.recorder((frame) => (images.push(frame), this.update())));
      if (bucket.shown === images.length) continue;
      bucket.shown = images.length;
      fill(bucket.body, images.length > 0 && [
        h("p", { class: "bucket-count" }, T.bucket(images.length)),
        h("ul", { class: "thumbs" },
          images.slice(0, SHOWN).map((file, number) => h("li", {}, thumbnail(file, file.name),
            button("×", () => (images.splice(number, 1), (bucket.shown = null), this.update()), { class: "close", "aria-label": T.takeOut(file.name) }))),
          images.length > SHOWN && h("li", { class: "more" }, T.more(images.length - SHOWN))),
      ]);
    }
    const filled = this.buckets.filter((b) => b.images.length);
    const total = filled.reduce((sum, b) => sum + b.images.length, 0);
    const unnamed = filled.some((b) => !b.name.value.trim());
    this.why.textContent = !total ? T.needsImages : unnamed ? T.needsName : "";
    this.next.textContent = T.check(total);
    this.next.disabled = !total || unnamed;
  }

  // ------------------------------------------------------------------ what happens on the server

  async send() {
    const filled = this.buckets.filter((b) => b.images.length);
    const files = filled.flatMap((b) => b.images);
    const form = new FormData();
    form.append("labels", JSON.stringify(filled.flatMap((b) => b.images.map(() => b.name.value.trim()))));
    for (const file of files) form.append("files", file, file.name);
    this.next.disabled = true;
    this.why.textContent = T.uploading;
    try {
      const { upload, job } = await send(`/models/${state.path}/uploads`, form);
      this.sent = { upload, files, check: job.id };
      this.camera.close();
      fill(this.cameraBox);
      await lookNow();
    } catch (error) {
      complain(error);
    }
    this.update();
  }

  async showNow() {
    for (const upload of state.uploads) {
      if (!this.reviews.has(upload.upload)) {
        const mine = this.sent?.upload === upload.upload;
        const review = new Review(upload, mine ? this.sent.files : null, mine ? () => (this.sent = null) : null);
        this.reviews.set(upload.upload, review);
        this.stage.append(review.element);
      }
      this.reviews.get(upload.upload).update(upload);
    }
    for (const [id, review] of this.reviews) {
      if (state.uploads.some((u) => u.upload === id)) continue;
      review.element.remove();
      this.reviews.delete(id);
      if (this.sent?.upload === id) this.finished();
    }
    this.gather.hidden = this.sent !== null;
    const changes = state.jobs.filter((job) => !["check", "onnx"].includes(job.kind) && !job.preview && !isActive(job));
    const last = changes.at(-1);
    const shown = last?.kind === "teach" && last.state === "done" && sessionStorage.getItem(CLOSED) !== last.id ? last.id : null;
    if (last?.kind === "teach" && last.state === "failed" && this.told !== last.id) complain(new Error(last.error));
    this.told = last?.id;
    if (this.result === shown) return;
    this.result = shown;
    fill(this.results);
    if (shown) fill(this.results, taught((await get(`/jobs/${shown}`)).result, () => (sessionStorage.setItem(CLOSED, shown), this.showNow())));
  }

  /** The upload of this page is gone: taught, given up, or its check was cancelled. */
  finished() {
    const { check } = this.sent;
    this.sent = null;
    const job = state.jobs.find((j) => j.id === check);
    if (job?.state === "cancelled") return toast(T.cancelled);
    if (job?.state === "failed") return complain(new Error(job.error));
    for (const bucket of [...this.buckets]) this.removeBucket(bucket);
  }
}

/** What a teaching changed, in a card. */
function taught(result, close) {
  const before = result.accuracy_before, now = result.accuracy;
  const notes = [
    ...result.notes,
    result.known_images > 0 && T.known(result.known_images),
    result.copies > 0 && T.copies(result.copies),
    result.broken.length > 0 && T.broken(result.broken.length),
  ].filter(Boolean);
  return h("div", { class: "card result", id: "taught" },
    h("div", { class: "row" }, h("h2", {}, T.learned(result)), button("×", close, { class: "close inline", "aria-label": T.close })),
    h("p", { class: "lead" }, T.learnedIn(result)),
    now !== null && [
      h("div", { class: "figures" }, figure(T.before, percent(before, 1)), h("div", { class: "arrow", "aria-hidden": "true" }, "→"), figure(T.now, percent(now, 1), T.interval(result.accuracy_interval))),
      h("p", { class: "hint" }, T.leftOutOnce),
    ],
    warnings(result) ||
      (result.suffering.length ? [h("h3", {}, T.worse), h("ul", {}, result.suffering.slice(0, 8).map((c) => h("li", {}, T.fromTo(c))))] :
        now !== null && before !== null && h("p", {}, T.nothingWorse)),
    notes.length > 0 && h("ul", { class: "hint" }, notes.map((note) => h("li", {}, note))),
    h("div", { class: "actions" },
      button(T.askIt, () => (location.hash = address("ask")), { class: "primary" }),
      result.images > 0 && button(T.undoLesson, () => undo(1))),
  );
}
