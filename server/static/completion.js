// The completion panel: a drawn or loaded picture, its holes filled in several ways, and one of these to continue from.
import {call, formOf, json, key, Problem} from "./service.js";
import {$, all, counted, duration, fieldsOf, models, recognises, restore, shapeOf, Task, write} from "./parts.js";
import {Board, GUIDE, pngOf} from "./editor.js";
import {Gallery} from "./gallery.js";
import {Likelihood} from "./likelihood.js";
import {PATH as SAMPLES, receive} from "./samples.js";
import {EDITS, Upload} from "./upload.js";
import {Visit} from "./visit.js";

const VIEWS = ["alternatives", "strip", "likelihood"];

export class Completion {
  constructor(viewer) {
    this.panel = $("completion");
    this.form = $("completion-form");
    this.board = new Board($("editor"));
    const hooks = {paint: (record) => this.paint(record), open: (record, records) => viewer.open(record, records)};
    this.gallery = new Gallery(this.panel, hooks);
    this.strip = ["strip-prefix", "strip-all"].map((id) => new Gallery($(id), hooks));
    this.likelihood = new Likelihood();
    this.task = new Task(this.panel);
    this.upload = new Upload(this.panel, this.board, this.task);
    this.visit = new Visit(this.panel.querySelector(".visit"), this.gallery, this.task, {shown: () => {
      if (!this.task.running) this.task.notice.clear();
      $("known").textContent = "";  // it describes the previous completions
      this.show("alternatives");
      this.follow();
    }});
    this.form.onsubmit = () => this.complete();
    this.form.elements.n.oninput = () => this.invite();
    document.addEventListener("model", ({detail: card}) => this.take(card));
    this.board.changed = () => this.follow();
    this.board.lifted = () => $("live").checked && this.board.holes && this.form.requestSubmit();
    for (const button of all("[data-tool]")) {
      button.onclick = () => this.use(button.dataset.tool);
    }
    for (const button of all("[data-do]")) {
      button.onclick = () => this.do(button.dataset.do);
    }
    $("brush").oninput = () => { this.board.brush = $("brush").valueAsNumber; };
    $("colour").oninput = () => this.ink();
    document.addEventListener("keydown", (event) => this.panel.hidden || $("viewer").open || this.key(event));
  }

  get records() {
    return [this.gallery, ...this.strip].flatMap((gallery) => gallery.records);
  }

  take(card) {
    const {board, upload} = this;
    $("colour").parentElement.hidden = card.channels === 1;
    const thing = card.classes.join("") === "0123456789" ? "digit" : "picture";
    for (const word of all("[data-thing]")) word.textContent = thing;
    const {source} = board;
    if (board.take(card)) upload.follow(source);
    this.ink();
    this.invite();
  }

  ink() {
    const [r, g, b] = $("colour").value.match(/\w\w/g).map((digits) => parseInt(digits, 16));
    this.board.colour = [r, g, b];
  }

  /** Completions to draw where only the best n are shown: n if the model does not recognise classes. */
  candidates(n) {
    return recognises(models.chosen) ? Math.min(models.limits.max_n, 4 * n) : n;
  }

  invite() {
    const n = Math.min(models.limits.max_n, Math.max(1, this.form.elements.n.valueAsNumber || 1));
    $("better").nextElementSibling.textContent = `Draw ${this.candidates(n)}, show the best ${n}`;
    $("better").disabled = this.candidates(n) === n;
    $("better").parentElement.hidden = !recognises(models.chosen);
    if (models.chosen) this.gallery.invite(n, models.chosen);
  }

  use(tool) {
    Object.assign(this.board, {tool, box: null});
    this.board.draw();
    for (const button of all("[data-tool]")) {
      button.setAttribute("aria-pressed", String(button.dataset.tool === tool));
    }
  }

  /** What a button does: something of the panel, or of the board. */
  do(name) {
    const {board} = this;
    if (board.halves[name]) board.only(name);
    else (this[name] ? this : board)[name]();
  }

  load() { $("file").click(); }
  clear() { this.upload.clear(); }

  /** Update the panel after a change of the board. */
  follow() {
    const {board, panel} = this;
    this.upload.show();
    $("editor-hint").hidden = board.touched;
    panel.querySelector("[data-do=undo]").disabled = !board.past.length;
    panel.querySelector("[data-do=redo]").disabled = !board.future.length;
    write($("editor-help"), board.words);
    for (const record of this.records) record.gallery.pin(record, record === board.from);
  }

