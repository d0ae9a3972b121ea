// Samples: images drawn from nothing, as their rows arrive, and the draws of this visit.
import { blobOf, call, events, key, Problem } from "./service.js";
import {
  $,
  copied,
  counted,
  duration,
  el,
  fieldsOf,
  models,
  refill,
  restore,
  saveAs,
  Task,
  thingOf,
} from "./parts.js";
import { Gallery, rowsSoFar, withSettings } from "./gallery.js";

export const PATH = "v1/images/generations";
const KEPT = 20; // draws
const SHOWN = 8; // images in a small picture
const ACROSS = 4;
export const TRIES = 16; // images among which completions of many classes are sought
const AT_ONCE = 4; // requests of a draw: a browser has six connections

export class Samples {
  constructor(viewer) {
    const panel = $("samples");
    this.form = $("samples-form");
    this.gallery = new Gallery(panel, {
      paint: rowsSoFar,
      open: (record, records) => viewer.open(record, records),
    });
    this.task = new Task(panel);
    this.visit = new Visit(panel.querySelector(".visit"), this.gallery, this.task, {
      link: ["samples", "It draws these images again."],
    });
    this.form.onsubmit = ({ submitter }) => {
      if (submitter) this.gallery.reveal();
      this.draw();
    };
    $("write").onclick = () => this.write({});
    document.addEventListener("model", () => {
      $("write").hidden = !models.cards.some((card) => thingOf(card) === "letter");
    });
  }

  /** Draw at once when a visitor arrives, and when the link changes. query: that of the link, or "". */
  arrive(query) {
    if (query === this.query || (this.query != null && !query)) return;
    this.query = query;
    const fields = query && Object.fromEntries(new URLSearchParams(query));
    if (fields.word) this.write(fields);
    else this.task.attempt(() => this.again(fields, "link"));
  }

  /** Ask for a word, or write that of a link. */
  write(fields) {
    const left = () => this.gallery.records.length || this.again();
    import("./word.js").then(
      ({ write }) => write(fields, left),
      (problem) => this.task.notice.show(problem),
    );
  }

  /** Draw with these fields, if any; from: where they are from. */
  again(fields, from) {
    if (fields) refill(this.form, fields, from);
    this.form.requestSubmit();
  }

  /** Restore the form that gave this image. */
  reuse({ about, seed }) {
    this.task.attempt(() => {
      restore(this.form, { ...about.fields, seed, n: null });
      this.form.elements.seed.focus();
    });
  }

  draw() {
    const task = this.task;
    return task.start(async (signal) => {
      const [fields, card] = [fieldsOf(this.form), models.chosen];
      task.say(
        (task.doing =
          fields.label === "each"
            ? "Drawing one of each."
            : `Drawing ${counted(fields.n, "image")}.`),
      );
      const began = performance.now();
      let records;
      try {
        await drawn(
          this.gallery,
          task,
          fields,
          { card, path: PATH },
          signal,
          (body) => body,
          () => {
            ({ records } = this.gallery);
          },
        );
      } finally {
        if (records) this.visit.add(records);
      }
      task.say(
        `${counted(records.length, "image")} in ${duration((performance.now() - began) / 1000)}, ` +
          `from seed ${records[0].seed}. Click one to enlarge it.`,
      );
    });
  }
}

/** What draws images again, from the first of them. */
const settingsOf = ({ about: { fields, each }, seed, index }) => ({
  ...fields,
  ...(each && { label: "each" }),
  seed: seed - index,
});

/**
 * Draw images, shown in a gallery as they grow: n at once, or by a request each where one of each class is asked for.
 * bodyOf(fields): of a request · begun(): called when the first answer has arrived. Resolves to the last event's data.
 */
export async function drawn(gallery, task, fields, about, signal, bodyOf, begun) {
  signal.throwIfAborted();
  const each = fields.label === "each";
  const seed = fields.seed ?? Math.floor(Math.random() * 2 ** 32);
  const { classes } = about.card;
  // a completion has few classes of many, which the model draws if it chooses
  const labels = about.given && classes.length > TRIES ? Array(TRIES).fill(null) : classes;
  const parts = each
    ? labels.map((label, at) => ({ ...fields, n: 1, label, seed: seed + at }))
    : [fields];
  const waiting = [...parts.entries()];
  const ending = new AbortController(); // all requests end with the first that fails, or with the signal
  const every = ending.signal;
  signal.addEventListener("abort", () => ending.abort(signal.reason));
  let records, last;
  const some = async () => {
    while (waiting.length && !every.aborted) {
      const [at, part] = waiting.shift();
      const body = bodyOf({ ...part, stream: true });
      const response = await task.insist(
        () => call(about.path, { body, accept: "text/event-stream", signal: every }),
        every,
      );
      if (!records) {
        gallery.begin(each ? parts.length : fields.n, about.card, {
          ...about,
          keyed: Boolean(key.get()),
          each,
          fields: part,
        });
        ({ records } = gallery);
        if (each)
          records.forEach((record, label) => {
            record.about = { ...record.about, fields: parts[label] };
          });
        begun();
      }
      last = await receive(gallery, response, every, each ? [records[at]] : records);
    }
  };
  try {
    await Promise.all(Array.from({ length: AT_ONCE }, some));
  } finally {
    ending.abort();
  }
  signal.throwIfAborted(); // else its caller would take an earlier draw for this one
  return last;
}

