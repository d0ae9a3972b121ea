// Samples: images drawn from nothing, as their rows arrive.
import {call, events, key, Problem} from "./service.js";
import {$, counted, duration, fieldsOf, models, restore, Task} from "./parts.js";
import {Gallery, rowsSoFar} from "./gallery.js";
import {Visit} from "./visit.js";

export const PATH = "v1/images/generations";

export class Samples {
  constructor(viewer) {
    const panel = $("samples");
    this.form = $("samples-form");
    this.gallery = new Gallery(panel, {paint: rowsSoFar, open: (record, records) => viewer.open(record, records)});
    this.task = new Task(panel);
    this.visit = new Visit(panel.querySelector(".visit"), this.gallery, this.task, {link: linkOf, stored: "linpix-visit"});
    this.form.onsubmit = () => this.draw();
  }

  /** Draw at once when a visitor arrives, and when the link changes. query: that of the link, or "". */
  arrive(query) {
    if (query === this.query || (this.query != null && !query)) return;
    this.query = query;
    this.visit.restore();
    this.task.attempt(() => {
      if (query) restore(this.form, Object.fromEntries(new URLSearchParams(query)));
      const wrong = this.form.querySelector(":invalid");
      if (wrong) throw new Problem(`This link cannot be drawn: its ${wrong.name} is ${wrong.value}. ${wrong.validationMessage}`);
      this.form.requestSubmit();
    });
  }

  /** Restore the form that gave this image. */
  reuse({about, seed}) {
    this.task.attempt(() => {
      restore(this.form, {...about.fields, seed, n: null});
      this.form.elements.seed.focus();
    });
  }

  draw() {
    const task = this.task;
    return task.start(async (signal) => {
      const [fields, card] = [fieldsOf(this.form), models.chosen];
      task.say(`Drawing ${counted(fields.n, "image")}.`);
      const response = await call(PATH, {body: {...fields, stream: true}, accept: "text/event-stream", signal});
      const began = performance.now();
      this.gallery.begin(fields.n, card, {card, fields, path: PATH, keyed: Boolean(key.get())});
      const {records} = this.gallery;
      try {
        await receive(this.gallery, response, signal);
      } finally {
        this.visit.add(records);
      }
      task.say(`${counted(fields.n, "image")} in ${duration((performance.now() - began) / 1000)}, `
        + `from seed ${records[0].seed}. Click one to enlarge it.`);
    });
  }
}

function linkOf(records) {
  const [{about: {fields}, seed, index}] = records;
  return `${location.href.split("#")[0]}#/samples?${new URLSearchParams({...fields, seed: seed - index})}`;
}

/** Show a stream's images in a gallery; resolves when all are finished and painted. Returns the last event's data. */
export async function receive(gallery, response, signal) {
  const {records} = gallery;
  const finished = () => records.filter((record) => record.done).length;
  let last;
  try {
    for await (const {data} of events(response, signal)) {
      last = data;
      gallery.receive(data, records);
    }
    if (finished() < records.length) {
      throw new Problem("The connection ended before the images were finished. Try again.", {code: "broken"});
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
