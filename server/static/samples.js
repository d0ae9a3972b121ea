// Samples: images drawn from nothing, as their rows arrive.
import {call, events, key, Problem} from "./service.js";
import {$, counted, duration, fieldsOf, figure, models, Task} from "./parts.js";
import {Gallery, rowsSoFar} from "./gallery.js";

export const PATH = "v1/images/generations";

export class Samples {
  constructor(viewer) {
    const panel = $("samples");
    this.form = $("samples-form");
    this.gallery = new Gallery(panel, {paint: rowsSoFar, open: (record, records) => viewer.open(record, records)});
    this.task = new Task(this.form, panel.querySelector(".notice"), panel.querySelector(".status"));
    this.form.addEventListener("submit", () => this.draw());
    this.form.elements.n.addEventListener("input", () => this.invite());
    document.addEventListener("model", ({detail: card}) => {
      this.form.querySelector("[data-facts]").textContent = [`${card.width} × ${card.height} ${card.channels === 1 ? "grey" : "colour"}`,
        card.bits_per_dim.test_10000 && `${figure(card.bits_per_dim.test_10000)} bits/dim`].filter(Boolean).join(" · ");
      this.invite();
    });
  }

  invite() {
    const n = Math.min(models.limits.max_n, Math.max(1, this.form.elements.n.valueAsNumber || 1));
    this.form.parentElement.querySelector("[data-invite]").textContent = `Draw ${counted(n, "image")}`;
    if (models.chosen) this.gallery.invite(n, models.chosen);
  }

  reuse({answer, seed}) {
    this.task.attempt(() => {
      models.choose(answer.model);
      this.form.elements.seed.value = seed;
      this.form.elements.seed.focus();
    });
  }

  async draw() {
    const task = this.task;
    await task.start(async (signal) => {
      const [fields, card] = [fieldsOf(this.form), models.chosen];
      task.say(`Drawing ${counted(fields.n, "image")}.`);
      const response = await call(PATH, {body: {...fields, stream: true}, accept: "text/event-stream", signal});
      const began = performance.now();
      this.gallery.begin(fields.n, card, {card, fields, path: PATH, keyed: Boolean(key.get())});
      await receive(this.gallery, response, signal);
      task.say(`${counted(fields.n, "image")} in ${duration((performance.now() - began) / 1000)}, `
        + `from seed ${this.gallery.records[0].seed}. Click one to enlarge it.`);
    });
  }

}

/** Show a stream's images in a gallery; resolves when all are finished and painted. Returns the last event's data. */
export async function receive(gallery, response, signal) {
  let last;
  try {
    for await (const {data} of events(response, signal)) {
      last = data;
      gallery.receive(data);
    }
    if (gallery.finished.length < gallery.records.length) {
      throw new Problem("The connection ended before the images were finished. Try again.", {code: "broken"});
    }
  } catch (problem) {
    gallery.end();
    problem.stopped = `Stopped. ${gallery.finished.length} of ${counted(gallery.records.length, "image")} finished.`;
    throw problem;
  }
  await Promise.all(gallery.records.map((record) => record.showing));
  return last;
}
