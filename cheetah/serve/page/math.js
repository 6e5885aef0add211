/** TeX's formulas, as far as models usually write them, as MathML. What is unknown here is shown as it was written. */
import { element } from "./dom.js";

const LONGEST = 5000,
  DEEPEST = 40;
const NAMESPACE = "http://www.w3.org/1998/Math/MathML";

const GREEK = `
    alpha α beta β gamma γ delta δ epsilon ϵ varepsilon ε zeta ζ eta η theta θ vartheta ϑ iota ι kappa κ lambda λ
    mu μ nu ν xi ξ pi π varpi ϖ rho ρ varrho ϱ sigma σ varsigma ς tau τ upsilon υ phi ϕ varphi φ chi χ psi ψ omega
    ω Gamma Γ Delta Δ Theta Θ Lambda Λ Xi Ξ Pi Π Sigma Σ Upsilon Υ Phi Φ Psi Ψ Omega Ω infty ∞ partial ∂ nabla ∇
    ell ℓ hbar ℏ Re ℜ Im ℑ aleph ℵ emptyset ∅ varnothing ∅ forall ∀ exists ∃ nexists ∄ top ⊤ bot ⊥ angle ∠ prime ′
    dagger † degree ° imath ı jmath ȷ % % # # $ $ & & _ _
  `;
const SIGNS = `
    cdot ⋅ times × div ÷ pm ± mp ∓ ast ∗ star ⋆ circ ∘ bullet ∙ oplus ⊕ ominus ⊖ otimes ⊗ odot ⊙ cap ∩ cup ∪
    setminus ∖ land ∧ wedge ∧ lor ∨ vee ∨ neg ¬ lnot ¬ le ≤ leq ≤ leqslant ⩽ ge ≥ geq ≥ geqslant ⩾ ne ≠ neq ≠ ll ≪
    gg ≫ equiv ≡ approx ≈ sim ∼ simeq ≃ cong ≅ propto ∝ in ∈ notin ∉ ni ∋ subset ⊂ subseteq ⊆ supset ⊃ supseteq ⊇
    perp ⊥ parallel ∥ mid ∣ to → rightarrow → longrightarrow ⟶ leftarrow ← gets ← leftrightarrow ↔ Rightarrow ⇒
    Leftarrow ⇐ Leftrightarrow ⇔ implies ⟹ iff ⟺ mapsto ↦ uparrow ↑ downarrow ↓ vdash ⊢ models ⊨ therefore ∴
    because ∵ ldots … dots … cdots ⋯ vdots ⋮ ddots ⋱ colon : lbrace { rbrace } langle ⟨ rangle ⟩ lfloor ⌊ rfloor ⌋
    lceil ⌈ rceil ⌉ lvert | rvert | vert | lVert ‖ rVert ‖ Vert ‖ | ‖ { { } } backslash \\ triangleq ≜ coloneqq ≔
    prec ≺ succ ≻ rightharpoonup ⇀ hookrightarrow ↪ int ∫ iint ∬ iiint ∭ oint ∮
  `;
const LARGE = "sum ∑ prod ∏ coprod ∐ bigcup ⋃ bigcap ⋂ bigoplus ⨁ bigotimes ⨂ bigvee ⋁ bigwedge ⋀";
const NAMES = `
    sin cos tan cot sec csc arcsin arccos arctan sinh cosh tanh log ln lg exp det dim ker deg arg gcd hom Pr
  `;
const LIMITS = "lim max min sup inf limsup liminf argmax argmin";
const ACCENTS = `
    hat ^ widehat ^ bar ¯ overline ¯ vec → tilde ~ widetilde ~ dot ˙ ddot ¨ overrightarrow → overbrace ⏞
  `;
