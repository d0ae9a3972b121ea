// Loaded pictures: shrunk, cropped to the board or prepared for it, and shown with a frame that can be moved.
import { blobOf, canvasOf, decode, formOf, json, Problem } from "./service.js";
import { $, el, models, recognises, shapeOf, thingOf, titleOf } from "./parts.js";
import { edgeInk, GUIDE, pngOf } from "./editor.js";

export const EDITS = "v1/images/edits";
const LARGEST = 1024; // pixels a side of what is kept of a picture
const THUMBNAIL = 270; // pixels a side
const GRIP = 22; // of these, how far from a corner of the frame a finger takes it
const COLOURED = 12; // how much differences of channels differ on average; tinted paper has the same everywhere
const UNIT = 32; // the longer side of a photograph's shape
const NOTICEABLE = 12; // smaller differences of a value leave the photograph as it is
const BLANK = 20; // in a prepared picture, less ink than this counts as none
const STEEP = 3; // strokes get edges up to this many times as sharp as in an enlarged picture

export class Upload {
  constructor(panel, board, task, loaded) {
    Object.assign(this, { panel, board, task, loaded, framed: null, said: "" });
    $("prepare").onchange = () =>
      board.source && this.load(board.source, { ...board.framed, asked: $("prepare").checked });
    const send = (file) =>
      file && document.dispatchEvent(new CustomEvent("file", { detail: file }));
    $("file").onchange = () => {
      send($("file").files[0]);
      $("file").value = "";
    };
    document.addEventListener("paste", ({ clipboardData }) => send(clipboardData?.files[0]));
    const easel = panel.querySelector(".easel");
    for (const name of ["dragover", "drop"]) {
      document.addEventListener(name, (event) => {
        if (!event.dataTransfer?.types.includes("Files")) return;
        event.preventDefault(); // else the browser would leave the page for the picture
        easel.classList.toggle("over", name === "dragover");
        if (name === "drop") send(event.dataTransfer.files[0]);
      });
    }
    document.addEventListener(
      "dragleave",
      (event) => event.relatedTarget || easel.classList.remove("over"),
    );
    const listeners = {
      pointerdown: "grab",
      pointermove: "drag",
      pointerup: "release",
      pointercancel: "release",
      keydown: "nudge",
    };
    for (const [name, method] of Object.entries(listeners))
      $("upload-canvas").addEventListener(name, (event) => this[method](event));
  }

  /** After the board changed its shape: it keeps its own picture, or gets the last board's. */
  follow(source) {
    const { board, task } = this;
    if (task.status.textContent === this.said) task.say(""); // it was about a picture on another board
    const free = board.source || board.example || !board.touched; // not a drawing of the visitor's own
    if (source && free && board.source !== source) this.load(source);
  }

  /**
   * Put a picture on the board. It is kept, to be put on the board of another shape too.
   * fresh: it may have the model chosen · how: see read.
   */
  load(blob, { fresh, ...how } = {}) {
    return this.task.start(
      (signal) => this.read(blob, how, signal),
      (signal) => fresh && this.suit(signal),
      () => this.board.framed?.why || this.loaded(),
    );
  }

  /** asked: whether to prepare; undefined: if it looks as if it helps · chosen: left, top, right, bottom of a frame, or none. */
  async read(blob, { asked, chosen }, signal) {
    const { board } = this;
    this.task.say("Reading the picture.");
    const name = blob.name || "The picture";
    try {
      const whole = await shrunk(blob);
      if (!whole) throw new Problem(`This browser cannot read ${name}. Save it as PNG or JPEG.`);
      const view = chosen ? part(whole, chosen) : whole;
      let picture = fitted(view, board);
      let { crop } = picture;
      let [prepared, why] = [false, ""];
      if (models.chosen.board.prepare && (asked ?? unlikeMnist(picture, view))) {
        try {
          const answer = await this.prepare(picture, view, signal);
          picture = fitted(await createImageBitmap(await decode(answer.prepared.b64_json)), board);
          [crop, prepared] = [answer.crop, true];
        } catch (problem) {
          if (problem.status !== 400) throw problem;
          why = `Not prepared: ${problem.message.replace(/^Image: |, or leave out prepare/g, "")} Or drag the frame around one.`;
        }
      }
      signal.throwIfAborted();
      const [x, y] = chosen ?? [0, 0];
      crop = crop.map((side, at) => side + (at % 2 ? y : x));
      board.together(() => {
        board.load(picture, blob, { whole, asked, chosen, frame: chosen ?? crop, prepared, why });
        this.settle(`${name} is loaded${prepared ? " and prepared" : ""}`, whole, crop, prepared);
      });
    } finally {
      $("prepare").checked = Boolean(board.framed?.prepared);
    }
  }

