// Three plain tiles about the answer that is shown, and under Details the figures of the last seconds.

import { NONE, made, number, put, share } from "./elements.js";

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

const TILES = [
  {
    name: "tokens_per_s",
    title: "Tokens per second",
    value: ({ rate }) => number(rate),
    note: ({ request }) =>
      request?.wasPaused ? "with the pause for a lost device" : "a token is a word or a part of one",
  },
  {
    name: "times_plain",
    title: "Times plain decoding",
    value: ({ request, rate, plainS, isPlain }) =>
      isPlain && rate !== null
        ? "1×"
        : rate !== null && plainS && !request.wasPaused
          ? `${number(rate * plainS, 1)}×`
          : NONE,
    note: ({ request, plainS, isPlain }) =>
      isPlain
        ? "this is plain decoding: no guesses"
        : request?.wasPaused
          ? "not told after a pause"
          : plainS
            ? `without guesses: about ${number(1 / plainS)} per second`
            : "how much the guesses help",
  },
  {
    name: "guesses_right",
    title: "Guesses right",
    value: ({ request, isPlain }) =>
      request?.tokens && !isPlain ? share(request.guessed / request.tokens) : NONE,
    note: ({ request, isPlain }) =>
      request?.tokens && !isPlain
        ? `${request.guessed} of ${request.tokens} tokens were guessed ahead`
        : "tokens that were guessed ahead",
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
      put(value, about.value(of));
      put(note, about.note(of));
    }
    const figures = world.figures;
    for (const { about, value, note } of this.details) {
      put(value, figures ? about.value(figures) : NONE);
      put(note, about.note(figures));
    }
  }
}
