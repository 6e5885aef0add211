/** What can be set for a talk, and how it is said to the server. An empty field is left to the model and the server. */
import { byId, element } from "./dom.js";

const number = (label, hint, least, most, step = "any") => ({ kind: "number", label, hint, least, most, step });
const choice = (label, hint, choices) => ({ kind: "choice", label, hint, choices });

const FIELDS = {
  system: { kind: "text", label: "System prompt", hint: "What the model is told before the talk.", rows: 4 },
  temperature: number("Temperature", "0 always takes the likeliest token.", 0, 10),
  max_tokens: number("Most tokens", "Of an answer.", 1, 1e9, 1),
  top_p: number("Top p", "The likeliest tokens that have this probability together.", 0, 1),
  top_k: number("Top k", "So many of the likeliest tokens.", 0, 1e6, 1),
  min_p: number("Min p", "Tokens with this share of the likeliest one's probability.", 0, 1),
  seed: number("Seed", "The same seed draws the same answer.", 0, Number.MAX_SAFE_INTEGER, 1),
  repetition_penalty: number("Repetition penalty", "Above 1 against what was said already.", 0.01, 10),
  presence_penalty: number("Presence penalty", "Above 0 against words that occurred.", -2, 2),
  frequency_penalty: number("Frequency penalty", "The more, the more often they did.", -2, 2),
  thinking: choice("Thinking", "Of models whose template can turn it on and off.", {
    "": "as the model does",
    on: "on",
    off: "off",
  }),
  stop: { kind: "text", label: "Stop at", hint: "Texts that end an answer, one a line.", rows: 2 },
  tools: {
    kind: "text",
    label: "Tools",
    hint: "OpenAI's list of functions, as JSON. The page shows calls, and you say what they gave.",
    rows: 4,
    isCode: true,
  },
};

const THEMES = { "": "the system's", light: "light", dark: "dark" };

/** Fields of a request. */
export function requestFields(settings) {
  const { system, thinking, stop, tools, ...numbers } = settings;
  return {
    ...numbers,
    ...(stop ? { stop: stop.split("\n").filter(Boolean) } : {}),
    ...(tools ? { tools: JSON.parse(tools) } : {}),
    ...(thinking ? { chat_template_kwargs: { enable_thinking: thinking === "on" } } : {}),
  };
}

/** Fills the dialog with the settings of a talk. changed(settings): told each time that they are right. */
export function showSettings(settings, changed) {
  const current = { ...settings };
  const take = (name, value) => {
    if (value === "") delete current[name];
    else current[name] = value;
    changed({ ...current });
  };
  const rows = Object.entries(FIELDS).map(([name, field]) =>
    row(name, field, settings[name], (value) => take(name, value)),
  );
  const theme = choice("Colours", "Of this page.", THEMES);
  byId("fields").replaceChildren(...rows, row("theme", theme, document.documentElement.dataset.theme, chooseTheme));
}

function row(name, field, value, take) {
  const id = `set-${name}`,
    problem = element("p", { class: "problem", id: `${id}-problem`, role: "alert" });
  const input = inputOf(field, { id, "aria-describedby": `${id}-hint ${id}-problem` });
  input.value = value ?? "";
  input.addEventListener("input", () => {
    const wrong = wrongWith(field, input);
    problem.textContent = wrong ?? "";
    input.setAttribute("aria-invalid", String(Boolean(wrong)));
    if (!wrong) take(field.kind === "number" && input.value !== "" ? Number(input.value) : input.value);
  });
  const hint = element("p", { class: "hint", id: `${id}-hint` }, field.hint);
  return element(
    "div",
    { class: field.kind === "text" ? "wide" : null },
    element("label", { for: id }, field.label),
    input,
    problem,
    hint,
  );
}

function inputOf({ kind, rows, isCode, choices, least, most, step }, given) {
  if (kind === "text")
    return element("textarea", {
      ...given,
      rows,
      class: isCode ? "area code-like" : "area",
      spellcheck: isCode ? "false" : null,
    });
  if (kind === "number")
    return element("input", {
      ...given,
      type: "number",
      min: least,
      max: most,
      step,
      placeholder: "model’s own",
      inputmode: "decimal",
    });
  return element(
    "select",
    given,
    ...Object.entries(choices).map(([value, label]) => element("option", { value }, label)),
  );
}

/** What is wrong with what was typed, if anything is. */
function wrongWith(field, input) {
  const { least, most } = field,
    { validity } = input;
  if (validity.badInput) return "This is no number.";
  if (validity.rangeUnderflow || validity.rangeOverflow)
    return most > 1e6 ? `At least ${least}.` : `From ${least} to ${most}.`;
  if (validity.stepMismatch) return "A whole number.";
  if (!field.isCode || !input.value.trim()) return;
  try {
    if (!Array.isArray(JSON.parse(input.value))) return "A list is wanted: [ … ].";
  } catch (wrong) {
    return `This is no JSON: ${wrong.message}`;
  }
}

function chooseTheme(theme) {
  if (theme) document.documentElement.dataset.theme = theme;
  else delete document.documentElement.dataset.theme;
  try {
    window.localStorage.setItem("cheetah.theme", theme);
  } catch {} // it then holds as long as the page
}
