// Loaded pictures: read, cropped to the board or prepared for it, and shown with a frame around what the model sees.
import {decode, formOf, json, Problem} from "./service.js";
import {$, models} from "./parts.js";
import {edgeInk, GUIDE, pngOf} from "./editor.js";
import {Photograph} from "./photograph.js";

export const EDITS = "v1/images/edits";
const MNIST = "28,28,1";  // the shape of prepared digits

export class Upload {
  constructor(panel, board, task) {
    Object.assign(this, {panel, board, task, framed: null, said: ""});
    $("prepare").onchange = () => board.source && this.load(board.source, $("prepare").checked);
    $("file").onchange = () => {
      const [file] = $("file").files;
      $("file").value = "";
      if (file) this.load(file);
    };
    document.addEventListener("paste", (event) => {
      const [file] = event.clipboardData?.files ?? [];
      if (!panel.hidden && file) this.load(file);
    });
    const easel = panel.querySelector(".easel");
    for (const name of ["dragover", "drop"]) {
      document.addEventListener(name, (event) => {
        if (panel.hidden || !event.dataTransfer?.types.includes("Files")) return;
        event.preventDefault();  // else the browser would leave the page for the picture
        easel.classList.toggle("over", name === "dragover");
        if (name === "drop" && event.dataTransfer.files[0]) this.load(event.dataTransfer.files[0]);
      });
    }
    document.addEventListener("dragleave", (event) => event.relatedTarget || easel.classList.remove("over"));
  }

  /** The picture that is being loaded, if any. */
  get loading() {
    return this.task.controller?.signal === this.signal ? this.blob : null;
  }

  /** Stop loading: another picture takes the place. */
  drop() {
    this.beside?.abort();
    if (!this.loading) return;
    this.task.start();
    this.task.say("");
  }

  /** After the board changed its shape: it keeps its own picture, or gets that being loaded, or the last board's. */
  follow(source) {
    const {board, task} = this;
    if (task.status.textContent === this.said) task.say("");  // it was about a picture on another board
    const picture = this.loading ?? source;
    const free = board.source || !board.touched;  // not a drawing of the visitor's own
    const due = picture && free && board.source !== picture;
    if (!due) return this.drop();
    if (this.loading || !task.running) return this.load(picture);
    this.drop();
    const {signal} = this.beside = new AbortController();  // what is being drawn goes on
    return this.read(picture, undefined, signal).catch((problem) => signal.aborted || task.notice.show(problem));
  }

  clear() {
    this.drop();
    this.board.clear();
  }

  /** Put a picture on the board if the API takes it. It is kept, to be put on the board of another shape too. */
  load(blob, asked) {
    this.beside?.abort();
    return this.task.start((signal) => {
      Object.assign(this, {blob, signal});
      this.task.say("Reading the picture.");
      return this.read(blob, asked, signal);
    });
  }

  async read(blob, asked, signal) {
    const {board} = this;
    const name = blob.name || "The picture";
    let bitmap;
    try {
      bitmap = await createImageBitmap(blob).catch(() => null);
      const picture = bitmap && fitted(bitmap, board);
      const prepared = board.shape === MNIST && (asked ?? (bitmap && unlikeMnist(picture, bitmap)));
      let answer;
      try {
        answer = await this.judge(picture, blob, prepared, signal);
      } catch (problem) {
        signal.throwIfAborted();
        const {message, status} = problem;
        if (status === 400 && prepared && asked == null) {  // it only looked like a digit
          return await this.read(blob, false, signal);
        }
        problem.message = message.replace(/^(Image|The body)/, () => name).replace(/ that begin with.*/, ".")
          + (status === 413 ? " Make it smaller." : "");
        throw problem;
      }
      if (!bitmap) throw new Problem(`This browser cannot read ${name}. Save it as PNG.`);
      const digit = prepared && await createImageBitmap(await decode(answer.prepared.b64_json));
      signal.throwIfAborted();
      const {crop} = prepared ? answer : picture;
      board.together(() => {
        board.load(prepared ? fitted(digit, board) : picture, blob, framed(bitmap, crop, prepared));
        this.settle(`${name} is loaded${prepared ? " and prepared" : ""}`, bitmap, crop, prepared);
      });
    } finally {
      bitmap?.close();
      $("prepare").checked = Boolean(board.framed?.prepared);
    }
  }

  /** Send a file to the API. A mask says that all of it is known, so nothing is drawn; holes are prepared as holes. */
  async judge(picture, blob, prepared, signal) {
    const fields = {image: blob, model: models.chosen.id, prepare: prepared ? "mnist" : "none"};
    const holed = picture?.known.includes(0) && !onTransparent(picture);
    if (!prepared || !holed) fields.mask = await pngOf(new ImageData(Uint8ClampedArray.of(0, 0, 0, 255), 1, 1));
    return json(EDITS, {body: formOf(fields), signal});
  }

  /** Show the file that the board's picture is from, if it is not shown yet. */
  show() {
    const {framed, shape} = this.board;
    if (framed === this.framed) return;
    this.framed = framed;
    $("upload").hidden = !framed;
    if (!framed) return;
    const {image, prepared} = framed;
    const {width, height} = image;
    Object.assign($("upload-canvas"), {width, height}).getContext("2d").drawImage(image, 0, 0);
    $("preparing").hidden = shape !== MNIST;
    $("prepare").checked = prepared;
  }

