// Inside: a picture drawn again token by token, with all that one head remembers of it. What is shown comes from three
// arrays that are asked for once; playing, scrubbing and pointing ask nothing of the server.
import { bytesOf, call, decode, formOf, json, Problem } from "./service.js";
import { $, el, figure, models, size, Task, thingOf, whole, write } from "./parts.js";
import { pngOf } from "./editor.js";
import { EDITS } from "./upload.js";

const PATH = "v1/images/inside";
const NPY = "application/x-npy";
const FIRST = { label: "4", seed: 6, layer: 1, head: 1 }; // a clear 4, and a head that looks along its strokes
const FILM_S = 16; // seconds of a whole picture
const STILL = 0.6; // share of a picture that is shown where nothing may move
const LOOKED = [255, 122, 24];
const BELOW = [72, 160, 240]; // a number of the state below 0,
const NONE = [17, 20, 26]; // one that is 0,
const ABOVE = [255, 150, 50]; // and one above
const KEPT = [122, 90, 46]; // a key and value that softmax keeps, of a dark
const INKED = [255, 226, 178]; // and of a light pixel
const TINT = 0.85; // of the pixel that was looked at most
const WIDE = 336; // screen pixels of a picture, at most
const AMID = " It lies amid background: a small network drew it, and it looked nowhere.";
const BEFORE = 8; // steps shown before the first one that goes through the layers
const COLOURS = ["red", "green", "blue"];
const STEPS = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] };

function chanceOf(share) {
  if (share > 0.999) return "more than 99.9 %";
  return share < 0.001 ? "less than 0.1 %" : `${figure(100 * share)} %`;
}

/** How unsure a distribution is: its entropy, in bits. */
const entropyOf = (chances) =>
  chances.reduce((sum, chance) => sum - chance * Math.log2(chance || 1), 0);

/** The number of these 16 bits of a float16. */
function half(bits) {
  const sign = bits & 0x8000 ? -1 : 1;
  const [exponent, fraction] = [(bits >> 10) & 31, (bits & 1023) / 1024];
  if (exponent === 31) return fraction ? NaN : sign * Infinity;
  return exponent ? sign * (1 + fraction) * 2 ** (exponent - 15) : sign * fraction * 2 ** -14;
}

/** An array that numpy.save wrote as little-endian float16; its rows are read when they are needed. */
class Rows {
  constructor(buffer) {
    const long = new DataView(buffer).getUint16(8, true);
    const header = new TextDecoder().decode(new Uint8Array(buffer, 10, long));
    if (!header.includes("'<f2'") || !header.includes("'fortran_order': False"))
      throw new Problem("The server sent an array of a form that this page does not know.");
    this.shape = /\(([\d, ]+)\)/.exec(header)[1].split(",").filter(Boolean).map(Number);
    this.halves = new Uint16Array(buffer, 10 + long);
    this.long = this.shape.slice(1).reduce((product, length) => product * length, 1);
  }

  row(at) {
    return Float32Array.from(this.halves.subarray(at * this.long, (at + 1) * this.long), half);
  }

  get largest() {
    let largest = 0;
    for (const bits of this.halves) largest = Math.max(largest, bits & 0x7fff); // ordered as their numbers are
    return half(largest);
  }
}

let views = 0; // made so far

/** One picture as one head of a model read it. A step adds a token: a sub-pixel, or a whole pixel. */
class View {
  /** facts: the JSON of the service · the others: its arrays, as Rows. */
  constructor(card, facts, { states, attention, distributions }) {
    Object.assign(this, { id: ++views, card, facts, states, attention, distributions });
    this.steps = facts.token + 1; // it was asked for the last one
    const { picture } = facts;
    this.height = picture.length;
    this.width = picture[0].length;
    this.channels = picture[0][0].length;
    this.values = picture.flat(2);
    this.bits = facts.bits.flat(2);
    this.stepsOfPixel = this.steps / (this.width * this.height);
    this.largest = states.largest;
    this.placesOf(facts.tokens);
  }

