// The chat box: talks to /v1/chat/completions, keeps the dialogue, and shows errors as one line.

import { ApiError, lineOf } from "./api.js";
import { byId, count, made, put } from "./elements.js";
import { Markdown } from "./markdown.js";
import { eventsOf } from "./stream.js";

const BOTTOM_PX = 40; // so near to the end of the dialogue the view follows it
const LINES = [2, 8]; // of the question that are seen, at least and at most
const EXAMPLES = {
  bundled: ["What is 17 + 25?", "Tell me a story.", "What is FlowSpec?"],
  other: ["Why is the sky blue?", "Explain a pipeline to a child.", "Write a poem about small computers."],
};

const TOY =
  "The bundled model is a toy of 11 million parameters: outside of sums, code and plays it talks nonsense. " +
  "For a real one start ";
const WITH_A_REAL_ONE = "flowspec serve --model Qwen/Qwen3-0.6B";

export class Chat {
  // `asked` is called when a question is on its way, `came` when there is more of the answer to draw.
  constructor(api, asked, came) {
    this.api = api;
    this.asked = asked;
    this.came = came;
    this.write = null; // what has come of the answer that runs
    this.examples = [];
    this.isToy = false;
    this.messages = [];
    this.model = null;
    this.abort = null;
    this.dialogue = byId("dialogue");
    this.question = byId("question");
    this.trouble = byId("chat-trouble");
    byId("ask").addEventListener("submit", (event) => {
      event.preventDefault();
      this.send();
    });
    this.question.addEventListener("keydown", (event) => {
      if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
        event.preventDefault();
        this.send();
      }
    });
    this.question.addEventListener("input", () => this._fit());
    byId("stop").addEventListener("click", () => this.stop());
    byId("new").addEventListener("click", () => this.renew());
    this.renew();
  }

  get answering() {
    return this.abort !== null;
  }

  // In one drawing with what is shown beside the chat, so that neither is ahead of the other.
  draw() {
    this.write?.();
  }

  stop() {
    this.abort?.abort();
  }

  renew() {
    this.stop();
    this.messages = [];
    this.trouble.hidden = true;
    this._invite();
  }

  // Offers questions that this model can answer. What was told of a server that was not there is over.
  suggest(model) {
    this.trouble.hidden = true;
    this.isToy = model === "bundled";
    this.examples = model ? (EXAMPLES[model] ?? EXAMPLES.other) : [];
    if (!this.messages.length && this.dialogue.querySelector(".empty")) this._invite();
  }

  _invite() {
    const empty = made("div", "empty", null, "Ask something, and watch the devices answer it.");
    if (this.isToy) {
      const command = made("code", "", made("p", "toy", empty, TOY));
      // a line may end between words, but not within --model
      for (const word of WITH_A_REAL_ONE.split(" ")) command.append(made("span", "word", null, word), " ");
    }
    for (const text of this.examples) {
      const button = made("button", "example", empty, text);
      button.type = "button";
      button.addEventListener("click", () => {
        this.question.value = text;
        this.send();
      });
    }
    this.dialogue.replaceChildren(empty);
  }

  async send() {
    const text = this.question.value.trim();
    if (!text || this.answering) return;
    this.question.value = "";
    this._fit();
    this.trouble.hidden = true;
    this.dialogue.querySelector(".empty")?.remove();
    this.asked();
    const asked = made("div", "turn user", this.dialogue, text);
    const answer = made("div", "turn assistant running", this.dialogue);
    this.dialogue.scrollTop = this.dialogue.scrollHeight;
    const messages = [...this.messages, { role: "user", content: text }];
    const said = { text: "", thoughts: "", reason: null, usage: null };
    const abort = new AbortController();
    this._running(abort);
    let failed = null;
    try {
      await this._stream(messages, abort.signal, answer, said);
    } catch (error) {
      if (!(error instanceof ApiError || error instanceof TypeError || error.name === "AbortError"))
        throw error;
      failed = error;
    } finally {
      answer.classList.remove("running");
      this._running(null);
    }
    if (!asked.isConnected) return; // a new dialogue was begun meanwhile
    if (said.text) this.messages = [...messages, { role: "assistant", content: said.text }];
    if (failed && failed.name !== "AbortError") this._fail(failed, asked, answer, said, text);
    else this._note(answer, failed ? "stopped" : noteOf(said));
  }

  async _stream(messages, signal, answer, said) {
    const model = (this.model ??= await this._firstModel(signal));
    const body = JSON.stringify({ model, messages, stream: true, stream_options: { include_usage: true } });
    const headers = { "Content-Type": "application/json", Accept: "text/event-stream" };
    const response = await this.api.call("/v1/chat/completions", { method: "POST", headers, body, signal });
    const write = this._writer(answer, said);
    this.write = write;
    try {
      await this._take(response, said);
    } finally {
      this.write = null;
      write(true);
    }
  }

  async _take(response, said) {
    for await (const { data } of eventsOf(response.body)) {
      if (data === "[DONE]") return;
      const chunk = JSON.parse(data);
      if (chunk.error) throw new ApiError(lineOf(chunk, "the answer broke off"));
      said.usage = chunk.usage ?? said.usage;
      const choice = chunk.choices?.[0];
      said.reason = choice?.finish_reason ?? said.reason;
      const { content, reasoning_content: thought } = choice?.delta ?? {};
      if (!content && !thought) continue;
      said.text += content ?? "";
      said.thoughts += thought ?? "";
      this.came();
    }
    if (said.reason === null) throw new ApiError("the answer broke off: the server closed the connection");
  }

  // Writes what there is, if it is more than before; `isWhole`: nothing more comes.
  _writer(answer, said) {
    const markdown = new Markdown(answer);
    let thoughts = null;
    let written = 0;
    return (isWhole = false) => {
      const length = said.text.length + said.thoughts.length;
      if (length === written && !isWhole) return;
      written = length;
      const follow = this._atEnd();
      if (said.thoughts) put((thoughts ??= thoughtsBefore(answer)), said.thoughts);
      if (said.text) thoughts?.parentElement.removeAttribute("open");
      markdown.show(said.text, isWhole);
      if (follow) this.dialogue.scrollTop = this.dialogue.scrollHeight;
    };
  }

  async _firstModel(signal) {
    const found = await (await this.api.call("/v1/models", { signal })).json();
    const first = found?.data?.[0]?.id;
    if (typeof first !== "string") throw new ApiError("the server names no model");
    return first;
  }

  _fail(error, asked, answer, said, text) {
    const told = /try again in/i.test(error.message);
    const wait =
      error.status === 429 && error.retryS !== null && !told
        ? ` Try again in ${Math.max(1, Math.ceil(error.retryS))} s.`
        : "";
    const line =
      error instanceof TypeError ? "the server cannot be reached" : error.message.replace(/\.$/, "");
    this.trouble.textContent = `${line[0].toUpperCase()}${line.slice(1)}.${wait}`;
    this.trouble.hidden = false;
    if (said.text) return;
    if (said.thoughts) answer.previousElementSibling.remove();
    asked.remove();
    answer.remove();
    if (!this.dialogue.querySelector(".turn")) this._invite();
    if (!this.question.value) this.question.value = text;
    this._fit();
    this.question.focus();
  }

  _note(answer, text) {
    if (!text) return;
    const follow = this._atEnd();
    answer.after(made("p", "turn-note", null, text));
    if (follow) this.dialogue.scrollTop = this.dialogue.scrollHeight;
  }

  _running(abort) {
    this.abort = abort;
    byId("stop").hidden = !abort;
    byId("send").hidden = Boolean(abort);
    this.dialogue.setAttribute("aria-busy", String(Boolean(abort)));
  }

  _atEnd() {
    const { scrollHeight, scrollTop, clientHeight } = this.dialogue;
    return scrollHeight - scrollTop - clientHeight < BOTTOM_PX;
  }

  _fit() {
    this.question.rows = LINES[0];
    while (this.question.rows < LINES[1] && this.question.scrollHeight > this.question.clientHeight)
      this.question.rows += 1;
  }
}

// What the model thinks before it answers: open until the answer begins.
function thoughtsBefore(answer) {
  const found = made("details", "thoughts", null);
  found.open = true;
  made("summary", "", found, "Thoughts");
  answer.before(found);
  return made("div", "", found);
}

// How long it took is told of the answer that is shown, in one place.
function noteOf(said) {
  const cut = said.reason === "length" ? "cut off: the limit of tokens is reached" : "";
  const tokens = said.usage?.completion_tokens;
  return [tokens ? count(tokens, "token") : "", cut].filter(Boolean).join("; ");
}