/** Show a stream's images in records of a gallery; resolves when all are finished and painted. Returns the last event's data. */
async function receive(gallery, response, signal, records) {
  const finished = () => records.filter((record) => record.done).length;
  let last;
  try {
    for await (const { data } of events(response, signal)) {
      last = data;
      gallery.receive(data, records);
    }
    if (finished() < records.length) {
      throw new Problem("The connection ended before the images were finished. Try again.", {
        code: "broken",
      });
    }
  } catch (problem) {
    gallery.end(records);
    problem.stopped = `Stopped. ${finished()} of ${counted(records.length, "image")} finished.`;
    throw problem;
  } finally {
    await Promise.all(records.map((record) => record.showing));
  }
  return last;
}

/** The draws of this visit: earlier ones to show again, all images of one in a picture, and a link that draws them again. */
export class Visit {
  /** box: where it is shown · shown: called when an earlier draw is · link: its panel, and what it does. */
  constructor(box, gallery, task, { shown = () => {}, link }) {
    Object.assign(this, { gallery, task, shown, link, draws: [] });
    this.list = el("ul", { "aria-label": "Earlier draws" });
    this.buttons = [
      el("button", { disabled: true, click: () => this.download() }, "Save all"),
      el("button", { disabled: true, click: () => this.send() }, "Copy link"),
    ];
    box.append(
      el("div", { class: "buttons" }, ...this.buttons),
      el("h3", {}, "This visit"),
      this.list,
    );
  }

  /** Keep a draw if at least one image of it is finished. */
  add(records) {
    if (!records.some((record) => record.done)) return;
    this.list.prepend(this.entry(records));
    this.draws = [records, ...this.draws].slice(0, KEPT);
    [...this.list.children].slice(KEPT).forEach((item) => item.remove());
    this.mark();
  }

  entry(records) {
    const done = records.filter((record) => record.done);
    const { card, fields } = done[0].about;
    const words = [
      card.id,
      done[0].about.each
        ? "one of each"
        : fields.label == null
          ? "any class"
          : `class ${fields.label}`,
      `temperature ${fields.temperature}`,
      `seed ${done[0].seed}`,
    ].join(", ");
    return el(
      "li",
      {},
      el(
        "button",
        {
          class: "draw",
          "aria-label": words,
          title: words,
          click: () => {
            this.task.stop();
            this.gallery.again(records);
            this.shown();
            this.mark();
            this.task.say(`Drawn before: ${words}.`);
          },
        },
        sheet(
          done.slice(0, SHOWN).map((record) => record.canvas),
          ACROSS,
        ),
      ),
    );
  }

  mark() {
    [...this.list.children].forEach((item, at) =>
      item.firstChild.setAttribute("aria-current", String(this.draws[at] === this.gallery.records)),
    );
    for (const button of this.buttons) button.disabled = !this.gallery.finished.length;
  }

  /** All images in one picture, which draws them again where it is dropped on the page. */
  async download() {
    const { finished } = this.gallery;
    if (!finished.length) return; // the next draw has just begun
    const [first] = finished;
    const pictures = finished.map(({ around, canvas }) => around ?? canvas);
    const canvas = sheet(
      pictures,
      Math.ceil(Math.sqrt(pictures.length)),
      Math.max(1, Math.floor(112 / pictures[0].width)),
    );
    const png = await blobOf(canvas);
    const { fields, picture } = first.about;
    const all = {
      ...settingsOf(first),
      n: finished.length,
      ...(picture && { label: fields.label }),
    };
    saveAs(`linpix-${first.seed}-all.png`, await withSettings(first, png, all));
  }

  async send() {
    const { finished } = this.gallery;
    if (!finished.length) return;
    const [panel, does] = this.link;
    const settings = new URLSearchParams(settingsOf(finished[0]));
    const address = `${location.href.split("#")[0]}#/${panel}?${settings}`;
    const how = (await copied(address)) ? "The link is copied." : `Copy this link: ${address} .`;
    this.task.say(`${how} ${does}`);
  }
}

function sheet(pictures, across, zoom = 1) {
  const [width, height] = [pictures[0].width * zoom, pictures[0].height * zoom];
  const canvas = el("canvas", {
    width: across * width,
    height: Math.ceil(pictures.length / across) * height,
  });
  const context = canvas.getContext("2d");
  context.imageSmoothingEnabled = false;
  pictures.forEach((picture, at) =>
    context.drawImage(
      picture,
      (at % across) * width,
      Math.floor(at / across) * height,
      width,
      height,
    ),
  );
  return canvas;
}