  /** Where each step's token is among those that go through the layers, and how many of these there are by then. */
  placesOf(tokens) {
    this.places = new Int32Array(this.steps).fill(-1);
    tokens.forEach(({ kind, at }, place) => {
      if (kind === "drawn") this.places[at] = place;
    });
    let read = tokens.filter(({ kind }) => kind !== "drawn").length;
    this.read = this.places.map((place) => (place < 0 ? read : (read = place + 1)));
    this.opening = Math.max(0, this.places.findIndex((place) => place >= 0) - BEFORE);
  }

  /** Pixels that are drawn once this step is done. */
  pixelsAfter(step) {
    return Math.floor((step + 1) / this.stepsOfPixel);
  }

  pixelOf(step) {
    return Math.floor(step / this.stepsOfPixel);
  }

  /** The step that draws a channel of a pixel. */
  stepOf(pixel, channel) {
    return pixel * this.stepsOfPixel + (this.stepsOfPixel > 1 ? channel : 0);
  }

  /** Numbers that linear attention keeps, the state, and those that softmax keeps for a token: its key and its value. */
  get numbers() {
    const { key_dim: keys, value_dim: values } = this.facts;
    return { state: keys * (values + 1), line: keys + values };
  }

  /** Multiplications of a step by linear attention: k times v, q times S, and q times z. */
  get linearWork() {
    const { key_dim: keys, value_dim: values } = this.facts;
    return 2 * keys * values + keys;
  }

  get numberBytes() {
    return this.card.state === "fp16" ? 2 : 4;
  }

  /** The colours that values stand for, as #rrggbb; none if they are levels of grey, red, green or blue. */
  get palette() {
    return (this.card.palette ?? []).map((colour) => colour.slice(0, 7)); // without its opacity
  }

  /** How many values a sub-pixel can have. */
  get choices() {
    return this.palette.length || 256;
  }

  /** Red, green and blue of a pixel. */
  colourOf(pixel) {
    return this.shown(this.values.slice(pixel * this.channels, (pixel + 1) * this.channels));
  }

  /** Red, green and blue of a pixel with these values. */
  shown(values) {
    const colour = this.palette[values[0]]?.match(/\w\w/g).map((digits) => parseInt(digits, 16));
    return colour ?? COLOURS.map((_, at) => values[at % values.length]);
  }

  /** The pixel of which the model was least sure, of those drawn so far that looked at any. chosen: sub-pixels to leave out. */
  leastSure(step, channel, chosen) {
    const unsure = this.bits.slice(0, (this.pixelOf(step) + 1) * this.channels).map((bits, at) => {
      const own = bits != null && at % this.channels === channel && !chosen.includes(at);
      const looked = this.places[this.stepOf(Math.floor(at / this.channels), channel)] >= 0;
      return own && looked ? entropyOf(this.distributions.row(at)) : -1;
    });
    return Math.floor(unsure.indexOf(Math.max(...unsure)) / this.channels);
  }

  /** From 0, black, to 1, white. */
  lightOf(pixel) {
    return this.colourOf(pixel).reduce((sum, value) => sum + value / 3 / 255, 0);
  }

  /** How bright a number of the state is shown. Most are much smaller than the largest, so by its square root. */
  strengthOf(number) {
    return Math.sqrt(Math.abs(number) / this.largest);
  }

  /** How much a step looked at each pixel: 1 for the one that it looked at most; null if it looked nowhere. */
  looksOf(step) {
    const place = this.places[step];
    if (place < 0) return null;
    const weights = this.attention.row(place);
    const looks = new Float32Array(this.width * this.height);
    for (let earlier = 0; earlier <= step; earlier++)
      if (this.places[earlier] >= 0) looks[this.pixelOf(earlier)] += weights[this.places[earlier]];
    const most = Math.max(...looks);
    return looks.map((look) => look / most);
  }

  /** The numbers that the head remembers after a step: key by key, each a row of S and one number of z. */
  stateAfter(step) {
    const read = this.read[step];
    return read ? this.states.row(read - 1) : new Float32Array(this.states.long);
  }

