// Images in a grid that fills as their pixels arrive, and one of them enlarged.
import { blobOf, bytesOf, canvasOf, decode } from "./service.js";
import { $, copied, el, percent, recognises } from "./parts.js";

export const FITS = 0.5; // a class fits if the model recognises it with more than this confidence
const CAPTION = 20; // screen pixels below a picture
const KEYWORD = "linpix\0\0\0\0\0"; // of an iTXt chunk: not compressed, in no language
const TABLE = Uint32Array.from({ length: 256 }, (_, n) => {
  for (let bit = 0; bit < 8; bit++) n = n & 1 ? 0xedb88320 ^ (n >>> 1) : n >>> 1;
  return n;
});

/**
 * The grid that shows count images largest: a whole number of screen pixels per pixel, and the fewest empty places.
 * below: screen pixels for the words below an image.
 */
function arrange(count, image, room, below) {
  let best = { scale: 0 };
  for (const gap of [12, 8, 6]) {
    for (let columns = 1; columns <= count; columns++) {
      const rows = Math.ceil(count / columns);
      const scale = Math.floor(
        Math.min(
          (room.width - gap * (columns - 1)) / (columns * image.width),
          (room.height - gap * (rows - 1) - below * rows) / (rows * image.height),
        ),
      );
      const empty = rows * columns - count;
      if (scale > best.scale || (scale === best.scale && empty < best.empty))
        best = { scale, columns, gap, empty };
    }
  }
  if (best.scale) return best;
  return {
    scale: 1,
    columns: Math.max(1, Math.floor((room.width + 6) / (image.width + 6))),
    gap: 6,
  };
}

export class Gallery {
  /** paint(record) gives the ImageData to show; open(record, records) is called for an image that is clicked. */
  constructor(stage, { paint, open }) {
    this.field = stage.querySelector(".field");
    this.list = stage.querySelector(".gallery");
    Object.assign(this, { paint, open, records: [] });
    new ResizeObserver(() => this.layout()).observe(this.field);
  }

  /** Show empty frames. */
  invite(count, image) {
    if (this.records.length) return;
    this.image = image;
    this.list.replaceChildren(...Array.from({ length: count }, () => el("li", { class: "frame" })));
    this.list.setAttribute("aria-hidden", "true");
    this.layout();
  }

  /** Begin anew with count frames; about holds what the images have in common. */
  begin(count, image, about) {
    this.again(
      Array.from({ length: count }, (_, index) => {
        const canvas = el("canvas", { width: image.width, height: image.height });
        const record = { gallery: this, index, about, canvas, rows: 0, done: false, pinned: false };
        record.button = el(
          "button",
          {
            class: "picture",
            "aria-label": `Image ${index + 1}, not begun`,
            click: () => record.image && this.open(record, this.records),
          },
          canvas,
        );
        record.words = el("p", { class: "caption" });
        record.frame = el("li", { class: "frame" }, record.button, record.words);
        about.given?.photograph?.surround(record);
        return record;
      }),
    );
  }

  /** Bring the images into view. Only for a press of a button: while one draws, the page must stay where it is. */
  reveal() {
    const { top, bottom } = this.field.getBoundingClientRect();
    if (top > innerHeight * 0.9 || bottom < innerHeight * 0.3)
      this.field.closest(".stage").scrollIntoView();
  }

  /** Show these images, which may have been shown before. */
  again(records) {
    this.records = records;
    this.image = records[0].about.card;
    this.list.removeAttribute("aria-hidden");
    this.list.replaceChildren(...records.map((record) => record.frame));
    this.layout();
  }

  clear() {
    this.records = [];
    this.list.replaceChildren();
  }

  /** Show the image of an event. Of events that arrive while an image is decoded, only the last is shown. */
  receive(data, records) {
    const record = records[data.image_index];
    const done = data.type.endsWith(".completed");
    const rows = done ? record.canvas.height : data.rows;
    Object.assign(record, { seed: data.seed, answer: data, rows, done, base64: data.b64_json });
    this.name(record, done ? "" : ", being drawn");
    record.showing ??= this.show(record);
    return record.showing;
  }

