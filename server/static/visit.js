// The draws of this visit: earlier ones to show again, all images of one in a file, and a link that draws them again.
import {bytesOf} from "./service.js";
import {copied, el, models} from "./parts.js";

const KEPT = 20;  // draws, at most
const SHOWN = 8;  // images of a draw, in its small picture
const ACROSS = 4;

export class Visit {
  /** box: where it is shown · shown: called when an earlier draw is · link(records): an address, optional · stored: a key of the tab's storage, optional. */
  constructor(box, gallery, task, {shown = () => {}, link, stored} = {}) {
    Object.assign(this, {gallery, task, shown, stored, draws: []});
    this.list = el("ul", {"aria-label": "Earlier draws"});
    this.buttons = [el("button", {disabled: true, click: () => this.download()}, "Download all")];
    if (link) this.buttons.push(el("button", {disabled: true, click: () => gallery.finished.length && this.send(link(gallery.finished))}, "Copy link"));
    box.append(el("div", {class: "buttons"}, ...this.buttons), el("h3", {}, "This visit"), this.list);
  }

  /** Keep a draw if at least one image of it is finished. */
  async add(records) {
    await this.restored;  // draws from before a reload are listed below it
    if (!records.some((record) => record.done)) return;
    this.list.prepend(this.entry(records));
    this.draws = [records, ...this.draws].slice(0, KEPT);
    [...this.list.children].slice(KEPT).forEach((item) => item.remove());
    this.mark();
    this.save();
  }

  entry(records) {
    const done = records.filter((record) => record.done);
    const {card, fields} = done[0].about;
    const words = [card.id, fields.label == null ? "any class" : `class ${card.classes[fields.label]}`,
      `temperature ${fields.temperature}`, `seed ${done[0].seed}`].join(", ");
    const small = done.slice(0, SHOWN);
    const canvas = el("canvas", {width: ACROSS * card.width, height: Math.ceil(small.length / ACROSS) * card.height});
    small.forEach((record, at) => canvas.getContext("2d")
      .drawImage(record.canvas, at % ACROSS * card.width, Math.floor(at / ACROSS) * card.height));
    return el("li", {}, el("button", {class: "draw", "aria-label": words, title: words, click: () => {
      this.task.stop();
      this.gallery.again(records);
      this.shown();
      this.mark();
      this.task.say(`Drawn before: ${words}.`);
    }}, canvas));
  }

  mark() {
    [...this.list.children].forEach((item, at) => item.firstChild.setAttribute("aria-current", String(this.draws[at] === this.gallery.records)));
    for (const button of this.buttons) button.disabled = !this.gallery.finished.length;
  }

  download() {
    const {finished} = this.gallery;
    if (!finished.length) return;  // the next draw has just begun
    const url = URL.createObjectURL(zip(finished.map(({seed, base64}) => [`linpix-${seed}.png`, bytesOf(base64)])));
    el("a", {href: url, download: `linpix-${finished[0].seed}.zip`}).click();
    setTimeout(() => URL.revokeObjectURL(url), 60_000);
  }

  async send(address) {
    this.task.say(await copied(address) ? "The link is copied. It draws these images again." : `This link draws these images again: ${address}`);
  }

  // --- what outlives a reload ---

  save() {
    if (!this.stored) return;
    const draws = this.draws.map((records) => ({...records[0].about, card: records[0].about.card.id, answers: records.map(({done, answer}) => done ? answer : null)}));
    try {
      sessionStorage.setItem(this.stored, JSON.stringify(draws));
    } catch {  // more than the browser keeps: a reload then loses these draws
    }
  }

  /** List the draws from before a reload, of models that are still served. */
  restore() {
    this.restored ??= (async () => {
      for (const {card: id, answers, ...about} of JSON.parse(sessionStorage.getItem(this.stored)) ?? []) {
        const card = models.cards.find((one) => one.id === id);
        if (!card) continue;
        const records = this.gallery.make(answers.length, card, {...about, card});
        await Promise.all(answers.map((answer) => answer && this.gallery.receive(answer, records)));
        this.gallery.end(records);
        this.list.append(this.entry(records));
        this.draws.push(records);
      }
    })();
    return this.restored;
  }
}

const TABLE = Uint32Array.from({length: 256}, (_, n) => {
  for (let bit = 0; bit < 8; bit++) n = n & 1 ? 0xedb88320 ^ n >>> 1 : n >>> 1;
  return n;
});

const crc32 = (bytes) => ~bytes.reduce((sum, byte) => TABLE[(sum ^ byte) & 255] ^ sum >>> 8, -1);

/** A ZIP archive of [name, bytes], not compressed, as PNG already is. Names are ASCII. */
function zip(files) {
  const packed = (...words) => new Uint8Array(Uint16Array.from(words).buffer);
  const long = (value) => [value & 0xffff, value >>> 16];
  const [parts, directory] = [[], []];
  let offset = 0;
  for (const [name, bytes] of files) {
    const path = new TextEncoder().encode(name);
    const size = long(bytes.length);
    const [flags, method, time, date, extra] = [0, 0, 0, 0x21, 0];  // stored, on 1 January 1980
    const common = [10, flags, method, time, date, ...long(crc32(bytes)), ...size, ...size, path.length, extra];
    parts.push(packed(...long(0x04034b50), ...common), path, bytes);
    const [comment, disk, inside, outside] = [0, 0, 0, [0, 0]];
    directory.push(packed(...long(0x02014b50), 10, ...common, comment, disk, inside, ...outside, ...long(offset)), path);
    offset += 30 + path.length + bytes.length;
  }
  const size = directory.reduce((sum, part) => sum + part.length, 0);
  const end = packed(...long(0x06054b50), 0, 0, files.length, files.length, ...long(size), ...long(offset), 0);
  return new Blob([...parts, ...directory, end], {type: "application/zip"});
}