  /** What the model had expected of a sub-pixel, in words. of: which of its colours, if several · taken: drawn or chosen. */
  toldOf(at, of, taken) {
    const [value, bits] = [this.values[at], this.bits[at]];
    if (bits == null) return `Its${of} value, ${value}, was given.`;
    const chances = this.distributions.row(at);
    const likeliest = chances.indexOf(Math.max(...chances));
    const also =
      likeliest === value
        ? "It was the likeliest."
        : `The likeliest was ${likeliest}, with ${chanceOf(chances[likeliest])}.`;
    const surprise = bits < 0.01 ? "less than 0.01" : figure(bits);
    return `The value ${taken},${of} ${value}, had a chance of ${chanceOf(2 ** -bits)}: ${surprise} bits of surprise (each halves the chance). ${also}`;
  }

  /** The picture up to a pixel, with another value in it; what comes after is transparent. */
  changed(pixel, channel, value) {
    const image = new ImageData(this.width, this.height);
    for (let at = 0; at <= pixel; at++) image.data.set([...this.colourOf(at), 255], 4 * at);
    const values = this.values.slice(pixel * this.channels, (pixel + 1) * this.channels);
    values[channel] = value;
    image.data.set(this.shown(values), 4 * pixel);
    return image;
  }
}

/** The tab, whose part of the page comes with this script. */
export async function open() {
  const panel = $("inside");
  panel.innerHTML = await (await call("static/inside.html")).text();
  const style = panel.querySelector("link");
  await new Promise((done) => {
    style.onload = style.onerror = done;
  });
  return new Inside();
}

class Inside {
  constructor() {
    this.panel = $("inside");
    this.form = this.panel.querySelector("form");
    this.task = new Task(this.panel);
    this.picture = $("inside-picture");
    this.slider = $("inside-step");
    this.value = $("inside-value");
    this.again = this.panel.querySelector("[data-first]");
    this.still = matchMedia("(prefers-reduced-motion: reduce)");
    const { model, label, layer, head, channel } = this.form.elements;
    this.form.onsubmit = () => this.draw(Math.floor(Math.random() * 2 ** 32));
    model.onchange = () => this.take(model.value);
    label.onchange = () => this.draw(this.seed);
    layer.onchange = head.onchange = () => this.turn();
    channel.onchange = () => this.show();
    this.again.onclick = () => this.draw(this.drawn);
    $("inside-most").onclick = () =>
      this.view && this.pin(this.view.leastSure(this.step, this.channel, this.chosen));
    $("inside-play").onclick = () => {
      this.pinned = null;
      this.playing ? this.pause() : this.play();
    };
    this.slider.oninput = () => {
      this.pause();
      this.pinned = null;
      this.follow(this.slider.valueAsNumber);
    };
    this.listen();
    document.addEventListener("model", () => this.list());
    this.list();
  }

  /** Listen to what points at a pixel, and to what chooses a value. */
  listen() {
    const { picture, value } = this;
    const histogram = $("inside-histogram");
    const expected = histogram.parentElement;
    expected.onpointerenter = () => this.pause(); // its pixel stays under the hand
    expected.addEventListener("focusin", () => this.pause());
    picture.onpointermove = (event) => this.point(this.pixelAt(event));
    picture.onpointerleave = () => this.point(null);
    picture.onclick = (event) => this.pin(this.pixelAt(event));
    picture.onkeydown = (event) => this.key(event);
    value.oninput = () => this.showHistogram();
    $("inside-on").onclick = () => this.drawOn(value.valueAsNumber);
    histogram.onpointermove = (event) => this.showHistogram(this.valueAt(event));
    histogram.onpointerleave = () => this.showHistogram();
    histogram.onclick = (event) => this.drawOn(this.valueAt(event));
  }

  /** The models that can be looked into. The first to be shown has the simplest tokens and the smallest state. */
  list() {
    const able = models.cards.filter(({ attention }) => attention === "linear");
    const { model } = this.form.elements;
    const [simplest] = [...able].sort(
      (one, other) => one.conditional - other.conditional || one.state_bytes - other.state_bytes,
    );
    const before = able.some(({ id }) => id === model.value) ? model.value : simplest?.id;
    model.replaceChildren(
      ...able.map(({ id }) => el("option", { value: id, selected: id === before }, id)),
    );
    this.panel.querySelector(".inside").hidden = this.task.starter.disabled = !able.length;
    if (model.value !== this.card?.id) this.take(model.value);
    if (!able.length)
      this.task.notice.show(
        new Problem("No loaded model has linear attention: load one, such as mnist-small."),
      );
  }