  async show(record) {
    let shown;
    do {
      shown = record.answer; // not its picture: new rows that are black do not change that
      const { rows } = record;
      Object.assign(record, { image: await decode(shown.b64_json), shown: rows });
      this.repaint(record);
    } while (shown !== record.answer);
    if (record.done) record.about.given?.photograph?.finish(record);
    record.showing = null;
  }

  repaint(record) {
    record.canvas.getContext("2d").putImageData(this.paint(record), 0, 0);
    record.painted?.();
  }

  pin(record, pinned) {
    if (record.pinned === pinned) return;
    record.pinned = pinned;
    record.frame.classList.toggle("pinned", pinned);
    this.name(record, "");
  }

  name(record, state) {
    const what = nameOf(record);
    if (record.done) record.words.textContent = what && what + sureness(record.answer);
    const label = `Image ${record.index + 1}${what && record.done ? `, a ${what}` : ""}${record.seed == null ? "" : `, seed ${record.seed}`}${state}${record.pinned ? ", pinned" : ""}`;
    if (record.button.getAttribute("aria-label") !== label)
      record.button.setAttribute("aria-label", label);
  }

  /** No more events will come: mark the images that are unfinished. */
  end(records) {
    for (const record of records.filter((one) => !one.done)) {
      record.frame.classList.add("unfinished");
      this.name(record, record.rows ? `, stopped after row ${record.rows}` : ", not begun");
    }
  }

  get finished() {
    return this.records.filter((record) => record.done);
  }

  layout() {
    const width = this.field.clientWidth;
    if (!this.image || !width) return;
    const image = this.records[0]?.about.given?.photograph?.shape ?? this.image;
    const below = recognises(this.records[0]?.about.card ?? this.image) ? CAPTION : 0;
    const left = innerHeight - this.field.getBoundingClientRect().top - scrollY - 20; // of the screen's height
    const tall = matchMedia("(min-width: 60rem)").matches
      ? Math.max(340, left)
      : Math.min(width * 1.7, Math.max(parseFloat(getComputedStyle(this.field).minHeight), left));
    const count = this.list.childElementCount || 1;
    const { scale, columns, gap } = arrange(
      count,
      image,
      { width, height: Math.max(tall, 120) },
      below,
    );
    const { style } = this.list;
    style.width = `${columns * (image.width * scale + gap) - gap}px`;
    style.setProperty("--gap", `${gap}px`);
    style.setProperty("--width", `${image.width * scale}px`);
    style.setProperty("--height", `${image.height * scale}px`);
    style.setProperty("--below", `${below}px`);
  }
}

/** The class that the model recognises in an image; "" if it does not recognise classes. */
function nameOf({ answer, about: { card } }) {
  const label = answer?.label ?? "";
  return card.classes.length && Number.isInteger(label) ? card.classes[label] : label;
}

/** How sure the model is of a class, where that says something. */
function sureness({ confidence, confident }) {
  const short = Math.round(100 * confidence) < 99; // else it may be in pieces, or almost blank
  if (confidence <= FITS || (confident === false && !short)) return " · unsure";
  return short ? ` · ${percent(confidence)}` : "";
}

/** The rows drawn so far; those to come are transparent. */
export function rowsSoFar(record) {
  const { image, shown } = record;
  image.data.fill(0, shown * image.width * 4);
  return image;
}

/** A record's picture as a PNG, ten times as large, by nearest neighbour. */
async function enlarged(record) {
  const { canvas } = record;
  const large = canvasOf(canvas.width * 10, canvas.height * 10);
  const context = large.getContext("2d");
  context.imageSmoothingEnabled = false;
  context.drawImage(canvas, 0, 0, large.width, large.height);
  return withSettings(record, await blobOf(large));
}

