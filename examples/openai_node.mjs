// Draw an image, watch one being drawn, and complete half of one: the stock openai package (npm install openai).
import { createReadStream, writeFileSync } from "node:fs";
import OpenAI from "openai";

const client = new OpenAI({
  baseURL: process.env.OPENAI_BASE_URL ?? "http://127.0.0.1:8000/v1",
  apiKey: process.env.OPENAI_API_KEY ?? "none",
});
const save = (name, picture) => writeFileSync(name, Buffer.from(picture.b64_json, "base64"));
const common = { model: "mnist-conditional", size: "280x280" };

// a prompt that is the name of a class conditions the image
const drawn = await client.images.generate({ ...common, prompt: "7" });
save("drawn.png", drawn.data[0]);

// each event shows more rows than the one before, the last one the whole image; with one
// attempt no row is drawn again
let number = 0;
const streamed = { ...common, prompt: "3", stream: true, partial_images: 4, attempts: 1 };
for await (const event of await client.images.generate(streamed))
  save(`streamed-${number++}.png`, event);

// keep the upper half of the seven, and have the lower half drawn anew
const half = { image: createReadStream("drawn.png"), keep_rows: 14 };
const completed = await client.images.edit({ ...common, ...half, prompt: "7" });
save("completed.png", completed.data[0]);