  /** Take another model, and draw its first picture. */
  take(id) {
    this.card = models.cards.find((card) => card.id === id);
    if (!this.card) return;
    const { label, channel } = this.form.elements;
    const { classes, channels } = this.card;
    label.replaceChildren(
      ...[["", "any"], ...classes.map((name) => [name, name])].map(([value, name]) =>
        el("option", { value, selected: value === FIRST.label }, name),
      ),
    );
    label.parentElement.hidden = !classes.length;
    channel.parentElement.hidden = channels === 1;
    this.fields = null;
    this.draw(FIRST.seed);
  }

  // --- what is asked of the service ---

  /** Draw the picture of a seed, and look into it from its first step. */
  draw(seed) {
    this.pause();
    this.seed = seed;
    this.making = () => this.draw(seed);
    this.task.status.scrollIntoView({ block: "nearest" }); // with the picture below it
    return this.task.start(async (signal) => {
      const { id } = this.card;
      const label = this.form.elements.label.value || null;
      this.task.say("Drawing a picture, and looking into the model.");
      await this.look({ model: id, label, seed }, signal);
      Object.assign(this, { drawn: seed, chosen: [], pinned: null });
      if (document.activeElement === this.again) this.task.starter.focus();
      this.again.disabled = true;
      const what = label ? `class ${label}` : `a ${thingOf(this.card)}`;
      const words = `${id} draws ${what} from seed ${seed}, each pixel given those before it.`;
      this.begin(this.view.opening, words);
    });
  }

  /** Look into the chosen head, at the same step. */
  turn() {
    const { fields, step, playing } = this;
    if (this.task.running) return this.making(); // of the picture that is on its way
    if (!fields) return;
    this.pause();
    this.making = () => this.turn();
    this.task.start(async (signal) => {
      this.task.say("Looking into another head.");
      await this.look(fields, signal);
      this.follow(step);
      this.task.say("The same picture, in another head.");
      if (playing) this.play();
    });
  }

  /** Keep the picture up to the pixel that is shown, with another value in it, and draw on with the same seed. */
  drawOn(value) {
    const { view, pixel, channel } = this;
    if (!view || !this.fields) return;
    this.pause();
    this.pin(pixel);
    this.making = () => this.drawOn(value);
    this.task.status.scrollIntoView({ block: "nearest" });
    this.task.start(async (signal) => {
      this.task.say("Drawing on from there.");
      const { model, label } = this.fields;
      const image = await pngOf(view.changed(pixel, channel, value));
      const body = formOf({ image, model, label, seed: this.drawn, n: 1 });
      const { data } = await json(EDITS, { body, signal });
      const drawn = new Blob([bytesOf(data[0].b64_json)], { type: "image/png" });
      await this.look({ model, label, image: drawn }, signal);
      const at = pixel * view.channels + channel;
      this.chosen = [...this.chosen.filter((before) => before < at), at];
      this.again.disabled = false;
      const words = `Pixel ${whole(pixel + 1)} is ${value} now. All before it is kept; all after it is drawn anew, with the same seed.`;
      this.begin(view.stepOf(pixel, view.channels - 1), words);
    });
  }

  /** Ask what a head did with a picture. fields: which picture. */
  async look(fields, signal) {
    const { card } = this;
    const known = this.fields === fields ? this.view : null; // then only the head is another
    const facts = known?.facts ?? (await json(PATH, { body: formOf(fields), signal }));
    if (!known) this.offer(facts);
    const { layer, head } = this.form.elements;
    const array = async (name) => {
      const body = formOf({ ...fields, layer: layer.value, head: head.value, array: name });
      return new Rows(await (await call(PATH, { body, accept: NPY, signal })).arrayBuffer());
    };
    // one after the other: together they may need more memory than the server gives to a visitor
    const states = await array("states");
    const attention = await array("attention");
    const distributions = known?.distributions ?? (await array("distributions"));
    signal.throwIfAborted();
    this.fields = fields;
    this.view = new View(card, facts, { states, attention, distributions });
  }