const SPACES = {
  ",": ".17em",
  ":": ".22em",
  ">": ".22em",
  ";": ".28em",
  " ": ".28em",
  "!": "-.17em",
  quad: "1em",
  qquad: "2em",
  "~": ".28em",
};
const IGNORED = new Set(
  `
    displaystyle textstyle limits nolimits big Big bigg Bigg bigl bigr Bigl Bigr biggl biggr Biggl Biggr bigm
    nonumber
  `
    .trim()
    .split(/\s+/),
);
const FENCES = {
  matrix: "",
  smallmatrix: "",
  pmatrix: "()",
  bmatrix: "[]",
  Bmatrix: "{}",
  vmatrix: "||",
  Vmatrix: "‖‖",
  cases: "{",
  aligned: "",
  align: "",
  "align*": "",
  gathered: "",
  gather: "",
  "gather*": "",
  array: "",
  split: "",
  equation: "",
  "equation*": "",
};

const pairs = (text) =>
  new Map(
    text
      .trim()
      .split(/\s+/)
      .flatMap((word, at, words) => (at % 2 ? [] : [[word, words[at + 1]]])),
  );
const IDENTIFIERS = pairs(GREEK),
  OPERATORS = pairs(SIGNS),
  LARGE_OPERATORS = pairs(LARGE),
  OVER = pairs(ACCENTS);
const FUNCTIONS = new Set(NAMES.split(" ")),
  LIMITED = new Set(LIMITS.split(" "));

// Letters of an alphabet: where A, a and 0 lie, and the letters that lie elsewhere.
const ALPHABETS = {
  mathbf: [0x1d400, 0x1d41a, 0x1d7ce, {}],
  boldsymbol: [0x1d468, 0x1d482, 0x1d7ce, {}],
  mathbb: [0x1d538, 0x1d552, 0x1d7d8, { C: "ℂ", H: "ℍ", N: "ℕ", P: "ℙ", Q: "ℚ", R: "ℝ", Z: "ℤ" }],
  mathcal: [
    0x1d49c,
    0x1d4b6,
    0,
    { B: "ℬ", E: "ℰ", F: "ℱ", H: "ℋ", I: "ℐ", L: "ℒ", M: "ℳ", R: "ℛ", e: "ℯ", g: "ℊ", o: "ℴ" },
  ],
  mathfrak: [0x1d504, 0x1d51e, 0, { C: "ℭ", H: "ℌ", I: "ℑ", R: "ℜ", Z: "ℨ" }],
};
const ALIKE = { mathscr: "mathcal", bm: "boldsymbol", bold: "mathbf" };
const UPRIGHT = new Set([
  "text",
  "mathrm",
  "textbf",
  "textit",
  "textrm",
  "mbox",
  "operatorname",
  "mathsf",
  "mathtt",
  "texttt",
  "operatorname*",
]);

/** A formula; where it cannot be read, its text. */
export function math(tex, isDisplay) {
  try {
    if (tex.length > LONGEST) throw new Unknown();
    const root = made("math", ...new Formula(tex).all());
    if (isDisplay) root.setAttribute("display", "block");
    return root;
  } catch (problem) {
    if (!(problem instanceof Unknown)) throw problem;
    return element("code", { class: "math" }, tex.trim());
  }
}

class Unknown extends Error {}

function made(name, ...children) {
  const node = document.createElementNS(NAMESPACE, name);
  node.append(...children);
  return node;
}

function space(width) {
  const node = made("mspace");
  node.setAttribute("width", width);
  return node;
}

function upright(text) {
  const node = made("mi", text);
  node.setAttribute("mathvariant", "normal");
  return node;
}

function operator(text, isStretchy) {
  const node = made("mo", text);
  node.setAttribute("stretchy", String(Boolean(isStretchy)));
  return node;
}

const row = (nodes) => (nodes.length === 1 ? nodes[0] : made("mrow", ...nodes));

class Formula {
  #tokens;
  #at = 0;
  #depth = 0;

  constructor(tex) {
    const bare = tex.replace(/(?<!\\)%[^\n]*/g, "");
    this.#tokens = bare.match(/\\(?:operatorname\*|[a-zA-Z]+|[^])|\d+(?:[.,]\d+)*|\s+|[^\\]/gu) ?? [];
  }

  all() {
    return this.#until(() => this.#next === undefined);
  }

