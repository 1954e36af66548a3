// Draw: sketch something and see the guess change with every stroke.

import { button, complain, h } from "./dom.js";
import { Answers, ask, correction } from "./ask.js";
import { View } from "./images.js";
import { state } from "./model.js";
import { T } from "./texts.js";

const SIDE = 448; // of the canvas, in px
const PEN = 16;
const SMALL = 28; // px of the drawings that the example has learned: as large as fits, in the upper left corner,
const LINE = 1; // with lines of 1 px
const FINER = 8; // drawn so much larger first, to be smooth

export class Draw extends View {
  start() {
    this.strokes = [];
    this.canvas = h("canvas", { width: SIDE, height: SIDE, class: "drawing", id: "drawing", role: "img", "aria-label": T.drawHere });
    this.answers = new Answers();
    this.canvas.addEventListener("pointerdown", (event) => this.begin(event));
    this.canvas.addEventListener("pointermove", (event) => this.move(event));
    for (const name of ["pointerup", "pointercancel"]) this.canvas.addEventListener(name, () => (this.drawing = false));
    this.correction = correction(() => small(this.strokes), () => this.guess());
    const names = state.about.classes.map((c) => c.name);
    this.place.replaceChildren(
      h("div", { class: "card" },
        h("h1", {}, T.drawTitle),
        h("p", { class: "lead" }, T.drawHelp(names)),
        h("div", { class: "split" },
          h("div", { class: "easel" }, this.canvas,
            h("div", { class: "actions" }, button(T.clear, () => this.clear()), button(T.oneStroke, () => this.undoStroke(), { class: "quiet" }))),
          h("div", {}, this.answers.element, this.correction,
            h("details", {}, h("summary", {}, T.all), h("ul", { class: "chips" }, names.map((name) => h("li", {}, name))))))),
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
        const image = await small(this.strokes);
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

/** A drawing as the example knows drawings. */
export async function small(strokes) {
  if (!strokes.length) return null;
  const [xs, ys] = [0, 1].map((axis) => strokes.flat().map((point) => point[axis]));
  const [left, top] = [Math.min(...xs), Math.min(...ys)];
  const size = Math.max(Math.max(...xs) - left, Math.max(...ys) - top, 40);
  const large = paper(SMALL * FINER);
  const place = (v, low) => (((v - low) / size) * (SMALL - LINE) + LINE / 2) * FINER;
  stroke(large.getContext("2d"), strokes.map((s) => s.map(([x, y]) => [place(x, left), place(y, top)])), LINE * FINER);
  const canvas = paper(SMALL);
  const brush = canvas.getContext("2d");
  brush.imageSmoothingQuality = "high";
  brush.drawImage(large, 0, 0, SMALL, SMALL);
  const blob = await new Promise((resolve) => canvas.toBlob(resolve, "image/png"));
  return new File([blob], "drawing.png", { type: "image/png" });
}

function paper(side) {
  const canvas = h("canvas", { width: side, height: side });
  const brush = canvas.getContext("2d");
  brush.fillStyle = "white";
  brush.fillRect(0, 0, side, side);
  return canvas;
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
