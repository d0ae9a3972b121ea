// The race: backends measured one after the other, then replayed side by side at the speeds that were measured.
import { call, decode, events, json, patiently, Problem, unless } from "./service.js";
import {
  $,
  counted,
  duration,
  el,
  fieldsOf,
  figure,
  models,
  shapeOf,
  size,
  Task,
  whole,
} from "./parts.js";

const PATH = "v1/compare";
const BUDGETS = [15, 30, 60, 120, 300];
const IMAGES = 8; // drawn for the lanes: all of them go through the same images in the same order
const COLOURS = {
  linear: "#1a9e77",
  softmax: "#d9622b",
  "stateful-softmax": "#2a8fd8",
  "lsh-1": "#b07cc6",
  "lsh-4": "#b8960c",
}; // as in server/compare/chart.py
const KINDS = [
  // seconds for one image of mnist-small and last step ÷ first, as in docs/numbers.md; bytes of its state
  ["linear", "compiled", "fixed memory, our kernels", 0.0164, 1, 67584],
  ["linear", "eager", "fixed memory", 0.882, 1, 67584],
  ["stateful-softmax", "eager", "keeps every key and value", 0.837, 1.1, 3211264],
  ["softmax", "eager", "begins anew for a pixel", 9.29, 3.4, 0],
  ["lsh-1", "eager", "hashes, begins anew too", 21.6, 5, 0],
  ["lsh-4", "eager", "four rounds of hashing", 60.9, 4, 0],
];
const ELSEWHERE =
  "Speeds that were not measured here yet are those of mnist-small on two cores of an AMD EPYC.";
const UNABLE = "Conditional models cannot be measured, and no other is loaded.";
const ENGINES = {
  eager: "torch",
  "eager+operator": "torch with our operator",
  compiled: "compiled",
};
const DOT = 3; // pixels from one finished image to the next in a pile

export class Race {
  constructor() {
    this.panel = $("race");
    this.form = $("race-form");
    const find = (selector) => this.panel.querySelector(selector);
    this.lanes = find(".lanes");
    this.clock = find(".clock");
    this.progress = find("progress");
    this.again = find("[data-again]");
    this.skip = find("[data-skip]");
    this.task = new Task(this.panel);
    this.form.onsubmit = () => this.compare({});
    this.again.onclick = () => this.task.start((signal) => this.run(signal));
    this.skip.onclick = () => {
      this.skipped = true;
    };
    this.form.elements.model.onchange = ({ target }) => models.choose(target.value);
    document.addEventListener("model", ({ detail: card }) => this.take(card));
    this.images = {}; // by model: drawn once, for all its races
  }

  limit(budget) {
    const choices = [...BUDGETS.filter((seconds) => seconds < budget), budget].slice(-5);
    const select = this.form.elements.budget;
    const before = select.value;
    select.replaceChildren(
      ...choices.map((seconds) => el("option", { value: seconds }, `${seconds} s`)),
    );
    select.value = choices.includes(Number(before))
      ? before
      : (choices.find((seconds) => seconds >= 30) ?? budget);
  }

  /** Take the model chosen elsewhere or, since conditional ones cannot be compared, one of its shape. */
  take(chosen) {
    const able = models.cards.filter((card) => !card.conditional);
    const cards = able.length ? able : models.cards;
    const near = [chosen, this.card, ...cards]
      .map((one) => cards.find((card) => card.id === one?.id))
      .filter(Boolean);
    this.card = near.find((card) => shapeOf(card) === shapeOf(chosen)) ?? near[0];
    this.form.elements.model.replaceChildren(
      ...cards.map((card) =>
        el("option", { value: card.id, selected: card === this.card }, card.id),
      ),
    );
    this.task.starter.hidden = this.form.elements.budget.parentElement.hidden =
      this.card.conditional;
    this.idle(this.card);
  }