  key(event) {
    if (event.target.matches("input:not([type=range], [type=checkbox]), select") || event.altKey) return;
    const letter = event.key.toLowerCase();
    let button;
    if (event.ctrlKey || event.metaKey) {
      const name = letter === "y" || (letter === "z" && event.shiftKey) ? "redo" : letter === "z" && "undo";
      button = name && this.panel.querySelector(`[data-do=${name}]`);
    } else if (event.target === this.board.canvas) {
      if ("+-".includes(event.key)) {
        $("brush")[event.key === "+" ? "stepUp" : "stepDown"]();
        this.board.brush = $("brush").valueAsNumber;
        return;
      }
      button = [...all("[data-key]")].find((one) => one.dataset.key === letter);
    } else if (letter === "p") {
      const record = this.records.find((one) => one.button === event.target);
      if (record?.done) this.pin(record);
    }
    if (!button) return;
    event.preventDefault();
    button.click();
  }

  // --- completing ---

  /** The board's picture, which of its pixels are known, and the edges of its holes as an image. */
  given() {
    const picture = this.board.image();
    const known = Array.from({length: picture.width * picture.height}, (_, pixel) => picture.data[4 * pixel + 3] > 0);
    if (!this.board.touched) throw new Problem("Nothing is drawn yet. Draw something, or load a picture.");
    const first = known.indexOf(false);
    if (first < 0) throw new Problem("Every pixel is known. Erase something, or press Lower half.");
    const before = this.board.from?.about.given?.kept;
    const kept = known.map((is, pixel) => is && (before?.[pixel] ?? true));  // known in every step since it was loaded
    return {picture, known, kept, first, edge: edgeOf(known, picture.width), photograph: this.board.photograph};
  }

  /** Draw completions of a given picture; returns the last event's data. */
  async draw(gallery, given, fields, card, signal) {
    const sent = await pngOf(given.picture);
    const response = await call(EDITS, {body: formOf({image: sent, ...fields, stream: true}), accept: "text/event-stream", signal});
    this.show(gallery === this.gallery ? "alternatives" : "strip");
    gallery.begin(fields.n, card, {card, fields, path: EDITS, keyed: Boolean(key.get()), picture: sent, given});
    for (const record of gallery.records) {
      record.button.style.setProperty("--edge-of-hole", given.edge);
      gallery.repaint(record);
    }
    return receive(gallery, response, signal);
  }

  complete() {
    return this.task.start(async (signal) => {
      const [fields, card] = [fieldsOf(this.form), models.chosen];
      const given = this.given();
      const {n} = fields;
      const candidates = $("better").checked && this.candidates(n) > n ? this.candidates(n) : undefined;
      if (candidates) fields.candidates = candidates;
      else if (fields.seed != null && fields.seed === this.once) fields.attempts = 1;
      this.task.say(candidates ? `Drawing ${candidates}; the best ${n} are shown at the end.` : `Completing in ${counted(n, "way")}.`);
      const began = performance.now();
      const answer = await this.draw(this.gallery, given, fields, card, signal);
      this.visit.add(this.gallery.records);
      this.tell(answer, card);
      this.task.say(`${counted(n, "completion")}${candidates ? `, the best of ${candidates},` : ""} in ${duration((performance.now() - began) / 1000)}. Click one to enlarge it or to continue from it.`);
    });
  }

  /** The first of these models that has the board's shape and uses all known pixels. */
  conditional(cards) {
    return cards.find((card) => card.conditional && shapeOf(card) === this.board.shape);
  }

  /** Complete the same holes with the same seeds twice: given only what comes before the first hole, and given all. */
  compare() {
    let plan;  // of both sides, even if the board changes meanwhile
    const begin = async () => {
      const fields = fieldsOf(this.form);
      const {board} = this;
      const {chosen, cards} = models;
      const other = this.conditional([chosen, ...cards]);
      if (!other) {
        throw new Problem(`No loaded model uses all known pixels of ${board.width} × ${board.height} pictures. `
          + "Start the server with a conditional model (mnist-conditional, cifar10-conditional), or choose a model of another size.");
      }
      const given = this.given();
      const {known, first} = given;
      if (known.lastIndexOf(true) < first) {
        throw new Problem("All known pixels come before the first hole, so both sides would be the same. Erase something above them, or press Inverse.");
      }
      plan = {fields: {seed: Math.floor(Math.random() * 2 ** 32), ...fields}, sides: [
        {card: chosen, count: first, given, conditioning: "prefix"},
        {card: other, count: known.filter(Boolean).length, given},
      ]};
    };
    const half = (at) => async (signal) => {
      const {card, count, given, ...more} = plan.sides[at];
      $(at ? "strip-all" : "strip-prefix").querySelector("p").textContent = `${card.id} · ${counted(count, "pixel")}`;
      if (!at) this.strip[1].clear();
      this.task.say("Completing with the pixels before the first hole, and with all known pixels.");
      await this.draw(this.strip[at], given, {...plan.fields, ...more, model: card.id}, card, signal);
      if (at) this.task.say("The same hole and seeds: given only the pixels before the first hole, and given all known pixels. Click one to continue from it.");
    };
    return this.task.start(begin, half(0), half(1));
  }

