// The drawing board: sub-pixels with ink, those that are known, and strokes that change either.

const HOLE = [["#2a3342", "#3d4a5e"], ["#e3ded2", "#c9c2b2"]];  // hatching in the dark and in the light
export const GUIDE = "#e07a5f";

export class Board {
  constructor(canvas) {
    this.canvas = canvas;
    Object.assign(this, {tool: "pen", brush: 2.5, colour: [255, 255, 255], past: [], cursor: null, changed: () => {}, boards: {}});
    canvas.addEventListener("pointerdown", (event) => this.down(event));
    canvas.addEventListener("pointermove", (event) => this.move(event));
    for (const name of ["pointerup", "pointercancel"]) canvas.addEventListener(name, () => this.up());
    canvas.addEventListener("keydown", (event) => this.key(event));
    canvas.addEventListener("blur", () => this.point(null));
    this.light = matchMedia("(prefers-color-scheme: light)");
    this.light.addEventListener("change", () => this.draw());
  }

  /** The board of a model's shape, as it was left; a new one is empty, and its lower half is to be filled in. */
  take({width, height, channels}) {
    const shape = [width, height, channels].join();
    if (shape === this.shape) return false;
    const {ink, known, past, touched, source} = this;
    this.boards[this.shape] = {ink, known, past, touched, source};
    Object.assign(this, {shape, width, height, channels});
    this.scale = Math.max(1, Math.floor(352 / width));
    this.canvas.width = width * this.scale;
    this.canvas.height = height * this.scale;
    Object.assign(this, this.boards[shape] ?? {ink: new Uint8ClampedArray(width * height * 3),
      known: new Uint8Array(width * height).fill(1), past: [], touched: false, source: null});
    if (!this.boards[shape]) this.fillHalf();
    this.point(null);
    return true;
  }

  fillHalf() {
    this.known.fill(0, Math.ceil(this.height / 2) * this.width);
  }

  /** Do something that Undo takes back. */
  change(work) {
    this.past = [...this.past.slice(-49), [this.ink.slice(), this.known.slice()]];
    this.touched = true;
    work();
    this.draw();
  }

  half() { this.change(() => this.fillHalf()); }
  keep() { this.change(() => this.known.fill(1)); }
  invert() { this.change(() => this.ink.forEach((value, at) => { this.ink[at] = 255 - value; })); }
  clear() {
    for (const [shape, {source}] of Object.entries(this.boards)) {
      if (source && source === this.source) delete this.boards[shape];  // the same picture for another model
    }
    this.source = null;
    this.change(() => {
      this.ink.fill(0);
      this.known.fill(1);
      this.fillHalf();
    });
    this.touched = false;
    this.changed();
  }

  undo() {
    const before = this.past.pop();
    if (before) [this.ink, this.known] = before;
    this.draw();
  }

  // --- strokes ---

  down(event) {
    if (event.button) return;
    event.preventDefault();
    this.canvas.focus({preventScroll: true});
    this.canvas.setPointerCapture(event.pointerId);
    this.point(null);
    this.at = this.place(event);
    this.change(() => this.stroke(this.at, this.at));
  }

  move(event) {
    if (!this.at) return;
    for (const one of event.getCoalescedEvents?.() ?? [event]) {
      const to = this.place(one);
      this.stroke(this.at, to);
      this.at = to;
    }
    this.draw();
  }

  up() {
    this.at = null;
  }

  place(event) {
    const box = this.canvas.getBoundingClientRect();
    return [(event.clientX - box.left) / box.width * this.width, (event.clientY - box.top) / box.height * this.height];
  }

  /** From one place to another, in pixels: the pen leaves ink with soft edges, rubbing out forgets whole pixels. */
  stroke([x0, y0], [x1, y1]) {
    const radius = this.brush / 2 * (this.tool === "rub" ? 1.6 : 1) * this.width / 28;
    const length = (x1 - x0) ** 2 + (y1 - y0) ** 2;
    for (let y = 0; y < this.height; y++) {
      for (let x = 0; x < this.width; x++) {
        const along = length ? Math.min(1, Math.max(0, ((x + .5 - x0) * (x1 - x0) + (y + .5 - y0) * (y1 - y0)) / length)) : 0;
        const away = Math.hypot(x + .5 - x0 - along * (x1 - x0), y + .5 - y0 - along * (y1 - y0));
        const strength = Math.min(1, Math.max(0, radius + .5 - away));
        if (strength) this.dab(y * this.width + x, strength);
      }
    }
  }

  dab(pixel, strength) {
    if (this.tool === "rub") {
      if (strength >= .5) this.known[pixel] = 0;
      return;
    }
    if (!this.known[pixel] && strength < .5) return;  // a stroke's soft edge is no pixel that somebody knows
    for (let channel = 0; channel < 3; channel++) {
      const at = 3 * pixel + channel;
      const before = this.known[pixel] ? this.ink[at] : 0;
      const ink = this.channels === 1 ? Math.max(before, 255 * strength) : before + (this.colour[channel] - before) * strength;
      this.ink[at] = ink;
    }
    this.known[pixel] = 1;
  }

