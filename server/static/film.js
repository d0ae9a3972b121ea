// The drawing of an image, row by row, as an animated GIF. The service draws the image again, with the same seed.
import { call, formOf } from "./service.js";
import { saveAs } from "./parts.js";

/** Save the drawing of a record's image. */
export async function film({ about: { fields, path, picture }, seed }) {
  const again = { ...fields, n: 1, seed };
  const body = picture ? formOf({ image: picture, ...again }) : again;
  const response = await call(path, { body, accept: "image/gif" });
  saveAs(`linpix-${seed}.gif`, await response.blob());
}
