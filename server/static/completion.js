// The completion panel: a drawn or loaded picture, its holes filled in several ways, and one of these to continue from.
import { decode, formOf, json, Problem } from "./service.js";
import {
  $,
  all,
  counted,
  duration,
  fieldsOf,
  models,
  recognises,
  refill,
  restore,
  shapeOf,
  Task,
  thingOf,
  titleOf,
  tonesOf,
  write,
} from "./parts.js";
import { Board, GUIDE, pngOf } from "./editor.js";
import { FITS, Gallery } from "./gallery.js";
import { PATH as SAMPLES, drawn, TRIES, Visit } from "./samples.js";
import { EDITS, Upload } from "./upload.js";

const VIEWS = ["alternatives", "strip", "likelihood"];

export class Completion {
  constructor(viewer) {
    this.panel = $("completion");
    this.form = $("completion-form");
    this.board = new Board($("editor"));
    const hooks = {
      paint: (record) => this.paint(record),
      open: (record, records) => viewer.open(record, records),
    };
    this.gallery = new Gallery(this.panel, hooks);
    this.strip = ["strip-prefix", "strip-all"].map((id) => new Gallery($(id), hooks));
    this.task = new Task(this.panel);
    this.upload = new Upload(this.panel, this.board, this.task, () => this.settled());
    this.visit = new Visit(this.panel.querySelector(".visit"), this.gallery, this.task, {
      link: ["completion", "It has these settings, and not your picture."],
      shown: () => {
        if (!this.task.running) this.task.notice.clear();
        $("known").textContent = ""; // it describes the previous completions
        this.show("alternatives");
        this.follow();
      },
    });
    this.form.onsubmit = ({ submitter }) => {
      if (submitter) this.gallery.reveal();
      this.complete();
    };
    this.form.elements.n.oninput = () => this.invite();
    document.addEventListener("model", ({ detail: card }) => this.take(card));
    this.board.changed = () => this.follow();
    this.board.lifted = () => this.settled();
    this.board.entered = () => this.form.requestSubmit();
    for (const button of all("[data-tool]")) {
      button.onclick = () => this.use(button.dataset.tool);
    }
    for (const button of all("[data-key]"))
      button.title = `${button.title || button.ariaLabel || button.textContent} (${button.dataset.key.toUpperCase()})`;
    for (const button of all("[data-do]")) {
      button.onclick = () => this.do(button.dataset.do);
    }
    $("brush").oninput = () => {
      this.board.brush = $("brush").valueAsNumber;
    };
    $("colour").oninput = () => this.ink();
    document.addEventListener(
      "keydown",
      (event) => this.panel.hidden || $("viewer").open || this.key(event),
    );
  }

  get records() {
    return [this.gallery, ...this.strip].flatMap((gallery) => gallery.records);
  }

  take(card) {
    const { board, upload } = this;
    $("colour").parentElement.hidden = tonesOf(card) === 1;
    $("thing").textContent = thingOf(card);
    const { ink } = card.board;
    if (ink && tonesOf(card) === 3)
      $("colour").value = `#${ink.map((value) => value.toString(16).padStart(2, "0")).join("")}`;
    const { source } = board;
    if (board.take(card)) upload.follow(source);
    this.ink();
    this.invite();
    $("fits").hidden = !recognises(card);
    this.arrive();
  }

  ink() {
    const { channels, ground } = this.board;
    this.board.colour =
      channels === 3
        ? $("colour")
            .value.match(/\w\w/g)
            .map((digits) => parseInt(digits, 16))
        : Array(3).fill(models.chosen.board.ink?.[0] ?? 255 - ground[0]);
  }

  /** Set the form as a new link says. Else show an example of the chosen model to a visitor who has drawn and loaded nothing. */
  arrive() {
    const { board, task } = this;
    if (this.panel.hidden || !models.chosen) return;
    import("./tries.js").then(
      ({ offer }) => offer($("tries")),
      () => {}, // the tab can be used without them
    );
    const query = location.hash.split("#/completion?")[1];
    if (query) {
      if (query !== this.query) this.followLink(query);
      return;
    }
    if (
      (board.touched && !(board.example && models.chosen !== this.shown)) ||
      (task.running && task.controller.signal !== this.showing)
    )
      return;
    this.sample({ seed: 19, label: models.chosen.classes[3] }, "An example");
  }

