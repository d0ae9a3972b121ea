// What the panels share: elements, figures as text, the models' choices, and the notice with its retry.
import {Problem} from "./service.js";

export const $ = (id) => document.getElementById(id);

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

/** Three digits, and never an exponent. */
export function figure(x) {
  if (x == null) return "–";
  const digits = x ? Math.max(0, 2 - Math.floor(Math.log10(Math.abs(x)))) : 0;
  return x.toLocaleString("en", {minimumFractionDigits: digits, maximumFractionDigits: digits});
}

/** What a picture and a model must share. */
export const shapeOf = ({width, height, channels}) => [width, height, channels].join();

export const whole = (x) => Math.round(x).toLocaleString("en");
export const counted = (n, one, many = `${one}s`) => `${whole(n)} ${n === 1 ? one : many}`;

export function duration(seconds) {
  if (seconds == null) return "–";
  if (seconds >= 1) return `${figure(seconds)} s`;
  return seconds >= 0.999e-3 ? `${figure(seconds * 1e3)} ms` : `${figure(seconds * 1e6)} µs`;
}

export function size(bytes) {
  if (!bytes) return "none";
  return bytes >= 2 ** 20 ? `${figure(bytes / 2 ** 20)} MiB` : bytes >= 1024 ? `${figure(bytes / 1024)} KiB` : `${bytes} B`;
}

/** The loaded models, one of them chosen in every panel at once. */
export const models = {
  cards: [],
  chosen: null,
  limits: {max_n: 16, compare_budget: 60},
  set(cards, limits) {
    this.cards = cards;
    this.limits = limits;
    for (const select of document.querySelectorAll("select.models")) {
      select.replaceChildren(...cards.map((card) => el("option", {value: card.id}, card.id)));
      select.onchange = () => this.choose(select.value);
    }
    for (const input of document.querySelectorAll("input[name=n]")) {
      input.max = limits.max_n;
      input.value = Math.min(input.value, limits.max_n);
    }
    this.choose((cards.find((card) => card.id === this.chosen?.id) ?? cards[0]).id);
  },
  choose(id) {
    const found = this.cards.find((card) => card.id === id);
    if (!found) throw new Problem(`${id} is no longer served. Choose another model.`);
    const before = this.chosen;
    this.chosen = found;
    for (const select of document.querySelectorAll("select.models")) select.value = id;
    for (const select of document.querySelectorAll("select[name=label]")) {
      const label = before?.id === id ? select.value : "";
      select.replaceChildren(el("option", {value: ""}, "any"),
        ...this.chosen.classes.map((name, index) => el("option", {value: index}, name)));
      select.value = label;
      select.disabled = !this.chosen.classes.length;
    }
    document.dispatchEvent(new CustomEvent("model", {detail: this.chosen}));
  },
};

/** The fields of a form as the API names them; an empty field is left out. */
export function fieldsOf(form) {
  if (!models.chosen) throw new Problem("The list of models has not arrived yet. Try again in a moment.");
  const given = Object.fromEntries([...new FormData(form)].filter(([, value]) => value !== ""));
  const fields = {model: given.model};
  for (const name of ["n", "seed", "temperature", "label"]) if (given[name] != null) fields[name] = Number(given[name]);
  if (fields.seed > Number.MAX_SAFE_INTEGER) throw new Problem(`The seed must be at most ${Number.MAX_SAFE_INTEGER}. Enter a smaller one.`);
  return fields;
}

/** Says what went wrong inside its box; where the server says when to come back, counts down to it. */
export class Notice {
  constructor(box) {
    this.box = box;
  }

  clear() {
    this.box.hidden = true;
    this.box.replaceChildren();
  }

  show(problem, again) {
    const text = problem instanceof Problem ? problem.message : `This page failed: ${problem.message}. Reload it.`;
    if (!(problem instanceof Problem)) console.error(problem);
    this.box.replaceChildren(el("p", {}, text));
    if (again) this.box.append(el("button", {type: "button", click: again}, "Try again"));
    this.box.hidden = false;
  }

  /** Resolves when the wait is over. Rejects when the signal is aborted. */
  wait(problem, signal) {
    const end = performance.now() + problem.retryAfter * 1000;
    const left = el("strong", {"aria-hidden": "true"});
    const why = problem.code === "queue_full" ? "The queue is full." : problem.message;
    this.box.replaceChildren(el("p", {}, why, ` Trying again by itself in ${problem.retryAfter} s. `, left));
    this.box.hidden = false;
    return new Promise((resolve, reject) => {
      const tick = () => {
        const seconds = Math.ceil((end - performance.now()) / 1000);
        left.textContent = `${Math.max(0, seconds)} s left`;
        if (seconds > 0) return;
        clearInterval(timer);
        this.clear();
        resolve();
      };
      const timer = setInterval(tick, 200);
      signal.addEventListener("abort", () => {  // at once: what is shown next is somebody else's
        clearInterval(timer);
        reject(signal.reason);
      });
      tick();
    });
  }
}

/** Work that can be stopped and, where the server says when, is tried again: a panel's form is its handle. */
export class Task {
  constructor(form, notice, status) {
    this.form = form;
    this.notice = new Notice(notice);
    this.status = status;
    this.stopper = form.querySelector("[data-stop]");
    this.stopper.addEventListener("click", () => this.stop());
    form.addEventListener("submit", (event) => event.preventDefault());
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

  /** Do something at once; what is wrong with it is said in the notice. */
  attempt(work) {
    try {
      work();
    } catch (problem) {
      this.notice.show(problem);
    }
  }

  /** work(signal), one after the other, each until it succeeds, is stopped or fails; a later start stops an earlier one. */
  async start(...works) {
    this.stop();
    const controller = this.controller = new AbortController();
    const {signal} = controller;
    this.notice.clear();
    this.stopper.disabled = false;
    this.form.dataset.running = "";
    try {
      while (works.length) {
        try {
          await works[0](signal);
          works.shift();
        } catch (problem) {
          if (!problem.retryAfter || signal.aborted) throw problem;
          this.say("Waiting for room.");
          await this.notice.wait(problem, signal);
        }
      }
    } catch (problem) {
      if (!signal.aborted) {
        this.say("");
        this.notice.show(problem, () => {
          this.form.querySelector("[type=submit]").focus();  // the button that has it goes away
          this.start(...works);
        });
      } else if (this.controller === controller) {
        this.notice.clear();
        this.say(problem.stopped ?? "Stopped.");
      }
    } finally {
      if (this.controller === controller) {
        this.controller = null;
        if (document.activeElement === this.stopper) this.form.querySelector("[type=submit]").focus();
        this.stopper.disabled = true;
        delete this.form.dataset.running;
      }
    }
  }
}
