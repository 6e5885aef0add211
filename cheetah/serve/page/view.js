/** How messages look: text, thoughts, calls of tools, how an answer ended, and what can be done with it. */
import { announce, button, copyButton, element, icon } from "./dom.js";
import { Markdown } from "./markdown.js";
import { isEmpty, parts } from "./talks.js";

const ENDS = {
  stopped: "Stopped.",
  length: "Cut: the limit of tokens or the context's end was reached.",
  cut: "Cut: the page was closed, or the connection lost, before the end.",
};

export const count = (number) => number.toLocaleString("en");

/** A message of the talk. act: what its buttons do, {edit, again, goOn, turn, answerCalls}, each with the message. */
export class MessageView {
  constructor(message, act) {
    this.message = message;
    this.act = act;
    this.actions = element("div", { class: "actions" });
    const name = message.role === "user" ? "You" : message.model || "The model";
    this.node = element(
      "article",
      { class: `message ${message.role}`, "aria-label": name },
      element("h2", { class: "unseen" }, name),
    );
  }

  static of(message, act) {
    return message.role === "user" ? new QuestionView(message, act) : new AnswerView(message, act);
  }

  /**
   * The buttons beside a message. state: {isBusy: something is made in this talk, isRunning: this is, isLast, versions,
   * results: of tools, edited: the message that is}.
   */
  showActions({ isBusy, versions }, ...own) {
    const place = versions.indexOf(this.message),
      turn = (by) => () => this.act.turn(versions[place + by]);
    const others =
      versions.length > 1 &&
      element(
        "span",
        { class: "versions" },
        button("The version before", { symbol: "before", disabled: isBusy || place === 0, on: { click: turn(-1) } }),
        element(
          "span",
          { "aria-label": `version ${place + 1} of ${versions.length}` },
          `${place + 1}/${versions.length}`,
        ),
        button("The next version", {
          symbol: "after",
          disabled: isBusy || place === versions.length - 1,
          on: { click: turn(1) },
        }),
      );
    this.actions.replaceChildren(...[others, ...own].filter(Boolean));
  }
}

class QuestionView extends MessageView {
  constructor(message, act) {
    super(message, act);
    this.node.append(element("div", { class: "bubble" }, message.content), this.actions);
  }

  show(state) {
    const { message, act } = this,
      disabled = state.isBusy;
    this.node.classList.toggle("edited", state.edited === message);
    this.showActions(
      state,
      state.isLast &&
        !state.isBusy &&
        button("Answer this", { symbol: "again", named: true, on: { click: () => act.again(message, message.id) } }),
      copyButton("Copy the message", () => message.content),
      button("Edit the message", { symbol: "edit", disabled, on: { click: () => act.edit(message) } }),
    );
  }
}

class AnswerView extends MessageView {
  #told; // blocks of the answer that a screen reader has been given
  #settled; // blocks that will not change any more
  #shown; // thoughts