  /** Show lanes at the speeds of another machine until this one is measured. */
  idle(card) {
    if (this.report) {
      if (!this.task.running && this.report.model !== card.id)
        this.task.say(`Measured with ${this.report.model}. Measure to see ${card.id}.`);
      return;
    }
    const kinds = KINDS.filter(([, engine]) => engine === "eager" || card.engine === "compiled");
    this.setUp(kinds, card);
    const tokens = card.width * card.height * card.channels;
    kinds.forEach(([, , , seconds, growth, bytes], at) =>
      this.time(
        this.all[at],
        {
          seconds_per_image: seconds,
          estimated: true,
          state_bytes: bytes,
          step_seconds: [
            { position: 0, seconds: 1 },
            { position: tokens - 1, seconds: growth },
          ],
        },
        tokens,
        true,
      ),
    );
    this.compareInWords();
  }

  /** Race at once, at known speeds. If the server has no comparison that was not cancelled, measure meanwhile. */
  async open(comparison) {
    if (this.task.running || this.report) return;
    if (comparison?.status === "running") await this.compare({ id: comparison.id, ours: false });
    else if ((!comparison || comparison.status === "cancelled") && !this.card.conditional)
      await this.compare({});
    else {
      await this.task.start(
        async (signal) => {
          const report = comparison && (await json(`${PATH}/${comparison.id}`, { signal })).report;
          if (report?.results.some((one) => one.seconds_per_image))
            this.show(report, comparison.status !== "completed");
        },
        (signal) =>
          this.run(signal, this.report ? `Measured before, with ${this.report.model}.` : ""),
      );
    }
  }

  /** Follow a comparison beside a race at earlier speeds; then race at its speeds. job: gets its id, and ours. */
  compare(job) {
    return this.task.start(
      async (signal) => {
        const { images } = await this.draw(this.card.id, signal);
        if (!this.report || this.report.model === this.card.id)
          this.replay(images, signal).catch(() => {});
      },
      (signal) => this.follow(job, signal),
      (signal) => this.run(signal),
    );
  }

  async follow(job, signal) {
    if (!job.id) await this.begin(job, signal);
    await this.watch(job, signal).catch((problem) => {
      if (problem.status !== 404) throw problem;
      return this.follow(job, signal); // the server was restarted, and does not know this comparison
    });
  }

  /** Begin a comparison, or find the running one. One stopped before it has an id is cancelled too. */
  async begin(job, signal) {
    const body = {
      model: fieldsOf(this.form).model,
      budget: Number(this.form.elements.budget.value),
    };
    await unless(signal, this.asked);
    if (!job.taken) {
      const posted = json(PATH, { body });
      this.asked = posted.then(
        ({ id }) => signal.aborted && end(id),
        () => {},
      );
      try {
        Object.assign(job, { ours: true, id: (await unless(signal, posted)).id });
        return;
      } catch (problem) {
        if (problem.status !== 409 || problem.retryAfter) throw problem; // with retryAfter: one was cancelled just now
        job.taken = true;
      }
    }
    const { comparison } = await json("v1/status", { signal });
    if (comparison?.status !== "running") {
      // it has just ended
      job.taken = false;
      await this.begin(job, signal);
    } else Object.assign(job, { ours: false, id: comparison.id });
  }

