// Puts the page together: live or replay, what is drawn when, and the keys.

import { Api } from "./api.js";
import { Chat } from "./chat.js";
import { watchColours } from "./colours.js";
import { Answer, Figures } from "./figures.js";
import { Key } from "./key.js";
import { Lanes } from "./lanes.js";
import { Timeline, World } from "./model.js";
import { RecordingError, readFile } from "./recording.js";
import { Replay } from "./replay.js";
import { Live } from "./stream.js";
import { Tree } from "./tree.js";

const FRAME_MS = 1000 / 30; // drawn at most so often
const SHARED_FRAME_MS = 1000 / 12; // and on the head's own machine, if it is small: the answer's work comes first
const SHARED_CORES = 4;
const STILL_MS = 1000; // and for those who want little motion
const LAG_S = [0.2, 3]; // of the live timeline: a trip is known when it is back
const DRIFT_S = 0.0005; // per batch, by which the least delay that was seen is forgotten
const SAID_MS = 2000;

const AHEAD_MS = 12; // asked for before it is due: the screen's frames come when they come
const CONTROLS_MS = 100;

const NOTHING = { model: "", method: "", drafters: [], world: "", stages: [], frames: [] };

const byId = (id) => document.getElementById(id);
const motion = matchMedia("(prefers-reduced-motion: reduce)");
const still = () => motion.matches;

const shared = ["localhost", "127.0.0.1", "[::1]"].includes(location.hostname) && navigator.hardwareConcurrency <= SHARED_CORES;
const frameMs = shared ? SHARED_FRAME_MS : FRAME_MS;

const key = new Key(() => replay || live.open());
const api = new Api(key);
const chat = new Chat(api);
const figures = new Figures(byId("tiles"), byId("rows"));
const answer = new Answer(choose);
const lanes = new Lanes(byId("lanes"), wake);
const tree = new Tree(byId("tree"), wake, still);
const live = new Live(api, { hello, frames: received, state: connected });

let shown = { timeline: new Timeline(), world: new World(NOTHING) }; // live
let behindS = null; // the person's clock less the recording's, at the quickest
let lagS = LAG_S[0];
let replay = null;
let timer = 0; // until the next drawing
let frame = 0; // of the screen that it waits for
let drawnMs = 0;
let dirty = true; // there is something new beside the clock
let saidMs = 0;
let toldMs = 0;

const world = () => (replay ?? shown).world;

function hello(document) {
  shown = { timeline: new Timeline(), world: new World(document) };
  behindS = null;
  about();
  connected("live");
  wake();
}

function received(frames) {
  const clockS = performance.now() / 1000;
  for (const frame of frames) {
    shown.world.apply(frame);
    shown.timeline.add(frame);
  }
  if (!frames.length) return;
  const delayS = clockS - frames.at(-1).t;
  behindS = behindS === null ? delayS : Math.min(behindS + DRIFT_S, delayS);
  shown.timeline.forgetOld();
  wake();
}

function connected(state, why = "") {
  if (replay) return;
  const words = { connecting: "connecting", live: "live", lost: "reconnecting", refused: "no key" };
  byId("state").textContent = words[state];
  byId("state").dataset.state = state;
  byId("state").title = why;
}

function about() {
  const { model, method, drafters, kind } = world();
  const with_ = drafters.length ? ` with ${drafters.join(", ")}` : "";
  const where = { cluster: "", emulated: ", emulated devices", simulated: ", simulated (virtual time)" }[kind] ?? "";
  const name = model.startsWith("/") ? model.split("/").pop() : model;
  byId("model").textContent = name ? `${name}: ${method}${with_}${where}` : "";
}

function choose(value) {
  world().chosen = value === "" ? null : JSON.parse(value);
  wake();
}

// Draws soon, if anybody can see it. Between two drawings nothing is asked of the browser, not even a frame of the screen.
function wake() {
  dirty = true;
  if (!frame && !document.hidden) soon(frameMs);
}

function soon(everyMs) {
  clearTimeout(timer);
  const waitMs = Math.max(0, drawnMs + everyMs - performance.now() - AHEAD_MS);
  timer = setTimeout(() => (frame ||= requestAnimationFrame(tick)), waitMs);
}

function tick(nowMs) {
  frame = 0;
  if (document.hidden) return;
  drawnMs = nowMs;
  draw(nowMs);
  if (moves() || dirty) soon(still() && !dirty ? STILL_MS : frameMs);
}

function moves() {
  if (tree.moving) return true;
  if (replay) return replay.playing;
  return shown.timeline.lastS > liveS() - lanes.spanS(shown.timeline, 1) - 1;
}

function liveS() {
  return behindS === null ? 0 : performance.now() / 1000 - behindS - lagS;
}

