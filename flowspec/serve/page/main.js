// Puts the page together: live, frozen at an answer's end, or a replay; what is drawn when, and the keys.

import { Answer } from "./answer.js";
import { Api } from "./api.js";
import { Chat } from "./chat.js";
import { watchColours } from "./colours.js";
import { byId, count } from "./elements.js";
import { Figures } from "./figures.js";
import { Kept } from "./kept.js";
import { Key } from "./key.js";
import { Lanes } from "./lanes.js";
import { DeviceMap } from "./map.js";
import { Timeline, World } from "./model.js";
import { Player } from "./player.js";
import { RecordingError, readFile } from "./recording.js";
import { Replay } from "./replay.js";
import { shelf } from "./shelf.js";
import { Story } from "./story.js";
import { Live } from "./stream.js";
import { Tree } from "./tree.js";

const FRAME_MS = 1000 / 30; // drawn at most so often,
const DRAWN_TIMES = 2; // and at most this part of the time
// And on the head's own machine, if it is small: the answer's work comes first.
const SHARED_FRAME_MS = 1000 / 12;
const SHARED_CORES = 4;
const STILL_MS = 1000; // and for those who want little motion
const LAG_S = [0.2, 3]; // of the live timeline: a trip is known when it is back
const DRIFT_S = 0.0005; // per batch, by which the least delay that was seen is forgotten
const SAID_MS = 2000;
const AHEAD_MS = 12; // asked for before it is due: the screen's frames come when they come
const WHOLE = -1; // the window that is as long as the answer

const NOTHING = { model: "", method: "", drafters: [], world: "", stages: [], frames: [] };
const STATES = {
  connecting: "connecting",
  loading: "loading",
  live: "live",
  lost: "reconnecting",
  refused: "no key",
};
const FAILED = "failed";

const motion = matchMedia("(prefers-reduced-motion: reduce)");
const still = () => motion.matches;
const isStatic = shelf.length > 0;

const shared =
  ["localhost", "127.0.0.1", "[::1]"].includes(location.hostname) &&
  navigator.hardwareConcurrency <= SHARED_CORES;
const frameMs = shared ? SHARED_FRAME_MS : FRAME_MS;

const key = new Key(() => isFile || live.open());
const api = new Api(key);
const chat = new Chat(api, () => !isFile && player.replay && backToLive(), wake);
const figures = new Figures(byId("tiles"), byId("figures"));
const answer = new Answer(choose);
const story = new Story();
const map = new DeviceMap(byId("map"));
const lanes = new Lanes(byId("lanes"), wake);
const tree = new Tree(byId("tree"), wake, still);
const player = new Player(wake, backToLive);
const live = new Live(api, { hello, frames: received, loading, state: connected });

let shown = { timeline: new Timeline(), world: new World(NOTHING), kept: new Kept(NOTHING) }; // live
let frozen = null; // the last answer's replay, which stands at its end until the next one begins
let isFile = false; // whether the replay is of a file, and not of what was just seen
let connection = "connecting";
let behindS = null; // the person's clock less the recording's, at the quickest
let lagS = LAG_S[0];
let timer = 0; // until the next drawing
let frame = 0; // of the screen that it waits for
let drawnMs = 0;
let tookMs = 0; // the last drawing
let dirty = true; // there is something new beside the clock
let saidMs = 0;

const world = () => (player.replay ?? shown).world;

function hello(document) {
  const timeline = new Timeline(document.stages);
  shown = { timeline, world: new World(document), kept: new Kept(document) };
  behindS = null;
  frozen = null;
  chat.suggest(document.model);
  about();
  connected("live");
  wake();
}

// The server is there, and loads its model.
function loading(report) {
  const world = new World({ ...NOTHING, model: report.model });
  world.loading = report.steps;
  shown = { timeline: new Timeline(), world, kept: new Kept(NOTHING) };
  frozen = null;
  about();
  connected("loading");
}

function received(frames) {
  const clockS = performance.now() / 1000;
  for (const each of frames) {
    const ran = shown.world.running.length;
    shown.kept.take(each, shown.world);
    shown.world.apply(each);
    shown.timeline.add(each);
    if (each.kind === "begin" || each.kind === "missed") frozen = null;
    if (each.kind === "failed") connected(connection);
    if (ran && !shown.world.running.length) freeze();
  }
  if (!frames.length) return;
  const delayS = clockS - frames.at(-1).t;
  behindS = behindS === null ? delayS : Math.min(behindS + DRIFT_S, delayS);
  shown.timeline.forgetOld();
  wake();
}

function freeze() {
  const recording = shown.kept.recording();
  frozen = recording && new Replay(recording);
  frozen?.seek(frozen.endS);
}

