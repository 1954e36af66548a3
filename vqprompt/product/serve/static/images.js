// Images from wherever people have them: dropped files and folders, the file chooser, the clipboard, the camera.

import { button, complain, fill, h } from "./dom.js";
import { T } from "./texts.js";

const IMAGE = /\.(jpe?g|jfif|png|bmp|gif|webp|tiff?|ppm|pgm|heic|heif|avif)$/i;
const BETWEEN_SHOTS = 200; // ms, while the button to record is held

export const isImage = (file) => file.type.startsWith("image/") || IMAGE.test(file.name);

/** What was dropped: [{file, folders}], folders being the names of the folders it was in, outermost first. */
export async function dropped(transfer) {
  const entries = [...transfer.items].map((item) => item.webkitGetAsEntry?.()).filter(Boolean);
  const files = [];
  const walk = async (entry, folders) => {
    if (entry.name.startsWith(".")) return;
    if (entry.isFile) {
      const file = await new Promise((resolve, reject) => entry.file(resolve, reject));
      files.push({ file, folders });
      return;
    }
    const reader = entry.createReader();
    for (;;) {
      const part = await new Promise((resolve, reject) => reader.readEntries(resolve, reject));
      if (!part.length) break;
      for (const inner of part) await walk(inner, [...folders, entry.name]);
    }
  };
  if (!entries.length) return chosen(transfer.files);
  for (const entry of entries) await walk(entry, []);
  return files;
}

/** What a file input has, in the same form. */
const chosen = (files) =>
  [...files].map((file) => ({ file, folders: (file.webkitRelativePath || "").split("/").slice(0, -1) }));

/** A button that opens the file chooser. take: called with what `dropped` returns. */
export function chooser(text, take, attributes = {}) {
  const input = h("input", { type: "file", hidden: true, accept: "image/*,.heic,.heif,.avif", ...attributes });
  input.addEventListener("change", () => {
    take(chosen(input.files));
    input.value = "";
  });
  return [button(text, () => input.click()), input];
}

/** Make an element a place to drop images on. */
export function takesDrops(zone, take) {
  zone.addEventListener("dragover", (event) => (event.preventDefault(), zone.classList.add("over")));
  zone.addEventListener("dragleave", () => zone.classList.remove("over"));
  zone.addEventListener("drop", (event) => {
    event.preventDefault();
    zone.classList.remove("over");
    dropped(event.dataTransfer).then(take).catch(complain);
  });
  return zone;
}

/** The camera as a <video>, and frames of it as JPEG. */
export class Camera {
  constructor() {
    this.video = h("video", { autoplay: true, muted: true, playsinline: true, class: "camera", "aria-label": T.camera });
    this.stream = null;
  }

  async open() {
    if (!navigator.mediaDevices) throw new Error(T.cameraInsecure);
    try {
      this.stream = await navigator.mediaDevices.getUserMedia({ video: { facingMode: "environment" } });
    } catch (error) {
      throw new Error(T.cameraFailed(error.message));
    }
    this.video.srcObject = this.stream;
    await this.video.play();
  }

  close() {
    this.stream?.getTracks().forEach((track) => track.stop());
    this.stream = null;
    this.video.srcObject = null;
  }

  get isOpen() {
    return this.stream !== null;
  }

  async frame(longest = 640) {
    const { videoWidth: width, videoHeight: height } = this.video;
    if (!width) return null;
    const scale = Math.min(1, longest / Math.max(width, height));
    const canvas = h("canvas", { width: Math.round(width * scale), height: Math.round(height * scale) });
    canvas.getContext("2d").drawImage(this.video, 0, 0, canvas.width, canvas.height);
    const blob = await new Promise((resolve) => canvas.toBlob(resolve, "image/jpeg", 0.9));
    return new File([blob], `camera ${new Date().toISOString().slice(11, 23)}.jpg`, { type: "image/jpeg" });
  }

  /** A button that takes several frames per second for as long as it is held, by pointer or key. */
  recorder(take) {
    let held = false;
    const press = async () => {
      if (held) return;
      held = true;
      element.textContent = T.recording;
      while (held && this.isOpen) {
        const frame = await this.frame();
        if (frame) take(frame);
        await new Promise((resolve) => setTimeout(resolve, BETWEEN_SHOTS));
      }
      element.textContent = T.record;
    };
    const release = () => (held = false);
    const isKey = (event) => event.key === " " || event.key === "Enter";
    const element = button(T.record, null, {
      class: "record",
      onpointerdown: (event) => (element.setPointerCapture(event.pointerId), press()),
      onkeydown: (event) => isKey(event) && (event.preventDefault(), press()),
      onkeyup: release,
      onblur: release,
      oncontextmenu: (event) => event.preventDefault(),
    });
    for (const name of ["pointerup", "pointercancel"]) element.addEventListener(name, release);
    return element;
  }
}

/** A button for the camera; where the camera cannot work, words instead. */
export const cameraButton = (text, open) => (window.isSecureContext ? button(text, open) : h("p", { class: "hint" }, T.cameraInsecure));

/** A thumbnail of a local image; what the browser cannot show becomes a grey square. */
export function thumbnail(blob, alt) {
  const image = h("img", { src: URL.createObjectURL(blob), alt, class: "thumb", loading: "lazy" });
  image.addEventListener("load", () => URL.revokeObjectURL(image.src), { once: true });
  image.addEventListener("error", () => image.classList.add("broken"), { once: true });
  return image;
}

/** A part of the page. It is built when it is first shown, and again for another model. */
export class View {
  constructor(place) {
    this.place = place;
    this.started = false;
  }

  show() {
    if (!this.started) this.start();
    this.started = true;
  }

  leave() {}

  forget() {
    this.started = false;
    fill(this.place);
  }
}
