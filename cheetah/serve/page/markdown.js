/**
 * Markdown as DOM nodes: what models write of CommonMark and GitHub's tables, tasks and strikethrough.
 *
 * Nodes are made one by one and text stays text: HTML in a text is shown as it is written, links lead to http, https
 * and mailto alone, images are links. A line end is a line break. Hostile text costs time in proportion to its length.
 */
import { coloured } from "./code.js";
import { copyButton, element } from "./dom.js";
import { math } from "./math.js";

const DEEPEST = 12; // lists and quotes within each other; deeper ones are text
const LONGEST = 100_000; // characters of a paragraph; of a longer one nothing is read
const LINKS = new Set(["http:", "https:", "mailto:"]);

/** Holds a text that grows, and makes anew only the blocks that changed. */
export class Markdown {
  #sources = [];

  constructor(place) {
    this.place = place;
  }

  /** Shows `text`. Gives the number of blocks that will not change any more while it grows. */
  show(text) {
    const found = blocks(text.split(/\r\n?|\n/));
    for (let number = 0; number < found.length; number++) {
      if (this.#sources[number] === found[number].source) continue;
      const node = nodeOf(found[number]),
        old = this.place.children[number];
      if (old) old.replaceWith(node);
      else this.place.append(node);
    }
    while (this.place.childElementCount > found.length) this.place.lastChild.remove();
    this.#sources = found.map((block) => block.source);
    return Math.max(0, found.length - 1);
  }
}

// Blocks: each reader gives {kind, next, ...} for lines[at] and what belongs to it, or nothing.

const READERS = [fence, heading, rule, mathBlock, quote, list, table, paragraph];

function blocks(lines, depth = 0) {
  const found = [];
  for (let at = 0; at < lines.length;) {
    if (!lines[at].trim()) {
      at++;
      continue;
    }
    let block;
    for (const read of READERS) if ((block = read(lines, at, depth))) break;
    block.source = lines.slice(at, block.next).join("\n");
    found.push(block);
    at = block.next;
  }
  return found;
}

function fence(lines, at) {
  const opened = /^( {0,3})(`{3,}(?=[^`]*$)|~{3,})[ \t]*(\S*)/.exec(lines[at]);
  if (!opened) return;
  const [, indent, marks, language] = opened;
  const isEnd = (line) =>
    /^ {0,3}(`+|~+)\s*$/.test(line) && line.trim()[0] === marks[0] && line.trim().length >= marks.length;
  let next = at + 1;
  while (next < lines.length && !isEnd(lines[next])) next++;
  const text = lines
    .slice(at + 1, next)
    .map((line) => outdented(line, indent.length))
    .join("\n");
  return { kind: "code", language, text, isOpen: next === lines.length, next: Math.min(next + 1, lines.length) };
}

function heading(lines, at) {
  const [, marks, text] = /^ {0,3}(#{1,6})(?:[ \t]+(.*))?$/.exec(lines[at]) ?? [];
  return (
    marks && {
      kind: "heading",
      level: marks.length,
      text: (text ?? "").replace(/(^|[ \t])#+[ \t]*$/, ""),
      next: at + 1,
    }
  );
}

function rule(lines, at) {
  return isRule(lines[at]) && { kind: "rule", next: at + 1 };
}

const isRule = (line) => /^ {0,3}([-*_])[ \t]*(?:\1[ \t]*){2,}$/.test(line);

const MATH = { $$: "$$", "\\[": "\\]" };

function mathBlock(lines, at) {
  const first = lines[at].trim(),
    end = MATH[first.slice(0, 2)];
  if (!end) return;
  for (let next = at; next < Math.min(lines.length, at + 100) && lines[next].trim(); next++) {
    const line = next === at ? first.slice(2) : lines[next].trimEnd();
    if (!line.trimEnd().endsWith(end)) continue;
    const text = [first.slice(2), ...lines.slice(at + 1, next + 1)].join("\n").trimEnd().slice(0, -2);
    return { kind: "math", text, next: next + 1 };
  }
}

function quote(lines, at, depth) {
  const behind = (line) => /^ {0,3}> ?(.*)$/.exec(line)?.[1];
  if (depth >= DEEPEST || behind(lines[at]) === undefined) return;
  const inside = [];
  let next = at;
  for (; next < lines.length; next++) {
    const own = behind(lines[next]);
    if (own === undefined && (!lines[next].trim() || begins(lines[next]) || !inside.at(-1).trim())) break;
    inside.push(own ?? lines[next]);
  }
  return { kind: "quote", inside: blocks(inside, depth + 1), next };
}

function list(lines, at, depth) {
  const first = itemOf(lines[at]);
  if (depth >= DEEPEST || !first) return;
  const items = [];
  let next = at,
    isLoose = false,
    wasBlank = false;
  for (let item = first; item && item.mark === first.mark; item = next < lines.length && itemOf(lines[next])) {
    isLoose ||= wasBlank;
    const body = [item.text],
      least = Math.min(item.width, item.indent + 2);
    wasBlank = false;
    for (next++; next < lines.length; next++) {
      const line = lines[next],
        indent = indentOf(line),
        isBlank = !line.trim();
      if (!isBlank && indent < least && (wasBlank || begins(line) || itemOf(line))) break;
      isLoose ||= wasBlank && !isBlank;
      wasBlank = isBlank;
      body.push(outdented(line, item.width));
    }
    items.push(body);
  }
  const inside = items.map((body) => {
    const [, box, text] = /^\[([ xX])\] (.*)$/.exec(body[0]) ?? [];
    return { box, inside: blocks(box ? [text, ...body.slice(1)] : body, depth + 1) };
  });
  return { kind: "list", start: first.number, isLoose, items: inside, next };
}

/** A line that begins an item of a list. mark: what all items of the list have; width: where the item's text begins. */
function itemOf(line) {
  const [, blank, mark, number, gap, text] = /^([ \t]*)([-*+]|(\d{1,9})[.)])(?:([ \t]+)(.*))?$/.exec(line) ?? [];
  if (!mark || isRule(line)) return;
  const indent = indentOf(blank + "x"),
    space = gap && text && gap.length <= 4 ? gap.length : 1;
  return { indent, width: indent + mark.length + space, mark: number ? mark.at(-1) : mark, number, text: text ?? "" };
}

function table(lines, at) {
  if (!lines[at].includes("|") || !lines[at + 1]?.includes("|")) return;
  const head = cells(lines[at]),
    sides = cells(lines[at + 1]);
  if (head.length !== sides.length || !sides.every((mark) => /^:?-+:?$/.test(mark))) return;
  let next = at + 2;
  while (next < lines.length && lines[next].trim() && !begins(lines[next])) next++;
  const side = (mark) => (mark.endsWith(":") ? (mark.startsWith(":") ? "middle" : "right") : undefined);
  return { kind: "table", head, sides: sides.map(side), rows: lines.slice(at + 2, next).map(cells), next };
}

function cells(line) {
  const bare = line
    .trim()
    .replace(/^\|/, "")
    .replace(/(^|[^\\])\|$/, "$1");
  return bare.split(/(?<!\\)\|/).map((cell) => cell.trim().replaceAll("\\|", "|"));
}

function paragraph(lines, at) {
  let next = at + 1;
  while (next < lines.length && lines[next].trim() && !interrupts(lines, next)) next++;
  return {
    kind: "paragraph",
    text: lines
      .slice(at, next)
      .map((line) => line.trimStart())
      .join("\n")
      .trimEnd(),
    next,
  };
}

function interrupts(lines, at) {
  return begins(lines[at]) || mathBlock(lines, at) || table(lines, at);
}

/** Whether a line ends the paragraph before it. A number other than 1 does not: it may just stand there. */
function begins(line) {
  const item = itemOf(line);
  return (
    fence([line], 0) ||
    heading([line], 0) ||
    isRule(line) ||
    /^ {0,3}>/.test(line) ||
    (item?.text && (!item.number || item.number === "1" || item.indent > 0))
  );
}

function indentOf(line) {
  return /^[ \t]*/.exec(line)[0].replaceAll("\t", "    ").length;
}

/** A line without `columns` of its indent, or as many as there are. */
function outdented(line, columns) {
  const blank = /^[ \t]*/.exec(line)[0];
  return columns ? blank.replaceAll("\t", "    ").slice(columns) + line.slice(blank.length) : line;
}

// Nodes of blocks.

const MAKERS = {
  code: ({ language, text, isOpen }) => codeBlock(language, text, isOpen),
  heading: ({ level, text }) => element(`h${Math.min(level + 2, 6)}`, { class: `level-${level}` }, ...inline(text)),
  rule: () => element("hr"),
  math: ({ text }) =>
    element("div", { class: "math-block", tabindex: 0, role: "group", "aria-label": "formula" }, math(text, true)),
  quote: ({ inside }) => element("blockquote", {}, ...inside.map(nodeOf)),
  list: ({ start, isLoose, items }) =>
    element(
      start ? "ol" : "ul",
      { start: start && start !== "1" ? Number(start) : null },
      ...items.map((item) => itemNode(item, isLoose)),
    ),
  table: tableNode,
  paragraph: ({ text }) => element("p", {}, ...inline(text)),
};

function nodeOf(block) {
  return MAKERS[block.kind](block);
}

function itemNode({ box, inside }, isLoose) {
  const done = box && box !== " ";
  const tick =
    box && element("input", { type: "checkbox", disabled: true, checked: done, "aria-label": done ? "done" : "to do" });
  const bare = (block) => (block.kind === "paragraph" && !isLoose ? inline(block.text) : [nodeOf(block)]);
  return element("li", { class: box ? "task" : null }, tick, ...inside.flatMap(bare));
}

function tableNode({ head, sides, rows }) {
  const row = (kind, texts) =>
    element("tr", {}, ...sides.map((side, at) => element(kind, { class: side }, ...inline(texts[at] ?? ""))));
  const made = element(
    "table",
    {},
    element("thead", {}, row("th", head)),
    element("tbody", {}, ...rows.map((texts) => row("td", texts))),
  );
  return element("div", { class: "table", tabindex: 0, role: "group", "aria-label": "table" }, made);
}

function codeBlock(language, text, isOpen) {
  const name = language.replace(/[^\w+#.-]/g, "").slice(0, 30);
  const head = element(
    "div",
    { class: "code-head" },
    element("span", {}, name || "text"),
    copyButton("Copy code", () => text, { named: true }),
  );
  const code = element("code", {}, ...coloured(text, name.toLowerCase()));
  const made = element("pre", { tabindex: 0, role: "group", "aria-label": `code${name ? ` in ${name}` : ""}` }, code);
  return element("div", { class: isOpen ? "code open" : "code" }, head, made);
}

// Inline: a list of nodes, in which runs of * _ ~ and [ wait for what closes them (CommonMark 0.31, appendix).

export function inline(text) {
  return text.length > LONGEST ? [text] : new Inline(text).nodes();
}

const ENTITIES = {
  amp: "&",
  lt: "<",
  gt: ">",
  quot: '"',
  apos: "'",
  nbsp: "\u00a0",
  mdash: "\u2014",
  ndash: "\u2013",
  hellip: "\u2026",
  times: "\u00d7",
  rarr: "\u2192",
};
const PLAIN = /[^\\`*_~[\]!<&\n$h]+|[^]/y;
const BARE = /https?:\/\/[^\s<>"`\\*|]+/iy;
const BARE_TARGET = String.raw`(?:[^\s()\\]|\\.|\((?:[^\s()\\]|\\.)*\))*`; // with pairs of parentheses
const TITLE = String.raw`"[^"]*"|'[^']*'|\([^()]*\)`;
const DESTINATION = new RegExp(
  String.raw`\(\s{0,9}(?:<([^<>\n]*)>|(${BARE_TARGET}))(?:\s{1,9}(?:${TITLE}))?\s{0,9}\)`,
  "y",
);

class Inline {
  #text;
  #at = 0;
  #last; // of a list that is linked both ways: {node | text, before, after}
  #runs = [];
  #brackets = [];
  #lacking = new Set(); // what has been looked for to the end in vain

  constructor(text) {
    this.#text = text;
    this.#last = { text: "" };
  }

  nodes() {
    const first = this.#last;
    while (this.#at < this.#text.length) this.#step();
    this.#pair(0);
    return [...between(first, undefined)];
  }

  #step() {
    const text = this.#text,
      at = this.#at,
      mark = text[at];
    if (mark === "\\") this.#escape();
    else if (mark === "`") this.#code();
    else if (mark === "*" || mark === "_" || mark === "~") this.#run(mark);
    else if (mark === "[" || (mark === "!" && text[at + 1] === "[")) this.#open(mark === "!");
    else if (mark === "]") this.#close();
    else if (mark === "<") this.#angle();
    else if (mark === "&") this.#entity();
    else if (mark === "$") this.#dollars();
    else if (mark === "\n") this.#add(element("br"), 1);
    else if (mark !== "h" || /\w/.test(text[at - 1] ?? "") || !this.#bare()) this.#plain();
  }

  #add(node, length) {
    this.#last = this.#last.after = { node, before: this.#last };
    this.#at += length;
    return this.#last;
  }

  #plain() {
    PLAIN.lastIndex = this.#at;
    const [found] = PLAIN.exec(this.#text);
    this.#add(found, found.length);
  }

  /** What a sticky expression finds here. */
  #match(expression) {
    expression.lastIndex = this.#at;
    return expression.exec(this.#text);
  }

  /** Where `end` comes next behind `from`, or nothing; each is looked for to the end of the text once at most. */
  #find(end, from) {
    if (this.#lacking.has(end)) return;
    const found = this.#text.indexOf(end, from);
    if (found >= 0) return found;
    this.#lacking.add(end);
  }

  #escape() {
    const next = this.#text[this.#at + 1] ?? "",
      closing = { "(": "\\)", "[": "\\]" }[next];
    const end = closing && this.#find(closing, this.#at + 2);
    if (end) this.#formula(2, end, next === "[");
    else if (next === "\n") this.#add(element("br"), 2);
    else if (/[!-/:-@[-`{-~]/.test(next)) this.#add(next, 2);
    else this.#add("\\", 1);
  }

  #code() {
    const [marks] = this.#match(/`+/y),
      from = this.#at + marks.length;
    if (!this.#lacking.has(marks)) {
      for (const found of this.#text.slice(from).matchAll(/`+/g)) {
        if (found[0].length !== marks.length) continue;
        const inside = this.#text.slice(from, from + found.index).replaceAll("\n", " ");
        const bare = /^ .*\S.* $/.test(inside) ? inside.slice(1, -1) : inside;
        return this.#add(element("code", {}, bare), 2 * marks.length + found.index);
      }
      this.#lacking.add(marks);
    }
    this.#add(marks, marks.length);
  }

  #run(mark) {
    const [marks] = this.#match(/\*+|_+|~+/y),
      count = marks.length;
    const before = this.#text[this.#at - 1] ?? " ",
      after = this.#text[this.#at + count] ?? " ";
    const blank = (side) => /\s/.test(side),
      sign = (side) => /[\p{P}\p{S}]/u.test(side);
    const left = !blank(after) && (!sign(after) || blank(before) || sign(before));
    const right = !blank(before) && (!sign(before) || blank(after) || sign(after));
    const item = this.#add(undefined, count);
    Object.assign(item, { mark, count, length: count });
    item.opens = left && (mark !== "_" || !right || sign(before)) && (mark !== "~" || count === 2);
    item.closes = right && (mark !== "_" || !left || sign(after)) && (mark !== "~" || count === 2);
    if (item.opens || item.closes) this.#runs.push(item);
  }

  /** Makes emphasis of the runs from number `bottom` on, and forgets them. */
  #pair(bottom) {
    const runs = this.#runs,
      lowest = {};
    for (let at = bottom; at < runs.length; at++) {
      const closer = runs[at];
      while (closer.closes && closer.count) {
        const kind = `${closer.mark}${closer.opens}${closer.length % 3}`;
        const fits = (run) => run.opens && run.count && run.mark === closer.mark && !isOdd(run, closer);
        let from = at - 1;
        while (from >= (lowest[kind] ?? bottom) && !fits(runs[from])) from--;
        if (from < (lowest[kind] ?? bottom)) {
          lowest[kind] = at;
          break;
        }
        wrap(runs[from], closer);
        const first = runs[from].count ? from + 1 : from;
        runs.splice(first, at - first);
        at = first;
        for (const kind in lowest) lowest[kind] = Math.min(lowest[kind], first);
      }
    }
    runs.length = bottom;
  }

  #open(isImage) {
    const length = isImage ? 2 : 1;
    const item = this.#add(isImage ? "![" : "[", length);
    this.#brackets.push({ item, isImage, runs: this.#runs.length, from: this.#at });
  }

  #close() {
    const opened = this.#brackets.pop();
    this.#at++;
    const target = opened && this.#match(DESTINATION);
    if (!target) {
      this.#at--;
      return this.#add("]", 1);
    }
    this.#pair(opened.runs);
    const inside = [...between(opened.item, undefined)];
    const label = opened.isImage
      ? [`image: ${this.#text.slice(opened.from, this.#at - 1) || "without a name"}`]
      : inside;
    this.#last = opened.item.before;
    this.#add(link(unescaped(target[1] ?? target[2]), label), target[0].length);
    if (!opened.isImage) this.#brackets = this.#brackets.filter((outer) => outer.isImage); // no link within a link
  }

  #angle() {
    const address = this.#match(/<((?:https?:|mailto:)[^\s<>]*)>/iy),
      line = this.#match(/<br ?\/?>/iy);
    if (address) this.#add(link(address[1], [address[1]]), address[0].length);
    else if (line) this.#add(element("br"), line[0].length);
    else this.#add("<", 1);
  }

  #entity() {
    const found = this.#match(/&(?:#(\d{1,7})|#[xX]([\da-fA-F]{1,6})|(\w{2,8}));/y);
    const code = found?.[1] ? Number(found[1]) : found?.[2] ? parseInt(found[2], 16) : 0;
    const text = code
      ? code <= 0x10ffff
        ? String.fromCodePoint(code)
        : ""
      : Object.hasOwn(ENTITIES, found?.[3]) && ENTITIES[found[3]];
    if (text) this.#add(text, found[0].length);
    else this.#add("&", 1);
  }

  /** $ is money unless it embraces something that a digit does not follow. */
  #dollars() {
    const isDouble = this.#text[this.#at + 1] === "$",
      end = isDouble && this.#find("$$", this.#at + 2);
    const single = this.#match(/\$(?=[^\s$])[^$\n]*[^\s$\\]\$(?!\d)|\$[^\s$\\]\$(?!\d)/y);
    if (end) this.#formula(2, end, true);
    else if (single) this.#formula(1, this.#at + single[0].length - 1, false);
    else this.#add("$", 1);
  }

  #formula(marks, end, isDisplay) {
    this.#add(math(this.#text.slice(this.#at + marks, end), isDisplay), end + marks - this.#at);
  }

  #bare() {
    const [found] = this.#match(BARE) ?? [];
    if (!found) return false;
    let unclosed = found.split(")").length - found.split("(").length,
      end = found.length;
    while (/[.,:;!?'_~\]]/.test(found[end - 1]) || (found[end - 1] === ")" && unclosed-- > 0)) end--;
    this.#add(link(found.slice(0, end), [found.slice(0, end)]), end);
    return true;
  }
}