function connected(state, why = "") {
  connection = state;
  wake();
  if (player.replay) return;
  const isFailed = state === "live" && shown.world.failed;
  byId("state").textContent = isFailed ? FAILED : STATES[state];
  byId("state").dataset.state = isFailed ? FAILED : state;
  byId("state").title = isFailed ? shown.world.failed : why;
}

function about() {
  const { model, method, drafters, kind } = world();
  const guessers = drafters.filter((name) => name !== "none");
  const by = guessers.length ? `, drafter ${guessers.join(", ")}` : "";
  const where =
    { cluster: "", emulated: ", emulated devices", simulated: ", simulated (virtual time)" }[kind] ?? "";
  const name = model.startsWith("/") ? model.split("/").pop() : model;
  const how = method ? `, method ${method}` : "";
  byId("model").textContent = name ? `model ${name}${how}${by}${where}` : "";
}

function choose(value) {
  world().chosen = value === "" ? null : JSON.parse(value);
  wake();
}

// Draws soon, if anybody can see it. Between two drawings nothing is asked of the browser, not even a frame
// of the screen.
function wake() {
  dirty = true;
  if (!frame && !document.hidden) soon(frameMs);
}

function soon(everyMs) {
  clearTimeout(timer);
  const dueMs = drawnMs + Math.max(everyMs, DRAWN_TIMES * tookMs);
  const waitMs = Math.max(0, dueMs - performance.now() - AHEAD_MS);
  timer = setTimeout(() => (frame ||= requestAnimationFrame(tick)), waitMs);
}

function tick(nowMs) {
  frame = 0;
  if (document.hidden) return;
  drawnMs = nowMs;
  const startedMs = performance.now();
  draw(nowMs);
  tookMs = performance.now() - startedMs;
  if (moves() || dirty) soon(still() && !dirty ? STILL_MS : frameMs);
}

function moves() {
  if (tree.moving) return true;
  if (player.replay) return player.replay.playing;
  if (frozen) return false;
  return shown.timeline.lastS > liveS() - lanes.spanS(shown.timeline, 1) - 1;
}

function liveS() {
  return behindS === null ? 0 : performance.now() / 1000 - behindS - lagS;
}

function draw(nowMs) {
  dirty = false;
  chat.draw();
  player.replay?.advance(nowMs);
  const now = world();
  const { timeline, nowS } = player.replay
    ? drawReplay(player.replay)
    : frozen && lanes.windowS <= 0
      ? drawReplay(frozen)
      : drawLive();
  if (player.replay) player.tick(nowMs);
  tree.draw(now.shown, nowMs);
  const plainS = timeline.plainS(nowS);
  figures.show(now, plainS);
  map.show(now, timeline, nowS);
  answer.show(now);
  story.show(now, { isReplay: Boolean(player.replay), isFrozen: Boolean(frozen), connection, plainS });
  byId("slowly").hidden = player.replay ? player.replay.playing || !player.replay.atEnd : !frozen;
  if (nowMs - saidMs > SAID_MS || !moves()) {
    saidMs = nowMs;
    say(now);
  }
}

function drawLive() {
  const { timeline, kept } = shown;
  const wanted = Math.min(LAG_S[1], Math.max(LAG_S[0], 1.5 * timeline.recentS));
  lagS += 0.02 * (wanted - lagS);
  const nowS = liveS();
  lanes.draw(timeline, shown.world, { nowS, startS: nowS - lanes.spanS(timeline, 1), originS: kept.startS });
  return { timeline, nowS };
}

// A replay, or the last answer as it stands: the whole of it once it is over.
function drawReplay(replay) {
  const { timeline, nowS, startS, endS } = replay;
  const isWhole = lanes.windowS === WHOLE || (lanes.windowS === 0 && replay.atEnd);
  const span = isWhole
    ? { startS, endS }
    : { startS: nowS - lanes.spanS(timeline, Math.max(0.25, replay.speed)) };
  lanes.draw(timeline, replay.world, { nowS, originS: startS, ...span });
  return { timeline, nowS };
}

// What the canvases show, in words.
function say(now) {
  const busy = now.figures
    ? now.stages
        .map((stage, at) => `${stage.name} ${Math.round(100 * (now.figures.busy[at] ?? 0))}% busy`)
        .join(", ")
    : "nothing has run yet";
  byId("lanes").setAttribute("aria-label", `Timeline of the devices: ${busy}`);
  const request = now.shown;
  const best = request ? request.guesses.sort((one, other) => other.value - one.value) : [];
  const likely = best
    .slice(0, 3)
    .map((node) => node.token.trim() || "blank")
    .join(", ");
  const named = likely ? `, the likeliest: ${likely}` : "";
  const words = request
    ? `${count(request.tokens, "token")} in the answer, ${count(best.length, "guess", "guesses")}${named}`
    : "no answer yet";
  byId("tree").setAttribute("aria-label", `Guesses: ${words}`);
}