  /** Follow a comparison to its end. An abort cancels ours. */
  async watch(job, signal) {
    const { id, ours } = job;
    if (ours)
      signal.onabort = () => {
        this.asked = end(id);
      };
    this.again.disabled = true;
    this.progress.hidden = false;
    this.progress.removeAttribute("value");
    let state;
    try {
      const response = await call(`${PATH}/${id}`, { accept: "text/event-stream", signal });
      for await (const event of events(response, signal)) {
        state = event.data;
        this.progress.value = state.progress;
        if (state.report) this.show(state.report, state.status !== "completed");
        const beside = state.shared_device
          ? " Other requests are running too, so figures may be low."
          : "";
        this.task.say(
          `${ours ? "Measuring" : `Watching ${id}, which another visitor started`}: ${Math.round(100 * state.progress)} %. Lanes change their speed as figures arrive.${beside}`,
        );
      }
      const { status, error } = state ?? {};
      if (status === "failed")
        throw new Problem(`The comparison failed: ${error}. Measure again.`, { code: status });
      if (status === "cancelled")
        throw new Problem("This comparison was stopped. Measure again.", { code: status });
      if (status !== "completed")
        throw new Problem("The connection broke off while measuring. Try again.", {
          code: "broken",
        });
    } catch (problem) {
      if (!problem.retryAfter && !["broken", "unreachable"].includes(problem.code))
        Object.assign(job, { id: null, taken: false });
      throw problem;
    } finally {
      this.progress.hidden = true;
      this.again.disabled = false;
    }
    signal.onabort = null;
  }

  // --- what was measured ---

  /** Show a report. While it grows, lanes without a figure stay as they were. */
  show(report, grows = false) {
    this.report = report;
    const textOf = (result) =>
      KINDS.find(
        ([backend, engine]) => backend === result.backend && engine === result.engine,
      )?.[2] ?? "";
    const card = models.cards.find((one) => one.id === report.model) ?? this.card;
    this.setUp(
      report.results
        .filter(({ batch }) => batch === 1)
        .map((one) => [one.backend, one.engine, textOf(one)]),
      card,
    );
    for (const lane of this.all) {
      const result = resultOf(report, lane, 1);
      if (result?.seconds_per_image || !grows) this.time(lane, result, report.tokens);
    }
    this.tabulate(report);
    if (!grows) this.compareInWords();
  }

  /** Give a lane its speed. elsewhere: of another machine. */
  time(lane, result, tokens, elsewhere = false) {
    Object.assign(lane, { elsewhere, disturbed: result?.disturbed });
    const total = (lane.total = result?.seconds_per_image);
    lane.bytes = result?.state_bytes;
    lane.ends = total && endsOf(result, tokens);
    lane.time.textContent = total
      ? `${result.estimated ? "~" : ""}${duration(total)}${mark(result)} each`
      : "not measured";
    lane.time.title = total && result.disturbed ? result.note : "";
    lane.item.classList.toggle("out", !total);
    if (!total) count(lane, 0);
  }

  /** What the speeds mean. Only lanes of one machine are compared. */
  compareInWords() {
    const find = (backend, engine) =>
      this.all.find((lane) => lane.backend === backend && lane.engine === engine && lane.total);
    const [linear, softmax] = [find("linear", "eager"), find("softmax", "eager")];
    if (linear && softmax && linear.elsewhere !== softmax.elsewhere) return; // soon both will be measured
    const [fast, slow] = linear?.total > softmax?.total ? [softmax, linear] : [linear, softmax];
    const times = (lane) =>
      counted(Math.max(1, Math.floor(slow.total / lane.total + 1e-9)), "picture");
    const [kept, ours] = [find("stateful-softmax", "eager"), find("linear", "compiled")].map(
      (lane) => lane?.elsewhere === slow?.elsewhere && lane,
    );
    $("headline-bad").hidden = ![linear, softmax, kept, ours].some(
      (lane) => lane && lane.disturbed,
    );
    if (!$("headline-bad").hidden) return; // the last good one stays
    $("headline").textContent =
      linear && softmax
        ? `While ${slow.backend} attention draws 1 picture, ${fast.backend} attention draws ${times(fast).replace(/ .*/, "")}.`
        : "";
    $("headline-more").textContent =
      !linear || !softmax
        ? ""
        : [
            "Both run in plain torch.",
            kept &&
              `Softmax that stores all it has computed draws ${times(kept)}, but needs ${size(kept.bytes)} for each; linear needs ${size(linear.bytes)}.`,
            ours && `Linear attention in our compiled code draws ${times(ours)}.`,
            this.all.some((lane) => lane.elsewhere)
              ? ELSEWHERE
              : `Measured with ${this.report.model}, ${new Date(this.report.created).toLocaleString()}.`,
            this.card.conditional && UNABLE,
          ]
            .filter(Boolean)
            .join(" ");
  }

