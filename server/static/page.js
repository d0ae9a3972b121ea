// The page: its panels, one of which, Now, shows what the service is doing; the key if the server asks for one; and the
// notice while the server does not answer.
import { json, key, onKey, patiently, Problem } from "./service.js";
import {
  $,
  all,
  counted,
  duration,
  el,
  figure,
  models as loaded,
  Notice,
  size,
  titleOf,
  whole,
  write,
} from "./parts.js";
import { Completion } from "./completion.js";
import { settingsIn, Viewer } from "./gallery.js";
import { Race } from "./race.js";
import { Samples } from "./samples.js";

const PANELS = ["samples", "completion", "race", "inside", "now"];
const notice = new Notice($("page-notice"));
let inside = null; // a promise, once its tab is opened
let latest = null; // the last status of the service; null while it does not answer

const KEPT = 60; // points of a chart, one an answer
const SPAN = 4; // rates are over this many intervals between answers
const SVG = "http://www.w3.org/2000/svg";

const served = (status) => status.models.map((model) => model.id).join();
const total = (status, field) => status.models.reduce((sum, model) => sum + model[field], 0);

const TILES = {
  images: ["Images per second", "finished"],
  pixels: ["Sub-pixels per second", "decoded"],
  step: ["Time of a step", "one token, the whole batch"],
  batch: ["Images in a batch", "stepped together"],
  waiting: ["Queue", "images waiting for a slot"],
  requests: ["Requests", "running"],
  kernel: ["Kernel in use", ""],
};

/** The panel Now: what the service is doing, polled every second, and the pulse that every panel shows. */
class Now {
  /** heard(status) is called for each answer, lost() when there is none. */
  constructor({ heard, lost }) {
    Object.assign(this, { heard, lost, answers: [] });
    this.tiles = Object.fromEntries(
      Object.entries(TILES).map(([name, [title, unit]]) => {
        const line = document.createElementNS(SVG, "polyline");
        const chart = document.createElementNS(SVG, "svg");
        const attributes = {
          viewBox: `0 0 ${KEPT - 1} 20`,
          preserveAspectRatio: "none",
          "aria-hidden": "true",
        };
        for (const [key, value] of Object.entries(attributes)) chart.setAttribute(key, value);
        chart.append(line);
        const [value, note] = [el("p", { class: "value" }, "–"), el("p", { class: "quiet" }, unit)];
        $("tiles").append(
          el(
            "div",
            { class: "tile", id: `tile-${name}` },
            el("h3", {}, title),
            value,
            note,
            unit ? chart : null,
          ),
        );
        return [name, { value, note, line, unit, past: [] }];
      }),
    );
    document.addEventListener("visibilitychange", () => this.poll());
    document.addEventListener("idle", () => key.get() || this.poll()); // a key's rate limit is for drawing
  }

  /** Poll now, and then regularly while the page is visible. */
  async poll() {
    clearTimeout(this.timer);
    if (document.hidden || this.asking) return;
    this.asking = true;
    const began = performance.now();
    let pause = key.get() && $("now").hidden ? 5000 : 1000; // polling must not use up a key's rate limit
    try {
      const status = await json("v1/status", { patience: 10 });
      this.take(status);
      await this.heard(status);
    } catch (problem) {
      if (problem.status === 429) {
        // the rate limit of this visitor's key
        this.pulse("waiting", "Asking less often");
        pause = 1000 * problem.retryAfter;
      } else {
        this.pulse("lost", "No connection");
        this.answers = [];
        this.lost(problem);
      }
    } finally {
      this.asking = false;
      this.timer = setTimeout(
        () => this.poll(),
        Math.max(200, pause - (performance.now() - began)),
      );
    }
  }

  pulse(state, text) {
    $("pulse").dataset.state = state;
    write($("pulse-text"), text);
  }

  take(status) {
    const before = this.answers.at(-1);
    if (before && (status.uptime < before.uptime || served(before) !== served(status)))
      this.answers = []; // sums began anew
    this.answers = [...this.answers, status].slice(-SPAN - 1);
    const used = total(status, "slots_used");
    this.pulse(
      status.status === "ready" ? (used ? "busy" : "ready") : "waiting",
      status.status === "ready"
        ? used
          ? `Drawing ${counted(used, "image")}`
          : "Ready"
        : status.status === "draining"
          ? "Shutting down"
          : "Starting",
    );
    if ($("now").hidden && this.drawn) this.record(status);
    else this.show(status);
  }