  /** Let one of a model's layers and heads be chosen. */
  offer({ layers, heads }) {
    for (const [name, count] of Object.entries({ layer: layers, head: heads })) {
      const select = this.form.elements[name];
      const before = select.options.length ? select.selectedIndex : FIRST[name];
      const chosen = Math.min(before, count - 1);
      const options = Array.from({ length: count }, (_, at) =>
        el("option", { value: at, selected: at === chosen }, `${at + 1} of ${count}`),
      );
      select.replaceChildren(...options);
    }
  }

  // --- time ---

  /** Show a picture that has just come from this step on; where nothing may move, at a step that says something. */
  begin(step, words) {
    const { view, picture } = this;
    this.hovered = null;
    this.slider.max = view.steps - 1;
    this.value.max = view.choices - 1;
    Object.assign(picture, { width: view.width, height: view.height });
    picture.style.width = `${view.width * Math.max(1, Math.floor(WIDE / view.width))}px`;
    this.task.say(words);
    const telling = this.pinned != null ? view.steps - 1 : Math.round(STILL * view.steps);
    this.follow(this.still.matches ? telling : step);
    if (!this.still.matches) this.play();
  }

  play() {
    const { view } = this;
    if (!view) return;
    this.pause();
    this.playing = true;
    if (this.step === view.steps - 1) this.step = view.opening;
    const [from, began] = [this.step, performance.now()];
    const frame = (now) => {
      const seconds = Math.max(0, now - began) / 1000;
      const step = Math.min(view.steps - 1, from + Math.floor((seconds / FILM_S) * view.steps));
      if (this.panel.hidden || step === view.steps - 1) this.pause();
      else this.next = requestAnimationFrame(frame);
      if (step !== this.step) this.follow(step);
    };
    this.next = requestAnimationFrame(frame);
    this.button();
  }

  pause() {
    cancelAnimationFrame(this.next);
    this.playing = false;
    this.button();
  }

  button() {
    write($("inside-play"), this.playing ? "Pause" : "Play");
    $("inside-words").setAttribute("aria-live", this.playing ? "off" : "polite");
  }

  /** Go to a step. */
  follow(step) {
    this.step = step;
    this.slider.value = step;
    const words = `Step ${whole(step + 1)} of ${whole(this.view.steps)}`;
    this.slider.setAttribute("aria-valuetext", words);
    write($("inside-step-words"), words);
    this.show();
  }

  // --- the pixel that is looked at ---

  /** The pixel that is pointed at, else the one that was clicked, else the newest. */
  get pixel() {
    const newest = this.view.pixelOf(this.step);
    return Math.min(this.hovered ?? this.pinned ?? newest, newest);
  }

  get channel() {
    return this.view.channels > 1 ? Number(this.form.elements.channel.value) : 0;
  }

  /** The step that drew it. */
  get looked() {
    return Math.min(this.view.stepOf(this.pixel, this.channel), this.step);
  }

  valueAt({ offsetX, target }) {
    const at = Math.floor((this.view?.choices * offsetX) / target.clientWidth);
    return Math.min(this.value.max, Math.max(0, at));
  }

  pixelAt({ offsetX, offsetY }) {
    const { view, picture } = this;
    if (!view) return null;
    const column = Math.floor((offsetX * view.width) / picture.clientWidth);
    const row = Math.floor((offsetY * view.height) / picture.clientHeight);
    const inside = Math.min(column, row) >= 0 && column < view.width && row < view.height;
    const pixel = row * view.width + column;
    return inside && pixel <= view.pixelOf(this.step) ? pixel : null;
  }

  point(pixel) {
    if (!this.view || this.hovered === pixel) return;
    this.hovered = pixel;
    this.show();
  }

