/** The list of talks: chosen, renamed and deleted there; arrows go from one to the next. */
import { button, byId, element } from "./dom.js";

const DAY_MS = 86_400_000;
let renamed; // the talk whose name is being written

/** Shows the talks, last changed first. act: {choose, rename, delete}, each with a talk. */
export function listTalks(talks, open, act) {
  const list = byId("talks");
  if (renamed && talks.includes(renamed)) return; // who writes a name is not disturbed
  const focused = document.activeElement?.closest?.("#talks li")?.dataset.talk;
  const kind = [...(document.activeElement?.classList ?? [])].find((name) => name.startsWith("do-"));
  let group;
  const rows = talks.flatMap((talk) => {
    const name = ageOf(talk.changed),
      head = name !== group && element("li", { class: "group" }, name);
    group = name;
    return [head, row(talk, talk.id === open.id, act)].filter(Boolean);
  });
  list.replaceChildren(...rows);
  if (focused) list.querySelector(`li[data-talk="${focused}"] .${kind ?? "name"}`)?.focus();
}

function row(talk, isOpen, act) {
  const name = element(
    "button",
    {
      type: "button",
      class: "name do-open",
      "aria-current": isOpen ? "true" : null,
      on: { click: () => act.choose(talk), keydown: arrow },
    },
    element("span", {}, talk.title || "Untitled"),
  );
  const made = element(
    "li",
    { class: isOpen ? "open" : null, "data-talk": talk.id },
    name,
    button(`Rename ${talk.title}`, {
      symbol: "edit",
      class: "quiet do-rename",
      title: "Rename",
      on: { click: () => rename(talk, made, act) },
    }),
    button(`Delete ${talk.title}`, {
      symbol: "delete",
      class: "quiet do-delete",
      title: "Delete",
      on: { click: () => act.delete(talk) },
    }),
  );
  return made;
}

function rename(talk, place, act) {
  const input = element("input", { "aria-label": "Name of the talk", maxlength: 200 });
  const done = (name) => {
    if (renamed !== talk) return;
    renamed = undefined;
    if (name.trim()) talk.title = name.trim();
    act.rename(talk);
    byId("talks").querySelector(`li[data-talk="${talk.id}"] .name`)?.focus();
  };
  input.value = talk.title;
  input.addEventListener("keydown", (event) => {
    if (event.key === "Enter") done(input.value);
    if (event.key === "Escape") {
      event.preventDefault();
      done(talk.title);
    }
  });
  input.addEventListener("blur", () => done(input.value));
  renamed = talk;
  place.replaceChildren(input);
  input.select();
}

function arrow(event) {
  const by = { ArrowDown: 1, ArrowUp: -1 }[event.key];
  if (!by) return;
  event.preventDefault();
  const names = [...byId("talks").querySelectorAll(".name")];
  names[(names.indexOf(event.currentTarget) + by + names.length) % names.length].focus();
}

function ageOf(changed) {
  const days = Math.floor((new Date().setHours(0, 0, 0, 0) - new Date(changed).setHours(0, 0, 0, 0)) / DAY_MS + 0.5);
  return days < 1 ? "Today" : days < 2 ? "Yesterday" : days < 7 ? "This week" : "Before";
}
