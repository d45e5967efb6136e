// Colours for code: comments, strings, numbers and keywords, by families of languages. Not a parser: what it does not
// know stays plain.

const words = (text) => new Set(text.split(" "));

const C_LIKE = "break case catch class const continue default do else enum extends false finally for if import in new null return static super switch this throw true try typeof void while";
const KEYWORDS = {
  js: words(`${C_LIKE} as async await debugger delete export from function get instanceof interface let of set type undefined var with yield implements private public readonly`),
  python: words("False None True and as assert async await break case class continue def del elif else except finally for from global if import in is lambda match nonlocal not or pass raise return self try while with yield"),
  c: words(`${C_LIKE} abstract auto bool boolean byte char constexpr crate double dyn explicit extern final float fn fun func go goto impl int interface let long loop match mod move mut namespace nullptr nil override package private protected pub public range ref self short signed sizeof string struct template trait type union unsafe unsigned use using val var virtual volatile where yield defer chan map select throws final record var`),
  shell: words("case cd do done echo elif else esac exit export fi for function if in local read return set source sudo then unset until while"),
  sql: words("add all alter and as asc between by case constraint create cross default delete desc distinct drop else end exists foreign from full group having if in index inner insert into is join key left like limit not null offset on or order outer primary references returning right select set table then union unique update values view when where with"),
  ruby: words("alias and begin break case class def defined do else elsif end ensure false for if in module next nil not or redo require rescue retry return self super then true undef unless until when while yield function local repeat"),
  data: words("true false null yes no on off"),
};

const STRING = String.raw`"(?:\\.|[^"\\\n])*"?|'(?:\\.|[^'\\\n])*'?`;
const NUMBER = String.raw`\b(?:0[xXbBoO][\da-fA-F_]+|\d[\d_]*(?:\.\d+)?(?:[eE][+-]?\d+)?)\w*`;
const NAME = String.raw`[\p{L}_$][\p{L}\p{N}_$]*`;
const SLASHES = String.raw`\/\/.*|\/\*[^]*?(?:\*\/|$)`;
const HASH = String.raw`#.*`;

const rules = (comment, string, name = NAME, flags = "") =>
  new RegExp(`(?<comment>${comment})|(?<string>${string})|(?<number>${NUMBER})|(?<name>${name})`, `gu${flags}`);

const FAMILIES = {
  js: [rules(SLASHES, String.raw`\x60(?:\\[^]|[^\x60\\])*\x60?|${STRING}`), "js"],
  python: [rules(HASH, String.raw`"""[^]*?(?:"""|$)|'''[^]*?(?:'''|$)|${STRING}`), "python"],
  c: [rules(`${SLASHES}|^[ \\t]*#[ \\t]*(?:include|define|if|ifdef|ifndef|endif|else|pragma).*`, String.raw`"(?:\\.|[^"\\\n])*"?|'(?:\\.|[^'\\\n]){1,8}'`, NAME, "m"), "c"],
  shell: [rules(String.raw`(?<![^\s;])#.*`, String.raw`"(?:\\[^]|[^"\\])*"?|'[^']*'?`), "shell"],
  sql: [rules(String.raw`--.*|\/\*[^]*?(?:\*\/|$)`, STRING), "sql"],
  ruby: [rules(`--.*|${HASH}`, STRING), "ruby"],
  data: [rules(HASH, STRING), "data"],
  json: [rules(String.raw`\/\/.*`, String.raw`"(?:\\.|[^"\\\n])*"(?!\s*:)`, String.raw`"(?:\\.|[^"\\\n])*"(?=\s*:)|[a-z]+`), "data"],
  css: [rules(String.raw`\/\*[^]*?(?:\*\/|$)`, STRING, String.raw`[@#.]?-{0,2}[a-zA-Z_][\w-]*`), null],
  markup: [rules(String.raw`<!--[^]*?(?:-->|$)`, STRING, String.raw`<\/?[\w:-]+|\/?>`), "markup"],
  diff: [/(?<comment>^@@.*|^(?:diff|index) .*)|(?<string>^\+.*)|(?<removed>^-.*)/gmu, null],
};

const LANGUAGES = {
  js: "js javascript jsx mjs ts tsx typescript",
  python: "py python python3 pyi",
  c: "c h cc cpp c++ hpp cxx csharp cs c# java kotlin kt go golang rust rs swift scala dart php zig objc glsl cuda",
  shell: "sh bash zsh shell console fish dockerfile docker makefile make",
  sql: "sql sqlite postgres postgresql mysql",
  ruby: "rb ruby lua elixir",
  data: "yaml yml toml ini conf env properties",
  json: "json jsonc json5 jsonl",
  css: "css scss less",
  markup: "html xml svg vue xhtml",
  diff: "diff patch",
};
const FAMILY_OF = new Map(Object.entries(LANGUAGES).flatMap(([family, names]) => names.split(" ").map((name) => [name, family])));

const MAX_LENGTH = 50_000; // beyond it, code stays plain

/** [{kind, text}, ...]: together the code; kind is null, comment, string, number, keyword or removed. */
export function highlight(code, language) {
  const family = FAMILIES[FAMILY_OF.get(language.toLowerCase())];
  if (!family || code.length > MAX_LENGTH) return [{ kind: null, text: code }];
  const [pattern, keywords] = family;
  const tokens = [];
  let end = 0;
  for (const match of code.matchAll(pattern)) {
    let kind = Object.keys(match.groups).find((name) => match.groups[name] !== undefined);
    if (kind === "name") kind = isKeyword(match[0], keywords) ? "keyword" : null;
    if (kind === null) continue;
    if (match.index > end) tokens.push({ kind: null, text: code.slice(end, match.index) });
    tokens.push({ kind, text: match[0] });
    end = match.index + match[0].length;
  }
  if (end < code.length) tokens.push({ kind: null, text: code.slice(end) });
  return tokens;
}

function isKeyword(name, keywords) {
  if (keywords === "markup" || name.startsWith('"')) return true; // a tag, or a key of JSON
  if (!keywords) return false;
  return KEYWORDS[keywords].has(keywords === "sql" ? name.toLowerCase() : name);
}