  /** Show the likelihood of a finished image, or of the board's picture: of what is erased there, else of all of it. */
  judge(record) {
    return this.task.start(async (signal) => {
      const {board, task} = this;
      task.say("Computing the likelihood.");
      const {model, label} = fieldsOf(this.form);
      const card = record?.about.card ?? models.chosen;
      const known = record ? record.about.given?.known : board.holes ? [...board.known].map(Boolean) : null;
      await this.likelihood.ask(record?.image ?? board.image(true), known, record?.about.fields ?? {model, label}, card, signal);
      this.show("likelihood");
      task.say(record ? `The likelihood of the image of seed ${record.seed}.`
        : known ? "The likelihood of what was erased, as it was before." : "The likelihood of the picture.");
    });
  }

  /** Make a completion the board's picture, to be erased and completed again. Undo takes it back. */
  pin(record) {
    const {board, task} = this;
    task.attempt(() => {
      if (shapeOf(record.about.card) !== board.shape) models.choose(record.answer.model);
      this.upload.drop();
      board.put(record.image, record);
      if (board.tool === "pen") this.use("rub");
      task.say(`Image ${record.index + 1} is pinned: it is your picture now, all of it known. Erase what you do not like and complete again. Undo goes back.`);
      board.canvas.focus();
    });
  }

  adopt(record) {
    this.task.attempt(() => {
      models.choose(record.answer.model);
      this.upload.adopt(record.base64, `The image of seed ${record.seed}`);
      this.board.canvas.focus();
    });
  }

  /** Restore the picture and the form that gave this completion. */
  reuse({about, seed}) {
    this.task.attempt(() => {
      restore(this.form, {...about.fields, seed, n: null});
      this.once = about.fields.candidates || about.fields.attempts ? seed : null;  // candidates are drawn once
      $("better").checked = false;
      this.upload.drop();
      this.board.put(about.given.picture, null, about.given.known);
      this.board.photograph = about.given.photograph;
      this.form.elements.seed.focus();
    });
  }

  sample() {
    return this.task.start(async (signal) => {
      this.task.say("Drawing a sample.");
      const fields = fieldsOf(this.form);
      const {shape} = this.board;
      const answer = await json(SAMPLES, {body: {...fields, n: 1}, signal});
      if (this.board.shape !== shape) throw new Problem("Another model was chosen meanwhile. Take a sample again.");
      await this.upload.adopt(answer.data[0].b64_json, `A sample of seed ${answer.data[0].seed}`);
    });
  }

  // --- what is shown ---

  show(view) {
    for (const name of VIEWS) $(name).hidden = name !== view;
    $("known").hidden = view !== "alternatives";
    const stage = this.panel.querySelector(".stage");
    const {top} = stage.getBoundingClientRect();
    if (top > innerHeight * .7 || (top < 0 && view !== "alternatives")) stage.scrollIntoView();
    this.panel.querySelector("[data-do=back]").hidden = view === "alternatives";
  }

  back() {
    this.show("alternatives");
    this.task.starter.focus();  // the button that had the focus is hidden
  }

  /** The known pixels and the rows drawn so far; the rest is transparent. */
  paint({image, shown = 0, about: {given: {picture, known}}}) {
    const {width, height} = picture;
    const painted = new ImageData(new Uint8ClampedArray((image ?? picture).data), width, height);
    known.forEach((is, pixel) => {
      if (!is && pixel >= shown * width) painted.data.fill(0, 4 * pixel, 4 * pixel + 4);
    });
    return painted;
  }

  /** Say if known pixels were not used, and which model would use them. */
  tell({known, known_before_first_hole: before, conditioning}, card) {
    const late = (known - before) / card.channels;
    const other = this.conditional(models.cards);
    $("known").textContent = conditioning !== "partial" ? ""
      : `${counted(late, "known pixel")} had little influence or none: ${card.id} draws from the top left to the bottom right, and they come after its first hole.`
        + (other ? ` Choose ${other.id}, which uses them all.` : "");
  }
}

/** The lines between known and erased pixels, as an image for a style. */
function edgeOf(known, width) {
  const lines = known.map((is, pixel) => {
    const [x, y] = [pixel % width, Math.floor(pixel / width)];
    return (x && is !== known[pixel - 1] ? `M${x} ${y}v1` : "") + (y && is !== known[pixel - width] ? `M${x} ${y}h1` : "");
  });
  return `url("data:image/svg+xml,${encodeURIComponent(`<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 ${width} ${known.length / width}">`
    + `<path d="${lines.join("")}" stroke="${GUIDE}" stroke-width="2" vector-effect="non-scaling-stroke"/></svg>`)}")`;
}
