/** The page: which talk is open, what is asked and stopped, and what the keys do. */
import { announce, button, byId, element } from "./dom.js";
import { Refused, Server } from "./server.js";
import { showSettings } from "./settings.js";
import { listTalks } from "./list.js";
import { memoryOf, showFacts, size, speedOf } from "./about.js";
import { requestOf, take } from "./answers.js";
import { Talk, Talks, isEmpty } from "./talks.js";
import { MessageView, count } from "./view.js";

const SAVE_MS = 2000; // between what is kept of an answer that is being made
const NEAR_PX = 60; // from the end: whoever reads there follows what comes

const server = new Server();
const talks = new Talks(changedElsewhere);
const runs = new Map(); // id of a talk -> what is being made in it: {message, controller}
const drafts = new Map(); // id of a talk -> {text, edited} that was not sent
const views = new Map(); // id of a message -> its view, of the open talk
let open = newTalk();
let edited; // the message that is being edited
let model; // what the server tells of it
let latest = new Map(); // what the server counted when it was last asked behind an answer
let isLeaving = false; // the page is being closed or loaded anew
const deleted = new Set(); // ids of talks, as long as they stay so

// Talks.

function newTalk() {
  return new Talk({ settings: talks.settings });
}

/** Shows a talk, and what was being written in it. */
function openTalk(talk) {
  drafts.set(open.id, { text: byId("text").value, edited });
  open = talk;
  views.clear();
  byId("talk").replaceChildren();
  notify("");
  const draft = drafts.get(talk.id);
  write(draft?.text ?? "", draft?.edited);
  closeList();
  if (location.hash.slice(1) !== (talk.isEmpty ? "" : talk.id))
    history.pushState(null, "", talk.isEmpty ? location.pathname : `#${talk.id}`);
  show();
  follow();
}

function keep(talk) {
  if (!talk.isEmpty && !deleted.has(talk.id) && !talks.save(talk))
    notify("The browser has no room for this talk: it is lost when the page is closed. Delete others.");
}

function changedElsewhere(id) {
  if (id === open.id && !runs.has(id) && talks.get(id)) {
    open = talks.get(id);
    views.clear();
    byId("talk").replaceChildren();
  }
  show();
}

function deleteTalk(talk) {
  runs.get(talk.id)?.controller.abort();
  deleted.add(talk.id);
  talks.delete(talk.id);
  if (talk === open) openTalk(newTalk());
  else show();
  toast(`Deleted: ${talk.title}`, "Undo", () => {
    deleted.delete(talk.id);
    keep(talk);
    openTalk(talk);
  });
}

// What is on the screen.

const act = {
  edit(message) {
    write(message.content, message);
    byId("text").focus();
  },
  async again(message, parent) {
    const talk = open,
      before = talk.tip;
    focusText();
    if (!(await answer(talk, parent))) return turnBack(talk, before);
    if (message.role !== "assistant" || message.content !== talk.find(talk.tip).content) return;
    toast("The same again: this model takes the likeliest token.", "Set a temperature", openSettings);
  },
  goOn(message) {
    focusText();
    return answer(open, message.parent, message);
  },
  turn(message) {
    open.turnTo(message);
    keep(open);
    show();
  },
  async answerCalls(message, results) {
    const talk = open,
      added = message.calls.map((call, number) =>
        talk.add(number ? talk.tip : message.id, { role: "tool", tool_call_id: call.id, content: results[number] }),
      );
    if (await answer(talk, talk.tip)) return;
    for (const result of added.reverse()) talk.remove(result);
    turnBack(talk, message.id);
  },
};

function turnBack(talk, tip) {
  talk.tip = tip;
  keep(talk);
  show();
}

function show() {
  const place = byId("talk"),
    path = open.path(),
    run = runs.get(open.id),
    isBusy = Boolean(run);
  const results = path.filter((message) => message.role === "tool"),
    shown = path.filter((message) => message.role !== "tool");
  const nodes = shown.map((message) => {
    const view = views.get(message.id) ?? MessageView.of(message, act);
    views.set(message.id, view);
    view.show({
      isBusy,
      isRunning: message === run?.message,
      isLast: message === path.at(-1),
      versions: open.versions(message),
      results,
      edited,
    });
    return view.node;
  });
  const first = shown.length ? systemNode() : welcome();
  place.replaceChildren(...(first ? [first] : []), ...nodes);
  byId("title").textContent = open.title || "New chat";
  document.title = open.title ? `${open.title} – Cheetah` : "Cheetah";
  byId("open-settings").classList.toggle("changed", Object.keys(open.settings).length > 0);
  listTalks(talks.all(), open, {
    choose: (talk) => (openTalk(talk), focusText()),
    rename: (talk) => (keep(talk), show()),
    delete: deleteTalk,
  });
  showSend();
  showRoom();
}

