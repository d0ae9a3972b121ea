// A word, letter after letter by the models that draw these, all from one seed: one picture, and a link that draws it.
import { blobOf, canvasOf, decode, json, Problem } from "./service.js";
import { $, copied, el, models, saveAs, Task, thingOf } from "./parts.js";
import { PATH } from "./samples.js";

const LONGEST = 12; // characters
const GAP = 3; // pixels between letters, and around the word
const SPACE = 8; // pixels of a space
const FAINT = 32; // a value that differs less from the ground is not ink
const [SAVED, SHOWN] = [8, 6]; // how many times as large it is saved, and at most shown
const KINDS = ["letter", "digit"];

/** The model that draws a character: the chosen one, or one that recognises what it has drawn. Throws a Problem. */
function modelOf(character) {
  const able = models.cards.filter(
    (card) => KINDS.includes(thingOf(card)) && card.classes.includes(character),
  );
  const card =
    able.find((one) => one === models.chosen) ?? able.find((one) => one.conditional) ?? able[0];
  if (!card) throw new Problem(`No loaded model draws ${character}. Choose another word.`);
  return card;
}

/** A letter without the empty columns beside it, as a canvas. */
function trimmed(image, ground) {
  const { data, width, height } = image;
  const inked = (column) => {
    for (let row = 0; row < height; row++)
      if (Math.abs(data[4 * (row * width + column)] - ground) > FAINT) return true;
    return false;
  };
  const columns = [...Array(width).keys()].filter(inked);
  const [left, right] = [columns[0] ?? 0, columns.at(-1) ?? width - 1];
  const canvas = canvasOf(right - left + 1, height);
  canvas.getContext("2d").putImageData(image, -left, 0);
  return canvas;
}

class Word {
  /** closed(): called when the dialog is left. */
  constructor(closed) {
    const button = (text, click) => el("button", { type: "button", disabled: true, click }, text);
    this.save = button("Save", () => this.download());
    this.send = button("Copy link", () => this.copy());
    this.canvas = el("canvas", { role: "img", hidden: true });
    this.dialog = el(
      "dialog",
      { id: "word", "aria-labelledby": "word-title" },
      el(
        "button",
        { class: "close", "aria-label": "Close", click: () => this.dialog.close() },
        "✕",
      ),
      el("h2", { id: "word-title" }, "Write a word"),
      el(
        "form",
        {},
        el(
          "label",
          {},
          `Word, of up to ${LONGEST} letters and digits`,
          el("input", {
            name: "word",
            maxlength: LONGEST,
            required: true,
            autocomplete: "off",
            spellcheck: "false",
          }),
        ),
        el(
          "label",
          {},
          "Seed of each letter",
          el("input", {
            name: "seed",
            inputmode: "numeric",
            pattern: "[0-9]{1,15}",
            placeholder: "new",
            autocomplete: "off",
          }),
        ),
        el(
          "div",
          { class: "buttons" },
          el("button", { type: "submit", class: "primary" }, "Write"),
          el("button", { type: "button", "data-stop": true, disabled: true }, "Stop"),
          this.save,
          this.send,
        ),
      ),
      el("div", { class: "notice", role: "alert", hidden: true }),
      el("p", { class: "status", role: "status" }),
      this.canvas,
    );
    document.body.append(this.dialog);
    this.task = new Task(this.dialog);
    this.task.form.onsubmit = () => this.write();
    this.dialog.onclose = () => {
      this.task.stop();
      closed();
    };
    addEventListener("popstate", () => this.dialog.close());
  }

  /** Show the dialog. word, seed: those of a link, to be drawn at once. */
  open({ word = "", seed = "" }) {
    const { form } = this.task;
    if (!this.dialog.open) this.dialog.showModal();
    if (!word) return form.elements.word.focus();
    this.task.starter.focus(); // a field would open a phone's keyboard
    form.elements.word.value = word.slice(0, LONGEST);
    form.elements.seed.value = seed;
    form.requestSubmit();
  }

  write() {
    const { task } = this;
    const { word, seed } = task.form.elements;
    const characters = [...word.value.trim()];
    const from = seed.value === "" ? Math.floor(Math.random() * 2 ** 32) : Number(seed.value);
    const letters = [];
    this.fields = { word: characters.join(""), seed: from };
    this.save.disabled = this.send.disabled = true;
    const draw = (character, at) => async (signal) => {
      task.say(`Drawing ${at + 1} of ${characters.length}.`);
      if (character === " ") letters.push(canvasOf(SPACE, 1));
      else {
        const { id, board } = modelOf(character);
        const body = { model: id, label: character, seed: from, n: 1 };
        const { data } = await json(PATH, { body, signal });
        letters.push(trimmed(await decode(data[0].b64_json), board.ground?.[0] ?? 0));
      }
      this.paint(letters);
    };
    task.start(
      () => characters.filter((one) => one !== " ").forEach(modelOf), // a word is drawn whole, or not at all
      ...characters.map(draw),
      () => {
        task.say(`${this.fields.word}, each letter from seed ${from}.`);
        this.save.disabled = this.send.disabled = false;
      },
    );
  }

  /** Show the letters drawn so far, one beside the other. */
  paint(letters) {
    const { canvas } = this;
    canvas.hidden = false;
    canvas.width = letters.reduce((sum, letter) => sum + letter.width + GAP, GAP);
    canvas.height = Math.max(...letters.map((letter) => letter.height)) + 2 * GAP;
    const context = canvas.getContext("2d");
    const [ground] = models.cards.find((card) => thingOf(card) === "letter")?.board.ground ?? [0];
    context.fillStyle = `rgb(${ground} ${ground} ${ground})`;
    context.fillRect(0, 0, canvas.width, canvas.height);
    let left = GAP;
    for (const letter of letters) {
      if (letter.height > 1) context.drawImage(letter, left, GAP);
      left += letter.width + GAP;
    }
    const room = Math.floor(this.task.form.clientWidth / canvas.width);
    canvas.style.width = `${canvas.width * Math.max(1, Math.min(SHOWN, room))}px`;
    canvas.setAttribute("aria-label", `The word ${this.fields.word}, as it is drawn so far`);
  }

  async download() {
    const { canvas, fields } = this;
    const large = canvasOf(canvas.width * SAVED, canvas.height * SAVED);
    const context = large.getContext("2d");
    context.imageSmoothingEnabled = false;
    context.drawImage(canvas, 0, 0, large.width, large.height);
    saveAs(`linpix-${fields.word}-${fields.seed}.png`, await blobOf(large));
  }

  async copy() {
    const address = `${location.href.split("#")[0]}#/samples?${new URLSearchParams(this.fields)}`;
    const how = (await copied(address)) ? "The link is copied." : `Copy this link: ${address} .`;
    this.task.say(`${how} It writes this word again.`);
  }
}

let dialog = null;

/** Ask for a word, or write that of a link. */
export function write(fields, closed) {
  dialog ??= new Word(closed);
  dialog.open(fields);
}