const isOdd = (opener, closer) =>
  (opener.closes || closer.opens) &&
  (opener.length + closer.length) % 3 === 0 &&
  (opener.length % 3 !== 0 || closer.length % 3 !== 0);

/** Embraces what stands between two runs. */
function wrap(opener, closer) {
  const used = opener.count >= 2 && closer.count >= 2 ? 2 : 1;
  const name = opener.mark === "~" ? "del" : used === 2 ? "strong" : "em";
  const node = element(name, {}, ...between(opener, closer));
  opener.after = closer.before = { node, before: opener, after: closer };
  opener.count -= used;
  closer.count -= used;
}

/** The nodes and texts behind `first` and before `end`. */
function* between(first, end) {
  for (let item = first.after; item !== end; item = item.after) {
    const made = item.mark ? item.mark.repeat(item.count) : item.node;
    if (made !== "") yield made;
  }
}

const unescaped = (text) => text.replace(/\\([!-/:-@[-`{-~])/g, "$1");

/** A link that opens beside the page and says where it leads; its label alone if it leads nowhere that is safe. */
function link(target, label) {
  const address = URL.canParse(target) ? new URL(target) : undefined;
  if (!LINKS.has(address?.protocol)) return element("span", {}, ...label);
  return element(
    "a",
    { href: address.href, title: address.href, target: "_blank", rel: "noopener noreferrer nofollow" },
    ...label,
  );
}
