// The common part of LaTeX's formulas -> a tree of MathML, which browsers draw themselves. What is not understood gives
// null, and the page shows the source. It makes no elements, see `markdown_view.js`.

const MAX_SOURCE = 20_000;
const MATH_DEPTH = 40; // of groups in one another

const GREEK =
  "alpha α beta β gamma γ delta δ epsilon ϵ varepsilon ε zeta ζ eta η theta θ vartheta ϑ iota ι kappa κ lambda λ mu μ nu ν xi ξ " +
  "omicron ο pi π varpi ϖ rho ρ varrho ϱ sigma σ varsigma ς tau τ upsilon υ phi ϕ varphi φ chi χ psi ψ omega ω Gamma Γ Delta Δ " +
  "Theta Θ Lambda Λ Xi Ξ Pi Π Sigma Σ Upsilon Υ Phi Φ Psi Ψ Omega Ω hbar ℏ ell ℓ Re ℜ Im ℑ aleph ℵ partial ∂ nabla ∇ infty ∞ " +
  "emptyset ∅ varnothing ∅ imath ı jmath ȷ top ⊤ bot ⊥ angle ∠ triangle △ degree °";
const OPERATORS =
  "times × cdot ⋅ div ÷ pm ± mp ∓ ast ∗ star ⋆ circ ∘ bullet ∙ oplus ⊕ ominus ⊖ otimes ⊗ odot ⊙ wedge ∧ land ∧ vee ∨ lor ∨ cap ∩ " +
  "cup ∪ setminus ∖ neg ¬ lnot ¬ leq ≤ le ≤ geq ≥ ge ≥ neq ≠ ne ≠ ll ≪ gg ≫ approx ≈ equiv ≡ sim ∼ simeq ≃ cong ≅ propto ∝ prec ≺ " +
  "succ ≻ subset ⊂ supset ⊃ subseteq ⊆ supseteq ⊇ subsetneq ⊊ in ∈ notin ∉ ni ∋ forall ∀ exists ∃ nexists ∄ perp ⊥ parallel ∥ mid ∣ " +
  "nmid ∤ vdash ⊢ models ⊨ to → rightarrow → leftarrow ← gets ← leftrightarrow ↔ Rightarrow ⇒ implies ⟹ Leftarrow ⇐ " +
  "Leftrightarrow ⇔ iff ⟺ mapsto ↦ longrightarrow ⟶ longleftarrow ⟵ Longrightarrow ⟹ uparrow ↑ downarrow ↓ nearrow ↗ searrow ↘ " +
  "rightharpoonup ⇀ rightleftharpoons ⇌ ldots … dots … cdots ⋯ vdots ⋮ ddots ⋱ dotsc … dotsb ⋯ colon : prime ′ therefore ∴ because ∵ " +
  "langle ⟨ rangle ⟩ lfloor ⌊ rfloor ⌋ lceil ⌈ rceil ⌉ lvert | rvert | vert | lVert ‖ rVert ‖ Vert ‖ lbrace { rbrace } lbrack [ " +
  "rbrack ] backslash \\ triangleq ≜ coloneqq ≔ blacksquare ■ square □ checkmark ✓ dagger †";
const LARGE =
  "sum ∑ prod ∏ coprod ∐ bigcup ⋃ bigcap ⋂ bigoplus ⨁ bigotimes ⨂ bigvee ⋁ bigwedge ⋀ int ∫ iint ∬ iiint ∭ oint ∮";