function systemNode() {
  const { system } = open.settings;
  return (
    system &&
    element(
      "div",
      { class: "system" },
      button(`System prompt: ${system}`, { class: "quiet", on: { click: openSettings } }),
    )
  );
}

function welcome() {
  const name = model ? `Ask ${model.id} something` : "Ask something";
  const set =
    Object.keys(open.settings).length > 0 && element("p", {}, "The settings of the talk before hold here too.");
  return element(
    "div",
    { class: "welcome" },
    element("img", { src: "page/icon.svg", alt: "", width: 56, height: 56 }),
    element("h2", {}, name),
    set,
  );
}

function showSend() {
  const isRunning = runs.has(open.id),
    send = byId("send"),
    label = isRunning ? "Stop" : "Send";
  send.disabled = !isRunning && !byId("text").value.trim();
  send.setAttribute("aria-label", label);
  send.title = isRunning ? "Stop (Esc)" : "Send (Enter)";
  send.querySelector("use").setAttribute("href", isRunning ? "#icon-stop" : "#icon-send");
  byId("editing").hidden = !edited;
}

/** How much of the context the talk takes. */
function showRoom() {
  const stats = open.path().findLast((message) => message.stats)?.stats,
    most = model?.max_model_len,
    room = byId("room");
  const used = stats ? stats.prompt + stats.tokens : 0;
  room.textContent = !most
    ? ""
    : stats
      ? `${count(used)} of ${count(most)} tokens`
      : `context of ${count(most)} tokens`;
  room.classList.toggle("little", Boolean(most) && used > 0.9 * most);
}

let follows = true;

function follow() {
  const scroll = byId("scroll");
  follows = true;
  scroll.scrollTop = scroll.scrollHeight;
}

function scrolled() {
  const scroll = byId("scroll");
  follows = scroll.scrollHeight - scroll.scrollTop - scroll.clientHeight < NEAR_PX;
  byId("latest").hidden = follows;
}

/** Says what went wrong, above the message field, until something else is done. */
function notify(text) {
  const close = () => (notify(""), byId("text").focus());
  byId("notice").classList.toggle("shown", text !== "");
  byId("notice").replaceChildren(
    ...(text
      ? [element("span", {}, text), button("Close", { symbol: "close", class: "quiet", on: { click: close } })]
      : []),
  );
}

let toastEnds;

/** Says something for ten seconds, with a button. */
function toast(text, label, pressed) {
  const gone = () => byId("toast").replaceChildren();
  clearTimeout(toastEnds);
  toastEnds = setTimeout(gone, 10_000);
  byId("toast").replaceChildren(
    element("div", {}, element("span", {}, text), button(label, { on: { click: () => (gone(), pressed()) } })),
  );
}

// Asking.

/** Puts text into the message field. */
function write(text, message) {
  edited = message;
  byId("text").value = text;
  fit();
  for (const view of views.values()) view.node.classList.toggle("edited", view.message === edited);
  showSend();
}

/** Lets a keyboard type at once. On a screen that is touched, it would cover what was asked for. */
function focusText() {
  if (matchMedia("(pointer: fine)").matches) byId("text").focus();
}

function fit() {
  const text = byId("text");
  text.style.height = "auto";
  text.style.height = `${text.scrollHeight}px`;
}

async function send() {
  const text = byId("text").value.trim(),
    talk = open,
    before = talk.tip,
    changes = edited,
    title = talk.title;
  if (!text || runs.has(talk.id)) return;
  const question = talk.add(changes ? changes.parent : before, { role: "user", content: text });
  talk.title ||= text.split("\n")[0].slice(0, 80);
  write("");
  if (await answer(talk, question.id)) return;
  talk.remove(question); // nothing was said: the message goes back to where it was written
  talk.tip = before;
  talk.title = title;
  if (talk.isEmpty) talks.delete(talk.id);
  else keep(talk);
  giveBack(talk, text, changes);
  show();
}

