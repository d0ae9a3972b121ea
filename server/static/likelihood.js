// How likely? The model's surprise at a picture, as a map, and the class that it takes it for.
import { formOf, json } from "./service.js";
import { $, el, figure, percent, whole } from "./parts.js";
import { pngOf } from "./editor.js";

const LIKELIHOODS = "v1/images/likelihoods";
const BLIND = 8; // bits of a guess among 256 equally probable values
const SURPRISE = [255, 122, 24];
const GIVEN = [
  [12, 44, 82],
  [158, 212, 255],
]; // what black and white become where a pixel was given

/** A map of the model's surprise at a picture, pixel by pixel, and the class that it guesses. */
export class Likelihood {
  constructor() {
    $("overlay").onchange = () => this.draw();
  }

  /**
   * picture: opaque, of the model's shape · known: whether each pixel is given; null: all of it is scored.
   * The class is guessed from the whole picture. Resolves once the answers are shown; rejects with a Problem.
   */
  async ask(picture, known, { model, label }, card, signal) {
    const image = await pngOf(picture);
    const ask = async (fields) =>
      json(LIKELIHOODS, { body: formOf({ image, model, ...fields }), signal });
    const given = label == null ? {} : { label };
    if (known) {
      const mask = new ImageData(picture.width, picture.height);
      known.forEach((is, pixel) => {
        mask.data[4 * pixel + 3] = is ? 255 : 0;
      });
      given.mask = await pngOf(mask);
    }
    const found = await ask({ ...given, ...(!known && card.classes.length && { labels: "all" }) });
    const guess = known && card.classes.length ? await ask({ labels: "all" }) : found;
    this.shown = {
      picture,
      known,
      bits: found.map
        .flat()
        .map(([...values]) =>
          values[0] == null ? null : values.reduce((sum, value) => sum + value, 0) / values.length,
        ),
    };
    this.draw();
    this.tell(found, guess.labels, card);
  }

  draw() {
    const { picture, bits } = this.shown;
    const image = new ImageData(picture.width, picture.height);
    const over = $("overlay").checked;
    bits.forEach((value, pixel) => {
      const strength = value == null ? 0 : Math.min(1, value / BLIND);
      for (let channel = 0; channel < 3; channel++) {
        const ink = picture.data[4 * pixel + channel];
        const [dark, light] =
          over && value == null ? GIVEN.map((colour) => colour[channel]) : [0, over ? 150 : 255];
        const shown = dark + (ink / 255) * (light - dark);
        image.data[4 * pixel + channel] = over
          ? shown + (SURPRISE[channel] - shown) * strength
          : shown;
      }
      image.data[4 * pixel + 3] = 255;
    });
    const canvas = $("likelihood-canvas");
    canvas.width = picture.width;
    canvas.height = picture.height;
    canvas.getContext("2d").putImageData(image, 0, 0);
  }

  tell({ bits_per_dim: mean, counted }, labels, card) {
    const { bits, known, picture } = this.shown;
    const most = bits.indexOf(Math.max(...bits.map((value) => value ?? -1)));
    const [column, row] = [(most % picture.width) + 1, Math.floor(most / picture.width) + 1];
    const what = !known
      ? "The whole picture"
      : card.conditional
        ? "What was erased, given the rest"
        : "What was erased, given the pixels before each";
    $("likelihood-words").textContent =
      `${what}: ${figure(mean)} bits for each of ${whole(counted)} values. ` +
      `The greatest surprise: ${figure(bits[most])} bits in column ${column}, row ${row}.`;
    $("likelihood-canvas").setAttribute(
      "aria-label",
      `The picture, brighter orange where ${card.id} was more surprised`,
    );
    $("given").hidden = !known;
    $("guess").hidden = !labels;
    if (!labels) return;
    $("guess-words").textContent =
      `${card.id} takes it for: ${labels[0].label} (${percent(labels[0].posterior).replace(" %", "\u00a0%")})`;
    $("guess-bars").replaceChildren(
      ...labels.slice(0, 3).map(({ label, posterior }) => {
        const bar = el("i");
        bar.style.width = `${100 * posterior}%`;
        return el(
          "li",
          {},
          el("span", {}, label),
          el("b", {}, bar),
          el("span", {}, percent(posterior)),
        );
      }),
    );
  }
}
