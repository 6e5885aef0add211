/**
 * Talks and where they are kept: in this browser, each under a key of its own.
 *
 * A talk is a tree of messages. What was edited or made again stands beside what was there before, under the same
 * message; the talk that is shown goes from the root to `tip`.
 */

const PREFIX = "cheetah.talk.",
  SETTINGS = "cheetah.settings";

export class Talk {
  constructor({ id = newId(), title = "", changed = Date.now(), settings = {}, messages = [], tip = null } = {}) {
    Object.assign(this, { id, title, changed, settings, messages, tip });
  }

  /** The messages that are shown, first to last; up to that of `id`, if one is given. */
  path(id = this.tip) {
    const found = [];
    for (let at = this.find(id); at; at = this.find(at.parent)) found.unshift(at);
    return found;
  }

  find(id) {
    return this.messages.find((message) => message.id === id);
  }

  /** All messages that answer, or ask, at the same place, itself included. */
  versions(message) {
    return this.messages.filter((other) => other.parent === message.parent);
  }

  /** A new message below that of id `parent`, which is shown from now on. */
  add(parent, record) {
    const message = { id: newId(), parent, ...record };
    this.messages.push(message);
    this.tip = message.id;
    return message;
  }

  /** Takes away a message that nothing was said behind. */
  remove(message) {
    this.messages = this.messages.filter((other) => other !== message);
    if (this.tip === message.id) this.tip = message.parent;
  }

  /** Shows `message`, and what was said behind it last. */
  turnTo(message) {
    let last = message;
    for (let next = message; next; next = this.messages.findLast((other) => other.parent === last.id)) last = next;
    this.tip = last.id;
  }

  get isEmpty() {
    return this.messages.length === 0;
  }
}

function newId() {
  return Array.from(crypto.getRandomValues(new Uint8Array(9)), (byte) => byte.toString(36).padStart(2, "0")).join("");
}

/** All talks of this browser. onChange(id): called when another tab changed or deleted one. */
export class Talks {
  #talks = new Map();
  #storage;

  constructor(onChange) {
    try {
      this.#storage = window.localStorage;
    } catch {
      this.#storage = undefined; // the browser keeps nothing for this page: talks live as long as it
    }
    for (let at = 0; at < (this.#storage?.length ?? 0); at++) this.#read(this.#storage.key(at));
    window.addEventListener("storage", ({ key }) => {
      if (key !== null && !key.startsWith(PREFIX)) return;
      if (key === null) this.#talks.clear();
      else this.#read(key);
      onChange(key?.slice(PREFIX.length));
    });
  }

  /** Last changed first. */
  all() {
    return [...this.#talks.values()].sort((one, other) => other.changed - one.changed);
  }

  get(id) {
    return this.#talks.get(id);
  }

  /** Keeps `talk`. False if the browser has no room: it is then kept only as long as the page. */
  save(talk) {
    this.#talks.set(talk.id, talk);
    return this.#write(PREFIX + talk.id, talk);
  }

  delete(id) {
    this.#talks.delete(id);
    this.#storage?.removeItem(PREFIX + id);
  }

  /** What new talks begin with: the settings that were chosen last. */
  get settings() {
    try {
      return JSON.parse(this.#storage?.getItem(SETTINGS)) ?? {};
    } catch {
      return {};
    }
  }

  set settings(settings) {
    this.#write(SETTINGS, settings);
  }

  #read(key) {
    if (!key?.startsWith(PREFIX)) return;
    const id = key.slice(PREFIX.length);
    try {
      const record = JSON.parse(this.#storage.getItem(key));
      if (record && Array.isArray(record.messages)) this.#talks.set(id, settled(new Talk({ ...record, id })));
      else this.#talks.delete(id);
    } catch {
      this.#talks.delete(id); // not ours, or cut off
    }
  }

  #write(key, record) {
    try {
      this.#storage?.setItem(key, JSON.stringify(record));
      return this.#storage !== undefined;
    } catch {
      return false;
    }
  }
}

/** A talk that was kept while an answer was being made: what there was of it is told as cut, an empty one goes. */
function settled(talk) {
  for (const message of talk.messages.filter(({ role, end }) => role === "assistant" && !end)) {
    if (isEmpty(message)) talk.remove(message);
    else message.end = "cut";
  }
  return talk;
}

/** Whether nothing at all was answered. */
export function isEmpty({ content, reasoning, calls }) {
  return !content && !reasoning && !calls;
}

/** The thoughts and the answer in a message, where the server leaves <think> in the text too. */
export function parts(message) {
  const text = message.content,
    told = message.reasoning ?? "";
  const [, inside, closed, behind] = /^\s*<think>([^]*?)(?:(<\/think>)([^]*))?$/.exec(text) ?? [];
  if (inside !== undefined)
    return { thoughts: told + inside.trim(), answer: (behind ?? "").trimStart(), isThinking: !closed };
  const opened = told ? -1 : text.search(/^<\/think>[ \t]*$/m); // the chat template has opened the thought
  if (opened >= 0)
    return { thoughts: text.slice(0, opened).trim(), answer: text.slice(opened + 8).trimStart(), isThinking: false };
  return { thoughts: told, answer: text, isThinking: told !== "" && text === "" };
}