const FUNCTIONS = new Set(
  ("sin cos tan cot sec csc arcsin arccos arctan sinh cosh tanh coth log ln lg exp ker dim deg arg hom " +
    "det gcd Pr lim max min sup inf limsup liminf argmax argmin").split(" "),
);
const WITH_LIMITS = new Set("det gcd Pr lim max min sup inf limsup liminf argmax argmin".split(" "));
const ACCENTS = {
  hat: "^", widehat: "^", bar: "¯", overline: "¯", vec: "→", overrightarrow: "→", dot: "˙", ddot: "¨", tilde: "~", widetilde: "~",
  check: "ˇ", breve: "˘", acute: "´", grave: "`", overbrace: "⏞",
};
const UNDER = { underline: "_", underbrace: "⏟" };
const SPACES = { ",": "0.17em", ":": "0.22em", ">": "0.22em", ";": "0.28em", "!": "-0.17em", " ": "0.33em", quad: "1em", qquad: "2em" };
const IGNORED = new Set("displaystyle textstyle scriptstyle limits nolimits left. right. nonumber notag".split(" "));
const SIZES = /^(?:[bB]igg?[lrm]?)$/;
const FENCES = {
  matrix: ["", ""], smallmatrix: ["", ""], pmatrix: ["(", ")"], bmatrix: ["[", "]"], Bmatrix: ["{", "}"], vmatrix: ["|", "|"],
  Vmatrix: ["‖", "‖"], cases: ["{", ""], array: ["", ""], aligned: ["", ""], align: ["", ""], alignat: ["", ""], split: ["", ""],
  gathered: ["", ""], gather: ["", ""], equation: ["", ""],
};
// First capital, first small letter and first digit of an alphabet, and the letters that stand elsewhere.
const ALPHABETS = {
  mathbf: [0x1d400, 0x1d41a, 0x1d7ce, {}],
  boldsymbol: [0x1d468, 0x1d482, 0x1d7ce, {}],
  mathbb: [0x1d538, 0x1d552, 0x1d7d8, { C: "ℂ", H: "ℍ", N: "ℕ", P: "ℙ", Q: "ℚ", R: "ℝ", Z: "ℤ" }],
  mathcal: [0x1d49c, 0x1d4b6, 0, { B: "ℬ", E: "ℰ", F: "ℱ", H: "ℋ", I: "ℐ", L: "ℒ", M: "ℳ", R: "ℛ", e: "ℯ", g: "ℊ", o: "ℴ" }],
  mathfrak: [0x1d504, 0x1d51e, 0, { C: "ℭ", H: "ℌ", I: "ℑ", R: "ℜ", Z: "ℨ" }],
  mathsf: [0x1d5a0, 0x1d5ba, 0x1d7e2, {}],
  mathtt: [0x1d670, 0x1d68a, 0x1d7f6, {}],
};
ALPHABETS.mathscr = ALPHABETS.mathcal;
ALPHABETS.bm = ALPHABETS.boldsymbol;
const TEXTS = new Set("text textrm textbf textit mathrm operatorname mbox textsf texttt tag".split(" "));

const wordPairs = (text) => {
  const words = text.split(" ");
  return new Map(words.flatMap((word, at) => (at % 2 ? [] : [[word, words[at + 1]]])));
};
const [LETTERS, SYMBOLS, BIG] = [GREEK, OPERATORS, LARGE].map(wordPairs);

class MathError extends Error {}

const node = (tag, children, attributes = {}) => ({ tag, children, attributes });
const row = (children) => (children.length === 1 ? children[0] : node("mrow", children));
const operator = (text, attributes = {}) => node("mo", [text], attributes);

/** The tree of a formula with its delimiters, such as "$x^2$": `tag`, `attributes`, `children`; null if it is not understood. */
export function parseMath(source) {
  const found = /^\s*(\$\$|\$|\\\[|\\\()([\s\S]*?)(\$\$|\$|\\\]|\\\))\s*$/.exec(source);
  if (!found || source.length > MAX_SOURCE) return null;
  const display = found[1] === "$$" || found[1] === "\\[";
  try {
    const parser = new MathParser(found[2]);
    const children = parser.list(() => false);
    if (!children.length) return null;
    return node("math", [row(children)], display ? { display: "block" } : {});
  } catch (error) {
    if (error instanceof MathError) return null;
    throw error;
  }
}

class MathParser {
  constructor(text) {
    this.tokens = text.match(/\\[a-zA-Z]+\*?|\\[\s\S]|\s+|[\s\S]/gu) ?? [];
    this.at = 0;
    this.depth = 0;
  }

  get next() {
    return this.tokens[this.at];
  }

  spaces() {
    while (this.next !== undefined && !this.next.trim()) this.at += 1;
  }

  /** Items until `ends(token)`, which stays; the end of the text ends the outermost list only. */
  list(ends) {
    if ((this.depth += 1) > MATH_DEPTH) throw new MathError();
    const items = [];
    for (this.spaces(); !ends(this.next); this.spaces()) {
      if (this.next === undefined) {
        if (this.depth > 1) throw new MathError();
        break;
      }
      const item = this.item();
      if (item) items.push(item);
    }
    this.depth -= 1;
    return items;
  }

