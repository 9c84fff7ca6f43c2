// Server-sent events over fetch (an EventSource cannot send a key), and the live view's stream of frames.

import { ApiError } from "./api.js";

const SILENT_MS = 20000; // a stream that says nothing for so long is opened anew
const RETRY_MS = [500, 1000, 2000, 4000];

// The events of a response's body as {event, data}, one by one; comments are left out.
export async function* eventsOf(body, heard = () => {}) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  let event = "";
  let data = [];
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      heard();
      const lines = (rest + value).split(/\r\n|\n|\r(?=[^\n])/);
      rest = lines.pop();
      for (const line of lines) {
        if (line === "") {
          if (data.length) yield { event: event || "message", data: data.join("\n") };
          event = "";
          data = [];
          continue;
        }
        const colon = line.indexOf(":");
        const field = colon < 0 ? line : line.slice(0, colon);
        const content = colon < 0 ? "" : line.slice(colon + 1).replace(/^ /, "");
        if (field === "data") data.push(content);
        else if (field === "event") event = content;
      }
    }
  } finally {
    await reader.cancel().catch(() => undefined); // of one that broke off, which read() told already
  }
}

// Keeps the stream of frames open until it is closed: calls hello(document), frames(list), loading(report)
// while the server loads its model, and state(name, why).
export class Live {
  constructor(api, { hello, frames, loading, state }) {
    this.api = api;
    this.told = { hello, frames, loading, state };
    this.abort = null;
  }

  open() {
    if (this.abort) return;
    this.abort = new AbortController();
    this._keep(this.abort.signal);
  }

  close() {
    this.abort?.abort();
    this.abort = null;
  }

  async _keep(signal) {
    let failures = 0;
    let isLoading = false; // a stream that told so ends when it is over, and the next one begins at once
    while (!signal.aborted) {
      let why = "the stream ended";
      try {
        if (!isLoading) this.told.state("connecting");
        isLoading = await this._read(signal, () => (failures = 0));
      } catch (error) {
        if (signal.aborted) return;
        isLoading = false;
        if (error instanceof ApiError && error.refused) {
          this.abort = null;
          this.told.state("refused", error.message);
          return;
        }
        if (!(error instanceof ApiError || error instanceof TypeError || error.name === "AbortError"))
          throw error;
        why = error.message;
      }
      if (signal.aborted) return;
      if (!isLoading) this.told.state("lost", why);
      await new Promise((wake) => setTimeout(wake, RETRY_MS[Math.min(failures, RETRY_MS.length - 1)]));
      failures += 1;
    }
  }

  // Returns whether the last that was told is that the server loads.
  async _read(signal, began) {
    let isLoading = false;
    const silence = new AbortController();
    let timer = 0;
    const heard = () => {
      clearTimeout(timer);
      timer = setTimeout(() => silence.abort(), SILENT_MS);
    };
    const stop = () => silence.abort();
    signal.addEventListener("abort", stop);
    try {
      const response = await this.api.call("/live/events", {
        headers: { Accept: "text/event-stream" },
        signal: silence.signal,
      });
      heard();
      for await (const { event, data } of eventsOf(response.body, heard)) {
        if (signal.aborted) return false;
        isLoading = event === "loading";
        if (isLoading) {
          began();
          this.told.loading(JSON.parse(data));
        } else if (event === "hello") {
          began();
          this.told.hello(JSON.parse(data));
        } else if (event === "frames") {
          this.told.frames(JSON.parse(data));
        }
      }
    } finally {
      clearTimeout(timer);
      signal.removeEventListener("abort", stop);
    }
    return isLoading;
  }
}
