/** What every part of the page makes its elements with. No text ever becomes markup: children are nodes or text. */

/** An element. given: attributes; `on` holds listeners; undefined, null and false leave an attribute out. */
export function element(name, given = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(given)) {
    if (key === "on") for (const [event, listener] of Object.entries(value)) made.addEventListener(event, listener);
    else if (value === true) made.setAttribute(key, "");
    else if (value !== undefined && value !== null && value !== false) made.setAttribute(key, value);
  }
  made.append(...children.filter((child) => child !== undefined && child !== null && child !== false));
  return made;
}

const SVG = "http://www.w3.org/2000/svg";

/** One of the symbols that index.html defines, as decoration beside a label. */
export function icon(name) {
  const picture = document.createElementNS(SVG, "svg"),
    use = document.createElementNS(SVG, "use");
  picture.setAttribute("class", "icon");
  picture.setAttribute("aria-hidden", "true");
  use.setAttribute("href", `#icon-${name}`);
  picture.append(use);
  return picture;
}

/** A button. label: what it is called; shown as text unless there is a symbol alone. */
export function button(label, { symbol, named, ...given } = {}) {
  const shown = symbol ? [icon(symbol), named && element("span", {}, label)] : [label];
  const spoken = symbol && !named ? { "aria-label": label, title: label } : {};
  return element("button", { type: "button", ...spoken, ...given }, ...shown);
}

export const byId = (id) => document.getElementById(id);

/** Puts text into the clipboard; true if that worked. Pages that come by plain HTTP have only the older way. */
export async function copy(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    const focused = document.activeElement;
    const holder = element("textarea", { class: "unseen", "aria-hidden": "true" });
    holder.value = text;
    (document.querySelector("dialog[open]") ?? document.body).append(holder);
    holder.select();
    const worked = document.execCommand("copy");
    holder.remove();
    focused?.focus({ preventScroll: true });
    return worked;
  }
}

/** A button that copies what `text()` gives and says so. */
export function copyButton(label, text, given = {}) {
  const made = button(label, { symbol: "copy", ...given });
  let back;
  made.addEventListener("click", async () => {
    const worked = await copy(text());
    made.classList.toggle("done", worked);
    made.querySelector("use").setAttribute("href", worked ? "#icon-done" : "#icon-copy");
    announce(worked ? "Copied." : "The browser does not allow copying.");
    clearTimeout(back);
    back = setTimeout(() => {
      made.classList.remove("done");
      made.querySelector("use").setAttribute("href", "#icon-copy");
    }, 1500);
  });
  return made;
}

/** Tells a screen reader, behind what it says now. What was said before is gone from the page. */
export function announce(text) {
  const said = byId("said");
  while (said.childElementCount > 20) said.firstChild.remove();
  said.append(element("p", {}, text));
}
