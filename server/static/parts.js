// Shared by the panels: elements, figures as text, the models' choices, and the notice with its retry.
import { pause, Problem, unless } from "./service.js";

export const $ = (id) => document.getElementById(id);
export const all = (selector) => document.querySelectorAll(selector);

// The completion form's settings are a copy of the samples form's.
const [settings, copy] = all(".settings");
copy.append(...settings.cloneNode(true).children);
copy.querySelector("[name=n]").value = 6;

/** An element; attributes as given, functions as listeners, children as nodes or text. */
export function el(name, attributes = {}, ...children) {
  const element = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (typeof value === "function") element.addEventListener(key, value);
    else if (value === true) element.setAttribute(key, "");
    else if (value !== false && value != null) element.setAttribute(key, value);
  }
  element.append(...children.filter((child) => child != null));
  return element;
}

/** Set a text. An equal one stays: screen readers read each change aloud. */
export function write(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

/** Three significant digits, and never an exponent. */
export function figure(x) {
  if (x == null) return "–";
  const digits = x ? Math.max(0, 2 - Math.floor(Math.log10(Math.abs(x)))) : 0;
  return x.toLocaleString("en", { minimumFractionDigits: digits, maximumFractionDigits: digits });
}

/** Values that a drawing board has for a pixel of a model: 1 or 3. */
export const tonesOf = ({ channels, palette }) => (palette?.length ? 3 : channels);

/** The shape and ground, which a picture and a model must share. */
export const shapeOf = ({ width, height, channels, board }) =>
  [width, height, channels, board.ground].join();

const TITLES = {
  "mnist-conditional": "Digits",
  "letters-conditional": "Letters",
  avatars: "Faces",
  "cifar10-conditional": "Textures",
  "mnist-large": "Digits, larger",
  "mnist-small": "Digits, smaller",
  "cifar10-small": "Textures, smaller",
};

/** A model's name for people. */
export const titleOf = ({ id }) => TITLES[id] ?? id;

/** What a model's pictures show, in a word. */
export function thingOf({ classes }) {
  if (classes.join("") === "0123456789") return "digit";
  return classes[0] && classes.every((name) => /^\p{L}$/u.test(name)) ? "letter" : "picture";
}

/** Whether a model draws the class first, and so recognises it in what it has drawn; false while there is no model. */
export const recognises = (card) => Boolean(card?.conditional && card.classes.length);

export const whole = (x) => Math.round(x).toLocaleString("en");
export const percent = (share) =>
  share < 0.01 ? "under 1 %" : `${share < 1 ? Math.min(99, Math.round(100 * share)) : 100} %`;
export const counted = (n, one, many = `${one}s`) => `${whole(n)} ${n === 1 ? one : many}`;

export function duration(seconds) {
  if (seconds == null) return "–";
  if (seconds >= 1) return `${figure(seconds)} s`;
  return seconds >= 0.999e-3 ? `${figure(seconds * 1e3)} ms` : `${figure(seconds * 1e6)} µs`;
}

export function size(bytes) {
  if (!bytes) return "none";
  return bytes >= 2 ** 20
    ? `${figure(bytes / 2 ** 20)} MiB`
    : bytes >= 1024
      ? `${figure(bytes / 1024)} KiB`
      : `${bytes} B`;
}

/** The loaded models. One of them is chosen, in all panels at once; the race follows if it can compare it. */
export const models = {
  cards: [],
  chosen: null,
  decided: false, // by the visitor: then the page chooses no other
  limits: { max_n: 16, compare_budget: 60 },
  set(cards, limits) {
    cards = this.cards = cards.map((card) => ({ board: {}, ...card })); // an older server's cards have none
    this.limits = limits;
    const others = cards.filter(({ id }) => !TITLES[id]);
    const known = Object.keys(TITLES).map((id) => cards.find((card) => card.id === id));
    const tiles = [...known.filter(Boolean), ...others].map((card) => [card.id, titleOf(card)]);
    fill($("models"), "model", tiles);
    for (const input of all("input[name=n]")) {
      input.max = limits.max_n;
      input.value = Math.min(input.value, limits.max_n);
    }
    this.choose((cards.find((card) => card.id === this.chosen?.id) ?? surest(cards)).id);
  },
  /** Choose the model of this id in every panel, with its classes, temperature and facts. */
  choose(id) {
    const found = this.cards.find((card) => card.id === id);
    if (!found) throw new Problem(`${id} is no longer served. Choose another model.`);
    const before = this.chosen;
    this.chosen = found;
    for (const tile of all("#models input")) tile.checked = tile.value === id;
    for (const chips of all(".classes .chips")) {
      const label = before?.id === id ? chips.closest("form").elements.label.value : "";
      const choices = [["", "any"], ...found.classes.map((name) => [name, name])];
      if (found.classes.length && chips.closest("#samples")) choices.push(["each", "one of each"]);
      chips.parentElement.hidden = !found.classes.length;
      fill(chips, "label", choices, label);
    }
    const [calmest, wildest] = found.temperature_range ?? [0.3, 1.5];
    for (const input of all("input[name=temperature]")) {
      Object.assign(input, { min: calmest, max: wildest });
      if (before?.id !== id) enter(input, found.temperature ?? 1);
    }
    const facts = [
      `${found.width} × ${found.height} ${tonesOf(found) === 1 ? "grey" : "colour"}`,
      found.bits_per_dim.test_10000 && `${figure(found.bits_per_dim.test_10000)} bits/dim`,
      found.engine !== "compiled" && `slow: ${found.slots} at a time, by torch`,
      found.class_agreement && `draws a chosen class in ${percent(found.class_agreement)} of cases`,
    ];
    for (const span of all("[data-facts]")) span.textContent = facts.filter(Boolean).join(" · ");
    for (const span of all("[data-limits]")) span.textContent = found.limits ?? "";
    document.dispatchEvent(new CustomEvent("model", { detail: this.chosen }));
  },
};

/** Fill a group of chips, one for each [value, text]. */
function fill(chips, name, choices, chosen) {
  chips.replaceChildren(
    ...choices.map(([value, text]) =>
      el(
        "label",
        {},
        el("input", { type: "radio", name, value, checked: value === chosen }),
        el("span", { title: name === "model" ? value : null }, text),
      ),
    ),
  );
}

/** The model to begin with: of those with the first one's shape, the one that most often draws the class asked for. */
function surest([first, ...others]) {
  const alike = others.filter((card) => shapeOf(card) === shapeOf(first));
  return alike.reduce(
    (best, card) => ((card.class_agreement ?? 0) > (best.class_agreement ?? 0) ? card : best),
    first,
  );
}

/** The fields of a form as the API names them, without empty ones. */
export function fieldsOf(form) {
  if (!models.chosen)
    throw new Problem("The list of models has not arrived yet. Try again in a moment.", {
      code: "early",
    });
  const given = Object.fromEntries([...new FormData(form)].filter(([, value]) => value !== ""));
  const fields = { model: given.model ?? models.chosen.id };
  for (const name of ["n", "seed", "temperature", "label"])
    if (given[name] != null) fields[name] = name === "label" ? given[name] : Number(given[name]);
  if (fields.seed > Number.MAX_SAFE_INTEGER)
    throw new Problem(`The seed must be at most ${Number.MAX_SAFE_INTEGER}. Enter a smaller one.`);
  return fields;
}

/** Enter a value, and run the listeners that typing would run. */
function enter(input, value) {
  input.value = value;
  input.dispatchEvent(new Event("input"));
}

/** Set a form to the fields of an earlier request, or of a link; without n, the form keeps its own. */
export function restore(form, { model, label = "", seed = "", temperature, n }) {
  models.choose(model ?? models.chosen.id);
  const { classes } = models.chosen;
  form.elements.label.value = classes.includes(`${label}`) ? label : (classes[label] ?? label); // older links have an index
  form.elements.seed.value = seed;
  enter(form.elements.temperature, temperature ?? models.chosen.temperature ?? 1);
  if (n) enter(form.elements.n, n);
}

/** Restore a form as a link or a picture (from) says. Throws a Problem if that cannot be. */
export function refill(form, fields, from) {
  restore(form, fields);
  const wrong = form.querySelector(":invalid");
  if (wrong)
    throw new Problem(
      `This ${from} cannot be drawn: its ${wrong.name} is ${wrong.value}. ${wrong.title || wrong.validationMessage}`,
    );
}

/** Copy a text to the clipboard. Resolves to whether it worked: only pages from https or localhost may write there. */
export const copied = (text) =>
  navigator.clipboard?.writeText(text).then(
    () => true,
    () => false,
  ) ?? false;

/** Save a file with the visitor's downloads. */
export function saveAs(name, blob) {
  const url = URL.createObjectURL(blob);
  el("a", { href: url, download: name }).click();
  setTimeout(() => URL.revokeObjectURL(url), 60_000);
}

/** A box that says what went wrong. If the server says when to try again, it counts down to that. */
export class Notice {
  constructor(box) {
    this.box = box;
  }

  clear() {
    this.problem = null;
    this.box.hidden = true;
    this.box.replaceChildren();
  }

  show(problem, again) {
    this.problem = problem;
    const text =
      problem instanceof Problem
        ? problem.message
        : `This page failed: ${problem.message}. Reload it.`;
    if (!(problem instanceof Problem)) console.error(problem);
    this.box.replaceChildren(el("p", {}, text));
    if (again) this.box.append(el("button", { click: again }, "Try again"));
    this.box.hidden = false;
  }

  /** Resolves when the wait is over. Rejects when the signal is aborted. */
  async wait(problem, signal) {
    const left = el("strong", { "aria-hidden": "true" });
    const why =
      problem.code === "queue_full"
        ? "The queue is full."
        : problem.message.replace(/[;,] try again in \d+ s/, "");
    this.box.replaceChildren(el("p", {}, why, " This page tries again ", left));
    this.box.hidden = false;
    const end = performance.now() + problem.retryAfter * 1000;
    for (let seconds; (seconds = Math.ceil((end - performance.now()) / 1000)) > 0;) {
      left.textContent = `in ${seconds} s.`;
      await unless(signal, pause(1));
    }
    if (left.isConnected) this.clear();
  }
}

/** Work that a panel's form starts and stops. */
export class Task {
  constructor(panel) {
    const [form, notice, status, starter, stopper] = [
      "form",
      ".notice",
      ".status",
      "[type=submit]",
      "[data-stop]",
    ].map((selector) => panel.querySelector(selector));
    Object.assign(this, { form, notice: new Notice(notice), status, starter, stopper });
    stopper.onclick = () => this.stop();
    form.addEventListener("submit", (event) => event.preventDefault());
    document.addEventListener("back", () => {
      if (!["broken", "unreachable"].includes(this.notice.problem?.code)) return;
      if (notice.contains(document.activeElement)) starter.focus();
      this.notice.clear();
      this.say("The server is back. Try again.");
    });
  }

  get running() {
    return Boolean(this.controller);
  }

  say(text) {
    this.status.textContent = text;
  }

  stop() {
    this.controller?.abort();
  }

  /** Do something at once; the notice shows what went wrong. */
  attempt(work) {
    try {
      work();
    } catch (problem) {
      this.notice.show(problem);
    }
  }

  /** Run work(signal) again while the server says so. */
  async insist(work, signal) {
    for (;;) {
      try {
        return await work(signal);
      } catch (problem) {
        if (!problem.retryAfter || signal.aborted) throw problem;
        this.say("Waiting for a place.");
        await this.notice.wait(problem, signal);
        this.say(this.doing);
      }
    }
  }

  /** Run each work(signal) in order, until an error, a stop, or a later start. */
  async start(...works) {
    this.stop();
    const controller = (this.controller = new AbortController());
    const { signal } = controller;
    this.notice.clear();
    this.stopper.disabled = false;
    this.form.dataset.running = "";
    try {
      while (works.length) {
        await this.insist(works[0], signal);
        signal.throwIfAborted();
        works.shift();
      }
    } catch (problem) {
      if (!signal.aborted) {
        this.say("");
        this.notice.show(
          problem,
          problem.passing &&
            (() => {
              this.starter.focus(); // the button that has the focus goes away
              this.start(...works);
            }),
        );
      } else if (this.controller === controller) {
        this.notice.clear();
        this.say(problem.stopped ?? "Stopped.");
      }
    } finally {
      if (this.controller === controller) {
        this.controller = null;
        if (document.activeElement === this.stopper) this.starter.focus();
        this.stopper.disabled = true;
        delete this.form.dataset.running;
        document.dispatchEvent(new Event("idle"));
      }
    }
  }
}