  constructor(message, act) {
    super(message, act);
    this.waiting = element(
      "div",
      { class: "waiting", role: "img", "aria-label": "waiting for the model" },
      element("i"),
      element("i"),
      element("i"),
    );
    this.summary = element("summary");
    const thoughts = element("div", { class: "markdown" }),
      answer = element("div", { class: "markdown" });
    this.thoughts = element(
      "details",
      { class: "thoughts", on: { toggle: () => this.#showThoughts() } },
      this.summary,
      thoughts,
    );
    this.thoughtText = new Markdown(thoughts);
    this.answerText = new Markdown(answer);
    this.calls = element("div");
    this.end = element("p");
    this.stats = element("span", { class: "stats" });
    this.node.append(this.thoughts, answer, this.calls, this.waiting, this.end, this.actions);
  }

  show(state) {
    const { message, act } = this,
      { isBusy, isRunning } = state;
    this.showText(isRunning);
    this.#told ??= this.answerText.place.childElementCount; // what stands here from before is not told
    this.#showCalls(state);
    const isCut = message.end && message.end !== "stop";
    const text =
      message.problem ??
      (isCut ? ENDS[message.end] : isEmpty(message) && !isRunning ? "The model said nothing." : undefined);
    this.end.className = message.problem ? "end bad" : "end";
    this.end.replaceChildren(...(text && !isRunning ? [text] : []));
    const canGoOn = isCut && state.isLast && parts(message).answer && !parts(message).thoughts && !message.calls;
    if (isRunning) this.actions.replaceChildren(this.stats);
    else
      this.showActions(
        state,
        canGoOn &&
          button("Go on", { symbol: "more", named: true, disabled: isBusy, on: { click: () => act.goOn(message) } }),
        copyButton("Copy the answer", () => parts(message).answer),
        button("Make another answer", {
          symbol: "again",
          disabled: isBusy,
          on: { click: () => act.again(message, message.parent) },
        }),
        this.stats,
      );
  }

  /** The text so far. */
  showText(isRunning) {
    const { message } = this,
      { thoughts, answer, isThinking } = parts(message);
    this.#shown = thoughts;
    this.thoughts.hidden = !thoughts.trim();
    this.thoughts.classList.toggle("now", isRunning && isThinking);
    const seconds = message.thoughtMs && ` for ${(message.thoughtMs / 1000).toFixed(1)} s`;
    this.summary.textContent = isRunning && isThinking ? "Thinking…" : `Thought${seconds || ""}`;
    this.#showThoughts();
    this.#settled = this.answerText.show(answer);
    this.waiting.hidden = !isRunning || Boolean(answer || message.calls);
    this.stats.textContent = statsText(message.stats);
  }

  /** Gives a screen reader what it has not had and will not change any more; all that there is, once it is whole. */
  tell(isWhole) {
    const end = isWhole ? this.answerText.place.childElementCount : this.#settled;
    for (; this.#told < end; this.#told++) {
      const block = this.answerText.place.children[this.#told],
        code = block.querySelector("pre");
      announce(
        code ? `${code.getAttribute("aria-label")}, ${code.textContent.split("\n").length} lines` : block.textContent,
      );
    }
  }

  #showThoughts() {
    if (this.thoughts.open) this.thoughtText.show(this.#shown); // what is folded away costs nothing
  }

  #showCalls({ isBusy, isLast, results }) {
    const { message, act } = this,
      calls = message.calls ?? [];
    const cards = calls.map((call) => {
      const result = results.find((each) => each.tool_call_id === call.id);
      return element(
        "div",
        { class: "call" },
        element(
          "div",
          { class: "call-head" },
          icon("tool"),
          element("span", {}, "calls"),
          element("code", {}, call.function.name),
        ),
        element("pre", {}, prettyJson(call.function.arguments)),
        result && element("div", { class: "result-name" }, "gave"),
        result && element("pre", {}, result.content),
      );
    });
    if (calls.length && isLast && !isBusy) {
      const fields = calls.map((call, number) =>
        element("textarea", { class: "area code-like", id: `${message.id}-${number}`, rows: 2 }),
      );
      const form = element(
        "form",
        { class: "results" },
        ...calls.flatMap((call, number) => [
          element("label", { for: `${message.id}-${number}` }, `What ${call.function.name} gave`),
          fields[number],
        ]),
        element("button", { type: "submit" }, fields.length > 1 ? "Send the results" : "Send the result"),
      );
      form.addEventListener("submit", (event) => {
        event.preventDefault();
        act.answerCalls(
          message,
          fields.map((field) => field.value),
        );
      });
      cards.push(form);
    }
    this.calls.replaceChildren(...cards);
  }
}

function prettyJson(text) {
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    return text;
  }
}

/** Time to the first token, tokens and their rate, and how near the GPU came to its memory's speed if that is known. */
function statsText(stats) {
  if (!stats) return "";
  const told = [
    `first token ${stats.firstMs < 9950 ? `${stats.firstMs.toFixed(0)} ms` : `${(stats.firstMs / 1000).toFixed(1)} s`}`,
    `${count(stats.tokens)} token${stats.tokens === 1 ? "" : "s"}`,
  ];
  if (stats.rate) told.push(`${stats.rate.toFixed(1)} tokens/s`);
  if (stats.share) told.push(`${(100 * stats.share).toFixed(0)}\u00a0% of the read ceiling`);
  return told.join(" · ");
}
