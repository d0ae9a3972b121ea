// The drawing board: the ink of each sub-pixel, which pixels are known, and strokes that change both.

import { blobOf, canvasOf } from "./service.js";
import { shapeOf, tonesOf } from "./parts.js";

const HOLE = [
  ["#2a3342", "#3d4a5e"],
  ["#e3ded2", "#c9c2b2"],
]; // hatching in the dark and in the light theme
export const GUIDE = "#e07a5f";
const BOARD = [
  "ink",
  "known",
  "from",
  "photograph",
  "past",
  "future",
  "touched",
  "source",
  "framed",
  "example",
]; // kept for each shape's board

export class Board {
  constructor(canvas) {
    this.canvas = canvas;
    Object.assign(this, {
      tool: "pen",
      brush: 2.5,
      colour: [255, 255, 255],
      cursor: null,
      box: null,
      boards: {},
      ring: document.getElementById("ring"),
      changed: () => {},
      lifted: () => {},
      entered: () => {},
    });
    const listeners = {
      pointerdown: "down",
      pointermove: "move",
      pointerup: "up",
      keydown: "key",
      keyup: "released",
    };
    for (const [name, method] of Object.entries(listeners))
      canvas.addEventListener(name, (event) => this[method](event));
    canvas.onpointerleave = () => {
      this.ring.hidden = true;
    };
    canvas.onpointercancel = () => {
      this.at = this.box = null;
    };
    canvas.onblur = () => this.point(null);
    this.light = matchMedia("(prefers-color-scheme: light)");
    this.light.onchange = () => this.draw();
  }

  /** Show the board of a model's shape as it was left, or a new one, its lower half erased. False: it is shown already. */
  take(card) {
    const {
      width,
      height,
      palette,
      board: { ground },
    } = card;
    const channels = tonesOf(card);
    const shape = shapeOf(card);
    if (shape === this.shape) return false;
    this.boards[this.shape] = Object.fromEntries(BOARD.map((name) => [name, this[name]]));
    Object.assign(this, {
      shape,
      width,
      height,
      channels,
      transparent: Boolean(palette?.[0]?.endsWith("00")), // transparent pixels are ground, not holes
      ground: Array.from({ length: 3 }, (_, at) => ground?.[at % channels] ?? 0),
    });
    this.scale = Math.max(1, Math.floor(352 / width));
    this.canvas.parentElement.style.setProperty("--shape", Math.min(1, width / height));
    this.canvas.width = width * this.scale;
    this.canvas.height = height * this.scale;
    Object.assign(
      this,
      this.boards[shape] ?? {
        ink: this.paper(),
        known: new Uint8Array(width * height).fill(1),
        from: null,
        photograph: null,
        past: [],
        future: [],
        touched: false,
        source: null,
        framed: null,
        example: false,
      },
    );
    if (!this.boards[shape]) this.erase(this.halves.half);
    this.point(null);
    return true;
  }

  /** What buttons erase: left, top, right and bottom, as shares of the sides. */
  halves = {
    upper: [0, 0, 1, 0.5],
    half: [0, 0.5, 1, 1],
    left: [0, 0, 0.5, 1],
    right: [0.5, 0, 1, 1],
    middle: [0.25, 0.25, 0.75, 0.75],
  };

  /** A picture of nothing but ground. */
  paper() {
    return Uint8ClampedArray.from(
      { length: 3 * this.width * this.height },
      (_, at) => this.ground[at % 3],
    );
  }

  erase([left, top, right, bottom]) {
    const { width, height } = this;
    for (let y = Math.ceil(top * height); y < Math.ceil(bottom * height); y++) {
      this.known.fill(0, y * width + Math.ceil(left * width), y * width + Math.ceil(right * width));
    }
  }

  /** Do something that Undo takes back. */
  change(work) {
    this.example = false;
    this.past = [...this.past.slice(-49), this.state];
    this.future = [];
    this.touched = true;
    work();
    this.draw();
  }

  /** Several changes that Undo takes back at once. */
  together(work) {
    const past = [...this.past.slice(-49), this.state];
    work();
    this.past = past;
  }

  /** What Undo and Redo restore: the picture, the completion and file it is from, and what it can be laid back over. */
  get state() {
    const { ink, known, from, photograph, source, framed } = this;
    return { ink: ink.slice(), known: known.slice(), from, photograph, source, framed };
  }

  undo() {
    this.travel(this.past, this.future);
  }
  redo() {
    this.travel(this.future, this.past);
  }
  travel(back, forth) {
    if (!back.length) return;
    forth.push(this.state);
    Object.assign(this, back.pop());
    this.draw();
  }

  /** Erase one of the halves, and nothing else. */
  only(part) {
    this.change(() => {
      this.known.fill(1);
      this.erase(this.halves[part]);
    });
  }