  /** Ask the API to prepare what is in the frame. A mask says that all of it is known; holes are prepared as holes. */
  async prepare(picture, view, signal) {
    const large = view.width * view.height > 1e5;
    const image = await blobOf(view, ...(large ? ["image/webp", 0.95] : []));
    const mask = picture.known.includes(0) && !onTransparent(picture) ? null : await allKnown();
    return json(EDITS, {
      body: formOf({ image, mask, model: models.chosen.id, prepare: models.chosen.board.prepare }),
      signal,
    });
  }

  /** Have a loaded picture read by a model of each set of classes. The surest one suits it. */
  async suit(signal) {
    const { board } = this;
    if (board.framed?.why || board.photograph?.known.includes(0)) return;
    const able = models.cards.filter((card) => recognises(card) && shapeOf(card) === board.shape);
    const kinds = new Map(able.reverse().map((card) => [card.classes.join(), card]));
    const own = models.chosen.classes.join();
    if (kinds.size < 2 || !kinds.has(own)) return;
    const [image, mask] = [await pngOf(board.image(true)), await allKnown()];
    const sure = {};
    for (const [kind, card] of kinds) {
      const { data } = await json(EDITS, { body: formOf({ image, mask, model: card.id }), signal });
      sure[kind] = data[0].confidence;
    }
    const best = Object.keys(sure).reduce(
      (one, other) => (sure[other] > sure[one] ? other : one),
      own,
    );
    if (best === own) return;
    board.framed.suited = kinds.get(best);
    if (!models.decided) models.choose(kinds.get(best).id);
    this.framed = null; // the words about it are others now
    this.show();
  }

  /** Show the file that the board's picture is from, if it is not shown yet. */
  show() {
    const { framed } = this.board;
    if (framed === this.framed) return;
    this.framed = framed;
    $("upload").hidden = !framed;
    if (!framed) return;
    const { whole, prepared, why, suited } = framed;
    this.draw(framed.frame);
    $("preparing").hidden = !models.chosen.board.prepare;
    $("prepare").checked = prepared;
    const other =
      this.board.channels === 1 &&
      coloured(whole) &&
      models.cards
        .filter((card) => card.channels === 3)
        .sort((a, b) => b.conditional - a.conditional)[0];
    const looks = suited
      ? `It looks like a ${thingOf(suited)}, and ${titleOf(suited)} knows these. `
      : "";
    const use = (card, text) =>
      el("button", { type: "button", click: () => models.choose(card.id) }, text);
    $("upload-words").replaceChildren(
      why || `${looks}The model sees what is in the frame. Drag it, or one of its corners.`,
      other ? use(other, `In colour: ${titleOf(other)}`) : "",
      suited && suited !== models.chosen ? use(suited, `Use ${titleOf(suited)}`) : "",
    );
  }

  // --- the frame ---

  draw(frame) {
    const { whole } = this.board.framed;
    const scale = (this.scale = THUMBNAIL / Math.max(whole.width, whole.height));
    const canvas = Object.assign($("upload-canvas"), {
      width: Math.max(1, whole.width * scale),
      height: Math.max(1, whole.height * scale),
    });
    const context = canvas.getContext("2d");
    context.drawImage(whole, 0, 0, canvas.width, canvas.height);
    const [left, top, right, bottom] = frame.map((side) => side * scale);
    context.fillStyle = "#0007";
    context.beginPath();
    context.rect(0, 0, canvas.width, canvas.height);
    context.rect(left, top, right - left, bottom - top);
    context.fill("evenodd");
    context.fillStyle = context.strokeStyle = GUIDE;
    context.lineWidth = 3;
    context.strokeRect(left, top, right - left, bottom - top);
    for (const x of [left, right])
      for (const y of [top, bottom]) context.fillRect(x - 7, y - 7, 14, 14);
  }

