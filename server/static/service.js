// The service as the page sees it: requests with a key, errors as sentences, streams as events.

const STORED = "linpix-key";

/** What went wrong, in a sentence with a cure; retryAfter is in seconds, or null if waiting does not help. */
export class Problem extends Error {
  constructor(message, { status = 0, code = "", retryAfter = null } = {}) {
    super(message);
    Object.assign(this, { status, code, retryAfter });
  }

  /** Whether trying again can help: the network or the server failed, or had no room. */
  get passing() {
    return this.status
      ? [408, 429].includes(this.status) || this.status >= 500
      : Boolean(this.code);
  }
}

/** The key, which a reload of this tab remembers unless the browser denies storage. */
export const key = {
  value: "",
  get: () => key.value,
  set(value) {
    key.value = value;
    ifAllowed(() => sessionStorage.setItem(STORED, value));
  },
};
const ifAllowed = (work) => {
  try {
    return work();
  } catch {
    return null; // storage is denied, absent or full
  }
};
key.value = ifAllowed(() => sessionStorage.getItem(STORED)) ?? "";

/** Called when the service asks for a key; the page shows its dialog and resolves when there is another one to try. */
export const onKey = {
  ask: async () => {
    throw new Problem("This server asks for an API key.");
  },
};

export const sentence = (text) => {
  const trimmed = text.trim();
  return trimmed.charAt(0).toUpperCase() + trimmed.slice(1) + (/[.!?]$/.test(trimmed) ? "" : ".");
};

const GONE =
  "The server does not answer. Try again in a moment. If it is yours, start it: linpix serve.";

/** fetch, but throws a Problem unless it succeeds. body: an object for JSON, or FormData · patience: seconds. */
export async function call(path, { method, body, accept, signal, patience } = {}) {
  for (;;) {
    const headers = new Headers(accept ? { accept } : {});
    const sent = key.get();
    if (sent) headers.set("authorization", `Bearer ${sent}`);
    let payload = body;
    if (body && !(body instanceof FormData)) {
      headers.set("content-type", "application/json");
      payload = JSON.stringify(body);
    }
    let response;
    try {
      response = await fetch(path, {
        method: method ?? (body ? "POST" : "GET"),
        headers,
        body: payload,
        signal: patience ? AbortSignal.timeout(patience * 1000) : signal,
      });
    } catch (error) {
      if (signal?.aborted) throw error;
      throw new Problem(GONE, { code: "unreachable" });
    }
    if (response.ok) return response;
    const problem = await problemOf(response);
    if (response.status !== 401) throw problem;
    await onKey.ask(sent);
    signal?.throwIfAborted();
  }
}

export function formOf(fields) {
  const form = new FormData();
  for (const [name, value] of Object.entries(fields)) if (value != null) form.set(name, value);
  return form;
}

export const json = async (path, options) => (await call(path, options)).json();

/** As json, but again when a key's rate limit refuses. */
export async function patiently(path, options) {
  for (;;) {
    try {
      return await json(path, options);
    } catch (problem) {
      if (problem.status !== 429) throw problem;
      await pause(problem.retryAfter ?? 1);
    }
  }
}

export const pause = (seconds) => new Promise((resolve) => setTimeout(resolve, 1000 * seconds));

/** Settles as the promise does, or rejects when the signal is aborted. */
export function unless(signal, promise) {
  return Promise.race([
    promise,
    new Promise((_, reject) => signal.addEventListener("abort", () => reject(signal.reason))),
  ]);
}

async function problemOf(response) {
  const after = parseFloat(response.headers.get("retry-after"));
  const facts = {
    status: response.status,
    retryAfter: Number.isFinite(after) ? Math.max(after, 1) : null,
  };
  try {
    const { error } = await response.json();
    return new Problem(sentence(error.message), { ...facts, code: error.code });
  } catch {
    return new Problem(
      `The server answered ${response.status} without saying why. Its log has more.`,
      facts,
    );
  }
}

/** The events of a stream, as {event, data}. A stream that breaks, or an error event, throws a Problem. */
export async function* events(response, signal) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let text = "";
  try {
    for (;;) {
      let chunk;
      try {
        chunk = await reader.read();
      } catch (error) {
        if (signal?.aborted) throw error;
        throw new Problem(
          "The connection to the server broke off. Check that it still runs, then try again.",
          { code: "broken" },
        );
      }
      if (chunk.done) return;
      const blocks = (text + chunk.value).split(/\r?\n\r?\n/);
      text = blocks.pop();
      for (const block of blocks) {
        const fields = { event: "message", data: "" };
        for (const line of block.split(/\r?\n/)) {
          const [, name, value] = /^(\w+): ?(.*)$/.exec(line) ?? [];
          if (name) fields[name] = value;
        }
        if (!fields.data) continue; // a comment that keeps the connection alive
        const data = JSON.parse(fields.data);
        if (fields.event === "error")
          throw new Problem(sentence(data.error.message), { code: data.error.code });
        yield { event: fields.event, data };
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

/** The picture behind base64 PNG, as ImageData of its own size. */
export async function decode(base64) {
  const blob = new Blob([bytesOf(base64)], { type: "image/png" });
  const bitmap = await createImageBitmap(blob, {
    colorSpaceConversion: "none",
    premultiplyAlpha: "none",
  });
  const canvas = canvasOf(bitmap.width, bitmap.height);
  const context = canvas.getContext("2d", { willReadFrequently: true });
  context.drawImage(bitmap, 0, 0);
  bitmap.close();
  return context.getImageData(0, 0, canvas.width, canvas.height);
}

export const canvasOf = (width, height) =>
  Object.assign(document.createElement("canvas"), { width, height });

/** A canvas as a file: a PNG, unless how says a type and a quality. */
export const blobOf = (canvas, ...how) => new Promise((resolve) => canvas.toBlob(resolve, ...how));

export const bytesOf = (base64) => Uint8Array.from(atob(base64), (letter) => letter.charCodeAt(0));