  /** Stay at a pixel; at the newest one if there is none. */
  pin(pixel) {
    if (!this.view) return;
    this.pause();
    this.pinned = pixel;
    this.show();
  }

  key(event) {
    const step = STEPS[event.key];
    if (!this.view || (!step && event.key !== "Escape")) return;
    event.preventDefault();
    this.hovered = null;
    if (!step) return this.pin(null);
    const { width, height } = this.view;
    const column = (this.pixel % width) + step[0];
    const row = Math.floor(this.pixel / width) + step[1];
    const pixel = row * width + column;
    const there = Math.min(column, row) >= 0 && column < width && row < height;
    this.pin(there && pixel <= this.view.pixelOf(this.step) ? pixel : this.pixel);
  }

  // --- what is shown ---

  show() {
    if (!this.view) return;
    this.showPicture();
    this.showState();
    this.showKept();
    this.showFigures();
    this.showPixel();
  }

  /** What is drawn so far, tinted where the pixel that is looked at looked. */
  showPicture() {
    const { view, picture, pixel } = this;
    const looks = view.looksOf(this.looked);
    const image = new ImageData(view.width, view.height);
    for (let at = 0; at < view.pixelsAfter(this.step); at++) {
      const look = looks ? TINT * looks[at] : 0;
      image.data.set([...mixed(view.colourOf(at), LOOKED, look), 255], 4 * at);
    }
    picture.getContext("2d").putImageData(image, 0, 0);
    const { style } = $("inside-at");
    style.width = `${100 / view.width}%`;
    style.left = `${(100 / view.width) * (pixel % view.width)}%`;
    style.top = `${(100 / view.height) * Math.floor(pixel / view.width)}%`;
  }

  /** S and, a little apart, z: brighter is further from 0. */
  showState() {
    const { view } = this;
    const { key_dim: keys, value_dim: values } = view.facts;
    const state = view.stateAfter(this.step);
    const image = new ImageData(values + 2, keys);
    for (let at = 0; at < state.length; at++) {
      const [key, value] = [Math.floor(at / (values + 1)), at % (values + 1)];
      const colour = mixed(NONE, state[at] < 0 ? BELOW : ABOVE, view.strengthOf(state[at]));
      const column = value === values ? value + 1 : value;
      image.data.set([...colour, 255], 4 * (key * image.width + column));
    }
    paint($("inside-state"), image);
  }

  /** A line for each token that softmax would keep, as light as its pixel; and how much linear attention keeps. */
  showKept() {
    const { view } = this;
    const { tokens } = view.facts;
    const image = new ImageData(1, tokens.length);
    for (let place = 0; place < view.read[this.step]; place++) {
      const { kind, at } = tokens[place];
      const light = kind === "drawn" ? view.lightOf(view.pixelOf(at)) : 0;
      image.data.set([...mixed(KEPT, INKED, light), 255], 4 * place);
    }
    paint($("inside-kept"), image);
    const { state, line } = view.numbers;
    $("inside-mark").style.height = `${(100 * state) / (line * tokens.length)}%`;
  }

  /** Bytes, and multiplications of this step, of both kinds of attention. */
  showFigures() {
    const { view } = this;
    const { key_dim: keys, value_dim: values } = view.facts;
    const { state, line } = view.numbers;
    const read = view.read[this.step];
    const of = `${whole(this.step + 1)} ${view.stepsOfPixel > 1 ? "steps" : "pixels"}`;
    const skips = view.places.includes(-1) ? ": those amid background skip the layers" : "";
    const texts = {
      "inside-state-size": size(state * view.numberBytes),
      "inside-state-numbers": `${keys} × ${values + 1} numbers, at every step`,
      "inside-state-work": whole(view.linearWork),
      "inside-heads": `${view.facts.layers * view.facts.heads}`,
      "inside-kept-size": size(line * read * view.numberBytes),
      "inside-kept-numbers": `${whole(read)} × ${line} numbers (k and v)`,
      "inside-kept-work": whole(line * read),
      "inside-kept-lines": `${whole(read)} lines for ${of}${skips}.`,
      "inside-work-most": whole(line * view.facts.tokens.length),
      "inside-work-same": whole(view.linearWork),
      "inside-work-less": whole(Math.floor(view.linearWork / line)),
    };
    for (const [id, text] of Object.entries(texts)) write($(id), text);
    this.showWork();
  }