// Replay

function play(replay, name) {
  player.open(replay);
  byId("save").disabled = isFile;
  byId("state").textContent = `replay of ${name}`;
  byId("state").dataset.state = "replay";
  byId("state").title = replay.recording.created ? `made ${replay.recording.created}` : "";
  tree.forget();
  about();
  player.toggle(true);
}

// A recording that is read from somewhere: a file, or the page itself.
async function openRecording(reading, name) {
  trouble("");
  let recording;
  try {
    recording = await reading;
  } catch (error) {
    if (!(error instanceof RecordingError || error instanceof DOMException)) throw error;
    trouble(error.message);
    return;
  }
  live.close();
  isFile = true;
  play(new Replay(recording), name);
}

function openFile(file) {
  if (file) openRecording(readFile(file), file.name);
}

function backToLive() {
  const wasFile = isFile;
  player.close();
  isFile = false;
  byId("save").disabled = false;
  trouble("");
  tree.forget();
  about();
  connected(wasFile ? "connecting" : connection);
  if (wasFile) live.open();
  byId("slowly").hidden = !frozen; // what is hidden cannot have the focus
  byId(frozen ? "slowly" : "open").focus();
}

async function save() {
  trouble("");
  try {
    const response = await api.call("/live/recording");
    const url = URL.createObjectURL(await response.blob());
    const name =
      shown.world.model
        .split("/")
        .pop()
        .replace(/[^\w.-]+/g, "-") || "answer";
    const stamp = new Date().toISOString().slice(0, 19).replace(/[:T]/g, "-");
    Object.assign(document.createElement("a"), {
      href: url,
      download: `flowspec-${name}-${stamp}.json`,
    }).click();
    setTimeout(() => URL.revokeObjectURL(url), 60000);
  } catch (error) {
    if (!(error.name === "ApiError" || error instanceof TypeError)) throw error;
    const why = error instanceof TypeError ? "the server cannot be reached" : error.message;
    trouble(`The recording cannot be saved: ${why}`);
  }
}

function trouble(text) {
  byId("trouble").textContent = text;
  byId("trouble").hidden = !text;
}

byId("save").addEventListener("click", save);
byId("open").addEventListener("click", () => byId("file").click());
byId("file").addEventListener("change", () => {
  openFile(byId("file").files[0]);
  byId("file").value = "";
});
byId("slowly").addEventListener("click", () => {
  byId("speed").value = "0";
  if (player.replay) {
    player.open(player.replay);
    player.toggle(true);
    return;
  }
  play(frozen, "the last answer");
});
byId("window").addEventListener("change", () => {
  lanes.windowS = Number(byId("window").value);
  wake();
});

document.addEventListener("keydown", (event) => {
  if (key.dialog.open || event.altKey || event.ctrlKey || event.metaKey) return;
  if (event.key === "Escape" && chat.answering) chat.stop();
  else if (player.press(event)) event.preventDefault();
});

let dragged = 0; // elements that the dragged file is over: it enters one before it leaves the other
document.addEventListener("dragenter", (event) => {
  if (!event.dataTransfer?.types.includes("Files")) return;
  dragged += 1;
  byId("drop").hidden = false;
});
document.addEventListener("dragleave", (event) => {
  if (event.dataTransfer?.types.includes("Files")) dragged = Math.max(0, dragged - 1);
  byId("drop").hidden = dragged === 0;
});
document.addEventListener("dragover", (event) => event.preventDefault());
document.addEventListener("drop", (event) => {
  event.preventDefault();
  dragged = 0;
  byId("drop").hidden = true;
  openFile(event.dataTransfer?.files[0]);
});

document.addEventListener("visibilitychange", wake);
motion.addEventListener("change", wake);
watchColours(wake);
if (isStatic) {
  const choice = byId("recording");
  choice.replaceChildren(
    ...shelf.map(({ title }, at) =>
      Object.assign(document.createElement("option"), { value: at, textContent: title }),
    ),
  );
  const take = () => openRecording(shelf[choice.value].read(), "a recording");
  choice.addEventListener("change", take);
  for (const id of ["chat", "save", "back", "to-chat", "state"]) byId(id).hidden = true;
  byId("shelf").hidden = false;
  take();
} else {
  live.open();
}
wake();