  setUp(kinds, card) {
    const names = kinds.map(([backend, engine]) => `${backend} ${engine}`).join();
    if (this.names === `${names} ${card.id}`) return;
    this.names = `${names} ${card.id}`;
    for (const [name, room] of [
      ["--large", 140],
      ["--small", 84],
    ]) {
      // a whole number of screen pixels per pixel
      this.lanes.style.setProperty(
        name,
        `${card.width * Math.max(1, Math.floor(room / card.width))}px`,
      );
    }
    this.all = kinds.map(([backend, engine, text]) => {
      const lane = {
        backend,
        engine,
        canvas: el("canvas", { width: card.width, height: card.height, "aria-hidden": "true" }),
        pile: el("canvas", { width: 141, height: 45, class: "pile", "aria-hidden": "true" }),
        count: el("strong", {}, "0"),
        word: el("span", {}, " images"),
        time: el("p", { class: "time" }, "\u00a0"),
        bar: el("i", {}),
        memory: el("i", {}),
        kept: el("span", {}),
      };
      lane.item = coloured(
        backend,
        "li",
        { class: `lane ${backend === "linear" ? "ours" : ""}` },
        el("h3", {}, backend, el("small", {}, ENGINES[engine])),
        el("p", { class: "quiet" }, text),
        el("div", { class: "frame" }, lane.canvas),
        el("div", { class: "track", "aria-hidden": "true" }, lane.bar),
        el("p", { class: "memory", "aria-hidden": "true" }, "memory ", lane.kept),
        el("div", { class: "track", "aria-hidden": "true" }, lane.memory),
        el("p", { class: "count" }, lane.count, lane.word),
        lane.pile,
        lane.time,
      );
      return lane;
    });
    this.lanes.replaceChildren(...this.all.map((lane) => lane.item));
  }

  tabulate(report) {
    const batches = [...new Set(report.results.map((result) => result.batch))];
    const at = (lane, batch) => resultOf(report, lane, batch) ?? {};
    const tops = batches.map((batch) =>
      Math.max(...this.all.map((lane) => at(lane, batch).images_per_second ?? 0)),
    );
    const bar = (value, top, text) => {
      const fill = el("i");
      fill.style.width = value ? `${Math.max(1.5, (100 * value) / top)}%` : "0";
      return el(
        "td",
        { class: "bars" },
        el("span", {}, text),
        el("b", { "aria-hidden": "true" }, fill),
      );
    };
    const factor = (speed, base) => (speed && base ? ` (${figure(speed / base)}×)` : "");
    const bits = (result) =>
      result.bits_per_dim ? figure(result.bits_per_dim) + (result.exception ? "*" : "") : "–";
    this.panel
      .querySelector("thead")
      .replaceChildren(
        el(
          "tr",
          {},
          ...[
            "Attention",
            ...batches.map((batch) =>
              batch === 1 ? "Images/s, alone" : `Images/s, ${batch} together`,
            ),
            "Seconds for one",
            "bits/dim",
            "Memory of an image",
          ].map((text) => el("th", { scope: "col", class: /images/i.test(text) && "bars" }, text)),
        ),
      );
    this.panel.querySelector("tbody").replaceChildren(
      ...this.all.map((lane) => {
        const alone = at(lane, 1);
        return coloured(
          lane.backend,
          "tr",
          {},
          el("th", { scope: "row" }, lane.backend, el("small", {}, ` ${ENGINES[lane.engine]}`)),
          ...batches.map((batch, index) => {
            const one = at(lane, batch);
            return bar(
              one.images_per_second,
              tops[index],
              (one.estimated && one.images_per_second ? "~" : "") +
                figure(one.images_per_second) +
                mark(one) +
                factor(
                  one.images_per_second,
                  at({ ...lane, backend: "softmax" }, batch).images_per_second,
                ),
            );
          }),
          ...[
            (alone.estimated && alone.seconds_per_image ? "~" : "") +
              figure(alone.seconds_per_image) +
              mark(alone),
            bits(alone),
            size(alone.state_bytes),
          ].map((text) => el("td", {}, String(text))),
        );
      }),
    );
    $("figures").hidden = $("remarks").hidden = false;
    const { machine } = report;
    $("remarks").replaceChildren(
      el(
        "p",
        {},
        `${report.model} on ${machine.cpu}, ${counted(machine.threads, "thread")}, torch ${machine.torch}. ` +
          "In brackets: factor against softmax in the same engine. Rows of torch compare attention; compiled against torch compares kernels. " +
          "~ estimated from some steps.",
      ),
      ...report.notes.filter((note) => note.includes("†")).map((note) => el("p", {}, note)),
      el(
        "details",
        {},
        el("summary", {}, "Notes"),
        el("ul", {}, ...report.notes.map((note) => el("li", {}, note))),
      ),
    );
  }