  /** A link has settings only: the picture that they were used with stays where it was. */
  followLink(query) {
    this.query = query;
    this.task.start(() => {
      const fields = Object.fromEntries(new URLSearchParams(query));
      const each = fields.label === "each";
      models.decided = true;
      refill(this.form, each ? { ...fields, label: "", n: null } : fields, "link");
      const then = each ? ", and press One of each that fits" : "";
      this.task.say(
        `This link has settings, which are set now, and no picture. Draw, load or choose one${then}.`,
      );
    });
  }

  /** Show half of a sample, and its completions. */
  sample(how, what = "A sample") {
    return this.task.start(async (signal) => {
      Object.assign(this, { showing: signal, shown: models.chosen });
      this.task.say("Drawing a sample.");
      const { board } = this;
      const { shape, past } = board;
      const answer = await json(SAMPLES, {
        body: { ...fieldsOf(this.form), ...how, n: 1 },
        signal,
      });
      if (board.shape !== shape || board.past !== past) return; // or something was drawn meanwhile
      await this.upload.adopt(answer.data[0].b64_json, what);
      board.example = true;
      this.follow();
      await this.fill(
        signal,
        `${what}, completed in several ways. Draw over it to begin your own, or load a picture.`,
      );
    });
  }

  /** After each change of the picture: complete it, if that is wanted. */
  settled() {
    if ($("live").checked && this.board.holes && this.board.touched) this.form.requestSubmit();
  }

  invite() {
    if (models.chosen)
      this.gallery.invite(Math.max(1, this.form.elements.n.valueAsNumber || 1), models.chosen);
  }

  use(tool) {
    Object.assign(this.board, { tool, box: null });
    this.board.draw();
    for (const button of all("[data-tool]")) {
      button.setAttribute("aria-pressed", String(button.dataset.tool === tool));
    }
  }

  /** What a button does: something of the panel, or of the board. */
  do(name) {
    const { board } = this;
    if (board.halves[name]) board.only(name);
    else (this[name] ? this : board)[name]();
    if (board.halves[name] || ["undo", "redo", "inverse", "negative"].includes(name))
      this.settled();
  }

  load() {
    $("file").click();
  }
  clear() {
    this.task.stop();
    this.task.say("");
    this.board.clear();
    this.gallery.clear();
    this.visit.mark();
    $("known").textContent = "";
    this.show("alternatives");
    this.invite();
  }

  /** Update the panel after a change of the board. */
  follow() {
    const { board, panel } = this;
    if (board.framed?.why && board.framed !== this.upload.framed) this.gallery.clear(); // completions of another picture
    this.upload.show();
    $("editor-hint").hidden = board.touched;
    $("tries").hidden = board.touched && !board.example;
    panel.querySelector("[data-do=undo]").disabled = !board.past.length;
    panel.querySelector("[data-do=redo]").disabled = !board.future.length;
    write($("editor-help"), board.words);
    for (const record of this.records) record.gallery.pin(record, record === board.from);
  }