  /** Multiplications at each step of the whole picture; those after this one are paler. */
  showWork() {
    const { view } = this;
    const { canvas, context, colour } = drawing("inside-work");
    const most = view.numbers.line * view.facts.tokens.length;
    const wide = canvas.width / view.steps;
    const line = (name, workOf) => {
      context.strokeStyle = colour(name);
      context.lineWidth = 5;
      context.beginPath();
      view.read.forEach((read, step) => {
        const height = (canvas.height - 6) * (workOf(read) / most);
        context.lineTo(step * wide, canvas.height - 3 - height);
      });
      context.stroke();
    };
    line("--rival", (read) => view.numbers.line * read);
    line("--accent", () => view.linearWork);
    context.globalAlpha = 0.7;
    context.fillRect((this.step + 1) * wide, 0, canvas.width, canvas.height);
    context.globalAlpha = 1;
  }

  /** What the model expected of the pixel that is looked at, and how surprised it was. */
  showPixel() {
    const { view, pixel, channel } = this;
    const at = pixel * view.channels + channel;
    const last = view.choices - 1;
    if (this.offered !== `${view.id} ${at}`)
      this.value.value = view.values[at] <= last / 2 ? last : 0;
    this.offered = `${view.id} ${at}`;
    const [row, column] = [Math.floor(pixel / view.width), pixel % view.width];
    const of = view.channels > 1 ? ` ${COLOURS[channel]}` : "";
    write($("inside-pixel"), `Pixel ${whole(pixel + 1)}: row ${row + 1}, column ${column + 1}`);
    const taken = this.chosen.includes(at) ? "chosen" : "drawn";
    write(
      $("inside-words"),
      `${view.toldOf(at, of, taken)}${view.places[this.looked] < 0 ? AMID : ""}`,
    );
    this.showHistogram();
  }

  /** other: the value that is pointed at, else that of the slider. */
  showHistogram(other = this.value.valueAsNumber) {
    const { view, value, pixel, channel } = this;
    if (!view) return;
    const at = pixel * view.channels + channel;
    const chances = view.distributions.row(at).subarray(0, view.choices);
    const { canvas, context, colour } = drawing("inside-histogram");
    const [wide, tall] = [canvas.width / view.choices, canvas.height];
    context.strokeStyle = colour("--edge");
    const bar = (which, name) => {
      const height = Math.cbrt(chances[which]) * tall;
      context.fillStyle = view.palette[which] ?? colour(name);
      context.fillRect(which * wide, tall - height, wide, height);
      if (view.palette.length) context.strokeRect(which * wide, tall - height, wide, height);
    };
    const mark = (which, name) => {
      context.globalAlpha = 0.4;
      context.fillStyle = colour(name);
      context.fillRect(which * wide, 0, wide, tall);
      context.globalAlpha = 1;
      bar(which, name);
    };
    chances.forEach((_, which) => bar(which, "--edge"));
    mark(other, "--warn");
    mark(view.values[at], "--accent");
    write($("inside-range"), `Red: ${other}, a chance of ${chanceOf(chances[other])}`);
    write($("inside-on"), `Draw on with ${value.value}`);
  }
}

const paint = (canvas, image) => {
  Object.assign(canvas, { width: image.width, height: image.height });
  canvas.getContext("2d").putImageData(image, 0, 0);
};

/** A canvas, its context on an empty ground, and the page's colours by name. */
function drawing(id) {
  const canvas = $(id);
  const colours = getComputedStyle(canvas);
  const colour = (name) => colours.getPropertyValue(name);
  const context = canvas.getContext("2d");
  context.fillStyle = colour("--panel");
  context.fillRect(0, 0, canvas.width, canvas.height);
  return { canvas, context, colour };
}

/** A colour between two. share: of the second. */
const mixed = (one, other, share) => one.map((value, at) => value + (other[at] - value) * share);
