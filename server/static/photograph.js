// A photograph, and a finished picture laid back over the part of it that the model saw.

const LARGEST = 1024;  // pixels a side, as in the API's lay_back
const NOTICEABLE = 12;  // smaller differences of a value leave the photograph as it is
const BLANK = 20;  // in a prepared picture, less ink than this counts as none
const STEEP = 3;  // strokes get edges up to this many times as sharp as in an enlarged picture

export class Photograph {
  /**
   * bitmap: of any size · crop: left, top, right, bottom of what the board shows of it · board: as it was loaded.
   * prepared: the board has amounts of ink, and the bitmap the tones of ink and paper; else the board has the bitmap's
   * colours, or (negative) their negative.
   */
  constructor(bitmap, crop, {ink, known, width, height}, {prepared, negative}) {
    const scale = Math.min(1, LARGEST / Math.max(bitmap.width, bitmap.height));
    this.canvas = new OffscreenCanvas(Math.round(bitmap.width * scale), Math.round(bitmap.height * scale));
    this.canvas.getContext("2d").drawImage(bitmap, 0, 0, this.canvas.width, this.canvas.height);
    Object.assign(this, {ink: ink.slice(), known: known.slice(), width, height, prepared, negative, crop: crop.map((side) => side * scale)});
  }

  /** The photograph as a canvas, with image drawn where it was erased or differs from the loaded picture. image, kept: of the board's size. */
  lay(image, kept) {
    const {width, height, ink, known, canvas, negative} = this;
    const [left, top, right, bottom] = this.crop;
    const side = (right - left) / width;  // of a board pixel, in pixels of the photograph
    const laid = new OffscreenCanvas(canvas.width, canvas.height);
    const context = laid.getContext("2d");
    context.drawImage(canvas, 0, 0);
    const all = context.getImageData(0, 0, canvas.width, canvas.height);
    const tones = this.prepared && this.tones();
    const around = neighbours(width, height);
    let differs = Array.from(known, (is, pixel) => !is || !kept[pixel] || [0, 1, 2].some(
      (channel) => Math.abs(image.data[4 * pixel + channel] - ink[3 * pixel + channel]) > NOTICEABLE));
    for (let round = 0; round < 2; round++) {  // grow over the blur around strokes: seams are then outside it
      differs = around.map((near, pixel) => differs[pixel] || near.some((one) => differs[one]));
    }
    const layer = new Float32Array(width * height * 5);  // red, green, blue, ink over them, whether it is drawn
    for (let pixel = 0; pixel < width * height; pixel++) {
      const value = image.data.subarray(4 * pixel, 4 * pixel + 3);
      const under = tones ? tones.paper.subarray(3 * pixel, 3 * pixel + 3) : value.map((one) => negative ? 255 - one : one);
      layer.set([...under, tones ? value[0] / 255 : 0, differs[pixel]], 5 * pixel);
    }
    const steep = Math.min(STEEP, Math.max(1, side));
    const found = new Float32Array(5);
    for (let y = Math.max(0, Math.floor(top)); y < Math.min(laid.height, bottom); y++) {
      for (let x = Math.max(0, Math.floor(left)); x < Math.min(laid.width, right); x++) {
        between(layer, width, height, (x + .5 - left) / side - .5, (y + .5 - top) / side - .5, found);
        if (!found[4]) continue;
        const share = Math.min(1, Math.max(0, (found[3] - .5) * steep + .5));
        const at = 4 * (y * laid.width + x);
        const kept = (1 - found[4]) * all.data[at + 3] / 255;
        for (let channel = 0; channel < 3; channel++) {
          const drawn = tones ? found[channel] + (tones.ink[channel] - found[channel]) * share : found[channel];
          all.data[at + channel] = drawn + (all.data[at + channel] - drawn) * kept;
        }
        all.data[at + 3] = Math.max(all.data[at + 3], 255 * found[4]);
      }
    }
    context.putImageData(all, 0, 0);
    return laid;
  }

  /** The colour of the ink, and of the paper in each pixel of the board; beneath ink, it is that of pixels around. */
  tones() {
    const {width, height, ink: amount, crop: [left, top, right, bottom]} = this;
    const context = new OffscreenCanvas(width, height).getContext("2d");
    context.imageSmoothingQuality = "high";
    context.drawImage(this.canvas, left, top, right - left, bottom - top, 0, 0, width, height);
    const {data} = context.getImageData(0, 0, width, height);
    const around = neighbours(width, height);
    const blank = around.map((near, pixel) => data[4 * pixel + 3] > 250 && [pixel, ...near].every((one) => amount[3 * one] < BLANK));
    const mean = (weigh) => [0, 1, 2].map((channel) => {
      let [sum, total] = [0, 1e-9];
      for (let pixel = 0; pixel < blank.length; pixel++) {
        const weight = weigh(pixel) * data[4 * pixel + 3];
        sum += weight * data[4 * pixel + channel];
        total += weight;
      }
      return sum / total;
    });
    const usual = mean((pixel) => Number(blank[pixel]));
    const paper = Float32Array.from(blank.flatMap((is, pixel) => is ? [...data.subarray(4 * pixel, 4 * pixel + 3)] : usual));
    for (let round = 0; round < 2 * width; round++) {
      for (let at = 0; at < paper.length; at++) {
        const pixel = Math.floor(at / 3);
        const near = around[pixel];
        if (!blank[pixel]) paper[at] = near.reduce((sum, one) => sum + paper[3 * one + at % 3], 0) / near.length;
      }
    }
    return {paper, ink: mean((pixel) => (amount[3 * pixel] / 255) ** 4)};
  }
}

/** For each pixel, the indices of the eight around it, or of fewer at the edge. */
function neighbours(width, height) {
  return Array.from({length: width * height}, (_, pixel) => {
    const [x, y] = [pixel % width, Math.floor(pixel / width)];
    return [[0, -1], [-1, 0], [1, 0], [0, 1], [-1, -1], [1, -1], [-1, 1], [1, 1]].map(([dx, dy]) => [x + dx, y + dy])
      .filter(([u, v]) => u >= 0 && v >= 0 && u < width && v < height).map(([u, v]) => v * width + u);
  });
}

/** Interpolate a layer's five values between the centres of its pixels, into found. */
function between(layer, width, height, x, y, found) {
  const [u, v] = [Math.min(width - 1, Math.max(0, x)), Math.min(height - 1, Math.max(0, y))];
  const [x0, y0] = [Math.floor(u), Math.floor(v)];
  const [x1, y1] = [Math.min(width - 1, x0 + 1), Math.min(height - 1, y0 + 1)];
  const [across, down] = [u - x0, v - y0];
  const along = (row, one) => layer[5 * (row * width + x0) + one] * (1 - across) + layer[5 * (row * width + x1) + one] * across;
  for (let one = 0; one < 5; one++) found[one] = along(y0, one) * (1 - down) + along(y1, one) * down;
}
