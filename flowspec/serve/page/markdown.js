// An answer's Markdown as elements of the page. The library only splits the text; every element is made here,
// and markup of the answer's own stays text.

import { Lexer } from "./marked.js";

const PLAIN_FROM = 20000; // characters from which on an answer is shown as it was written,
const SLOW_MS = 200; // or once splitting it took so long: it is done again while the answer comes
const HEADINGS = ["h3", "h4", "h5", "h6"];
const INLINE = { strong: "strong", em: "em", del: "del" };

const isBlock = (token) => token.type !== "space";

// Keeps an element in step with a text that grows: blocks that are as they were stay.
export class Markdown {
  constructor(element) {
    this.element = element;
    this.raws = [];
    this.settled = ""; // the text before the last block, which nothing that follows changes
    this.isPlain = false;
  }

  // `isWhole`: nothing more comes, so all is split once more: where a link leads to may be said behind it.
  show(text, isWhole = false) {
    this.isPlain ||= text.length >= PLAIN_FROM;
    const settled = !isWhole && !this.isPlain && text.startsWith(this.settled) ? this.settled : "";
    const before = settled ? this.raws.slice(0, -1) : [];
    const tokens = this._split(text.slice(settled.length));
    const fresh = tokens.filter(isBlock);
    const raws = [...before, ...fresh.map((token) => token.raw)];
    if (isWhole && tokens.some((token) => token.type === "def")) this.raws = [];
    const first = raws.findIndex((raw, at) => raw !== this.raws[at]);
    const kept = first < 0 ? raws.length : first;
    while (this.element.childNodes.length > kept) this.element.lastChild.remove();
    this.element.append(...fresh.slice(kept - before.length).map(block));
    this.raws = raws;
    const last = Math.max(0, tokens.findLastIndex(isBlock));
    const over = tokens.slice(0, last).map((token) => token.raw);
    this.settled = settled + over.join("");
  }

  _split(text) {
    const startedMs = performance.now();
    if (!this.isPlain) {
      try {
        const tokens = new Lexer({ gfm: true, breaks: true }).lex(text);
        this.isPlain = performance.now() - startedMs > SLOW_MS;
        return tokens;
      } catch {
        // nested too deeply for it: an answer is shown whatever it is
      }
    }
    this.isPlain = true;
    return [{ type: "plain", raw: text }];
  }
}

function made(tag, children) {
  const found = document.createElement(tag);
  found.append(...children);
  return found;
}

const blocks = (tokens) => tokens.filter(isBlock).map(block);

function block(token) {
  switch (token.type) {
    case "heading":
      return made(HEADINGS[Math.min(token.depth, HEADINGS.length) - 1], inline(token.tokens));
    case "paragraph":
      return made("p", inline(token.tokens));
    case "code":
      return made("pre", [made("code", [token.text])]);
    case "blockquote":
      return made("blockquote", blocks(token.tokens));
    case "list": {
      const list = made(token.ordered ? "ol" : "ul", token.items.map(item));
      if (token.ordered && Number.isSafeInteger(token.start)) list.start = token.start;
      return list;
    }
    case "table":
      return table(token);
    case "hr":
      return made("hr", []);
    default: // markup, definitions, what nothing is known of: as it was written
      return made("p", [token.raw.trimEnd()]);
  }
}

function item(token) {
  const box = token.task ? [token.checked ? "☑ " : "☐ "] : [];
  const children = token.tokens.filter((each) => each.type !== "space" && each.type !== "checkbox");
  return made("li", [
    ...box,
    ...children.flatMap((each) => (each.type === "text" ? inline(each.tokens ?? [each]) : [block(each)])),
  ]);
}

function table(token) {
  const row = (cells, tag) =>
    made(
      "tr",
      cells.map((cell) => made(tag, inline(cell.tokens))),
    );
  const found = made("table", [
    made("thead", [row(token.header, "th")]),
    made(
      "tbody",
      token.rows.map((cells) => row(cells, "td")),
    ),
  ]);
  return Object.assign(made("div", [found]), { className: "wide" });
}

function inline(tokens) {
  return tokens.map((token) => {
    if (token.type === "br") return document.createElement("br");
    if (token.type === "codespan") return made("code", [token.text]);
    if (token.type === "escape" || (token.type === "text" && !token.tokens))
      return document.createTextNode(token.text);
    if (token.type === "text") return made("span", inline(token.tokens));
    if (Object.hasOwn(INLINE, token.type)) return made(INLINE[token.type], inline(token.tokens));
    if (token.type === "link" && token.raw.startsWith("["))
      // Where it leads is to be read, and not one click away.
      return made("span", [...inline(token.tokens), ` (${token.href})`]);
    return document.createTextNode(token.raw); // pictures, markup, bare addresses: as they were written
  });
}