  // --- the race itself ---

  /** The images of one model for the lanes, drawn before anything is measured. */
  async draw(model, signal) {
    if (!this.images[model]) {
      const answer = await json("v1/images/generations", {
        body: { model, n: Math.min(IMAGES, models.limits.max_n) },
        signal,
      });
      this.images[model] = {
        images: await Promise.all(answer.data.map((one) => decode(one.b64_json))),
        seed: answer.data[0].seed,
      };
    }
    return this.images[model];
  }

  async run(signal, measured = "") {
    if (!this.all.some((lane) => lane.total))
      throw new Problem("There was no time to measure anything. Choose a longer time.");
    const { images, seed } = await this.draw(this.report?.model ?? this.card.id, signal);
    signal.throwIfAborted();
    const same =
      images.length > 1
        ? `images, seeds ${seed} to ${seed + images.length - 1}`
        : `image, seed ${seed}`;
    this.task.say(
      `Every lane draws the same ${same}, again and again. One dot is one image. ${measured}`,
    );
    await this.replay(images, signal);
    for (const lane of this.all.filter(({ total }) => total))
      paint(lane, images[0], images[0].height * images[0].width); // by now all have drawn it
    this.task.say(
      `The race is over. The lanes show their first image, of seed ${seed}. ${measured}`,
    );
  }

  /** Run all lanes, at speeds that may still change, until the slowest has drawn one image. */
  replay(images, signal) {
    this.halt?.();
    const { names } = this;
    this.skipped = this.skip.disabled = false;
    for (const lane of this.all) {
      Object.assign(lane, { drawn: -1, made: 0 });
      for (const canvas of [lane.canvas, lane.pile])
        canvas.getContext("2d").clearRect(0, 0, canvas.width, canvas.height);
      count(lane, 0);
    }
    return new Promise((resolve, reject) => {
      const began = performance.now();
      const frame = (now) => {
        if (names !== this.names) return this.halt(); // lanes of another model
        const timed = this.all.filter((lane) => lane.total);
        for (const lane of timed) lane.most = Math.max(...timed.map(({ bytes }) => bytes ?? 0), 1);
        const slowest = Math.max(...timed.map((lane) => lane.total));
        const elapsed = this.skipped
          ? slowest
          : Math.min(slowest, (Math.max(now, began) - began) / 1000);
        this.clock.textContent = `${elapsed.toFixed(1)} s`;
        for (const lane of timed) advance(lane, elapsed, images);
        if (elapsed < slowest) next = requestAnimationFrame(frame);
        else this.halt();
      };
      let next = requestAnimationFrame(frame);
      this.halt = () => {
        cancelAnimationFrame(next);
        this.skip.disabled = true;
        resolve();
      };
      signal.addEventListener("abort", () => {
        this.halt();
        reject(signal.reason);
      });
    });
  }
}