  record(status) {
    const first = this.answers[0];
    const seconds = status.uptime - first.uptime;
    const since = (field) => total(status, field) - total(first, field);
    const quanta = since("quanta");
    const rows = status.rows_sum - first.rows_sum;
    const rate = (count) => (seconds ? count / seconds : null);
    const figures = {
      images: rate(since("images_completed")),
      pixels: rate(since("pixels_generated")),
      step: quanta ? since("step_seconds_sum") / quanta : null,
      batch: quanta ? rows / quanta : null,
      waiting: total(status, "images_waiting"),
      requests: status.requests_running,
    };
    for (const [name, tile] of Object.entries(this.tiles))
      tile.past = [...tile.past, figures[name] ?? 0].slice(-KEPT);
    return figures;
  }

  show(status) {
    this.drawn = true;
    const figures = this.record(status);
    const texts = {
      images: figure(figures.images),
      pixels: whole(figures.pixels ?? 0),
      step: duration(figures.step),
      batch: figure(figures.batch),
      waiting: whole(figures.waiting),
      requests: whole(figures.requests),
      kernel: status.kernel,
    };
    for (const [name, tile] of Object.entries(this.tiles)) {
      write(tile.value, texts[name]);
      const top = Math.max(...tile.past, 1e-9);
      tile.line.setAttribute(
        "points",
        tile.past
          .map((x, at) => `${at + KEPT - tile.past.length},${19 - (18 * x) / top}`)
          .join(" "),
      );
    }
    const refused = Object.entries(status.requests_rejected).filter(([, count]) => count);
    this.tiles.requests.note.textContent = [
      `running, ${whole(status.requests_waiting)} waiting`,
      ...refused.map(([why, count]) => `${whole(count)} refused (${why.replaceAll("_", " ")})`),
    ].join(", ");
    this.showSlots(status.models);
    this.tiles.kernel.note.textContent = `LinPix ${status.version}, torch ${status.torch}, up for ${upFor(status.uptime)}`;
  }

  showSlots(models) {
    const names = models.map((model) => `${model.id} ${model.slots} ${memoryOf(model.id)}`).join(); // memory is known later
    if (this.names !== names) {
      this.names = names;
      this.rows = models.map((model) => {
        const squares = Array.from({ length: Math.min(model.slots, 256) }, () => el("i", {}));
        const text = el("span", {});
        return {
          squares,
          text,
          item: el(
            "div",
            { class: "slots" },
            el("h3", {}, model.id),
            el(
              "p",
              { class: "quiet" },
              [model.backend, model.engine, model.precision, model.device, memoryOf(model.id)]
                .filter(Boolean)
                .join(", "),
            ),
            el("div", { class: "squares", "aria-hidden": "true" }, ...squares),
            el("p", {}, text),
          ),
        };
      });
      $("slots").replaceChildren(el("h2", {}, "Slots"), ...this.rows.map((row) => row.item));
    }
    models.forEach((model, index) => {
      const { squares, text } = this.rows[index];
      squares.forEach((square, at) =>
        square.classList.toggle(
          "used",
          at < Math.ceil((model.slots_used * squares.length) / model.slots),
        ),
      );
      write(
        text,
        `${whole(model.slots_used)} of ${counted(model.slots, "slot")} in use, ${whole(model.images_waiting)} waiting, ${counted(model.images_completed, "image")} drawn`,
      );
    });
  }
}

function memoryOf(id) {
  const card = loaded.cards.find((one) => one.id === id);
  return card && `${size(card.state_bytes)} a slot`;
}

function upFor(seconds) {
  const [unit, word] =
    seconds >= 86400
      ? [86400, "day"]
      : seconds >= 3600
        ? [3600, "hour"]
        : seconds >= 60
          ? [60, "minute"]
          : [1, "second"];
  return counted(Math.floor(seconds / unit), word);
}

const viewer = new Viewer({
  reuse(record) {
    (record.about.given ? completion : samples).reuse(record);
  },
  complete(record) {
    select("completion");
    if (record.about.given) completion.pin(record);
    else completion.adopt(record);
  },
  judge(record) {
    select("completion");
    completion.judge(record);
  },
});
const samples = new Samples(viewer);
const completion = new Completion(viewer);
const race = new Race();
const now = new Now({ heard, lost });