  /** A pointer's place, in pixels of the picture. */
  place({ clientX, clientY }) {
    const box = $("upload-canvas").getBoundingClientRect();
    const { width } = this.board.framed.whole;
    return [((clientX - box.left) * width) / box.width, ((clientY - box.top) * width) / box.width];
  }

  /** Take the frame, or a corner of it. */
  grab(event) {
    const [x, y] = this.place(event);
    const [left, top, right, bottom] = this.board.framed.frame;
    const corner = [2 * x < left + right ? left : right, 2 * y < top + bottom ? top : bottom];
    this.held = {
      at: [x, y],
      frame: [left, top, right, bottom],
      anchor: Math.hypot(x - corner[0], y - corner[1]) * this.scale < GRIP && [
        left + right - corner[0],
        top + bottom - corner[1],
      ],
    };
    event.target.setPointerCapture(event.pointerId);
  }

  drag(event) {
    if (!this.held) return;
    const [x, y] = this.place(event);
    const {
      at,
      frame: [left, top, right, bottom],
      anchor,
    } = this.held;
    const tall = this.board.height / this.board.width;
    if (anchor) {
      const side = Math.max(
        16 / this.scale,
        Math.abs(x - anchor[0]),
        Math.abs(y - anchor[1]) / tall,
      );
      const [from, above] = [
        x < anchor[0] ? anchor[0] - side : anchor[0],
        y < anchor[1] ? anchor[1] - side * tall : anchor[1],
      ];
      this.moved = this.within([from, above, from + side, above + side * tall]);
    } else
      this.moved = this.within([
        left + x - at[0],
        top + y - at[1],
        right + x - at[0],
        bottom + y - at[1],
      ]);
    this.draw(this.moved);
  }

  release() {
    if (this.moved) this.load(this.board.source, { ...this.board.framed, chosen: this.moved });
    this.held = this.moved = null;
  }

  nudge(event) {
    const step = {
      ArrowLeft: [-1, 0, -1, 0],
      ArrowRight: [1, 0, 1, 0],
      ArrowUp: [0, -1, 0, -1],
      ArrowDown: [0, 1, 0, 1],
      "+": [-1, -1, 1, 1],
      "-": [1, 1, -1, -1],
    }[event.key];
    if (!step) return;
    event.preventDefault();
    const { frame } = this.board.framed;
    this.moved = this.within(
      frame.map((side, at) => side + (step[at] * (frame[2] - frame[0])) / 12),
    );
    this.draw(this.moved);
    this.release();
  }

  /** The frame, as large and as near as it can be within the picture. */
  within([left, top, right, bottom]) {
    const { width, height } = this.board.framed.whole;
    const share = Math.min(1, width / (right - left), height / (bottom - top));
    const [wide, tall] = [(right - left) * share, (bottom - top) * share];
    const [x, y] = [
      Math.max(0, Math.min(left, width - wide)),
      Math.max(0, Math.min(top, height - tall)),
    ];
    return [x, y, x + wide, y + tall];
  }

  /** Finish loading: a negative of the model's pictures is inverted, and a picture without holes gets one. */
  settle(what, whole, crop, prepared = false) {
    const { board, task } = this;
    const how =
      whole?.width > board.width || whole?.height > board.height ? "cropped and shrunk to " : "";
    const said = [`${what}, ${how}${board.width} × ${board.height}.`];
    const negative = board.inverted;
    if (negative) {
      board.negative();
      said.push(
        `It was ${board.ground[0] > 127 ? "light on dark" : "dark on light"}, so it is inverted.`,
      );
    }
    const photograph = whole ? new Photograph(whole, crop, board, { prepared, negative }) : null;
    if (!board.holes) {
      board.only("half");
      said.push("Its lower half will be filled in; press Keep all to erase by hand.");
    }
    board.photograph = photograph;
    this.said = said.join(" ");
    task.say(this.said);
  }

  async adopt(base64, what) {
    const picture = fitted(await createImageBitmap(await decode(base64)), this.board);
    this.board.together(() => {
      this.board.load(picture);
      this.settle(what);
    });
  }
}