function draw(nowMs) {
  dirty = false;
  if (replay) {
    replay.advance(nowMs);
    lanes.draw(replay.timeline, replay.world, replay.nowS, replay.speed);
    if (!replay.playing || nowMs - toldMs > CONTROLS_MS) controls(nowMs);
  } else {
    const wanted = Math.min(LAG_S[1], Math.max(LAG_S[0], 1.5 * shown.timeline.recentS));
    lagS += 0.02 * (wanted - lagS);
    lanes.draw(shown.timeline, shown.world, liveS(), 1);
  }
  const now = world();
  tree.draw(now.shown, nowMs);
  figures.show(now);
  answer.show(now);
  if (nowMs - saidMs > SAID_MS || !moves()) {
    saidMs = nowMs;
    say(now);
  }
}

// What the canvases show, in words.
function say(now) {
  const busy = now.figures ? now.stages.map((stage, at) => `${stage.name} ${Math.round(100 * (now.figures.busy[at] ?? 0))}% busy`).join(", ") : "nothing has run yet";
  byId("lanes").setAttribute("aria-label", `Timeline of the devices: ${busy}`);
  const request = now.shown;
  const best = request ? [...request.nodes.values()].filter((node) => !node.committed).sort((one, other) => other.value - one.value) : [];
  const likely = best.slice(0, 3).map((node) => node.token.trim() || "blank").join(", ");
  const words = request ? `${request.tokens} tokens committed, ${best.length} guesses${likely ? `, the likeliest: ${likely}` : ""}` : "no answer yet";
  byId("tree").setAttribute("aria-label", `Token tree: ${words}`);
}

// Replay

function controls(nowMs) {
  toldMs = nowMs;
  const play = replay.playing ? "Pause" : "Play";
  if (byId("play").textContent !== play) byId("play").textContent = play;
  byId("scrub").value = replay.nowS;
  byId("instant").textContent = `${(replay.nowS - replay.startS).toFixed(2)} / ${(replay.endS - replay.startS).toFixed(2)} s`;
}

async function openFile(file) {
  if (!file) return;
  trouble("");
  let recording;
  try {
    recording = await readFile(file);
  } catch (error) {
    if (!(error instanceof RecordingError || error instanceof DOMException)) throw error;
    trouble(error.message);
    return;
  }
  live.close();
  replay = new Replay(recording);
  replay.speed = Number(byId("speed").value);
  Object.assign(byId("scrub"), { min: replay.startS, max: replay.endS });
  byId("replay").hidden = false;
  byId("save").disabled = true;
  byId("state").textContent = `replay of ${file.name}`;
  byId("state").dataset.state = "replay";
  byId("state").title = recording.created ? `made ${recording.created}` : "";
  tree.forget();
  about();
  toggle(true);
  byId("play").focus();
}

function toggle(play = !replay.playing) {
  if (play) replay.play();
  else replay.pause();
  controls(performance.now());
  wake();
}

function backToLive() {
  replay = null;
  byId("replay").hidden = true;
  byId("save").disabled = false;
  trouble("");
  tree.forget();
  about();
  live.open();
  wake();
  byId("open").focus();
}

async function save() {
  trouble("");
  try {
    const response = await api.call("/live/recording");
    const url = URL.createObjectURL(await response.blob());
    const name = shown.world.model.split("/").pop().replace(/[^\w.-]+/g, "-") || "answer";
    const stamp = new Date().toISOString().slice(0, 19).replace(/[:T]/g, "-");
    Object.assign(document.createElement("a"), { href: url, download: `flowspec-${name}-${stamp}.json` }).click();
    setTimeout(() => URL.revokeObjectURL(url), 60000);
  } catch (error) {
    if (!(error.name === "ApiError" || error instanceof TypeError)) throw error;
    trouble(`The recording cannot be saved: ${error instanceof TypeError ? "the server cannot be reached" : error.message}`);
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
byId("play").addEventListener("click", () => toggle());
byId("back").addEventListener("click", backToLive);
byId("scrub").addEventListener("input", () => {
  replay.pause();
  replay.seek(Number(byId("scrub").value));
  wake();
});
byId("speed").addEventListener("change", () => {
  if (replay) replay.speed = Number(byId("speed").value);
  wake();
});
byId("window").addEventListener("change", () => {
  lanes.windowS = Number(byId("window").value);
  wake();
});

document.addEventListener("keydown", (event) => {
  if (key.dialog.open || event.altKey || event.ctrlKey || event.metaKey) return;
  if (event.key === "Escape" && chat.answering) {
    chat.stop();
  } else if (event.key === " " && replay && !event.target.closest("input:not([type=range]), textarea, select, button, a")) {
    event.preventDefault();
    toggle();
  }
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
live.open();
wake();