function curlOf({ about, seed }) {
  const quote = (text) => `'${text.replaceAll("'", "'\\''")}'`;
  const { model, temperature, label, conditioning } = about.fields;
  const header = about.keyed ? ['-H "authorization: Bearer $LINPIX_KEY"'] : [];
  const url = new URL(about.path, location.href).href;
  const fields = { model, seed, temperature, label, conditioning };
  const body = about.picture
    ? [
        "-F image=@picture.png",
        ...Object.entries(fields)
          .filter(([, value]) => value != null)
          .map(([name, value]) => `-F ${quote(`${name}=${value}`)}`),
      ]
    : ["-H 'content-type: application/json'", `-d ${quote(JSON.stringify(fields))}`];
  return [
    `curl -s ${quote(url)} -H 'accept: image/png'`,
    ...header,
    ...body,
    `-o linpix-${seed}.png`,
  ].join(" \\\n  ");
}

/** The dialog that shows one image. Its buttons close it, and pass the image to reuse, complete or judge. */
export class Viewer {
  constructor(leaving) {
    this.dialog = $("viewer");
    this.links = [];
    this.status = this.dialog.querySelector(".status");
    this.dialog.onclose = () => {
      this.forget();
      if (history.state) history.back();
    };
    this.dialog.onclick = ({ target }) => {
      if (target === this.dialog) target.close();
    };
    this.dialog.onkeydown = (event) => {
      const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
      if (step) this.turn(step);
    };
    $("viewer-curl").onclick = () => this.copy();
    for (const name in leaving) $(`viewer-${name}`).onclick = () => this.leave(leaving[name]);
    $("viewer-photo").onclick = () => this.toggle();
    $("viewer-film").onclick = () => this.film();
  }

  open(record, records) {
    Object.assign(this, { record, records });
    record.painted = () => this.draw();
    this.laid = record.done ? record.around : null;
    $("viewer-command").hidden = true;
    this.status.textContent = "";
    if (!this.dialog.open) {
      if (!history.state) history.pushState("viewer", ""); // Back closes it
      this.dialog.showModal();
    }
    this.draw();
  }

  /** Close, or open again, as the history says. */
  travel(state) {
    if (!state) this.dialog.close();
    else if (this.record) this.open(this.record, this.records);
  }

  turn(step) {
    const there = this.records.filter((record) => record.image);
    this.forget();
    this.open(
      there[(there.indexOf(this.record) + step + there.length) % there.length],
      this.records,
    );
  }

  draw() {
    const { record } = this;
    const { answer, about } = record;
    const canvas = this.laid ?? record.canvas;
    const shown = $("viewer-canvas");
    shown.width = canvas.width;
    shown.height = canvas.height;
    const room = Math.min(innerWidth - 64, innerHeight - 320, 420);
    const fits = room / Math.max(canvas.width, canvas.height);
    const scale = this.laid ? Math.min(1, fits) : Math.max(1, Math.floor(fits));
    shown.style.width = `${canvas.width * scale}px`;
    shown.style.height = `${canvas.height * scale}px`;
    shown.classList.toggle("smooth", Boolean(this.laid));
    shown.getContext("2d").drawImage(canvas, 0, 0);
    shown.setAttribute(
      "aria-label",
      `Seed ${record.seed}, drawn by ${answer.model}${this.laid ? ", laid over the photograph" : ""}`,
    );
    const { label } = about.fields;
    const what = record.done && nameOf(record);
    $("viewer-title").textContent = what
      ? `${what}, ${answer.confidence > FITS && answer.confident !== false ? "recognised with" : "unsure:"} ${percent(answer.confidence)}`
      : `Image ${record.index + 1}`;
    $("viewer-facts").textContent = [
      answer.model,
      label == null ? "any class" : `class ${label}`,
      `seed ${record.seed}`,
      `temperature ${about.fields.temperature}`,
      `${answer.engine} engine, ${answer.precision}`,
      record.done ? null : `${record.rows} rows so far`,
    ]
      .filter(Boolean)
      .join(" · ");
    for (const id of ["save", "save-large", "film", "complete", "judge"])
      $(`viewer-${id}`).hidden = !record.done;
    $("viewer-complete").textContent = about.picture ? "Pin it" : "Complete it";
    $("viewer-sent").hidden = !about.picture;
    $("viewer-photo").hidden = !record.around || !record.done;
    $("viewer-photo").setAttribute("aria-pressed", String(Boolean(this.laid)));
    $("viewer-save-photo").hidden = !this.laid;
    if (record.done) this.offer(record);
  }