/** Puts what could not be sent back into the message field, before what was written since. */
function giveBack(talk, text, message) {
  const since = talk === open ? byId("text").value : (drafts.get(talk.id)?.text ?? "");
  const whole = since.trim() ? `${text}\n${since}` : text;
  if (talk === open) write(whole, message);
  else drafts.set(talk.id, { text: whole, edited: message });
}

/** Has the model answer below the message of id `parent`, or go on with `begun`. False if it said nothing. */
async function answer(talk, parent, begun) {
  if (runs.has(talk.id)) return true;
  notify("");
  const message = begun ?? talk.add(parent, { role: "assistant", content: "", model: model?.id });
  const run = { message, controller: new AbortController() },
    said = message.content;
  runs.set(talk.id, run);
  delete message.problem;
  delete message.end;
  talk.changed = Date.now();
  keep(talk);
  if (talk === open && location.hash.slice(1) !== talk.id) history.replaceState(null, "", `#${talk.id}`);
  show();
  if (talk === open) {
    follow();
    announce("The model answers.");
  }
  let problem,
    saved = Date.now();
  try {
    const body = requestOf(talk, begun ? message.id : parent, { model, goesOn: Boolean(begun) });
    await take(message, server.chat(body, run.controller.signal), () => {
      draw(talk, message);
      if (Date.now() - saved < SAVE_MS) return;
      keep(talk);
      saved = Date.now();
    });
  } catch (failure) {
    if (isLeaving) return true; // the browser has cut it: what was kept stays
    problem = failure;
  }
  runs.delete(talk.id);
  ended(talk, message, problem, !isEmpty(message) && (!begun || message.content !== said));
  return talk.messages.includes(message);
}

/** What is left when an answer has ended, whole or not. */
function ended(talk, message, problem, isNew) {
  const isWhole = message.end !== undefined && !problem;
  if (problem?.name === "AbortError") message.end = "stopped";
  else if (problem) {
    if (!(problem instanceof Refused)) console.error(problem);
    if (isNew) message.problem = problem.message;
    else if (problem.status !== 401) notify(problem.message);
    message.end ??= "cut";
  }
  if (isEmpty(message) && !isWhole) talk.remove(message);
  keep(talk);
  show();
  if (talk === open) {
    views.get(message.id)?.tell(true);
    announce(problem ? "The answer has ended early." : "The answer is whole.");
  }
  if (problem?.status === 401) askForKey("");
  else if (problem?.status === 0) watchServer();
  else if (isWhole) measured(talk, message);
}

let drawing = false,
  quietUntil = 0;

/** Shows what has come, once a frame, and more rarely where that takes long. */
function draw(talk, message) {
  if (drawing || talk !== open) return;
  drawing = true;
  const wait = Math.max(0, quietUntil - performance.now());
  setTimeout(
    () =>
      requestAnimationFrame(() => {
        drawing = false;
        if (talk !== open || runs.get(talk.id)?.message !== message) return;
        const began = performance.now();
        views.get(message.id).showText(true);
        views.get(message.id).tell(false);
        showRoom();
        quietUntil = performance.now() + 4 * (performance.now() - began);
      }),
    wait,
  );
}

function stop() {
  runs.get(open.id)?.controller.abort();
}

// The server.

let watching;

/** Asks who the model is, and again every few seconds while nobody answers. */
async function watchServer() {
  clearTimeout(watching);
  try {
    model = await server.model();
    byId("model").classList.remove("away");
  } catch (problem) {
    if (problem.status === 401) return askForKey("");
    byId("model").classList.add("away");
    watching = setTimeout(watchServer, 4000);
    return showModel();
  }
  show();
  showModel(await counted());
}

/** What the server counts; nothing where it does not say. */
function counted() {
  return server.metrics().catch(() => new Map());
}

/** The model, its context and memory, and how near it came to the memory's speed. */
function showModel(metrics = new Map()) {
  latest = metrics;
  const isAway = byId("model").classList.contains("away"),
    { share } = speedOf(metrics),
    memory = memoryOf(metrics);
  const told = [
    model && `context ${count(model.max_model_len)}`,
    memory > 0 && size(memory),
    share > 0 && `${(100 * share).toFixed(0)}\u00a0% of the read ceiling`,
  ].filter(Boolean);
  const name = isAway ? "no server" : (model?.id ?? "…");
  byId("model").replaceChildren(
    element("span", { class: "dot" }),
    element("span", { class: "name" }, name),
    element("span", { class: "more" }, told.join(" · ")),
  );
}

