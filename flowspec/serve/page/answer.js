// The answer so far, in words: its tokens, those that were guessed ahead marked; which answer is shown where
// there are several; what it took.

import { byId, made, put } from "./elements.js";

const TOKENS_SHOWN = 1500; // of a long answer the last ones

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
    put(this.prompt, request ? request.prompt.trim() : "");
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
    const each = ids.map((id) =>
      option(JSON.stringify(id), `${id}${world.requests.get(id).running ? ", running" : ""}`),
    );
    this.select.replaceChildren(option("", "the newest"), ...each);
    this.select.value = world.chosen === null ? "" : JSON.stringify(world.chosen);
  }
}

function summaryOf(request, { lost, isPlain }) {
  const tokens = `${request.tokens} tokens`;
  if (request.running && lost)
    return `${tokens}. A device is lost: the answer goes on when others have its layers.`;
  if (isPlain) return `${tokens}.`;
  const guessed = request.running
    ? `${request.guesses.length} guesses in the tree`
    : `${request.guessed} of them guessed ahead`;
  const wrong = request.wrong
    ? ` ${request.wrong} other guesses were wrong and were dropped: there are several for each token, ` +
      "and at most one of them is right."
    : "";
  return `${tokens}, ${guessed}.${wrong}`;
}