  /** What a command or a script takes: a group in braces, or one character or command. */
  group() {
    if ((this.depth += 1) > MATH_DEPTH) throw new MathError();
    const found = this.argument();
    this.depth -= 1;
    return found;
  }

  argument() {
    this.spaces();
    if (/^[0-9]$/.test(this.next ?? "")) return node("mn", [this.tokens[this.at++]]);
    if (this.next !== "{") return this.atom() ?? node("mrow", []);
    this.at += 1;
    const items = this.list((token) => token === "}");
    this.at += 1;
    return row(items);
  }

  /** The source between braces, for texts and names. */
  raw() {
    this.spaces();
    if (this.next !== "{") throw new MathError();
    const start = (this.at += 1);
    for (let open = 1; open; this.at += 1) {
      if (this.next === undefined) throw new MathError();
      open += this.next === "{" ? 1 : this.next === "}" ? -1 : 0;
    }
    return this.tokens.slice(start, this.at - 1).join("");
  }

  /** An atom with what stands above and below it. */
  item() {
    const base = this.atom();
    let [low, high] = [null, null];
    for (this.spaces(); ["^", "_", "'"].includes(this.next) || this.next === "\\limits"; this.spaces()) {
      const mark = this.tokens[this.at++];
      if (mark === "\\limits") continue;
      if (mark === "'") {
        const primes = [operator("′"), ...(high ? [high] : [])];
        high = row(primes);
      } else if (mark === "^") {
        high = high ? row([high, this.group()]) : this.group();
      } else if (low) throw new MathError();
      else low = this.group();
    }
    if (!low && !high) return base;
    const own = base ?? node("mrow", []);
    const kind = own.limits ? ["munder", "mover", "munderover"] : ["msub", "msup", "msubsup"];
    return node(low && high ? kind[2] : low ? kind[0] : kind[1], [own, low, high].filter(Boolean));
  }

  atom() {
    this.spaces();
    const token = this.tokens[this.at++];
    if (token === undefined || ["}", "&", "^", "_", "%", "#"].includes(token)) {
      if (token === "^" || token === "_") return (this.at -= 1), null; // a script of nothing
      throw new MathError();
    }
    if (token === "{") return (this.at -= 1), this.group();
    if (token === "~") return node("mspace", [], { width: "0.33em" });
    if (/[0-9]/.test(token)) return this.number(token);
    if (token[0] === "\\") return this.command(token.slice(1));
    if (/\p{L}/u.test(token)) return node("mi", [token]);
    if (token === "-") return operator("−");
    return operator(token, "()[]|".includes(token) ? { stretchy: "false" } : {});
  }

  number(first) {
    let text = first;
    while (/^[0-9]$/.test(this.next ?? "") || (this.next === "." && /[0-9]/.test(this.tokens[this.at + 1] ?? ""))) text += this.tokens[this.at++];
    return node("mn", [text]);
  }

  command(name) {
    if (LETTERS.has(name)) return node("mi", [LETTERS.get(name)]);
    if (SYMBOLS.has(name)) return operator(SYMBOLS.get(name));
    if (BIG.has(name)) return Object.assign(operator(BIG.get(name)), { limits: !name.endsWith("int") });
    if (FUNCTIONS.has(name)) return this.named(name, WITH_LIMITS.has(name));
    if (name in SPACES) return node("mspace", [], { width: SPACES[name] });
    if (IGNORED.has(name)) return null;
    if (SIZES.test(name)) return this.delimiter();
    if ("{}%$#&_|".includes(name)) return operator(name === "|" ? "‖" : name);
    if (name in ACCENTS) return this.accent(ACCENTS[name], "mover", name === "overbrace");
    if (name in UNDER) return this.accent(UNDER[name], "munder", name === "underbrace");
    if (TEXTS.has(name.replace("*", ""))) return this.text(name);
    if (name in ALPHABETS) return this.alphabet(ALPHABETS[name]);
    return this.structure(name);
  }

  named(name, limits) {
    const text = node(limits ? "mo" : "mi", [name], limits ? { movablelimits: "true" } : {});
    return limits ? Object.assign(text, { limits }) : row([text, operator("\u2061")]);
  }