  keep() {
    this.change(() => this.known.fill(1));
  }
  inverse() {
    this.change(() =>
      this.known.forEach((known, pixel) => {
        this.known[pixel] = 1 - known;
      }),
    );
  }
  negative() {
    this.change(() => {
      this.ink.forEach((value, at) => {
        this.ink[at] = 255 - value;
      });
      this.photograph = null;
    });
  }

  clear() {
    for (const [shape, { source }] of Object.entries(this.boards)) {
      if (source && source === this.source) delete this.boards[shape]; // the same picture in another shape
    }
    this.change(() => {
      this.ink = this.paper();
      this.known.fill(1);
      this.from = this.photograph = this.source = this.framed = null;
      this.erase(this.halves.half);
    });
    this.touched = false;
    this.changed();
  }

  /** Make an image the picture. known: for each pixel; all, if it is left out. */
  put(image, from, known) {
    this.change(() => {
      for (let pixel = 0; pixel < this.known.length; pixel++) {
        this.ink.set(image.data.subarray(4 * pixel, 4 * pixel + 3), 3 * pixel);
        this.known[pixel] = Number(known?.[pixel] ?? true);
      }
      this.from = from;
    });
  }

  // --- strokes ---

  down(event) {
    if (event.button) return;
    event.preventDefault();
    this.canvas.focus({ preventScroll: true });
    this.canvas.setPointerCapture(event.pointerId);
    this.point(null);
    this.at = this.place(event);
    if (this.tool === "box") this.span(this.at);
    else {
      if (this.example && this.tool === "pen") this.clear(); // a drawing takes the place of the example
      this.change(() => this.stroke(this.at, this.at));
    }
  }

  move(event) {
    this.surround(event);
    if (!this.at) return;
    const passed = event.getCoalescedEvents?.() ?? [];
    for (const one of passed.length ? passed : [event]) {
      const to = this.place(one);
      if (this.box) this.span(to);
      else this.stroke(this.at, to);
      this.at = to;
    }
    this.draw();
  }

  up() {
    if (!this.at) return;
    this.at = null;
    if (this.box) this.cut();
    this.lifted();
  }

  surround({ offsetX, offsetY, pointerType }) {
    const { ring, canvas } = this;
    ring.hidden = this.tool === "box" || pointerType === "touch";
    const side = ((2 * this.radius + 1) / this.width) * canvas.clientWidth;
    Object.assign(ring.style, {
      width: `${side}px`,
      height: `${side}px`,
      left: `${offsetX}px`,
      top: `${offsetY}px`,
    });
  }

  get radius() {
    return ((this.brush / 2) * (this.tool === "rub" ? 1.6 : 1) * this.width) / 28;
  }

  /** Begin the rectangle at a place, or stretch it to there. */
  span([x, y]) {
    const to = this.inside(x, y);
    this.box = [this.box?.[0] ?? to, to];
    this.draw();
  }

  /** The pixel at a place, or the nearest one. */
  inside(...place) {
    return place.map((value, axis) =>
      Math.min([this.width, this.height][axis] - 1, Math.max(0, Math.floor(value))),
    );
  }

  /** Left, top, right and bottom of the rectangle; right and bottom are outside. */
  get edges() {
    const [xs, ys] = [0, 1].map((axis) => this.box.map((corner) => corner[axis]));
    return [Math.min(...xs), Math.min(...ys), Math.max(...xs) + 1, Math.max(...ys) + 1];
  }

  cut() {
    const [left, top, right, bottom] = this.edges;
    this.box = null;
    this.change(() => {
      for (let y = top; y < bottom; y++)
        this.known.fill(0, y * this.width + left, y * this.width + right);
    });
  }

  place(event) {
    const box = this.canvas.getBoundingClientRect();
    return [
      ((event.clientX - box.left) / box.width) * this.width,
      ((event.clientY - box.top) / box.height) * this.height,
    ];
  }

  /** Draw from one place to another, in pixels: the pen leaves ink with soft edges, the eraser erases whole pixels. */
  stroke([x0, y0], [x1, y1]) {
    const { radius } = this;
    const length = (x1 - x0) ** 2 + (y1 - y0) ** 2;
    for (let y = 0; y < this.height; y++) {
      for (let x = 0; x < this.width; x++) {
        const along = length
          ? Math.min(
              1,
              Math.max(0, ((x + 0.5 - x0) * (x1 - x0) + (y + 0.5 - y0) * (y1 - y0)) / length),
            )
          : 0;
        const away = Math.hypot(x + 0.5 - x0 - along * (x1 - x0), y + 0.5 - y0 - along * (y1 - y0));
        const strength = Math.min(1, Math.max(0, radius + 0.5 - away));
        if (strength) this.dab(y * this.width + x, strength);
      }
    }
  }