  get #next() {
    return this.#tokens[this.#at];
  }

  #skipBlanks() {
    while (this.#next !== undefined && !this.#next.trim()) this.#at++;
  }

  #take(wanted) {
    this.#skipBlanks();
    const token = this.#tokens[this.#at++];
    if (token === undefined || (wanted !== undefined && token !== wanted)) throw new Unknown();
    return token;
  }

  /** Nodes up to where `isEnd`, which stays. */
  #until(isEnd) {
    const nodes = [];
    if (++this.#depth > DEEPEST) throw new Unknown();
    for (this.#skipBlanks(); !isEnd(); this.#skipBlanks()) {
      if (this.#next === undefined) throw new Unknown();
      const node = this.#scripted();
      if (node) nodes.push(node);
    }
    this.#depth--;
    return nodes;
  }

  #scripted() {
    const limited = this.#next?.replace(/^\\/, ""),
      isLarge =
        LARGE_OPERATORS.has(limited) || LIMITED.has(limited) || limited === "underbrace" || limited === "overbrace";
    const base = /^[_^']$/.test(this.#next) ? made("mrow") : this.#atom();
    let under, over;
    for (this.#skipBlanks(); /^([_^']|\\limits|\\nolimits)$/.test(this.#next); this.#skipBlanks()) {
      const mark = this.#take();
      if (mark === "'") over = made("mo", "′".repeat(1 + this.#primes()));
      else if (mark === "_" && !under) under = this.#argument();
      else if (mark === "^" && !over) over = this.#argument();
      else if (mark.length === 1) throw new Unknown();
    }
    if (!under && !over) return base;
    const [low, high, both] = isLarge ? ["munder", "mover", "munderover"] : ["msub", "msup", "msubsup"];
    return under && over ? made(both, base, under, over) : under ? made(low, base, under) : made(high, base, over);
  }

  #primes() {
    let more = 0;
    for (; this.#next === "'"; this.#at++) more++;
    return more;
  }

  /** A group in braces, or what stands there alone. */
  #argument() {
    this.#skipBlanks();
    if (this.#next !== "{") return this.#atom() ?? made("mrow");
    this.#at++;
    const nodes = this.#until(() => this.#next === "}");
    this.#at++;
    return row(nodes);
  }

  /** What stands in braces, as text. */
  #text(end = "}") {
    let text = "",
      open = 0;
    if (end === "}") this.#take("{");
    for (; this.#next !== undefined && (open || this.#next !== end); this.#at++) {
      open += this.#next === "{" ? 1 : this.#next === "}" ? -1 : 0;
      if (!/^[{}$]$/.test(this.#next)) text += this.#next.replace(/^\\(?=[^a-zA-Z])/, "");
    }
    this.#take(end);
    return text;
  }

  #atom() {
    const token = this.#next;
    if (token === "{") return this.#argument();
    this.#take();
    if (token.startsWith("\\") && token.length > 1) return this.#command(token.slice(1));
    if (/^\d/.test(token)) return made("mn", token);
    if (/^\p{L}$/u.test(token)) return made("mi", token);
    if (token === "}" || token === "&" || token === "$" || token === "\\" || token === "#") throw new Unknown();
    if (token === "~") return space(SPACES["~"]);
    return operator(token === "-" ? "−" : token === "*" ? "∗" : token);
  }

  #command(name) {
    if (IDENTIFIERS.has(name)) return made("mi", IDENTIFIERS.get(name));
    if (OPERATORS.has(name)) return operator(OPERATORS.get(name));
    if (LARGE_OPERATORS.has(name)) return made("mo", LARGE_OPERATORS.get(name));
    if (FUNCTIONS.has(name) || LIMITED.has(name)) return upright(name.replace(/^arg(?=m)/, "arg\u2009"));
    if (Object.hasOwn(SPACES, name)) return space(SPACES[name]);
    if (IGNORED.has(name)) return undefined;
    if (UPRIGHT.has(name))
      return name.startsWith("text") || name === "mbox"
        ? made("mtext", this.#text().replace(/ /g, "\u00a0"))
        : upright(this.#text());
    if (Object.hasOwn(ALPHABETS, ALIKE[name] ?? name)) return this.#letters(ALPHABETS[ALIKE[name] ?? name]);
    if (OVER.has(name)) return made("mover", this.#argument(), operator(OVER.get(name), /^(wide|over)/.test(name)));
    return this.#structure(name);
  }

  #structure(name) {
    switch (name) {
      case "frac":
      case "dfrac":
      case "tfrac":
      case "cfrac":
        return made("mfrac", this.#argument(), this.#argument());
      case "binom": {
        const fraction = made("mfrac", this.#argument(), this.#argument());
        fraction.setAttribute("linethickness", "0");
        return made("mrow", operator("(", true), fraction, operator(")", true));
      }
      case "sqrt": {
        this.#skipBlanks();
        if (this.#next !== "[") return made("msqrt", this.#argument());
        this.#at++;
        const degree = row(this.#until(() => this.#next === "]"));
        this.#at++;
        return made("mroot", this.#argument(), degree);
      }
      case "underline":
        return made("munder", this.#argument(), operator("_", true));
      case "underbrace":
        return made("munder", this.#argument(), operator("⏟", true));
      case "boxed":
      case "mathop":
      case "mathrel":
      case "mathbin":
        return this.#argument();
      case "overset":
      case "stackrel": {
        const over = this.#argument();
        return made("mover", this.#argument(), over);
      }
      case "underset": {
        const under = this.#argument();
        return made("munder", this.#argument(), under);
      }
      case "pmod":
        return made(
          "mrow",
          space("1em"),
          operator("("),
          upright("mod"),
          space(".3em"),
          this.#argument(),
          operator(")"),
        );
      case "bmod":
      case "mod":
        return made("mrow", space(".3em"), upright("mod"), space(".3em"));
      case "left":
        return this.#fenced();
      case "begin":
        return this.#environment();
      default:
        throw new Unknown();
    }
  }

  #letters([upper, lower, digit, elsewhere]) {
    this.#skipBlanks();
    const found = this.#next === "{" ? this.#text() : this.#take();
    if (/\\/.test(found)) throw new Unknown();
    const shift = (letter, from, base) => String.fromCodePoint(base + letter.codePointAt() - from.codePointAt());
    const letters = Array.from(found, (letter) => {
      if (Object.hasOwn(elsewhere, letter)) return elsewhere[letter];
      if (/[A-Z]/.test(letter)) return shift(letter, "A", upper);
      if (/[a-z]/.test(letter)) return shift(letter, "a", lower);
      return digit && /\d/.test(letter) ? shift(letter, "0", digit) : letter;
    });
    return made("mi", letters.join(""));
  }

  #fence() {
    const token = this.#take(),
      name = token.slice(1);
    if (token.startsWith("\\")) {
      if (!OPERATORS.has(name)) throw new Unknown();
      return OPERATORS.get(name);
    }
    return token === "." ? "" : token === "<" ? "⟨" : token === ">" ? "⟩" : token;
  }

  #fenced() {
    const open = this.#fence(),
      nodes = [];
    for (;;) {
      nodes.push(...this.#until(() => this.#next === "\\right" || this.#next === "\\middle"));
      const isMiddle = this.#take() === "\\middle";
      const sign = this.#fence();
      if (!isMiddle)
        return made("mrow", ...(open ? [operator(open, true)] : []), ...nodes, ...(sign ? [operator(sign, true)] : []));
      nodes.push(operator(sign, true));
    }
  }

  #environment() {
    const name = this.#text();
    if (!Object.hasOwn(FENCES, name)) throw new Unknown();
    if (name === "array") this.#text();
    const rows = [[]];
    for (;;) {
      rows.at(-1).push(this.#until(() => ["&", "\\\\", "\\end"].includes(this.#next)));
      const token = this.#take();
      if (token === "\\\\") rows.push([]);
      if (token === "\\end") break;
    }
    if (this.#text() !== name) throw new Unknown();
    if (rows.at(-1).length === 1 && !rows.at(-1)[0].length) rows.pop();
    const table = made("mtable", ...rows.map((cells) => made("mtr", ...cells.map((nodes) => made("mtd", ...nodes)))));
    if (/^(align|split|gather)/.test(name)) table.setAttribute("displaystyle", "true");
    const [open, close] = [...FENCES[name]];
    return made("mrow", ...(open ? [operator(open, true)] : []), table, ...(close ? [operator(close, true)] : []));
  }
}
