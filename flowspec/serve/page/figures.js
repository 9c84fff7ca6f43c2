// Three plain tiles about the answer that is shown, and under Details the figures of the last seconds.

import { NONE, count, made, number, put, share } from "./elements.js";

const mean = (values) =>
  values.length ? values.reduce((sum, value) => sum + value, 0) / values.length : null;

const DETAILS = [
  {
    name: "rate",
    title: "Tokens per second",
    value: (found) => number(found.tokens_per_s),
    note: () => "of all answers, last seconds",
  },
  {
    name: "S",
    title: "S",
    value: (found) => number(found.S, 2),
    note: () => "tokens per segment that commits any",
  },
  {
    name: "rho",
    title: "ρ (rho)",
    value: (found) => share(found.rho),
    note: () => "share of tokens that were in flight when known",
  },
  {
    name: "acceptance",
    title: "Acceptance",
    value: (found) => number(found.acceptance, 2),
    note: () => "tokens per segment sent",
  },
  {
    name: "busy",
    title: "Busy",
    value: (found) => share(mean(found.busy)),
    note: (found) => (found ? found.busy.map(share).join(" · ") : "share of the time, of each stage"),
  },
  {
    name: "dropped_rows",
    title: "Dropped rows",
    value: (found) => number(found.dropped_rows, 0),
    note: () => "of wrong guesses, last seconds",
  },
];

// How many times as fast an answer is as it would be without guesses; null where that is not known.
export function timesPlain({ rate, wasPaused }, plainS) {
  return rate !== null && plainS && !wasPaused ? rate * plainS : null;
}

// Values while an answer runs and has no figures yet are words.
const TILES = [
  {
    name: "tokens_per_s",
    title: "Tokens per second",
    value: ({ request, rate }) =>
      rate !== null || !request?.running ? number(rate) : { words: "reading the prompt" },
    note: ({ request }) =>
      request?.wasPaused ? "with the pause for a lost device" : "a token is a word or a part of one",
  },
  {
    name: "times_plain",
    title: "Speed-up",
    value: ({ request, rate, plainS, isPlain }) => {
      if (isPlain && rate !== null) return "1×";
      const times = request && timesPlain(request, plainS);
      if (times) return `${number(times, 1)}×`;
      return request?.running && !request.wasPaused ? { words: "known after some tokens" } : NONE;
    },
    note: ({ request, plainS, isPlain }) => {
      if (isPlain) return "this is plain decoding: no guesses";
      if (request?.wasPaused) return "not told after a pause";
      return plainS ? `over ${number(1 / plainS)} tokens/s without guesses` : "over answers without guesses";
    },
  },
  {
    name: "guessed_ahead",
    title: "Guessed ahead",
    value: ({ request, isPlain }) => {
      if (isPlain) return "none";
      if (request?.tokens) return share(request.guessed / request.tokens);
      if (!request?.running) return NONE;
      return { words: `${count(request.guesses.length, "guess", "guesses")} so far` };
    },
    note: ({ request, isPlain }) => {
      if (isPlain) return "nothing is guessed here";
      return request?.tokens
        ? `${request.guessed} of the answer's ${request.tokens} tokens`
        : "of the answer's tokens";
    },
  },
];

function tiles(list, abouts) {
  return abouts.map((about) => {
    const tile = made("div", "tile", list);
    made("dt", "", tile, about.title);
    const value = made("dd", "value", tile);
    value.dataset.figure = about.name;
    return { about, value, note: made("dd", "note", tile) };
  });
}

export class Figures {
  constructor(plain, details) {
    this.plain = tiles(plain, TILES);
    this.details = tiles(details, DETAILS);
  }

  // `plainS` is what a token would take without guesses, null where that is not known.
  show(world, plainS) {
    const request = world.shown;
    const of = { request, rate: request?.rate ?? null, plainS, isPlain: world.isPlain };
    for (const { about, value, note } of this.plain) {
      const found = about.value(of);
      value.classList.toggle("words", Boolean(found.words));
      put(value, found.words ?? found);
      put(note, about.note(of));
    }
    const figures = world.figures;
    for (const { about, value, note } of this.details) {
      put(value, figures ? about.value(figures) : NONE);
      put(note, about.note(figures));
    }
  }
}