  dab(pixel, strength) {
    if (this.tool === "rub") {
      if (strength >= 0.5) this.known[pixel] = 0;
      return;
    }
    if (!this.known[pixel] && strength < 0.5) return; // the soft edge of a stroke does not make an erased pixel known
    for (let channel = 0; channel < 3; channel++) {
      const at = 3 * pixel + channel;
      const [ground, pen] = [this.ground[channel], this.colour[channel]];
      const before = this.known[pixel] ? this.ink[at] : ground;
      this.ink[at] =
        this.channels === 3
          ? before + (pen - before) * strength
          : Math[pen > ground ? "max" : "min"](before, ground + (pen - ground) * strength);
    }
    this.known[pixel] = 1;
  }

  key(event) {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const step = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] }[
      event.key
    ];
    const [x, y] = this.cursor ?? [Math.floor(this.width / 2), Math.floor(this.height / 4)];
    if (step) {
      const to = this.inside(x + step[0], y + step[1]);
      if (this.tool === "box") {
        if (event.shiftKey && !this.box) this.span([x, y]);
        if (this.box) this.span(to);
      } else if (event.shiftKey) {
        this.change(() => this.stroke([x + 0.5, y + 0.5], [to[0] + 0.5, to[1] + 0.5]));
        this.pressed = true;
      }
      this.cursor = to;
    } else if (event.key === "Enter" && !this.box) {
      this.entered();
    } else if (event.key === " " || event.key === "Enter") {
      this.pressed = this.tool !== "box" || Boolean(this.box);
      if (this.box) this.cut();
      else if (this.tool === "box") this.span([x, y]);
      else this.change(() => this.stroke([x + 0.5, y + 0.5], [x + 0.5, y + 0.5]));
      this.cursor = [x, y];
    } else if (event.key === "Escape" && this.box) this.box = null;
    else return;
    event.preventDefault();
    this.draw();
  }

  /** The end of a stroke of keys. */
  released({ key }) {
    if (!this.pressed || !["Shift", " ", "Enter"].includes(key)) return;
    this.pressed = false;
    this.lifted();
  }

  /** Move the cursor to a pixel, or hide it with null; either drops the rectangle. */
  point(cursor) {
    this.cursor = cursor;
    this.box = null;
    this.draw();
  }

  /** A text: where the cursor is, and what can be done there. */
  get words() {
    if (this.box && !this.at) {
      const [left, top, right, bottom] = this.edges;
      return `${right - left} × ${bottom - top} pixels: Space erases, Escape lets go.`;
    }
    if (!this.cursor)
      return "Arrow keys move a cursor, Space draws, Shift with arrows draws a line, Enter completes.";
    const [x, y] = this.cursor;
    return `Column ${x + 1}, row ${y + 1}: ${this.known[y * this.width + x] ? "known" : "erased"}.`;
  }

  // --- pictures ---

  /** Take a picture of the board's shape. ink: three values a pixel · known: 1 or 0 · source, framed: as in state. */
  load({ ink, known }, source = null, framed = null) {
    this.change(() =>
      Object.assign(this, { ink, known, source, framed, from: null, photograph: null }),
    );
  }

  /** Whether a grey picture is a negative of the model's pictures, judged by its edge. */
  get inverted() {
    const edge = edgeInk(this);
    return (
      this.channels === 1 &&
      edge.length > 0 &&
      edge.reduce((sum, value) => sum + value, 0) > 127 * edge.length !== this.ground[0] > 127
    );
  }

  get holes() {
    return this.known.reduce((count, known) => count + 1 - known, 0);
  }

  /** The picture with its holes transparent, or (whole) with what is beneath them. */
  image(whole = false) {
    const image = new ImageData(this.width, this.height);
    this.known.forEach((known, pixel) => {
      if (known || whole)
        image.data.set([...this.ink.subarray(3 * pixel, 3 * pixel + 3), 255], 4 * pixel);
    });
    return image;
  }

  draw() {
    const { scale, width } = this;
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
      context.fillRect((pixel % width) * scale, Math.floor(pixel / width) * scale, scale, scale);
    });
    context.strokeStyle = GUIDE;
    if (this.box) {
      const [left, top, right, bottom] = this.edges.map((edge) => edge * scale);
      context.fillStyle = `${GUIDE}70`;
      context.fillRect(left, top, right - left, bottom - top);
      context.strokeRect(left, top, right - left, bottom - top);
    } else if (this.cursor)
      context.strokeRect(this.cursor[0] * scale, this.cursor[1] * scale, scale, scale);
    this.changed();
  }
}

/** The ink of known pixels at the edge, of a grey picture. */
export function edgeInk({ width, height, known, ink }) {
  const atEdge = (pixel) =>
    pixel < width || pixel >= width * (height - 1) || (pixel % width) % (width - 1) === 0;
  return [...known.keys()]
    .filter((pixel) => known[pixel] && atEdge(pixel))
    .map((pixel) => ink[3 * pixel]);
}

/** ImageData as a PNG that keeps its alpha. */
export function pngOf(image) {
  const canvas = canvasOf(image.width, image.height);
  canvas.getContext("2d").putImageData(image, 0, 0);
  return blobOf(canvas);
}