/** Puts the share of the read ceiling beside an answer, if the server measures it. */
async function measured(talk, message) {
  const before = latest,
    metrics = await counted(),
    { share } = speedOf(metrics, before);
  showModel(metrics);
  if (!(share > 0) || !message.stats) return;
  message.stats.share = share;
  keep(talk);
  show();
}

async function openAbout() {
  const dialog = byId("about");
  showFacts({ model, metrics: new Map() });
  dialog.showModal();
  const version = await server.version().catch(() => undefined);
  while (dialog.open) {
    const metrics = await counted();
    showFacts({ model, metrics, version });
    await new Promise((resolve) => setTimeout(resolve, 1000));
  }
}

function askForKey(problem) {
  byId("key-problem").textContent = problem;
  showModel();
  if (!byId("key-wanted").open) byId("key-wanted").showModal();
}

async function useKey(event) {
  event.preventDefault();
  server.key = byId("key").value.trim();
  try {
    model = await server.model();
  } catch (problem) {
    return askForKey(problem.status === 401 ? "The server does not take this key." : problem.message);
  }
  byId("key").value = "";
  byId("key-wanted").close();
  notify("");
  byId("text").focus();
  await watchServer();
}

function openSettings() {
  showSettings(open.settings, (settings) => {
    open.settings = settings;
    talks.settings = settings;
    keep(open);
    show();
  });
  byId("settings").showModal();
}

// Keys and buttons.

function typed(event) {
  const text = byId("text");
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    send();
  } else if (event.key === "ArrowUp" && !text.value && !runs.has(open.id)) {
    const last = open.path().findLast((message) => message.role === "user");
    if (last) {
      event.preventDefault();
      act.edit(last);
    }
  }
}

function escaped(event) {
  if (event.key !== "Escape" || event.isComposing || event.defaultPrevented || document.querySelector("dialog[open]"))
    return;
  if (document.body.classList.contains("listing")) list(false);
  else if (runs.has(open.id)) stop();
  else if (edited) write("");
}

function closeList() {
  if (document.body.classList.contains("listing")) list(false);
}

function list(isShown) {
  document.body.classList.toggle("listing", isShown);
  byId("open-side").setAttribute("aria-expanded", String(isShown));
  document.querySelector("main").inert = isShown;
  byId(isShown ? "close-side" : "open-side").focus();
}

function begin() {
  byId("ask").addEventListener("submit", (event) => (event.preventDefault(), runs.has(open.id) ? stop() : send()));
  byId("text").addEventListener("keydown", typed);
  byId("text").addEventListener("input", () => (fit(), showSend()));
  byId("no-edit").addEventListener("click", () => (write(""), byId("text").focus()));
  byId("new").addEventListener("click", () => (openTalk(newTalk()), focusText()));
  byId("latest").addEventListener("click", () => (follow(), focusText()));
  byId("open-side").addEventListener("click", () => list(true));
  byId("close-side").addEventListener("click", () => list(false));
  byId("shade").addEventListener("click", () => list(false));
  matchMedia("(max-width: 50rem)").addEventListener("change", closeList);
  byId("open-settings").addEventListener("click", openSettings);
  byId("neutral").addEventListener("click", () => {
    talks.settings = open.settings = {};
    keep(open);
    byId("settings").close();
    openSettings();
  });
  byId("model").addEventListener("click", () => (model ? openAbout() : watchServer()));
  byId("key-form").addEventListener("submit", useKey);
  byId("no-key").addEventListener("click", () => byId("key-wanted").close());
  for (const dialog of document.querySelectorAll("dialog"))
    dialog.addEventListener("click", ({ target }) => target === dialog && dialog.close());
  document.addEventListener("keydown", escaped);
  byId("scroll").addEventListener("scroll", scrolled, { passive: true });
  const sizes = new ResizeObserver(() => (follows ? follow() : scrolled()));
  for (const place of ["talk", "scroll"]) sizes.observe(byId(place));
  window.addEventListener("popstate", openAddressed);
  window.addEventListener("pagehide", leave);
  window.addEventListener("pageshow", ({ persisted }) => persisted && location.reload());
  openAddressed();
  watchServer();
}

function leave() {
  isLeaving = true;
  for (const id of runs.keys()) if (talks.get(id)) talks.save(talks.get(id));
}

function openAddressed() {
  const talk = talks.get(location.hash.slice(1));
  if (talk !== open) openTalk(talk ?? newTalk());
}

begin();
