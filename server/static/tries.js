// Pictures to try on the board while nothing is on it. They are drawn here, and then loaded as a visitor's own are.
import { blobOf, canvasOf } from "./service.js";
import { el, models, shapeOf, thingOf, titleOf } from "./parts.js";

const digits = (card) => thingOf(card) === "digit";
const letters = (card) => thingOf(card) === "letter";

/** A name, how many pixels wide and high it is, which models can take it, and what draws it. */
const TRIES = [
  ["Half a 4", 28, digits, halfOfA4],
  [
    "A photographed 7",
    240,
    digits,
    (context) => photograph(context, "M64 74Q120 58 176 68Q128 128 108 196"),
  ],
  [
    "A letter",
    240,
    letters,
    (context) =>
      photograph(context, "M84 60V186M84 62Q168 52 160 96Q152 126 86 122Q124 132 170 186"),
  ],
  ["A boat", 96, (card) => card.channels === 3, boat],
  ["A sticker", 16, (card) => card.palette?.[0]?.endsWith("00"), sticker],
];

/** A line along a path, in the style of SVG. */
function line(context, path, width, colour) {
  Object.assign(context, {
    strokeStyle: colour,
    lineWidth: width,
    lineCap: "round",
    lineJoin: "round",
  });
  context.stroke(new Path2D(path));
}

function filled(context, path, colour) {
  context.fillStyle = colour;
  context.fill(new Path2D(path));
}

/** The lower half is transparent: it is to be drawn. */
function halfOfA4(context) {
  context.fillRect(0, 0, 28, 28);
  line(context, "M9 5L7 14H20M18 5L17 24", 2.6, "#fff");
  context.clearRect(0, 14, 28, 14);
}

/** Ink on paper that is not lit evenly, a little aslant. */
function photograph(context, path) {
  const light = context.createRadialGradient(80, 60, 20, 130, 130, 240);
  light.addColorStop(0, "#f4ecd8");
  light.addColorStop(1, "#a79a80");
  filled(context, "M0 0H240V240H0Z", light);
  context.rotate(0.06);
  line(context, path, 13, "#27304f");
}

function boat(context) {
  const sky = context.createLinearGradient(0, 0, 0, 64);
  sky.addColorStop(0, "#5f9fd8");
  sky.addColorStop(1, "#dcebf5");
  filled(context, "M0 0H96V64H0Z", sky);
  filled(context, "M0 62H96V96H0Z", "#1f5280");
  filled(context, "M46 8V56H18Z", "#fbfaf4");
  filled(context, "M51 18V56H74Z", "#e6dcc4");
  filled(context, "M12 60H86L74 74H24Z", "#9c3320");
}

/** A face, of whole pixels, on nothing. */
function sticker(context) {
  filled(context, "M3 2H13V6H3Z", "#28150a");
  filled(context, "M3 4H12V6H14V8H13V11H12V12H4V11H3V8H2V6H3Z", "#ffdfb4");
  filled(context, "M4 5H7V7H4ZM9 5H12V7H9Z", "#fff");
  filled(context, "M4 6H5V7H4ZM9 6H10V7H9Z", "#697b94");
  filled(context, "M6 9H10V10H6Z", "#de0f0d");
  filled(context, "M3 13H13V14H14V16H2V14H3Z", "#03396c");
  filled(context, "M7 12H9V13H10V14H9V15H7V14H6V13H7Z", "#ffdbac");
}

/** Offer those that a loaded model can take; best one that uses all known pixels. */
export function offer(box) {
  const { chosen, cards } = models;
  const ordered = [chosen, ...cards.filter(({ conditional }) => conditional), ...cards];
  const pictures = TRIES.flatMap(([name, side, suits, draw]) => {
    const card = ordered.find(suits);
    return card ? [picture(name, side, card, draw)] : [];
  });
  box.replaceChildren(el("span", { "aria-hidden": "true" }, "Try"), ...pictures);
}

/** A button with a picture, which a press loads. card: of a model that can take it. */
function picture(name, side, card, draw) {
  const canvas = canvasOf(side, side);
  draw(canvas.getContext("2d"));
  const load = async () => {
    const decided = models.decided && shapeOf(models.chosen) === shapeOf(card);
    if (!decided && models.chosen !== card) models.choose(card.id);
    const file = new File([await blobOf(canvas)], name, { type: "image/png" });
    document.dispatchEvent(new CustomEvent("file", { detail: file }));
    document.getElementById("editor").focus({ preventScroll: true }); // this button goes away
  };
  const title = `${name}, for ${titleOf(card)}`;
  return el("button", { type: "button", title, "aria-label": title, click: load }, canvas);
}
