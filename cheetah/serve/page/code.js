/** Colours for code: comments, strings, numbers, keywords and calls, by a few families of languages. */
import { element } from "./dom.js";

const LONGEST = 50_000; // characters; longer code has no colours

const FAMILIES = {
  slashes: `
    c h cc cpp c++ hpp cu cuda java js javascript jsx mjs ts typescript tsx go rust rs kotlin kt swift cs csharp
    c# php scala dart zig glsl wgsl css scss proto ptx
  `,
  hashes: `
    py python py3 python3 ipython sh bash zsh shell console fish rb ruby yaml yml toml r make makefile dockerfile
    perl pl cmake ini conf elixir nim jl julia powershell ps1 graphql
  `,
  dashes: "sql postgresql mysql sqlite lua haskell hs ada vhdl",
  json: "json jsonc json5 jsonl",
  markup: "html xml svg vue htm",
  diff: "diff patch",
};

const FAMILY_OF = Object.fromEntries(
  Object.entries(FAMILIES).flatMap(([family, names]) =>
    names
      .trim()
      .split(/\s+/)
      .map((name) => [name, family]),
  ),
);

const KEYWORDS = {
  slashes: `
    abstract as async await auto bool boolean break case catch char class const constexpr consteval continue
    default defer delete do double dyn else enum export extends extern false final finally float fn for foreach
    from func function go goto if impl implements import in inline instanceof int interface internal is let long
    loop match mod module move mut namespace new nil noexcept null nullptr operator override package private
    protected pub public range ref return Self self short signed sizeof static string struct super switch template
    this throw throws trait true try type typedef typename typeof union unsafe unsigned use using val var virtual
    void volatile where while with yield __global__ __device__ __shared__ __host__ __restrict__ undefined
  `,
  hashes: `
    and as assert async await begin break case class continue def del do done elif else elsif end esac except
    export False false fi finally for from function global if import in is lambda let local match module None nil
    nonlocal not null or pass raise require rescue return self set then True true try unless until use while with
    yield echo
  `,
  dashes: `
    add all alter and as asc begin between by case cast create cross default delete desc distinct do drop else
    elseif end exists false for foreign from full function group having if in index inner insert into is join key
    left like limit local nil not null offset on or order outer over partition primary references repeat return
    right select set table then true union unique until update using values view when where while with data
    deriving instance let module of type
  `,
  json: "true false null",
};

const WORDS = Object.fromEntries(
  Object.entries(KEYWORDS).map(([family, words]) => [family, new Set(words.trim().split(/\s+/))]),
);

const STRING = String.raw`"(?:[^"\\\n]|\\.)*"?|'(?:[^'\\\n]|\\.)*'?`;
const NUMBER = String.raw`(?<![\w$])(?:0[xX][\da-fA-F_]+|0[bB][01_]+|\d[\d_]*(?:\.\d+)?(?:[eE][-+]?\d+)?)\w*`;
const WORD = String.raw`[A-Za-z_$][\w$]*`;

const expression = (comment, string = STRING) =>
  new RegExp(`(?<comment>${comment})|(?<string>${string})|(?<number>${NUMBER})|(?<word>${WORD})`, "gm");

const DIRECTIVES = "include|define|undef|if|ifdef|ifndef|else|elif|endif|pragma|error";

const PARTS = {
  slashes: expression(
    String.raw`\/\/[^\n]*|\/\*[^]*?(?:\*\/|(?![^]))|^[ \t]*#[ \t]*(?:${DIRECTIVES})\b[^\n]*`,
    `${STRING}|\`(?:[^\`\\\\]|\\\\[^])*\`?`,
  ),
  hashes: expression(String.raw`(?<![\w$&{])#[^\n]*`, `"""[^]*?(?:"""|(?![^]))|'''[^]*?(?:'''|(?![^]))|${STRING}`),
  dashes: expression(String.raw`--[^\n]*|\/\*[^]*?(?:\*\/|(?![^]))`),
  json: expression(String.raw`\/\/[^\n]*`, String.raw`"(?:[^"\\\n]|\\.)*"?`),
  markup: /(?<comment><!--[^]*?(?:-->|(?![^])))|(?<string>"[^"<>]*"|'[^'<>]*')|(?<word><\/?[\w:-]+|\/?>)/g,
  diff: /^(?:(?<added>\+[^\n]*)|(?<removed>-[^\n]*)|(?<comment>@@[^\n]*))/gm,
};

/** Text and spans of `code`; the text alone where the language is not known. */
export function coloured(code, language) {
  const family = Object.hasOwn(FAMILY_OF, language) ? FAMILY_OF[language] : undefined;
  if (!family || code.length > LONGEST) return [code];
  const made = [];
  let at = 0;
  for (const found of code.matchAll(PARTS[family])) {
    const kind = kindOf(found, family, code);
    if (!kind) continue;
    made.push(code.slice(at, found.index), element("span", { class: `is-${kind}` }, found[0]));
    at = found.index + found[0].length;
  }
  return [...made, code.slice(at)];
}

function kindOf(found, family, code) {
  const [kind] = Object.entries(found.groups).find(([, text]) => text !== undefined);
  if (
    kind === "string" &&
    family === "json" &&
    /^\s*:/.test(code.slice(found.index + found[0].length, found.index + found[0].length + 20))
  )
    return "name";
  if (kind !== "word" || family === "markup") return kind;
  const word = family === "dashes" ? found[0].toLowerCase() : found[0];
  if (WORDS[family].has(word)) return "word";
  return code[found.index + found[0].length] === "(" ? "call" : undefined;
}
