/* What the tests look at inside of the page. */
"use strict";

const markdown = async () => (await import("/page/markdown.js")).Markdown;

/** Texts as HTML, without the buttons beside code. */
async function rendered(texts) {
  const Markdown = await markdown();
  return texts.map((text) => {
    const place = document.createElement("div");
    new Markdown(place).show(text);
    for (const node of place.querySelectorAll("button, .code-head")) node.remove();
    return place.innerHTML;
  });
}

/** The beginnings of a text that look otherwise when they have grown than when they are shown at once. */
async function grownOtherwise(text, step) {
  const Markdown = await markdown();
  const place = document.createElement("div");
  const grown = new Markdown(place);
  const wrong = [];
  for (let end = 0; end < text.length + step; end += step) {
    const whole = document.createElement("div");
    new Markdown(whole).show(text.slice(0, end));
    grown.show(text.slice(0, end));
    if (!place.isEqualNode(whole)) wrong.push(text.slice(0, end));
  }
  return wrong;
}

const words = (text) => new Set(text.trim().split(/\s+/));
const ELEMENTS = words(`
  P H3 H4 H5 H6 DIV PRE CODE SPAN EM STRONG DEL A BR HR UL OL LI INPUT BLOCKQUOTE TABLE THEAD TBODY TR TH TD
  BUTTON svg use
`);
const FORMULAS = words(`
  math mrow mi mn mo mtext mspace mfrac msqrt mroot msub msup msubsup munder mover munderover mtable mtr mtd
`);
const ATTRIBUTES = words(`
  class href title target rel tabindex role aria-label aria-hidden type disabled checked start display stretchy
  mathvariant width linethickness displaystyle
`);

/** What texts make that no text may make: elements, attributes, targets of links, or a call of hacked(). */
async function forbidden(texts) {
  const Markdown = await markdown();
  const place = document.createElement("div");
  const wrong = [];
  window.hacked = () => wrong.push("a text has run");
  document.body.append(place);
  for (const text of texts) {
    place.replaceChildren();
    new Markdown(place).show(text);
    for (const node of place.querySelectorAll("*")) {
      const isFormula = node.namespaceURI === "http://www.w3.org/1998/Math/MathML";
      if (!(isFormula ? FORMULAS : ELEMENTS).has(node.tagName)) wrong.push([node.tagName, text.slice(0, 60)]);
      for (const { name, value } of node.attributes) {
        const leadsAway = name === "href" && !/^(https?:\/\/|mailto:|#icon-)/.test(value);
        if (!ATTRIBUTES.has(name) || leadsAway) wrong.push([name, value, text.slice(0, 60)]);
      }
      if (isFormula) continue;
      node.dispatchEvent(new Event("mouseover"));
      node.dispatchEvent(new Event("error"));
    }
    await new Promise((resolve) => setTimeout(resolve));
  }
  place.remove();
  return wrong;
}

/** Texts that are seen, with a contrast to what they stand on of less than `least`. */
function faint(least) {
  const canvas = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
  const parts = (colour) => {
    canvas.clearRect(0, 0, 1, 1);
    canvas.fillStyle = colour;
    canvas.fillRect(0, 0, 1, 1);
    return [...canvas.getImageData(0, 0, 1, 1).data];
  };
  const luminance = (colour) => {
    const linear = (part) => (part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4);
    const [red, green, blue] = parts(colour).map((part) => linear(part / 255));
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue;
  };
  const ground = (node) => {
    const colour = node ? getComputedStyle(node).backgroundColor : "white";
    return parts(colour)[3] > 250 ? colour : ground(node.parentElement);
  };
  const isSeen = (node) =>
    [...node.childNodes].some((child) => child.nodeType === Node.TEXT_NODE && child.data.trim()) &&
    node.checkVisibility({ visibilityProperty: true }) &&
    !node.closest(":disabled, noscript");
  return [...document.querySelectorAll("body *")].filter(isSeen).flatMap((node) => {
    const [low, high] = [getComputedStyle(node).color, ground(node)].map(luminance).sort((one, other) => one - other);
    const contrast = (high + 0.05) / (low + 0.05);
    return contrast < least ? [[contrast, node.outerHTML.slice(0, 80)]] : [];
  });
}