/** A file's picture, at most LARGEST pixels a side; null if it cannot be read. */
async function shrunk(blob) {
  const bitmap = await createImageBitmap(blob).catch(() => null);
  if (!bitmap) return null;
  const share = Math.min(1, LARGEST / Math.max(bitmap.width, bitmap.height));
  const canvas = canvasOf(
    Math.max(1, Math.round(bitmap.width * share)),
    Math.max(1, Math.round(bitmap.height * share)),
  );
  const context = canvas.getContext("2d");
  context.imageSmoothingQuality = "high";
  context.drawImage(bitmap, 0, 0, canvas.width, canvas.height);
  bitmap.close();
  return canvas;
}

/** What is in a frame. */
function part(whole, [left, top, right, bottom]) {
  const canvas = canvasOf(
    Math.max(1, Math.round(right - left)),
    Math.max(1, Math.round(bottom - top)),
  );
  canvas.getContext("2d").drawImage(whole, -left, -top);
  return canvas;
}

function coloured(canvas) {
  const context = canvasOf(32, 32).getContext("2d");
  context.drawImage(canvas, 0, 0, 32, 32);
  const { data } = context.getImageData(0, 0, 32, 32);
  const opaque = [...Array(1024).keys()].filter((pixel) => data[4 * pixel + 3] > 127);
  const meanOf = (values) => values.reduce((sum, value) => sum + value, 0) / values.length;
  const away = (other) => {
    const differences = opaque.map((pixel) => data[4 * pixel] - data[4 * pixel + other]);
    const mean = meanOf(differences);
    return meanOf(differences.map((value) => Math.abs(value - mean)));
  };
  return Math.max(away(1), away(2)) > COLOURED;
}

/** A mask that hides nothing. */
const allKnown = () => pngOf(new ImageData(Uint8ClampedArray.of(0, 0, 0, 255), 1, 1));

/** Whether less than one side of the edge is known. */
const onTransparent = (picture) => edgeInk(picture).length < picture.width;

/** Whether to prepare a picture unasked: if its ground is not black, or if it is larger than MNIST's and has no holes. */
function unlikeMnist(picture, { width, height }) {
  const edge = edgeInk(picture);
  if (!onTransparent(picture) && 2 * edge.filter(Boolean).length > edge.length) return true;
  return Math.max(width, height) > 28 && (!picture.known.includes(0) || onTransparent(picture));
}

/** A picture cropped around its centre to a shape; transparent parts are not known. crop: in pixels of the picture. */
function fitted(bitmap, { width, height, channels, transparent, ground }) {
  const theirs = Math.min(bitmap.width / width, bitmap.height / height); // its pixels per pixel of the board
  const fine = Math.min(16, Math.max(1, theirs));
  const [wide, tall] = [Math.round(width * fine), Math.round(height * fine)];
  const context = canvasOf(wide, tall).getContext("2d");
  context.imageSmoothingEnabled = theirs > fine;
  context.imageSmoothingQuality = "high";
  const [w, h] = [(bitmap.width * fine) / theirs, (bitmap.height * fine) / theirs];
  context.drawImage(bitmap, Math.round((wide - w) / 2), Math.round((tall - h) / 2), w, h);
  const [left, top] = [(bitmap.width - width * theirs) / 2, (bitmap.height - height * theirs) / 2];
  const { data } = context.getImageData(0, 0, wide, tall);
  const edge = (at) => Math.round(at * fine);
  const [ink, known] = [new Uint8ClampedArray(3 * width * height), new Uint8Array(width * height)];
  for (let pixel = 0; pixel < known.length; pixel++) {
    const [x, y] = [pixel % width, Math.floor(pixel / width)];
    const sums = [0, 0, 0, 0];
    for (let row = edge(y); row < edge(y + 1); row++) {
      for (let at = 4 * (row * wide + edge(x)); at < 4 * (row * wide + edge(x + 1)); at += 4) {
        for (let channel = 0; channel < 3; channel++)
          sums[channel] += (data[at + channel] * data[at + 3]) / 255;
        sums[3] += data[at + 3] / 255;
      }
    }
    known[pixel] = sums[3] >= ((edge(x + 1) - edge(x)) * (edge(y + 1) - edge(y))) / 2 ? 1 : 0;
    let [r, g, b] = sums.map((sum) => sum / Math.max(sums[3], 1e-6));
    if (channels === 1) r = g = b = 0.299 * r + 0.587 * g + 0.114 * b;
    const bare = transparent && !known[pixel];
    if (bare) known[pixel] = 1;
    ink.set(bare ? ground : [r, g, b], 3 * pixel);
  }
  return { width, height, ink, known, crop: [left, top, bitmap.width - left, bitmap.height - top] };
}

