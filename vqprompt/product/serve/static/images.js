// Images from wherever people have them: dropped files and folders, the file chooser, the clipboard, the camera.

import { complain, h } from "./dom.js";

const IMAGE = /\.(jpe?g|jfif|png|bmp|gif|webp|tiff?|ppm|pgm|heic|heif|avif)$/i;

export const isImage = (file) => file.type.startsWith("image/") || IMAGE.test(file.name);

/** What was dropped: [{file, folders}], folders being the names of the folders it was in, outermost first. */
export async function dropped(transfer) {
  const entries = [...transfer.items].map((item) => item.webkitGetAsEntry?.()).filter(Boolean);
  const found = [];
  const walk = async (entry, folders) => {
    if (entry.name.startsWith(".")) return;
    if (entry.isFile) {
      const file = await new Promise((resolve, reject) => entry.file(resolve, reject));
      found.push({ file, folders });
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
  return found;
}

/** What a file input has, in the same form. */
export const chosen = (files) =>
  [...files].map((file) => ({ file, folders: (file.webkitRelativePath || "").split("/").slice(0, -1) }));

/** A place to drop images on, with buttons to choose files instead. take: called with what `dropped` returns. */
export function dropzone(title, take, { folder = false, many = true, extra = [] } = {}) {
  const input = (attributes) => {
    const element = h("input", { type: "file", hidden: true, ...attributes });
    element.addEventListener("change", () => {
      take(chosen(element.files));
      element.value = "";
    });
    return element;
  };
  const files = input({ accept: "image/*,.heic,.heif,.avif", multiple: many, class: "choose-files" });
  const folders = folder ? input({ webkitdirectory: true, class: "choose-folder" }) : null;
  const zone = h(
    "div",
    { class: "dropzone" },
    h("p", { class: "big" }, title),
    h(
      "div",
      { class: "actions" },
      h("button", { type: "button", onclick: () => files.click() }, many ? "Choose images" : "Choose an image"),
      folders && h("button", { type: "button", onclick: () => folders.click() }, "Choose a folder"),
      extra,
    ),
    files,
    folders,
  );
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
    this.video = h("video", { autoplay: true, muted: true, playsinline: true, class: "camera", "aria-label": "Camera" });
    this.stream = null;
  }

  async open() {
    if (!navigator.mediaDevices) throw new Error("The camera needs a secure address: this machine itself, or https.");
    try {
      this.stream = await navigator.mediaDevices.getUserMedia({ video: { facingMode: "environment" } });
    } catch (error) {
      throw new Error(`The camera cannot be used (${error.message}).`);
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
    return new Promise((resolve) => canvas.toBlob(resolve, "image/jpeg", 0.9));
  }
}

/** A thumbnail of a local image; what the browser cannot show becomes a grey square. */
export function thumbnail(blob, alt) {
  const image = h("img", { src: URL.createObjectURL(blob), alt, class: "thumb", loading: "lazy" });
  image.addEventListener("load", () => URL.revokeObjectURL(image.src), { once: true });
  image.addEventListener("error", () => image.classList.add("broken"), { once: true });
  return image;
}

// A view that may use the camera. It is built when it is first shown.
export class CameraTab {
  constructor(place) {
    this.place = place;
    this.camera = new Camera();
    this.started = false;
  }

  show() {
    if (!this.started) this.start();
    this.started = true;
  }
}
