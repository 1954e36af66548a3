// Answers what is in an image, with the model of model.js. Works on any page, and without a server:
//   const { probabilities, familiarity } = await vqprompt.predict(fileOrVideoOrCanvas);   // below 0 is unknown
"use strict";
const vqprompt = (() => {
  const { side, classes, notes } = vqpromptModel; // notes: for each class, words to show instead of percentages, or none

  async function unpacked(text) {
    const packed = atob(text);
    const bytes = new Uint8Array(packed.length);
    for (let i = 0; i < packed.length; i++) bytes[i] = packed.charCodeAt(i);
    return new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"))).arrayBuffer();
  }

  async function open() {
    const script = new Blob([await unpacked(vqpromptRuntime.script)], { type: "text/javascript" });
    const ort = await import(URL.createObjectURL(script));
    ort.env.wasm.numThreads = 1; // more need a server that isolates the page
    ort.env.wasm.wasmBinary = await unpacked(vqpromptRuntime.wasm);
    const graph = new Uint8Array(await unpacked(vqpromptModel.graph));
    const session = await ort.InferenceSession.create(graph, { graphOptimizationLevel: "disabled" });
    return { ort, session };
  }

  const ready = open();

  // Upright pixels [height * width * 4]; what is transparent becomes white.
  async function pixelsOf(image) {
    const upright = { imageOrientation: "from-image", colorSpaceConversion: "none" };
    const bitmap = await createImageBitmap(image, image instanceof Blob ? upright : undefined);
    const canvas = Object.assign(document.createElement("canvas"), { width: bitmap.width, height: bitmap.height });
    const context = canvas.getContext("2d", { willReadFrequently: true });
    context.fillStyle = "white";
    context.fillRect(0, 0, canvas.width, canvas.height);
    context.drawImage(bitmap, 0, 0);
    return context.getImageData(0, 0, canvas.width, canvas.height);
  }

  // For each of `target` pixels: the first of `source` pixels that it is made of, and their weights as whole numbers.
  // The cubic filter, its widening and its rounding are Pillow's, so that the result is the same to the last bit.
  const ONE = 2 ** 22;
  function filters(source, target) {
    const scale = source / target, wide = Math.max(scale, 1), support = 2 * wide;
    const cubic = (x) => (x < 1 ? (1.5 * x - 2.5) * x * x + 1 : x < 2 ? ((-0.5 * x + 2.5) * x - 4) * x + 2 : 0);
    return Array.from({ length: target }, (_, i) => {
      const center = (i + 0.5) * scale;
      const first = Math.max(0, Math.trunc(center - support + 0.5));
      const end = Math.min(source, Math.trunc(center + support + 0.5));
      const raw = Array.from({ length: end - first }, (_, j) => cubic(Math.abs((j + first - center + 0.5) / wide)));
      const sum = raw.reduce((a, b) => a + b, 0);
      return { first, weights: raw.map((w) => Math.trunc((w / sum) * ONE + (w < 0 ? -0.5 : 0.5))) };
    });
  }

  // One direction: `lines` lines of `source` pixels become lines of `target` pixels. Pixels of a line are `step` apart,
  // lines `stride` apart; both in numbers of three or four per pixel.
  function resampled(data, lines, source, target, step, stride, out, outStep, outStride) {
    const all = filters(source, target);
    for (let line = 0; line < lines; line++)
      for (let i = 0; i < target; i++) {
        const { first, weights } = all[i];
        let r = ONE / 2, g = ONE / 2, b = ONE / 2;
        for (let j = 0, at = line * stride + first * step; j < weights.length; j++, at += step) {
          r += data[at] * weights[j];
          g += data[at + 1] * weights[j];
          b += data[at + 2] * weights[j];
        }
        const at = line * outStride + i * outStep;
        out[at] = Math.floor(r / ONE);
        out[at + 1] = Math.floor(g / ONE);
        out[at + 2] = Math.floor(b / ONE);
      }
    return out;
  }

  // The whole image, squashed to a square: uint8 [side, side, 3].
  function squashed({ data, width, height }) {
    const rows = new Uint8ClampedArray(height * side * 3);
    resampled(data, height, width, side, 4, width * 4, rows, 3, side * 3);
    const square = new Uint8ClampedArray(side * side * 3);
    return resampled(rows, side, height, side, side * 3, 3, square, side * 3, 3);
  }

  async function predict(image) {
    const { ort, session } = await ready;
    const pixels = await pixelsOf(image);
    const square = new Uint8Array(squashed(pixels).buffer);
    const { probabilities, familiarity } = await session.run({
      pixels: new ort.Tensor("uint8", square, [1, side, side, 3]),
      aspect: new ort.Tensor("float32", [pixels.width / pixels.height], [1]),
    });
    return { probabilities: Array.from(probabilities.data), familiarity: familiarity.data[0] };
  }

  return { classes, notes, ready, predict, squashed, pixelsOf };
})();