  key(event) {
    if (event.target.matches("input:not([type=range], [type=checkbox]), select") || event.altKey)
      return;
    const letter = event.key.toLowerCase();
    let button;
    if (event.ctrlKey || event.metaKey) {
      const name =
        letter === "y" || (letter === "z" && event.shiftKey) ? "redo" : letter === "z" && "undo";
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
    const known = Array.from(
      { length: picture.width * picture.height },
      (_, pixel) => picture.data[4 * pixel + 3] > 0,
    );
    if (!this.board.touched)
      throw new Problem("Nothing is drawn yet. Draw something, or load a picture.");
    const first = known.indexOf(false);
    if (first < 0) throw new Problem("Every pixel is known. Erase something, or press Lower half.");
    const before = this.board.from?.about.given?.kept;
    const kept = known.map((is, pixel) => is && (before?.[pixel] ?? true)); // known in every step since it was loaded
    return {
      picture,
      known,
      kept,
      first,
      edge: edgeOf(known, picture.width),
      photograph: this.board.photograph,
    };
  }

  /** Draw completions of a given picture; returns the last event's data. */
  async draw(gallery, given, fields, card, signal) {
    const sent = await pngOf(given.picture);
    return drawn(
      gallery,
      this.task,
      fields,
      { card, path: EDITS, picture: sent, given },
      signal,
      (body) => formOf({ image: sent, ...body }),
      () => {
        this.show(gallery === this.gallery ? "alternatives" : "strip");
        for (const record of gallery.records) {
          record.button.style.setProperty("--edge-of-hole", given.edge);
          gallery.repaint(record);
        }
      },
    );
  }

  complete() {
    return this.task.start((signal) => this.fill(signal));
  }

  /** Complete as each class, and show those that fit. */
  each() {
    return this.task.start((signal) => this.fill(signal, "", true));
  }

  /** Complete the board's picture, and say (words) what is shown then. */
  async fill(signal, words, each = false) {
    const [fields, card] = [fieldsOf(this.form), models.chosen];
    const { gallery, task } = this;
    const given = this.given();
    if (each) fields.label = "each";
    const many = card.classes.length > TRIES;
    const trying = many ? "Trying classes." : "Trying each class.";
    task.say((task.doing = each ? trying : `Completing in ${counted(fields.n, "way")}.`));
    const began = performance.now();
    const answer = await this.draw(gallery, given, fields, card, signal);
    let { records } = gallery;
    if (each) {
      const sure = ({ answer: { confidence } }) => confidence;
      records = records.filter((record) => sure(record) > FITS).sort((a, b) => sure(b) - sure(a));
      const labels = records.map((record) => record.answer.label);
      records = records.filter((_, at) => labels.indexOf(labels[at]) === at); // the surest of each class
      if (!records.length)
        throw new Problem(
          "No class fits: the model recognises none of its completions. Erase more, or let it choose any class.",
        );
      gallery.again(records);
    }
    this.visit.add(records);
    this.tell(answer, card);
    const classes = counted(records.length, "class", "classes");
    const fit = many ? `${classes} in ${TRIES} tries` : `${classes} of ${card.classes.length} fit`;
    const took = duration((performance.now() - began) / 1000);
    task.say(
      words ||
        `${each ? fit : counted(fields.n, "completion")} in ${took}. Click one to enlarge it or to continue from it.`,
    );
  }

  /** The first of these models that has the board's shape and uses all known pixels. */
  conditional(cards) {
    return cards.find((card) => card.conditional && shapeOf(card) === this.board.shape);
  }

  /** Complete the same holes twice with the same seeds: given what comes before the first hole, and given all. */
  compare() {
    let plan; // of both sides, even if the board changes meanwhile
    const begin = async () => {
      const fields = fieldsOf(this.form);
      const { board } = this;
      const { chosen, cards } = models;
      const other = this.conditional([chosen, ...cards]);
      if (!other) {
        throw new Problem(
          `No loaded model uses all known pixels of ${board.width} × ${board.height} pictures. Load a conditional model, such as mnist-conditional.`,
        );
      }
      const given = this.given();
      const { known, first } = given;
      if (known.lastIndexOf(true) < first) {
        throw new Problem(
          "All known pixels come before the first hole, so both sides would be alike. Press Inverse.",
        );
      }
      plan = {
        fields: { seed: Math.floor(Math.random() * 2 ** 32), ...fields },
        sides: [
          { card: chosen, count: first, given, conditioning: "prefix" },
          { card: other, count: known.filter(Boolean).length, given },
        ],
      };
    };
    const half = (at) => async (signal) => {
      const { card, count, given, ...more } = plan.sides[at];
      $(at ? "strip-all" : "strip-prefix").querySelector("p").textContent =
        `${titleOf(card)} · ${counted(count, "pixel")}`;
      if (!at) this.strip[1].clear();
      this.task.say("Completing with the pixels before the first hole, and with all known pixels.");
      await this.draw(
        this.strip[at],
        given,
        { ...plan.fields, ...more, model: card.id },
        card,
        signal,
      );
      if (at)
        this.task.say("The same hole and seeds, on both sides. Click one to continue from it.");
    };
    return this.task.start(begin, half(0), half(1));
  }

  /** Show the likelihood of a finished image, or of the board's picture: of what is erased, else of all of it. */
  judge(record) {
    return this.task.start(async (signal) => {
      const { board, task } = this;
      task.say("Computing the likelihood.");
      const { Likelihood } = await import("./likelihood.js"); // asked for by few
      this.likelihood ??= new Likelihood();
      const { model, label } = fieldsOf(this.form);
      const card = record?.about.card ?? models.chosen;
      const known = record
        ? record.about.given?.known
        : board.holes
          ? [...board.known].map(Boolean)
          : null;
      await this.likelihood.ask(
        record?.image ?? board.image(true),
        known,
        record?.about.fields ?? { model, label },
        card,
        signal,
      );
      this.show("likelihood");
      task.say(
        record
          ? `The likelihood of image ${record.index + 1}.`
          : known
            ? "The likelihood of what was erased."
            : "The likelihood of the picture.",
      );
    });
  }

  /** Make a completion the board's picture, to be erased and completed again. Undo takes it back. */
  pin(record) {
    const { board, task } = this;
    task.attempt(() => {
      if (shapeOf(record.about.card) !== board.shape) models.choose(record.answer.model);
      task.stop();
      board.put(record.image, record);
      if (board.tool === "pen") this.use("rub");
      task.say(
        `Image ${record.index + 1} is your picture now. Erase what you do not like. Undo goes back.`,
      );
      board.canvas.focus();
    });
  }

  adopt(record) {
    this.task.attempt(() => {
      models.choose(record.answer.model);
      this.upload
        .adopt(record.base64, `The image of seed ${record.seed}`)
        .then(() => this.settled());
      this.board.canvas.focus();
    });
  }

  /** Complete as the settings in a picture say. */
  async again({ picture, ...fields }) {
    const image = await decode(picture);
    const known = Array.from(
      { length: image.width * image.height },
      (_, pixel) => image.data[4 * pixel + 3] > 0,
    );
    this.reuse({
      about: { fields, given: { picture: image, known, photograph: null } },
      seed: fields.seed,
    });
    this.complete();
  }

  /** Restore the picture and the form that gave this completion. */
  reuse({ about, seed }) {
    this.task.attempt(() => {
      restore(this.form, { ...about.fields, seed, n: null });
      this.task.stop();
      this.board.put(about.given.picture, null, about.given.known);
      this.board.photograph = about.given.photograph;
      this.form.elements.seed.focus();
    });
  }

  // --- what is shown ---

  show(view) {
    for (const name of VIEWS) $(name).hidden = name !== view;
    $("known").hidden = view !== "alternatives";
    const stage = this.panel.querySelector(".stage");
    if (view !== "alternatives" && stage.getBoundingClientRect().top < 0) stage.scrollIntoView();
    this.panel.querySelector("[data-do=back]").hidden = view === "alternatives";
  }

  back() {
    this.show("alternatives");
    this.task.starter.focus(); // the button that had the focus is hidden
  }

  /** The known pixels and the rows drawn so far; the rest is transparent. */
  paint({
    image,
    shown = 0,
    about: {
      given: { picture, known },
    },
  }) {
    const { width, height } = picture;
    const painted = new ImageData(new Uint8ClampedArray((image ?? picture).data), width, height);
    known.forEach((is, pixel) => {
      if (!is && pixel >= shown * width) painted.data.fill(0, 4 * pixel, 4 * pixel + 4);
    });
    return painted;
  }

  /** Say if known pixels were not used, and which model would use them. */
  tell({ known, known_before_first_hole: before, conditioning }, card) {
    const late = (known - before) / card.channels;
    const other = this.conditional(models.cards);
    $("known").textContent =
      conditioning !== "partial"
        ? ""
        : `${counted(late, "known pixel")} had little influence or none: ${card.id} draws from the top left to the bottom right, and they come after its first hole.` +
          (other ? ` Choose ${other.id}, which uses them all.` : "");
  }
}

/** The lines between known and erased pixels, as an image for a style. */
function edgeOf(known, width) {
  const lines = known.map((is, pixel) => {
    const [x, y] = [pixel % width, Math.floor(pixel / width)];
    return (
      (x && is !== known[pixel - 1] ? `M${x} ${y}v1` : "") +
      (y && is !== known[pixel - width] ? `M${x} ${y}h1` : "")
    );
  });
  return `url("data:image/svg+xml,${encodeURIComponent(
    `<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 ${width} ${known.length / width}">` +
      `<path d="${lines.join("")}" stroke="${GUIDE}" stroke-width="2" vector-effect="non-scaling-stroke"/></svg>`,
  )}")`;
}
