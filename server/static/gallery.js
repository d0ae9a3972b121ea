// Images in a grid that fills as their pixels arrive, and one of them enlarged.
import {bytesOf, decode} from "./service.js";
import {$, copied, el, models} from "./parts.js";

/** The grid that shows count images largest: a whole number of screen pixels per pixel, and the fewest empty places. */
function arrange(count, image, room) {
  let best = {scale: 0};
  for (const gap of [12, 8, 6]) {
    for (let columns = 1; columns <= count; columns++) {
      const rows = Math.ceil(count / columns);
      const scale = Math.floor(Math.min((room.width - gap * (columns - 1)) / (columns * image.width),
        (room.height - gap * (rows - 1)) / (rows * image.height)));
      const empty = rows * columns - count;
      if (scale > best.scale || (scale === best.scale && empty < best.empty)) best = {scale, columns, gap, empty};
    }
  }
  if (best.scale) return best;
  return {scale: 1, columns: Math.max(1, Math.floor((room.width + 6) / (image.width + 6))), gap: 6};
}

export class Gallery {
  /** paint(record) gives the ImageData to show; open(record, records) is called for an image that is clicked. */
  constructor(stage, {paint, open}) {
    this.field = stage.querySelector(".field");
    this.list = stage.querySelector(".gallery");
    this.invitation = stage.querySelector(".invitation");
    Object.assign(this, {paint, open, records: []});
    new ResizeObserver(() => this.layout()).observe(this.field);
  }

  /** Show empty frames, and the invitation to fill them. */
  invite(count, image) {
    if (this.records.length) return;
    this.image = image;
    this.list.replaceChildren(...Array.from({length: count}, () => el("li", {class: "frame"})));
    this.list.setAttribute("aria-hidden", "true");
    this.layout();
  }

  /** Begin anew with count frames; about holds what the images have in common. */
  begin(count, image, about) {
    this.again(this.make(count, image, about));
    if (this.field.getBoundingClientRect().top > innerHeight * .7) this.field.closest(".stage").scrollIntoView();
  }

  /** Frames for count images, not yet shown. */
  make(count, image, about) {
    return Array.from({length: count}, (_, index) => {
      const canvas = el("canvas", {width: image.width, height: image.height});
      const record = {gallery: this, index, about, canvas, rows: 0, done: false, pinned: false};
      record.button = el("button", {class: "picture", "aria-label": `Image ${index + 1}, not begun`,
        click: () => record.image && this.open(record, this.records)}, canvas);
      record.frame = el("li", {class: "frame"}, record.button);
      return record;
    });
  }

  /** Show these images, which may have been shown before. */
  again(records) {
    this.records = records;
    this.image = records[0].about.card;
    if (this.invitation) this.invitation.hidden = true;
    this.list.removeAttribute("aria-hidden");
    this.list.replaceChildren(...records.map((record) => record.frame));
    this.layout();
  }

  clear() {
    this.records = [];
    this.list.replaceChildren();
  }

  /** Show the image of an event. Of events that arrive while an image is decoded, only the last is shown. */
  receive(data, records = this.records) {
    const record = records[data.image_index];
    const done = data.type.endsWith(".completed");
    const rows = done ? record.canvas.height : data.rows;
    Object.assign(record, {seed: data.seed, answer: data, rows, done, base64: data.b64_json});
    this.name(record, done ? "" : ", being drawn");
    record.showing ??= this.show(record);
    return record.showing;
  }

  async show(record) {
    let shown;
    do {
      shown = record.answer;  // not its picture: new rows that are black do not change that
      const {rows} = record;
      Object.assign(record, {image: await decode(shown.b64_json), shown: rows});
      this.repaint(record);
    } while (shown !== record.answer);
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
    const label = `Image ${record.index + 1}${record.seed == null ? "" : `, seed ${record.seed}`}${state}${record.pinned ? ", pinned" : ""}`;
    if (record.button.getAttribute("aria-label") !== label) record.button.setAttribute("aria-label", label);
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
    const below = innerHeight - this.field.getBoundingClientRect().top - scrollY - 20;  // height left on the screen
    const tall = matchMedia("(min-width: 60rem)").matches ? Math.max(340, below)
      : Math.min(width * 1.7, Math.max(width * .75, below));
    const count = this.list.childElementCount || 1;
    const {scale, columns, gap} = arrange(count, this.image, {width, height: Math.max(tall, 120)});
    const style = this.list.style;
    style.width = `${columns * (this.image.width * scale + gap) - gap}px`;
    style.setProperty("--gap", `${gap}px`);
    style.setProperty("--width", `${this.image.width * scale}px`);
    style.setProperty("--height", `${this.image.height * scale}px`);
    const over = this.invitation?.style;  // it covers the frames, not the whole field
    if (!over) return;
    over.width = style.width;
    over.height = `${Math.ceil(count / columns) * (this.image.height * scale + gap) - gap}px`;
  }
}

/** The rows drawn so far; those to come are transparent. */
export function rowsSoFar(record) {
  const {image, shown} = record;
  image.data.fill(0, shown * image.width * 4);
  return image;
}

/** A canvas as a PNG, ten times as large, by nearest neighbour. */
function enlarged(canvas) {
  const large = new OffscreenCanvas(canvas.width * 10, canvas.height * 10);
  const context = large.getContext("2d");
  context.imageSmoothingEnabled = false;
  context.drawImage(canvas, 0, 0, large.width, large.height);
  return large.convertToBlob({type: "image/png"});
}