  /** Finish loading: a picture dark on light is inverted, and one without holes gets one, to be completed. */
  settle(what, bitmap, crop, prepared = false) {
    const {board, task} = this;
    const how = bitmap?.width > board.width ? "cropped and shrunk to " : "";
    const said = [`${what}, ${how}${board.width} × ${board.height}.`];
    const negative = board.inverted;
    if (negative) {
      board.negative();
      said.push("It was dark on light, so it is inverted.");
    }
    const photograph = bitmap ? new Photograph(bitmap, crop, board, {prepared, negative}) : null;
    if (!board.holes) {
      board.only("half");
      said.push("Its lower half will be filled in; press Keep all to erase by hand.");
    }
    board.photograph = photograph;
    this.said = said.join(" ");
    task.say(this.said);
  }

  async adopt(base64, what) {
    this.drop();
    const picture = fitted(await createImageBitmap(await decode(base64)), this.board);
    this.board.together(() => {
      this.board.load(picture);
      this.settle(what);
    });
  }
}

/** Whether hardly anything of the edge is known: less than one side of it. */
const onTransparent = (picture) => edgeInk(picture).length < picture.width;

/**
 * Whether to prepare a picture unasked: if its ground is not black; if it is larger than MNIST's, also if its ground is
 * transparent or its ink is not 20 pixels large in the middle. Digits of MNIST stay as they are, enlarged too.
 */
function unlikeMnist(picture, {width, height}) {
  const {known, ink} = picture;
  const edge = edgeInk(picture);
  if (!onTransparent(picture) && 2 * edge.filter(Boolean).length > edge.length) return true;
  if (Math.max(width, height) <= 28) return false;
  if (known.includes(0)) return onTransparent(picture);
  const drawn = [...known.keys()].filter((pixel) => ink[3 * pixel] > 32);
  const [xs, ys] = [drawn.map((pixel) => pixel % 28), drawn.map((pixel) => Math.floor(pixel / 28))];
  const size = (places) => Math.max(...places) - Math.min(...places) + 1;
  const off = (places) => Math.abs(places.reduce((sum, place) => sum + place, 0) / places.length - 13.5);
  return Math.max(Math.abs(Math.max(size(xs), size(ys)) - 20), off(xs), off(ys)) > 2;
}

/** A small copy of a loaded picture, with a frame around what the model sees. crop: left, top, right, bottom. */
function framed(picture, crop, prepared = false) {
  const scale = 270 / Math.max(picture.width, picture.height);
  const image = new OffscreenCanvas(Math.max(1, picture.width * scale), Math.max(1, picture.height * scale));
  const context = image.getContext("2d");
  context.drawImage(picture, 0, 0, image.width, image.height);
  const [left, top, right, bottom] = crop.map((side) => side * scale);
  context.strokeStyle = GUIDE;
  context.lineWidth = 8;
  context.strokeRect(left, top, right - left, bottom - top);
  return {image, prepared};
}

/** A picture cropped around its centre to a shape; transparent parts are not known. crop: in pixels of the picture. */
function fitted(bitmap, {width, height, channels}) {
  const theirs = Math.min(bitmap.width / width, bitmap.height / height);  // its pixels per pixel of the board
  const fine = Math.min(16, Math.max(1, theirs));
  const [wide, tall] = [Math.round(width * fine), Math.round(height * fine)];
  const context = new OffscreenCanvas(wide, tall).getContext("2d");
  context.imageSmoothingEnabled = theirs > fine;
  context.imageSmoothingQuality = "high";
  const [w, h] = [bitmap.width * fine / theirs, bitmap.height * fine / theirs];
  context.drawImage(bitmap, Math.round((wide - w) / 2), Math.round((tall - h) / 2), w, h);
  const [left, top] = [(bitmap.width - width * theirs) / 2, (bitmap.height - height * theirs) / 2];
  const {data} = context.getImageData(0, 0, wide, tall);
  const edge = (at) => Math.round(at * fine);
  const [ink, known] = [new Uint8ClampedArray(3 * width * height), new Uint8Array(width * height)];
  for (let pixel = 0; pixel < known.length; pixel++) {
    const [x, y] = [pixel % width, Math.floor(pixel / width)];
    const sums = [0, 0, 0, 0];
    for (let row = edge(y); row < edge(y + 1); row++) {
      for (let at = 4 * (row * wide + edge(x)); at < 4 * (row * wide + edge(x + 1)); at += 4) {
        for (let channel = 0; channel < 3; channel++) sums[channel] += data[at + channel] * data[at + 3] / 255;
        sums[3] += data[at + 3] / 255;
      }
    }
    known[pixel] = sums[3] >= (edge(x + 1) - edge(x)) * (edge(y + 1) - edge(y)) / 2 ? 1 : 0;
    let [r, g, b] = sums.map((sum) => sum / Math.max(sums[3], 1e-6));
    if (channels === 1) r = g = b = .299 * r + .587 * g + .114 * b;
    ink.set([r, g, b], 3 * pixel);
  }
  return {width, height, ink, known, crop: [left, top, bitmap.width - left, bitmap.height - top]};
}