  key(event) {
    const step = {ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1]}[event.key];
    const [x, y] = this.cursor ?? [Math.floor(this.width / 2), Math.floor(this.height / 4)];
    if (step) {
      const inside = (value, end) => Math.min(end - 1, Math.max(0, value));
      const to = [inside(x + step[0], this.width), inside(y + step[1], this.height)];
      if (event.shiftKey) this.change(() => this.stroke([x + .5, y + .5], [to[0] + .5, to[1] + .5]));
      this.point(to);
    } else if (event.key === " " || event.key === "Enter") {
      this.change(() => this.stroke([x + .5, y + .5], [x + .5, y + .5]));
      this.point([x, y]);
    } else return;
    event.preventDefault();
  }

  point(cursor) {
    this.cursor = cursor;
    this.draw();
  }

  // --- pictures ---

  /** Take a picture, cropped around its centre to the model's shape; its transparent parts are holes. */
  load(bitmap) {
    const theirs = Math.min(bitmap.width / this.width, bitmap.height / this.height);  // pixels for one of ours
    const fine = Math.min(16, Math.max(1, theirs));
    const [wide, tall] = [Math.round(this.width * fine), Math.round(this.height * fine)];
    const context = new OffscreenCanvas(wide, tall).getContext("2d");
    context.imageSmoothingEnabled = theirs > fine;
    context.imageSmoothingQuality = "high";
    const [w, h] = [bitmap.width * fine / theirs, bitmap.height * fine / theirs];
    context.drawImage(bitmap, Math.round((wide - w) / 2), Math.round((tall - h) / 2), w, h);
    const [left, top] = [(bitmap.width - this.width * theirs) / 2, (bitmap.height - this.height * theirs) / 2];
    this.cropped = [left, top, bitmap.width - left, bitmap.height - top];
    const {data} = context.getImageData(0, 0, wide, tall);
    const edge = (at) => Math.round(at * fine);
    this.change(() => {
      for (let pixel = 0; pixel < this.known.length; pixel++) {
        const [x, y] = [pixel % this.width, Math.floor(pixel / this.width)];
        const sums = [0, 0, 0, 0];
        for (let row = edge(y); row < edge(y + 1); row++) {
          for (let at = 4 * (row * wide + edge(x)); at < 4 * (row * wide + edge(x + 1)); at += 4) {
            for (let channel = 0; channel < 3; channel++) sums[channel] += data[at + channel] * data[at + 3] / 255;
            sums[3] += data[at + 3] / 255;
          }
        }
        this.known[pixel] = sums[3] >= (edge(x + 1) - edge(x)) * (edge(y + 1) - edge(y)) / 2 ? 1 : 0;
        let [r, g, b] = sums.map((sum) => sum / Math.max(sums[3], 1e-6));
        if (this.channels === 1) r = g = b = .299 * r + .587 * g + .114 * b;
        this.ink.set([r, g, b], 3 * pixel);
      }
    });
  }

  /** Whether a grey picture is dark on light, judged by its edge. */
  get inverted() {
    if (this.channels !== 1) return false;
    const edge = [...this.known.keys()].filter((pixel) => {
      const x = pixel % this.width;
      const y = Math.floor(pixel / this.width);
      return this.known[pixel] && (x === 0 || y === 0 || x === this.width - 1 || y === this.height - 1);
    });
    return edge.reduce((sum, pixel) => sum + this.ink[3 * pixel], 0) > 127 * edge.length;
  }

  get holes() {
    return this.known.reduce((count, known) => count + 1 - known, 0);
  }

  /** The picture with its holes transparent. */
  image() {
    const image = new ImageData(this.width, this.height);
    this.known.forEach((known, pixel) => {
      if (known) image.data.set([...this.ink.subarray(3 * pixel, 3 * pixel + 3), 255], 4 * pixel);
    });
    return image;
  }

  draw() {
    const {scale, width} = this;
    if (!scale) return;
    const context = this.canvas.getContext("2d");
    const [back, line] = HOLE[Number(this.light.matches)];
    context.fillStyle = back;
    context.fillRect(0, 0, this.canvas.width, this.canvas.height);
    context.strokeStyle = line;
    context.lineWidth = 2;
    context.beginPath();
    for (let x = -this.canvas.height; x < this.canvas.width; x += 8) {
      context.moveTo(x, this.canvas.height);
      context.lineTo(x + this.canvas.height, 0);
    }
    context.stroke();
    this.known.forEach((known, pixel) => {
      if (!known) return;
      const [r, g, b] = this.ink.subarray(3 * pixel, 3 * pixel + 3);
      context.fillStyle = `rgb(${r} ${g} ${b})`;
      context.fillRect(pixel % width * scale, Math.floor(pixel / width) * scale, scale, scale);
    });
    if (this.cursor) {
      context.strokeStyle = GUIDE;
      context.strokeRect(this.cursor[0] * scale, this.cursor[1] * scale, scale, scale);
    }
    this.changed();
  }
}

/** ImageData as a PNG that keeps its alpha. */
export function pngOf(image) {
  const canvas = new OffscreenCanvas(image.width, image.height);
  canvas.getContext("2d").putImageData(image, 0, 0);
  return canvas.convertToBlob({type: "image/png"});
}
