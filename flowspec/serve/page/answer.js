// The answer so far, in words: its tokens, those that were guessed ahead marked; which answer is shown where
// there are several; what it took.

import { byId, count, made, put } from "./elements.js";

const TOKENS_SHOWN = 1500; // of a long answer the last ones
const TAIL_CHARS = 200; // a frame has no more than so many of a prompt, its last ones
const NAME_CHARS = 24; // of a question, in the list of answers
const NOTHING_YET = "The answer will stand here, and below it what is guessed of its next words.";

export class Answer {
  constructor(chosen) {
    this.prompt = byId("strip-prompt");
    this.strip = byId("strip");
    this.text = byId("strip-text");
    this.summary = byId("summary");
    this.which = byId("which");
    this.select = byId("request");
    this.select.addEventListener("change", () => chosen(this.select.value));
    this.listed = "";
    this.request = null;
    this.version = "";
  }

  show(world) {
    this._list(world);
    const request = world.shown;
    const version = `${request?.version} ${world.lost}`;
    if (request === this.request && version === this.version) return;
    const goesOn = request !== null && request === this.request;
    this.request = request;
    this.version = version;
    put(this.prompt, request ? questionOf(request.prompt) : NOTHING_YET);
    this._say(request?.said ?? [], goesOn, request?.running ?? false);
    put(this.summary, request ? summaryOf(request, world) : "No answer has run yet.");
  }

  // Adds what is new, or writes all of it again; tokens of the last instant are marked while more is to come.
  _say(said, goesOn, isRunning) {
    if (!goesOn || said.length < this.text.childElementCount || said.length > TOKENS_SHOWN)
      this.text.replaceChildren();
    const from = said.length > TOKENS_SHOWN ? said.length - TOKENS_SHOWN : this.text.childElementCount;
    for (const fresh of this.text.querySelectorAll(".fresh")) fresh.classList.remove("fresh");
    for (const token of said.slice(from)) made("span", token.guessed ? "right" : "", this.text, token.text);
    const lastS = said.at(-1)?.t;
    for (let at = said.length - 1; isRunning && at >= 0 && said[at].t === lastS; at -= 1)
      this.text.children[at - said.length + this.text.childElementCount]?.classList.add("fresh");
    this.strip.scrollTop = this.strip.scrollHeight;
  }

  _list(world) {
    const ids = world.order.length > 1 ? world.order : [];
    const listed = JSON.stringify([ids, ids.map((id) => world.requests.get(id).running), world.chosen]);
    if (listed === this.listed) return;
    this.listed = listed;
    this.which.hidden = !ids.length;
    const option = (value, text) =>
      Object.assign(document.createElement("option"), { value, textContent: text });
    const each = ids.map((id, place) =>
      option(JSON.stringify(id), nameOf(place + 1, world.requests.get(id))),
    );
    this.select.replaceChildren(option("", "auto"), ...each);
    this.select.value = world.chosen === null ? "" : JSON.stringify(world.chosen);
  }
}

// What is told of a prompt; where its beginning is missing that is seen, and it begins with a whole word.
function questionOf(prompt) {
  const isCut = prompt.length >= TAIL_CHARS;
  return isCut ? `… ${prompt.replace(/^\S*\s+/, "").trim()}` : prompt.trim();
}

// An answer in the list: its place, and how its question begins.
function nameOf(place, { prompt, running }) {
  const question = questionOf(prompt).replace(/\s+/g, " ");
  const begin = question.length > NAME_CHARS ? `${question.slice(0, NAME_CHARS)}…` : question;
  return `${place}${begin && `: ${begin}`}${running ? ", running" : ""}`;
}

function summaryOf(request, { lost, isPlain }) {
  const tokens = count(request.tokens, "token");
  if (request.running && lost)
    return `${tokens}. A device is lost: the answer goes on when others have its layers.`;
  if (isPlain) return `${tokens}.`;
  const guessed = request.running
    ? `${count(request.guesses.length, "guess", "guesses")} in the tree`
    : `${request.guessed} of them guessed ahead`;
  const wrong = request.wrong
    ? ` ${count(request.wrong, "other guess was", "other guesses were")} wrong and dropped: there are ` +
      "several for each token, and at most one of them is right."
    : "";
  return `${tokens}, ${guessed}.${wrong}`;
}
