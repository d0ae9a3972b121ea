// Completion: a picture that is drawn or loaded, its holes filled in several ways at once.
import {call, decode, json, key, Problem} from "./service.js";
import {$, counted, duration, fieldsOf, models, Task, whole} from "./parts.js";
import {Board, GUIDE, pngOf} from "./editor.js";
import {Gallery} from "./gallery.js";
import {PATH as SAMPLES, receive} from "./samples.js";

const PATH = "v1/images/edits";
const TINTS = {  // what black and white become
  steered: [[12, 44, 82], [158, 212, 255]],
  between: [[58, 28, 92], [216, 184, 255]],
  unused: [[92, 52, 0], [255, 206, 120]],
};

function formOf(fields) {
  const form = new FormData();
  for (const [name, value] of Object.entries(fields)) form.set(name, value);
  return form;
}

export class Completion {
  constructor(viewer) {
    this.panel = $("completion");
    this.form = $("completion-form");
    this.board = new Board($("editor"));
    this.gallery = new Gallery(this.panel, {paint: (record) => this.paint(record), open: (record, records) => viewer.open(record, records)});
    this.task = new Task(this.form, this.panel.querySelector(".notice"), this.panel.querySelector(".status"));
    this.form.addEventListener("submit", () => this.complete());
    this.form.elements.n.addEventListener("input", () => this.invite());
    document.addEventListener("model", ({detail: card}) => this.take(card));
    this.board.changed = () => {
      $("editor-hint").hidden = this.board.touched;
      this.panel.querySelector("[data-do=undo]").disabled = !this.board.past.length;
    };
    for (const button of this.panel.querySelectorAll("[data-tool]")) {
      button.addEventListener("click", () => this.use(button.dataset.tool));
    }
    const doing = {load: () => $("file").click(), sample: () => this.sample(), clear: () => this.clear()};
    for (const button of this.panel.querySelectorAll("[data-do]")) {
      const name = button.dataset.do;
      button.addEventListener("click", doing[name] ?? (() => this.board[name]()));
    }
    $("brush").addEventListener("input", () => { this.board.brush = $("brush").valueAsNumber; });
    $("colour").addEventListener("input", () => this.ink());
    $("prepare").addEventListener("change", () => this.board.source && this.load(this.board.source, $("prepare").checked));
    $("mark").addEventListener("change", () => this.gallery.records.forEach((record) => this.gallery.repaint(record)));
    this.receivePictures();
  }

  get open() {
    return !this.panel.hidden;
  }

  take(card) {
    const {board, task} = this;
    $("colour").parentElement.hidden = card.channels === 1;
    const thing = card.classes.join("") === "0123456789" ? "digit" : "picture";
    for (const word of this.panel.querySelectorAll("[data-thing]")) word.textContent = thing;
    const {source} = board;
    if (board.take(card)) {
      if (task.status.textContent === this.said) task.say("");  // of a picture that is on another board
      const free = board.source || !board.touched;  // no drawing that is somebody's own
      this.frame(null);
      if (!free || board.source === this.loading) this.loading = null;  // what is still read was for another board
      if (source && board.source !== source && free && !this.loading) this.load(source);
    }
    this.ink();
    this.invite();
  }

  ink() {
    const [r, g, b] = $("colour").value.match(/\w\w/g).map((digits) => parseInt(digits, 16));
    this.board.colour = [r, g, b];
  }

  invite() {
    const n = Math.min(models.limits.max_n, Math.max(1, this.form.elements.n.valueAsNumber || 1));
    if (models.chosen) this.gallery.invite(n, models.chosen);
  }

  use(tool) {
    this.board.tool = tool;
    for (const button of this.panel.querySelectorAll("[data-tool]")) {
      button.setAttribute("aria-pressed", String(button.dataset.tool === tool));
    }
  }

  // --- pictures from elsewhere ---