/** A photograph, over which finished pictures are laid back. */
class Photograph {
  /**
   * crop: left, top, right, bottom of what the board shows of it · board: as it was loaded.
   * prepared: the board has amounts of ink, and the canvas the tones of ink and paper; else the board has the canvas's
   * colours, or (negative) their negative.
   */
  constructor(canvas, crop, board, { prepared, negative }) {
    const { ink, known, width, height, ground } = board;
    // what is drawn is then ink on nothing
    const bare =
      board.channels === 1 && models.chosen.board.ground && onTransparent(fitted(canvas, board));
    Object.assign(this, {
      canvas,
      bare,
      ground: ground[0],
      ink: ink.map((one, at) => (bare && !known[Math.floor(at / 3)] ? ground[0] : one)),
      known: known.slice(),
      width,
      height,
      prepared,
      negative,
      crop,
    });
  }

  /** Its sides, in proportion. */
  get shape() {
    const unit = UNIT / Math.max(this.canvas.width, this.canvas.height);
    return {
      width: Math.max(1, Math.round(this.canvas.width * unit)),
      height: Math.max(1, Math.round(this.canvas.height * unit)),
    };
  }

  /** Put the photograph around a record's picture, while this is drawn. */
  surround(record) {
    const { width, height } = this.canvas;
    const around = (record.around = Object.assign(canvasOf(width, height), {
      className: "around",
    }));
    around.getContext("2d").drawImage(this.canvas, 0, 0);
    const [left, top, right, bottom] = this.crop;
    for (const [name, share] of Object.entries({
      left: left / width,
      top: top / height,
      wide: (right - left) / width,
      tall: (bottom - top) / height,
    })) {
      record.canvas.style.setProperty(`--${name}`, `${100 * share}%`);
    }
    record.button.prepend(around);
  }

  /** Lay a finished picture over it. */
  finish({ around, image, frame, about }) {
    const context = around.getContext("2d");
    context.globalCompositeOperation = "copy"; // what is transparent in it, too
    context.drawImage(this.lay(image, about.given.kept), 0, 0);
    frame.classList.add("laid");
  }

  /** The photograph, with image drawn where it was erased or differs from the loaded picture. image, kept: of the board's size. */
  lay(image, kept) {
    const { width, height, ink, known, canvas, negative, bare, ground } = this;
    const [left, top, right, bottom] = this.crop;
    const side = (right - left) / width; // of a board pixel, in pixels of the photograph
    const laid = canvasOf(canvas.width, canvas.height);
    const context = laid.getContext("2d");
    context.drawImage(canvas, 0, 0);
    const all = context.getImageData(0, 0, canvas.width, canvas.height);
    const tones = (this.prepared || bare) && (this.toned ??= this.tones());
    const around = neighbours(width, height);
    let differs = Array.from(
      known,
      (is, pixel) =>
        (is ? !kept[pixel] : !bare) ||
        [0, 1, 2].some(
          (channel) =>
            Math.abs(image.data[4 * pixel + channel] - ink[3 * pixel + channel]) > NOTICEABLE,
        ),
    );
    for (let round = 0; round < 2; round++) {
      // grow over the blur around strokes: seams are then outside it
      differs = around.map((near, pixel) => differs[pixel] || near.some((one) => differs[one]));
    }
    const layer = new Float32Array(width * height * 5); // red, green, blue, ink over them or how opaque they are, whether it is drawn
    for (let pixel = 0; pixel < width * height; pixel++) {
      const value = image.data.subarray(4 * pixel, 4 * pixel + 3);
      let under = value.map((one) => (negative ? 255 - one : one));
      if (tones) under = tones.paper.subarray(3 * pixel, 3 * pixel + 3);
      if (bare) under = tones.ink;
      const opaque = image.data[4 * pixel + 3];
      const amount = (tones ? Math.abs(value[0] - ground) : opaque) / 255;
      layer.set([...under, amount, differs[pixel]], 5 * pixel);
    }
    const steep = Math.min(STEEP, Math.max(1, side));
    const found = new Float32Array(5);
    for (let y = Math.max(0, Math.floor(top)); y < Math.min(laid.height, bottom); y++) {
      for (let x = Math.max(0, Math.floor(left)); x < Math.min(laid.width, right); x++) {
        between(
          layer,
          width,
          height,
          (x + 0.5 - left) / side - 0.5,
          (y + 0.5 - top) / side - 0.5,
          found,
        );
        if (!found[4]) continue;
        const share = Math.min(1, Math.max(0, (found[3] - 0.5) * steep + 0.5));
        const at = 4 * (y * laid.width + x);
        const kept = (1 - found[4]) * all.data[at + 3];
        const over = 255 * found[4] * (bare || !tones ? share : 1);
        for (let channel = 0; channel < 3; channel++) {
          const drawn = tones
            ? found[channel] + (tones.ink[channel] - found[channel]) * share
            : found[channel];
          all.data[at + channel] = (all.data[at + channel] * kept + drawn * over) / (kept + over);
        }
        all.data[at + 3] = kept + over;
      }
    }
    context.putImageData(all, 0, 0);
    return laid;
  }

