/** The server that the page came from: who the model is, how it does, and answers as they are made. */

/** What the server, or the way to it, said instead of an answer. status: 0 if nobody answered. */
export class Refused extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

const KEY = "cheetah.key";

export class Server {
  #key = "";

  constructor() {
    try {
      this.#key = window.sessionStorage.getItem(KEY) ?? "";
    } catch {} // the key is then kept as long as the page
  }

  set key(key) {
    this.#key = key;
    try {
      window.sessionStorage.setItem(KEY, key);
    } catch {}
  }

  /** {id, max_model_len, ...} of the model that is served. Refused(401) where a key is wanted. */
  async model() {
    const { data } = await (await this.#ask("v1/models")).json();
    return data[0];
  }

  async version() {
    return (await (await this.#ask("version")).json()).version;
  }

  /** What the server counts: name -> [{labels, value}]. */
  async metrics() {
    const found = new Map();
    for (const line of (await (await this.#ask("metrics")).text()).split("\n")) {
      const [, name, labels, value] = /^([\w:]+)(?:\{(.*)\})? (\S+)$/.exec(line) ?? [];
      if (!name) continue;
      const pairs = [...(labels ?? "").matchAll(/(\w+)="((?:[^"\\]|\\.)*)"/g)].map(([, label, text]) => [label, text]);
      found.set(name, [...(found.get(name) ?? []), { labels: Object.fromEntries(pairs), value: Number(value) }]);
    }
    return found;
  }

  /** The chunks of an answer, until the server says that it is whole. Refused if it says anything else. */
  async *chat(body, signal) {
    const given = { ...body, stream: true, stream_options: { include_usage: true, continuous_usage_stats: true } };
    const response = await this.#ask("v1/chat/completions", {
      method: "POST",
      headers: { "content-type": "application/json" },
      body: JSON.stringify(given),
      signal,
    });
    for await (const data of events(response, signal)) {
      if (data === "[DONE]") return;
      const record = JSON.parse(data);
      if (record.error) throw new Refused(500, record.error.message);
      yield record;
    }
    throw new Refused(0, "The server ended before the answer did.");
  }

  async #ask(path, { headers = {}, ...options } = {}) {
    const key = this.#key ? { authorization: `Bearer ${this.#key}` } : {};
    const response = await reached(fetch(path, { ...options, cache: "no-store", headers: { ...headers, ...key } }));
    if (response.ok) return response;
    const told = await response.json().catch(() => undefined);
    throw new Refused(
      response.status,
      told?.error?.message ?? `The server answered ${response.status} ${response.statusText}.`,
    );
  }
}

/** What a promise of the network gives; Refused if nobody is there. */
async function reached(promise) {
  try {
    return await promise;
  } catch (problem) {
    if (problem.name === "AbortError") throw problem;
    throw new Refused(0, "The server does not answer. Is it still running?");
  }
}

/** The data of server-sent events. */
async function* events(response) {
  const decoder = new TextDecoder(),
    reader = response.body.getReader();
  let held = "";
  for (;;) {
    const { done, value } = await reached(reader.read());
    if (done) return;
    held += decoder.decode(value, { stream: true });
    const lines = held.split(/\r?\n/);
    held = lines.pop();
    for (const line of lines) if (line.startsWith("data:")) yield line.slice(5).trim();
  }
}