  receivePictures() {
    const easel = this.panel.querySelector(".easel");
    $("file").addEventListener("change", () => {
      const [file] = $("file").files;
      $("file").value = "";
      if (file) this.load(file);
    });
    document.addEventListener("paste", (event) => {
      const [file] = event.clipboardData?.files ?? [];
      if (this.open && file) this.load(file);
    });
    for (const name of ["dragover", "drop"]) {
      document.addEventListener(name, (event) => {
        if (!this.open || !event.dataTransfer?.types.includes("Files")) return;
        event.preventDefault();  // else the browser would leave the page for the picture
        easel.classList.toggle("over", name === "dragover");
        if (name === "drop" && event.dataTransfer.files[0]) this.load(event.dataTransfer.files[0]);
      });
    }
    document.addEventListener("dragleave", (event) => event.relatedTarget || easel.classList.remove("over"));
  }

  clear() {
    this.loading = null;
    this.frame(null);
    this.board.clear();
  }

  /** Put a picture on the board; it is kept, to be put on that of another model too. */
  async load(blob, prepare) {
    const {board, task} = this;
    this.loading = blob;
    task.notice.clear();
    let bitmap;
    try {
      bitmap = await createImageBitmap(blob);
    } catch {
      if (this.loading === blob) this.loading = null;
      task.notice.show(new Problem(`${blob.name || "That"} is not a picture that this browser can read. Choose a PNG, JPEG or WebP.`));
      return;
    }
    if (this.loading === blob) {  // else another picture was chosen meanwhile
      this.loading = null;
      board.source = blob;
      const what = blob.name ? `${blob.name} is loaded` : "The picture is loaded";
      board.load(bitmap);
      this.frame(bitmap, board.cropped);
      const can = board.shape === "28,28,1";
      $("preparing").hidden = !can;
      if ($("prepare").checked = can && (prepare ?? (board.inverted && bitmap.width > 28))) {
        await this.prepare(blob, bitmap, what, prepare);
      } else this.settle(what);
    }
    bitmap.close();
  }

  /** The server finds the digit; the board gets what the model is to see of it. */
  prepare(blob, bitmap, what, asked) {
    return this.task.start(async (signal) => {
      const {board} = this;
      let answer;
      try {
        answer = await json(PATH, {body: formOf({image: blob, model: models.chosen.id, prepare: "mnist",
          ...(!board.holes && {keep_rows: 28})}), signal});
      } catch (problem) {
        if (asked || problem.status !== 400) throw problem;
        $("prepare").checked = false;  // it only looked like a digit
        this.settle(what);
        return;
      }
      const {prepared, crop} = answer;
      if (board.source !== blob) return;
      board.load(await createImageBitmap(await decode(prepared.b64_json)));
      this.frame(bitmap, crop);
      this.settle(`${what} and prepared`);
    });
  }

  /** A loaded picture, and in it what the model sees: left, top, right, bottom. */
  frame(picture, crop) {
    $("upload").hidden = !picture;
    if (!picture) return;
    const canvas = $("upload-canvas");
    const scale = 270 / Math.max(picture.width, picture.height);
    canvas.width = picture.width * scale;
    canvas.height = picture.height * scale;
    const context = canvas.getContext("2d");
    context.drawImage(picture, 0, 0, canvas.width, canvas.height);
    const [left, top, right, bottom] = crop.map((side) => side * scale);
    context.strokeStyle = GUIDE;
    context.lineWidth = 8;
    context.strokeRect(left, top, right - left, bottom - top);
  }

  /** A picture without holes gets one, so that there is something to complete. */
  settle(what) {
    const {board, task} = this;
    const said = [`${what}, cropped to ${board.width} × ${board.height}.`];
    if (board.inverted) {
      board.invert();
      said.push("It was dark on light, so it is inverted.");
    }
    if (!board.holes) {
      board.half();
      said.push("Its lower half will be filled in; press Keep all to rub out by hand.");
    }
    this.said = said.join(" ");
    task.say(this.said);
  }

