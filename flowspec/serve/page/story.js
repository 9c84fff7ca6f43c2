// One sentence that says what one sees while it happens, for somebody who never heard of speculation.

import { byId, count, number, put } from "./elements.js";
import { timesPlain } from "./figures.js";

const AWAY = {
  connecting: "Connecting to the server.",
  lost: "The server is not there; trying again.",
  refused: "This server wants a key.",
};
const ABOUT =
  "FlowSpec runs one language model on several small devices, which check in a pipeline what a small model " +
  "guesses ahead; this page shows them at it. ";
const SLOWER = 0.95; // times as fast as without guesses
const LOOKED_UP = "ngram"; // a drafter that is no model

// What happens: a kind, by which those who listen are told of changes only, and the sentence.
function told(world, { isReplay, isFrozen, connection, plainS }) {
  if (!isReplay && connection === "loading") return [`loading ${world.model}`, loadingOf(world)];
  if (!isReplay && connection !== "live") return [connection, AWAY[connection]];
  if (world.failed) return ["failed", failureOf(world, isReplay)];
  const request = world.shown;
  const loading = world.devices.find((device) => device.loading);
  const doing = loading
    ? ` ${loading.name}: ${loading.loading.doing}, ${Math.round(100 * loading.loading.share)}%.`
    : "";
  if (world.lost) {
    const why = lossOf(world);
    const until = isAllLost(world) ? "one comes back" : "all layers are there again";
    const then = request?.running
      ? ` The answer waits until ${until}, and then goes on with the very same tokens.`
      : "";
    return [`lost ${why}`, `${why}${then}${doing}`];
  }
  if (!request) {
    const devices = world.stages.length;
    const parts =
      devices === 1
        ? "One device holds the whole model."
        : `${devices} devices hold a part of the model each.`;
    const what = isReplay
      ? "This is a recording of how they answer."
      : "Ask something, and watch them answer together.";
    return ["idle", `${isReplay ? "" : ABOUT}${parts} ${what}${doing}`];
  }
  if (!request.running)
    return [
      isFrozen || isReplay ? "ended" : "idle",
      `${endOf(request, world.isPlain ? null : timesPlain(request, plainS))}${doing}`,
    ];
  if (request.isReading && request.tokens)
    return ["reading again", "The devices read again what is known, and go on with the very same tokens."];
  if (request.isReading) {
    const read = Math.min(request.promptTokens, request.reused + request.read);
    return ["reading", `The devices read the question: ${read} of ${request.promptTokens} tokens.`];
  }
  const back = world.devices.find((device) => world.isBack(device.name));
  const news = back ? `${back.name} is back and helps again. ` : "";
  if (world.isPlain)
    return [
      "plain",
      `${news}Without guesses: each token goes through all devices before the next one can begin. ` +
        "One works, the others wait.",
    ];
  if (request.isUnaided)
    return [
      "unaided",
      `${news}No guesses at the moment: they would not make it faster here, by what was measured. ` +
        "Each token goes through all devices before the next one begins.",
    ];
  const models = world.drafters.filter((name) => name !== LOOKED_UP).length;
  const who =
    models > 1
      ? "Small models guess the next words"
      : models
        ? "A small model guesses the next words"
        : "The next words are guessed by what followed before";
  return [
    "guessing",
    `${news}${who}, and the devices check many guesses at once. ` +
      "Right ones are the answer; wrong ones are dropped, and change no word of it.",
  ];
}

// The devices' cards tell how far each of them is.
function loadingOf({ model, loading }) {
  const ready = loading.filter((step) => step.share >= 1).length;
  const far = loading.length ? ` (${ready} of ${loading.length} devices ready)` : "";
  return `The server loads the model ${model}${far}. This page goes on by itself when it can answer.`;
}

function failureOf({ failed }, isReplay) {
  const again = isReplay ? "" : " Nothing is answered any more: start flowspec serve again.";
  return `It failed: ${failed}.${again}`;
}

const isAllLost = ({ devices }) => devices.length > 0 && devices.every((device) => !device.present);

// Who is lost: what was told first of it has the reason, but names one device only.
function lossOf(world) {
  const held = new Set(world.stages.map((stage) => stage.name));
  const gone = world.devices.filter((device) => !device.present && held.has(device.name));
  if (isAllLost(world)) return "All devices are lost.";
  if (gone.length > 1) return `Lost: ${gone.map((device) => device.name).join(", ")}.`;
  if (world.note) return `${world.note[0].toUpperCase()}${world.note.slice(1)}.`;
  return gone.length ? `Lost: ${gone[0].name}.` : "The devices share the layers out anew.";
}

// How an answer went; `times` as fast as without guesses, null where that is not known.
function endOf(request, times) {
  const { reason, statistics } = request.end;
  const isTimed = Number.isFinite(statistics.decode_s) && statistics.decode_s > 0;
  const seconds = isTimed ? ` in ${number(statistics.decode_s)} s` : "";
  const faster = times
    ? `, about ${number(times, 1)} times as fast as without guesses${times < SLOWER ? ", so slower" : ""}`
    : "";
  const why =
    {
      stop: "",
      length: " It ends here because it may have no more tokens.",
      cancelled: " It was stopped.",
    }[reason] ?? ` It ended by ${reason}.`;
  const guessed = request.guessed
    ? ` ${request.guessed} of them were guessed ahead, and only had to be checked.`
    : "";
  const losses = statistics.recoveries
    ? " The devices had to share the layers out anew; the answer is the same as without that."
    : "";
  return `Done: ${count(request.tokens, "token")}${seconds}${faster}.${guessed}${losses}${why}`;
}

export class Story {
  constructor() {
    this.kind = "";
    this.sentence = byId("sentence");
    this.status = byId("said-state");
  }

  show(world, how) {
    const [kind, sentence] = told(world, how);
    put(this.sentence, sentence);
    if (kind !== this.kind) put(this.status, sentence);
    this.kind = kind;
  }
}