const resultOf = ({ results }, { backend, engine }, batch) =>
  results.find((one) => one.batch === batch && one.backend === backend && one.engine === engine);

/** An element of a lane or row, in the colour of its kind of attention. */
function coloured(backend, ...element) {
  const made = el(...element);
  if (COLOURS[backend]) made.style.setProperty("--mine", COLOURS[backend]);
  return made;
}

/** The mark of a disturbed figure; its note says how. */
const mark = (result) => (result.disturbed ? "†" : "");

const end = (id) => patiently(`${PATH}/${id}`, { method: "DELETE" }).catch(() => {});

/** Seconds at which each token is drawn: between measured steps on straight lines, scaled to the whole image. */
function endsOf(result, tokens) {
  const steps = result.step_seconds;
  const ends = new Float64Array(tokens);
  let sum = 0;
  for (let t = 0, next = 0; t < tokens; t++) {
    while (next < steps.length && steps[next].position < t) next++;
    const [a, b] = [steps[Math.max(0, next - 1)], steps[Math.min(next, steps.length - 1)]];
    const share =
      b.position > a.position
        ? Math.min(1, Math.max(0, (t - a.position) / (b.position - a.position)))
        : 0;
    sum += a.seconds + share * (b.seconds - a.seconds);
    ends[t] = sum;
  }
  return ends.map((end) => (end * result.seconds_per_image) / sum);
}

function paint(lane, image, pixels) {
  const part = new ImageData(image.data.slice(), image.width);
  part.data.fill(0, pixels * 4);
  lane.canvas.getContext("2d").putImageData(part, 0, 0);
  const share = pixels / image.width / image.height; // of keys and values, those of each pixel are added
  lane.bar.style.width = `${100 * share}%`;
  const bytes = Math.round((lane.bytes ?? 0) * (lane.backend.startsWith("stateful") ? share : 1));
  lane.memory.style.width = `${Math.min(100, (100 * bytes) / lane.most)}%`;
  lane.kept.textContent = size(bytes);
}

function advance(lane, elapsed, images) {
  const made = Math.floor(elapsed / lane.total + 1e-9);
  const into = elapsed - made * lane.total;
  let [low, high] = [0, lane.ends.length];
  while (low < high) {
    const middle = (low + high) >> 1;
    if (lane.ends[middle] <= into) low = middle + 1;
    else high = middle;
  }
  const instant = lane.total < 0.1; // too quick for a screen
  const index = instant || !low ? Math.max(0, made - 1) : made;
  const image = images[index % images.length];
  const pixels =
    made > index
      ? image.width * image.height
      : Math.floor((low * image.width * image.height) / lane.ends.length);
  const state = index * 1e6 + pixels;
  if (state !== lane.drawn) {
    lane.drawn = state;
    paint(lane, image, pixels);
  }
  if (made === lane.made) return;
  const pile = lane.pile.getContext("2d");
  if (made < lane.made) {
    // the lane got slower
    pile.clearRect(0, 0, lane.pile.width, lane.pile.height);
    lane.made = 0;
  }
  pile.fillStyle = getComputedStyle(lane.bar).backgroundColor;
  const across = Math.floor(lane.pile.width / DOT);
  for (
    let one = lane.made;
    one < Math.min(made, across * Math.floor(lane.pile.height / DOT));
    one++
  ) {
    pile.fillRect((one % across) * DOT, Math.floor(one / across) * DOT, DOT - 1, DOT - 1);
  }
  lane.made = made;
  count(lane, made);
}

/** Say how many images a lane has drawn. */
function count(lane, made) {
  lane.count.textContent = lane.total ? whole(made) : "–";
  lane.word.textContent = made === 1 ? " image" : " images";
}
