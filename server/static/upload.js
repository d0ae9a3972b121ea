// Loaded pictures: read, cropped to the board or prepared for it, and shown with a frame around what the model sees.
import {decode, formOf, json, Problem} from "./service.js";
import {$, models} from "./parts.js";
import {GUIDE} from "./editor.js";
import {Photograph} from "./photograph.js";

export const EDITS = "v1/images/edits";
const MNIST = "28,28,1";  // the shape of prepared digits
const FORMATS = ["image/png", "image/jpeg", "image/webp", ""];  // what the API reads; "": the type is unknown
const OTHERS = /\b(avif|bmp|gif|hei[cf]|svg|tiff?)\b/i;

export class Upload {
  constructor(panel, board, task) {
    Object.assign(this, {panel, board, task, loading: null, framed: null, said: ""});
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

  /** After the board changed its shape: it keeps its own picture, or gets source, that of the board before. */
  follow(source) {
    const {board, task} = this;
    if (task.status.textContent === this.said) task.say("");  // it was about a picture on another board
    const free = board.source || !board.touched;  // not a drawing of the visitor's own
    if (!free || board.source === this.loading) this.loading = null;  // a picture still being read is for another board
    if (source && board.source !== source && free && !this.loading) this.load(source);
  }

  clear() {
    this.loading = null;
    this.board.clear();
  }

  /** Put a picture on the board. It is kept, to be put on the board of another shape too. */
  async load(blob, prepare) {
    const {board, task} = this;
    this.loading = blob;
    task.notice.clear();
    task.say("");  // it was about the picture before
    let bitmap;
    try {
      bitmap = FORMATS.includes(blob.type) && await createImageBitmap(blob);
    } catch {
      bitmap = null;
    }
    if (!bitmap) {
      if (this.loading === blob) this.loading = null;
      const [kind] = OTHERS.exec(`${blob.type} ${/\w*$/.exec(blob.name)}`) ?? [];
      const why = kind ? `${kind.toUpperCase()}, which cannot` : "not a picture that can";
      task.notice.show(new Problem(`${blob.name || "That"} is ${why} be read here. Choose a PNG, JPEG or WebP.`));
      return;
    }
    if (this.loading === blob) {  // else another picture was chosen meanwhile
      this.loading = null;
      const what = blob.name ? `${blob.name} is loaded` : "The picture is loaded";
      const {crop, ...picture} = fitted(bitmap, board);
      board.load(picture, blob, framed(bitmap, crop));
      if ($("prepare").checked = board.shape === MNIST && (prepare ?? unlikeMnist(board, bitmap))) {
        await this.prepare(blob, what, prepare);
      } else this.settle(what, bitmap, crop);
    }
    bitmap.close();
  }

  /** Let the server find the digit, and put what the model sees of it on the board. */
  prepare(blob, what, asked) {
    const {board} = this;
    const {shape} = board;
    const whole = !board.holes || onTransparent(board);
    const fields = {image: blob, model: models.chosen.id, prepare: "mnist", ...(whole && {keep_rows: 28})};
    const gone = () => board.source !== blob || board.shape !== shape;
    return this.task.start(async (signal) => {
      if (gone()) return;  // it may be, when this is tried again
      let answer;
      try {
        answer = await json(EDITS, {body: formOf(fields), signal});
      } catch (problem) {
        if (gone() || this.loading) return;  // for another picture
        $("prepare").checked = false;
        if (!problem.status || problem.retryAfter) throw problem;  // to be tried again
        await this.load(blob, false);
        if (asked || problem.status !== 400) throw problem;  // else the picture only looked like a digit
        return;
      }
      const bitmap = await createImageBitmap(blob);  // each attempt closes its own
      const digit = await createImageBitmap(await decode(answer.prepared.b64_json));
      if (gone()) return;
      board.load(fitted(digit, board), blob, framed(bitmap, answer.crop, true));
      this.settle(`${what} and prepared`, bitmap, answer.crop, true);
      bitmap.close();
    });
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
    this.loading = null;
    this.board.load(fitted(await createImageBitmap(await decode(base64)), this.board));
    this.settle(what);
  }
}

/** Whether hardly anything of the edge is known: less than one side of it. */
const onTransparent = ({edge, width}) => edge.length < width;

/**
 * Whether to prepare a picture unasked: if its ground is not black; if it is larger than MNIST's, also if its ground is
 * transparent or its ink is not 20 pixels large in the middle. Digits of MNIST stay as they are, enlarged too.
 */
function unlikeMnist(board, {width, height}) {
  const {edge, known, ink} = board;
  if (!onTransparent(board) && 2 * edge.filter(Boolean).length > edge.length) return true;
  if (Math.max(width, height) <= 28) return false;
  if (board.holes) return onTransparent(board);
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
  return {ink, known, crop: [left, top, bitmap.width - left, bitmap.height - top]};
}
