// Draw: sketch something and see the guess change with every stroke.

import { complain, h } from "./dom.js";
import { Answers, ask, correction } from "./ask.js";
import { state } from "./model.js";

const SIDE = 448; // of the canvas, in px
const SMALL = 28; // of the drawings that the example has learned
const MARGIN = 2; // around the drawing, in small px
const PEN = 16;

export class Draw {
  constructor(place) {
    this.place = place;
    this.started = false;
  }

  show() {
    if (!this.started) this.start();
    this.started = true;
  }

  leave() {}

  start() {
    this.strokes = [];
    this.canvas = h("canvas", { width: SIDE, height: SIDE, class: "drawing", id: "drawing", "aria-label": "Draw here with the mouse or a finger" });
    this.answers = new Answers();
    this.canvas.addEventListener("pointerdown", (event) => this.begin(event));
    this.canvas.addEventListener("pointermove", (event) => this.move(event));
    for (const name of ["pointerup", "pointercancel"]) this.canvas.addEventListener(name, () => (this.drawing = false));
    this.correction = correction(() => this.small(), () => this.guess());
    this.place.replaceChildren(
      h("div", { class: "card" },
        h("h1", {}, "Draw something"),
        h("p", { class: "lead" }, `It knows ${state.about.classes.length} things, such as ${state.about.classes.filter((_, n) => n % 13 === 4).map((c) => c.name).join(", ")}. Watch the guess change as you draw.`),
        h("div", { class: "split" },
          h("div", { class: "easel" }, this.canvas,
            h("div", { class: "actions" },
              h("button", { type: "button", onclick: () => this.clear() }, "Clear"),
              h("button", { type: "button", class: "quiet", onclick: () => this.undoStroke() }, "Take back a stroke"))),
          h("div", {}, this.answers.element, this.correction))),
    );
    this.clear();
  }

  clear() {
    this.strokes = [];
    this.paint();
    this.answers.clear();
    this.correction.hidden = true;
  }

  undoStroke() {
    this.strokes.pop();
    this.paint();
    if (this.strokes.length) this.guess();
    else this.clear();
  }

  at(event) {
    const box = this.canvas.getBoundingClientRect();
    return [((event.clientX - box.left) / box.width) * SIDE, ((event.clientY - box.top) / box.height) * SIDE];
  }

  begin(event) {
    event.preventDefault();
    try {
      this.canvas.setPointerCapture(event.pointerId);
    } catch {
      // the pointer has already left
    }
    this.drawing = true;
    this.strokes.push([this.at(event)]);
    this.paint();
  }

  move(event) {
    if (!this.drawing) return;
    this.strokes.at(-1).push(this.at(event));
    this.paint();
    this.guess();
  }

  paint() {
    const brush = this.canvas.getContext("2d");
    brush.fillStyle = "white";
    brush.fillRect(0, 0, SIDE, SIDE);
    stroke(brush, this.strokes, PEN);
  }

  /** The drawing as the example knows drawings: 28 px, black on white, as large as fits. */
  async small() {
    if (!this.strokes.length) return null;
    const points = this.strokes.flat();
    const [xs, ys] = [points.map((p) => p[0]), points.map((p) => p[1])];
    const [left, top] = [Math.min(...xs), Math.min(...ys)];
    const size = Math.max(Math.max(...xs) - left, Math.max(...ys) - top, 40);
    const large = h("canvas", { width: SMALL * 8, height: SMALL * 8 });
    const brush = large.getContext("2d");
    brush.fillStyle = "white";
    brush.fillRect(0, 0, large.width, large.height);
    const scale = ((SMALL - 2 * MARGIN) * 8) / size;
    const place = (v, low, high) => (v - (low + high) / 2) * scale + large.width / 2;
    const [right, bottom] = [Math.max(...xs), Math.max(...ys)];
    const moved = this.strokes.map((s) => s.map(([x, y]) => [place(x, left, right), place(y, top, bottom)]));
    stroke(brush, moved, 12);
    const canvas = h("canvas", { width: SMALL, height: SMALL });
    const smaller = canvas.getContext("2d");
    smaller.imageSmoothingQuality = "high";
    smaller.drawImage(large, 0, 0, SMALL, SMALL);
    const blob = await new Promise((resolve) => canvas.toBlob(resolve, "image/png"));
    return new File([blob], "drawing.png", { type: "image/png" });
  }

  /** Ask about the drawing, one request at a time. If it changed while waiting, ask again. */
  async guess() {
    if (this.asking) {
      this.changed = true;
      return;
    }
    this.asking = true;
    try {
      do {
        this.changed = false;
        const image = await this.small();
        if (!image) break;
        const answer = await ask(image);
        if (this.strokes.length) {
          this.answers.show(answer);
          this.correction.hidden = false;
        }
      } while (this.changed);
    } catch (error) {
      complain(error);
    }
    this.asking = false;
  }
}

function stroke(brush, strokes, width) {
  brush.strokeStyle = "black";
  brush.lineWidth = width;
  brush.lineCap = brush.lineJoin = "round";
  for (const points of strokes) {
    brush.beginPath();
    brush.moveTo(...points[0]);
    if (points.length === 1) brush.lineTo(points[0][0] + 0.1, points[0][1]);
    for (const point of points.slice(1)) brush.lineTo(...point);
    brush.stroke();
  }
}