  text(name) {
    const words = this.raw();
    if (/[\\$]/.test(words.replace(/\\[ %&#_{}]/g, ""))) throw new MathError();
    const plain = words.replace(/\\([ %&#_{}])/g, "$1");
    if (name === "tag") return node("mtext", [`\u2003(${plain})`]);
    return name === "mathrm" || name.startsWith("operatorname") ? node("mi", [plain], { mathvariant: "normal" }) : node("mtext", [plain.replace(/ /g, "\u00a0")]);
  }

  alphabet([capital, small, digit, others]) {
    const styled = (text) =>
      text.replace(/[A-Za-z0-9]/g, (char) => {
        const [first, from] = /[A-Z]/.test(char) ? [capital, "A"] : /[a-z]/.test(char) ? [small, "a"] : [digit, "0"];
        return others[char] ?? (first ? String.fromCodePoint(first + char.charCodeAt(0) - from.charCodeAt(0)) : char);
      });
    const walk = (found) =>
      typeof found === "string" ? styled(found) : { ...found, children: found.tag === "mtext" ? found.children : found.children.map(walk) };
    return walk(this.group());
  }

  accent(mark, tag, limits) {
    const found = node(tag, [this.group(), operator(mark, { stretchy: String(!"˙¨~^ˇ˘´`".includes(mark)) })], { accent: "true" });
    return limits ? Object.assign(found, { limits }) : found;
  }

  structure(name) {
    switch (name) {
      case "frac": case "dfrac": case "tfrac": case "cfrac":
        return node("mfrac", [this.group(), this.group()]);
      case "binom": case "dbinom": case "tbinom":
        return row([operator("("), node("mfrac", [this.group(), this.group()], { linethickness: "0" }), operator(")")]);
      case "sqrt":
        return this.root();
      case "left":
        return this.fenced();
      case "overset": case "stackrel": case "underset": {
        const [mark, base] = [this.group(), this.group()];
        return node(name === "underset" ? "munder" : "mover", [base, mark]);
      }
      case "boxed": case "fbox":
        return node("mrow", [this.group()], { class: "boxed" });
      case "pmod":
        return row([operator("("), node("mi", ["mod"]), node("mspace", [], { width: "0.33em" }), this.group(), operator(")")]);
      case "bmod": case "mod":
        return operator("mod");
      case "phantom":
        return node("mphantom", [this.group()]);
      case "begin":
        return this.environment(this.raw().replace("*", ""));
    }
    throw new MathError();
  }

  root() {
    this.spaces();
    if (this.next !== "[") return node("msqrt", [this.group()]);
    this.at += 1;
    const index = row(this.list((token) => token === "]"));
    this.at += 1;
    return node("mroot", [this.group(), index]);
  }

  /** What stands behind \left, \right and \big: an operator, or nothing for a dot. */
  delimiter() {
    this.spaces();
    const token = this.tokens[this.at++] ?? "";
    const name = token.slice(1);
    if (token === ".") return null;
    if ("()[]|/<>".includes(token) && token) return operator({ "<": "⟨", ">": "⟩" }[token] ?? token, { stretchy: "true" });
    if (token[0] === "\\" && (SYMBOLS.has(name) || "{}|".includes(name))) return operator(SYMBOLS.get(name) ?? (name === "|" ? "‖" : name), { stretchy: "true" });
    throw new MathError();
  }

  fenced() {
    const items = [this.delimiter()];
    items.push(...this.list((token) => token === "\\right"));
    this.at += 1;
    items.push(this.delimiter());
    return node("mrow", items.filter(Boolean));
  }

  environment(name) {
    if (!Object.hasOwn(FENCES, name)) throw new MathError();
    if (name === "array" || name === "alignat") this.raw();
    const rows = [[]];
    for (;;) {
      const items = this.list((token) => ["&", "\\\\", "\\end"].includes(token));
      rows.at(-1).push(row(items));
      const token = this.tokens[this.at++];
      if (token === "\\end") break;
      if (token === "\\\\") rows.push([]);
    }
    if (this.raw().replace("*", "") !== name) throw new MathError();
    const last = rows.at(-1);
    if (last.length === 1 && last[0].tag === "mrow" && !last[0].children.length) rows.pop(); // behind a final \\
    const cells = rows.map((each) => node("mtr", each.map((cell) => node("mtd", [cell]))));
    const kind = name === "cases" ? "cases" : /^(?:align|aligned|alignat|split)$/.test(name) ? "aligned" : "matrix";
    const [open, close] = FENCES[name].map((text) => (text ? operator(text, { stretchy: "true" }) : null));
    return node("mrow", [open, node("mtable", cells, { class: kind }), close].filter(Boolean));
  }
}