  /** Put an image of ours on the board. */
  async adopt(base64, what) {
    this.loading = this.board.source = null;
    this.frame(null);
    this.board.load(await createImageBitmap(await decode(base64)));
    this.settle(what);
  }

  sample() {
    return this.task.start(async (signal) => {
      this.task.say("Drawing a sample.");
      const fields = fieldsOf(this.form);
      const {shape} = this.board;
      const answer = await json(SAMPLES, {body: {...fields, n: 1}, signal});
      if (this.board.shape !== shape) throw new Problem("Another model was chosen meanwhile. Take a sample again.");
      await this.adopt(answer.data[0].b64_json, `A sample of seed ${answer.data[0].seed}`);
    });
  }

  // --- completing ---

  async complete() {
    const {task, board, gallery} = this;
    await task.start(async (signal) => {
      if (!board.holes) throw new Problem("Every pixel is known. Rub something out, or press Lower half.");
      const [fields, card] = [fieldsOf(this.form), models.chosen];
      const picture = board.image();
      const sent = await pngOf(picture);
      const body = formOf({image: sent, ...fields, stream: true});
      task.say(`Completing in ${counted(fields.n, "way")}.`);
      const response = await call(PATH, {body, accept: "text/event-stream", signal});
      const began = performance.now();
      this.remember(picture);
      gallery.begin(fields.n, card, {fields, path: PATH, keyed: Boolean(key.get()), picture: sent});
      for (const record of gallery.records) gallery.repaint(record);
      const answer = await receive(gallery, response, signal);
      if (answer.conditioning === "full") {  // a conditional model reads all that is known before it draws
        this.given.kinds = this.given.kinds.map((kind) => kind && "steered");
        for (const record of gallery.records) gallery.repaint(record);
      }
      this.tell(answer, card.channels);
      task.say(`${counted(fields.n, "completion")} in ${duration((performance.now() - began) / 1000)}. Click one to enlarge it.`);
    });
  }

  /** What of the picture steers what: everything before the first hole, nothing after the last one. */
  remember(picture) {
    const known = Array.from({length: picture.width * picture.height}, (_, pixel) => picture.data[4 * pixel + 3] > 0);
    const [first, last] = [known.indexOf(false), known.lastIndexOf(false)];
    this.given = {picture, kinds: known.map((is, pixel) => !is ? null : pixel < first ? "steered" : pixel > last ? "unused" : "between")};
  }

  paint({image, shown = 0}) {
    const {picture, kinds} = this.given;
    const painted = new ImageData(picture.width, picture.height);
    const reached = shown * picture.width;
    const marked = $("mark").checked;
    kinds.forEach((kind, pixel) => {
      const source = kind ? picture : image;
      if (!kind && pixel >= reached) return;
      const [dark, light] = (marked && TINTS[kind]) || [[0, 0, 0], [255, 255, 255]];
      for (let channel = 0; channel < 3; channel++) {
        const value = source.data[4 * pixel + channel] / 255;
        painted.data[4 * pixel + channel] = dark[channel] + value * (light[channel] - dark[channel]);
      }
      painted.data[4 * pixel + 3] = 255;
    });
    return painted;
  }

  /** How many known pixels steered what, as the answer counts them. */
  tell({known, known_before_first_hole: before, known_after_last_hole: unused, conditioning}, channels) {
    const [all, steered, late] = [known, before, unused].map((count) => count / channels);
    const between = all - steered - late;
    const parts = [`${counted(all, "pixel")} of ${whole(this.given.kinds.length)} known.`];
    if (!all) parts[0] = "Nothing was known: the model drew it all.";
    else if (conditioning !== "partial") parts.push("All steered everything that was drawn.");
    else {
      parts.push(`${whole(steered)} steered everything.`);
      if (between) parts.push(`${whole(between)} steered only what follows them.`);
      if (late) parts.push(`${whole(late)} came after the last hole and ${late === 1 ? "was" : "were"} not used.`);
    }
    $("known").textContent = parts.join(" ");
  }
}