  /** The colour of the ink, and of the paper in each pixel of the board; beneath ink, it is that of pixels around. */
  tones() {
    const {
      width,
      height,
      crop: [left, top, right, bottom],
    } = this;
    const amount = this.ink.map((one) => Math.abs(one - this.ground));
    const context = canvasOf(width, height).getContext("2d");
    context.imageSmoothingQuality = "high";
    context.drawImage(this.canvas, left, top, right - left, bottom - top, 0, 0, width, height);
    const { data } = context.getImageData(0, 0, width, height);
    const around = neighbours(width, height);
    const blank = around.map(
      (near, pixel) =>
        data[4 * pixel + 3] > 250 && [pixel, ...near].every((one) => amount[3 * one] < BLANK),
    );
    const mean = (weigh) =>
      [0, 1, 2].map((channel) => {
        let [sum, total] = [0, 1e-9];
        for (let pixel = 0; pixel < blank.length; pixel++) {
          const weight = weigh(pixel) * data[4 * pixel + 3];
          sum += weight * data[4 * pixel + channel];
          total += weight;
        }
        return sum / total;
      });
    const usual = mean((pixel) => Number(blank[pixel]));
    const paper = Float32Array.from(
      blank.flatMap((is, pixel) => (is ? [...data.subarray(4 * pixel, 4 * pixel + 3)] : usual)),
    );
    for (let round = 0; round < 2 * width; round++) {
      for (let at = 0; at < paper.length; at++) {
        const pixel = Math.floor(at / 3);
        const near = around[pixel];
        if (!blank[pixel])
          paper[at] = near.reduce((sum, one) => sum + paper[3 * one + (at % 3)], 0) / near.length;
      }
    }
    return { paper, ink: mean((pixel) => (amount[3 * pixel] / 255) ** 4) };
  }
}

/** For each pixel, the indices of the eight around it, or of fewer at the edge. */
function neighbours(width, height) {
  return Array.from({ length: width * height }, (_, pixel) => {
    const [x, y] = [pixel % width, Math.floor(pixel / width)];
    return [
      [0, -1],
      [-1, 0],
      [1, 0],
      [0, 1],
      [-1, -1],
      [1, -1],
      [-1, 1],
      [1, 1],
    ]
      .map(([dx, dy]) => [x + dx, y + dy])
      .filter(([u, v]) => u >= 0 && v >= 0 && u < width && v < height)
      .map(([u, v]) => v * width + u);
  });
}

/** Interpolate a layer's five values between the centres of its pixels, into found. */
function between(layer, width, height, x, y, found) {
  const [u, v] = [Math.min(width - 1, Math.max(0, x)), Math.min(height - 1, Math.max(0, y))];
  const [x0, y0] = [Math.floor(u), Math.floor(v)];
  const [x1, y1] = [Math.min(width - 1, x0 + 1), Math.min(height - 1, y0 + 1)];
  const [across, down] = [u - x0, v - y0];
  const along = (row, one) =>
    layer[5 * (row * width + x0) + one] * (1 - across) +
    layer[5 * (row * width + x1) + one] * across;
  for (let one = 0; one < 5; one++)
    found[one] = along(y0, one) * (1 - down) + along(y1, one) * down;
}