function curlOf({about, seed}) {
  const quote = (text) => `'${text.replaceAll("'", "'\\''")}'`;
  const {model, temperature, label, conditioning, candidates} = about.fields;
  const attempts = candidates ? 1 : about.fields.attempts;  // candidates are drawn once
  const header = about.keyed ? ["-H \"authorization: Bearer $LINPIX_KEY\""] : [];
  const url = new URL(about.path, location.href).href;
  const fields = {model, seed, temperature, label, conditioning, attempts};
  const body = about.picture
    ? ["-F image=@picture.png", ...Object.entries(fields).filter(([, value]) => value != null)
      .map(([name, value]) => `-F ${quote(`${name}=${value}`)}`)]
    : ["-H 'content-type: application/json'", `-d ${quote(JSON.stringify(fields))}`];
  return [`curl -s ${quote(url)} -H 'accept: image/png'`, ...header, ...body, `-o linpix-${seed}.png`].join(" \\\n  ");
}

/** The dialog that shows one image. Its buttons close it, and pass the image to reuse, complete or judge. */
export class Viewer {
  constructor(leaving) {
    this.dialog = $("viewer");
    this.urls = [];
    this.status = this.dialog.querySelector(".status");
    this.dialog.onclose = () => this.forget();
    this.dialog.onclick = ({target}) => { if (target === this.dialog) target.close(); };
    this.dialog.onkeydown = (event) => {
      const step = {ArrowLeft: -1, ArrowRight: 1}[event.key];
      if (step) this.turn(step);
    };
    $("viewer-curl").onclick = () => this.copy();
    for (const name in leaving) $(`viewer-${name}`).onclick = () => this.leave(leaving[name]);
    $("viewer-photo").onclick = () => this.toggle();
  }

  open(record, records) {
    Object.assign(this, {record, records});
    record.painted = () => this.draw();
    this.laid = null;
    $("viewer-command").hidden = true;
    this.status.textContent = "";
    if (!this.dialog.open) this.dialog.showModal();
    this.draw();
  }

  turn(step) {
    const there = this.records.filter((record) => record.image);
    this.forget();
    this.open(there[(there.indexOf(this.record) + step + there.length) % there.length], this.records);
  }

  draw() {
    const {record} = this;
    const {answer, about} = record;
    const {photograph} = about.given ?? {};
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
    shown.setAttribute("aria-label", `Seed ${record.seed}, drawn by ${answer.model}${this.laid ? ", laid over the photograph" : ""}`);
    $("viewer-title").textContent = `Seed ${record.seed}`;
    const label = about.fields.label;
    const names = models.cards.find((card) => card.id === answer.model)?.classes ?? [];
    $("viewer-facts").textContent = [answer.model, label != null ? `class ${names[label] ?? label}`
      : answer.label != null ? `drawn as ${names[answer.label] ?? answer.label}` : "any class",
      `temperature ${about.fields.temperature}`, `${answer.engine} engine, ${answer.precision}`,
      record.done ? null : `${record.rows} rows so far`].filter(Boolean).join(" · ");
    for (const id of ["viewer-save", "viewer-save-large", "viewer-complete", "viewer-judge"]) $(id).hidden = !record.done;
    $("viewer-complete").textContent = about.picture ? "Pin it" : "Complete it";
    $("viewer-sent").hidden = !about.picture;
    $("viewer-photo").hidden = !photograph || !record.done;
    $("viewer-photo").setAttribute("aria-pressed", String(Boolean(this.laid)));
    $("viewer-save-photo").hidden = !this.laid;
    if (record.done) this.offer(record);
  }

  /** Show the image by itself, or laid over the photograph that was completed. */
  async toggle() {
    const {record} = this;
    const {photograph, kept} = record.about.given;
    this.laid = this.laid ? null : photograph.lay(record.image, kept);
    this.draw();
    const blob = await this.laid?.convertToBlob({type: "image/png"});
    if (blob && this.record === record) this.link($("viewer-save-photo"), blob, `linpix-${record.seed}-photograph.png`);
  }

  link(link, blob, name) {
    link.href = URL.createObjectURL(blob);
    link.download = name;
    this.urls.push(link.href);
  }

  async offer(record) {
    if (this.offered === record) return;
    this.offered = record;
    await record.showing;  // until its last rows are decoded
    const large = await enlarged(record.canvas);
    const native = new Blob([bytesOf(record.base64)], {type: "image/png"});
    if (this.offered !== record) return;
    this.link($("viewer-save"), native, `linpix-${record.seed}.png`);
    this.link($("viewer-save-large"), large, `linpix-${record.seed}-10x.png`);
    if (record.about.picture) this.link($("viewer-sent"), record.about.picture, "picture.png");
  }

  forget() {
    if (this.record) this.record.painted = null;
    this.offered = null;
    this.urls.splice(0).forEach((url) => URL.revokeObjectURL(url));
  }

  leave(where) {
    const {record} = this;
    this.dialog.close();
    where(record);
  }

  async copy() {
    const pre = $("viewer-command");
    pre.textContent = curlOf(this.record);
    pre.hidden = false;
    getSelection().selectAllChildren(pre);
    this.status.textContent = !await copied(pre.textContent) ? "Copy the selected command by hand."
      : this.record.about.picture ? "Copied. It reads picture.png: download “What was sent”." : "Copied.";
  }
}