  /** Show the image by itself, or laid over the photograph that was completed. */
  toggle() {
    this.laid = this.laid ? null : this.record.around;
    this.draw();
  }

  /** Save the drawing of the image; few ask for it. */
  async film() {
    this.status.textContent = "The image is drawn again.";
    $("viewer-film").disabled = true;
    try {
      const { film } = await import("./film.js");
      await film(this.record);
      this.status.textContent = "Saved.";
    } catch (problem) {
      this.status.textContent = problem.message;
    } finally {
      $("viewer-film").disabled = false;
    }
  }

  link(link, blob, name) {
    link.href = URL.createObjectURL(blob);
    link.download = name;
    this.links.push(link);
  }

  async offer(record) {
    if (this.offered === record) return;
    this.offered = record;
    await record.showing; // until its last rows are decoded
    const files = {
      "": await withSettings(record),
      "-large": await enlarged(record),
      "-photo": record.around && (await blobOf(record.around)),
    };
    if (this.offered !== record) return;
    for (const [id, blob] of Object.entries(files)) {
      if (blob) this.link($(`viewer-save${id}`), blob, `linpix-${record.seed}${id}.png`);
    }
    if (record.about.picture) this.link($("viewer-sent"), record.about.picture, "picture.png");
  }

  forget() {
    if (this.record) this.record.painted = null;
    this.offered = null;
    for (const link of this.links.splice(0)) {
      URL.revokeObjectURL(link.href);
      link.removeAttribute("href");
    }
  }

  leave(where) {
    const { record } = this;
    this.dialog.close();
    where(record);
  }

  async copy() {
    const pre = $("viewer-command");
    pre.textContent = curlOf(this.record);
    pre.hidden = false;
    getSelection().selectAllChildren(pre);
    this.status.textContent = !(await copied(pre.textContent))
      ? "Copy the selected command by hand."
      : this.record.about.picture
        ? "Copied. It reads picture.png: download “What was sent”."
        : "Copied.";
  }
}

// --- settings that travel with a picture, as a text chunk of its PNG ---

const crc32 = (bytes) => ~bytes.reduce((sum, byte) => TABLE[(sum ^ byte) & 255] ^ (sum >>> 8), -1);

/** A PNG of a record, with the settings that draw it again, and the picture that was sent, if any. png: a Blob, that of the server if absent. */
export async function withSettings(
  { about: { fields, picture }, seed, base64 },
  png,
  settings = { ...fields, n: 1, seed },
) {
  const bytes = png ? await bytesIn(png) : bytesOf(base64);
  const sent = picture && btoa(String.fromCharCode(...(await bytesIn(picture))));
  const text = new TextEncoder().encode(
    `iTXt${KEYWORD}${JSON.stringify({ ...settings, picture: sent })}`,
  );
  const chunk = new Uint8Array(text.length + 8);
  const view = new DataView(chunk.buffer);
  view.setUint32(0, text.length - 4);
  chunk.set(text, 4);
  view.setUint32(text.length + 4, crc32(text));
  const end = bytes.length - 12; // IEND is last, and empty
  return new Blob([bytes.subarray(0, end), chunk, bytes.subarray(end)], { type: "image/png" });
}

const bytesIn = async (blob) => new Uint8Array(await blob.arrayBuffer());

/** The settings in a file, or null. */
export async function settingsIn(file) {
  const bytes = await bytesIn(file.slice(0, 2 ** 22));
  const view = new DataView(bytes.buffer);
  if (bytes.length < 8 || view.getUint32(0) !== 0x89504e47) return null;
  for (let at = 8; at + 8 < bytes.length; at += view.getUint32(at) + 12) {
    const text = new TextDecoder().decode(bytes.subarray(at + 4, at + 8 + view.getUint32(at)));
    if (text.startsWith(`iTXt${KEYWORD}`)) return JSON.parse(text.slice(4 + KEYWORD.length));
  }
  return null;
}