function select(name) {
  for (const panel of PANELS) {
    const tab = $(`tab-${panel}`);
    tab.setAttribute("aria-selected", String(panel === name));
    tab.tabIndex = panel === name ? 0 : -1;
    $(panel).hidden = panel !== name;
  }
  $("models").hidden = !["samples", "completion"].includes(name);
  // not an id: the browser would scroll there; instead of the entry of the viewer, if that led here
  if (named() !== name)
    history[history.state ? "replaceState" : "pushState"](null, "", `#/${name}`);
  if (!latest) return;
  if (name === "samples") samples.arrive(location.hash.split("?")[1] ?? "");
  if (name === "completion") completion.arrive();
  if (name === "race") race.open(latest.comparison);
  if (name === "inside") openInside();
}

/** It is asked for when the tab is first opened. */
async function openInside() {
  try {
    await (inside ??= import("./inside.js").then(({ open }) => open()));
  } catch (problem) {
    inside = null;
    notice.show(problem);
  }
}

const named = () =>
  PANELS.find((panel) => location.hash.split("?")[0] === `#/${panel}`) ?? "samples";

const tabs = document.querySelector("[role=tablist]");
tabs.onclick = ({ target }) => {
  if (target.matches("[role=tab]")) select(target.getAttribute("aria-controls"));
};
tabs.onkeydown = (event) => {
  const at = PANELS.indexOf(named());
  const to = { ArrowLeft: at - 1, ArrowRight: at + 1, Home: 0, End: PANELS.length - 1 }[event.key];
  if (to === undefined) return;
  event.preventDefault();
  const panel = PANELS[(to + PANELS.length) % PANELS.length];
  select(panel);
  $(`tab-${panel}`).focus();
};
addEventListener("hashchange", () => select(named()));
addEventListener("popstate", ({ state }) => viewer.travel(state));

$("models").onchange = ({ target }) => {
  loaded.choose(target.value);
  loaded.decided = true;
  if (!$("completion").hidden && !completion.board.example) completion.settled();
};

for (const output of all("output[data-of]")) {
  const range = output.closest("form").elements[output.dataset.of];
  range.oninput = () => {
    output.textContent = range.valueAsNumber.toFixed(2);
  };
}

/** A file that was dropped, pasted or chosen: a picture by this page brings its settings back, any other is completed. */
document.addEventListener("file", async ({ detail: file }) => {
  const settings = latest && (await settingsIn(file).catch(() => null));
  if (settings && !settings.picture && $("completion").hidden) {
    select("samples");
    samples.task.attempt(() => samples.again(settings, "picture"));
  } else {
    select("completion");
    completion.task.attempt(() =>
      settings?.picture
        ? completion.again(settings)
        : completion.upload.load(file, { fresh: true }),
    );
  }
});

async function heard(status) {
  const same = latest && served(latest) === served(status);
  if (same) {
    latest = status;
    return;
  }
  const before = loaded.chosen;
  loaded.set((await patiently("v1/models")).data, status.limits); // the server came back, or has other models
  latest = status;
  notice.clear();
  document.dispatchEvent(new Event("back"));
  race.limit(status.limits.compare_budget);
  select(named());
  if (before && !loaded.cards.some(({ id }) => id === before.id)) {
    const gone = new Problem(
      `${before.id} is no longer served. ${titleOf(loaded.chosen)} is chosen now.`,
    );
    for (const { task } of [samples, completion]) task.notice.show(gone);
  }
  document.documentElement.dataset.ready = "";
  performance.mark("ready");
}

function lost(problem) {
  if (problem.code === "unreachable")
    problem = new Problem(
      "The server does not answer. This page continues when it is back. If it is yours, start it: linpix serve.",
    );
  if (latest || notice.box.hidden) notice.show(problem); // only once: screen readers read it aloud
  latest = null;
}

// One dialog, however many requests were refused. A request refused with an older key is sent with the newer one.
let asking = null;
onKey.ask = (tried) => {
  if (key.get() !== tried) return Promise.resolve();
  asking ??= new Promise((resolve) => {
    const dialog = $("key");
    $("key-why").textContent = tried
      ? "The server does not know that key. Enter another one."
      : "Enter one of its API keys. It stays in this tab until you close it.";
    dialog.oncancel = (event) => event.preventDefault();
    dialog.onclose = () => {
      key.set($("key-value").value.trim());
      $("key-value").value = "";
      asking = null;
      resolve();
    };
    dialog.showModal();
  });
  return asking;
};

history.replaceState(null, ""); // a reload closes the viewer
history.scrollRestoration = "manual"; // closing it must not scroll
select(named());
now.poll();
$("needs").remove();
