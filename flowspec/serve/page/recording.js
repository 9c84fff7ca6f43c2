// Reading a recording: wrong ones are refused with one line that says what was expected.

const SIZE_MAX = 256 * 1024 * 1024;

const isText = (value) => typeof value === "string";
const isNumber = (value) => typeof value === "number" && Number.isFinite(value);
const isCount = (value) => Number.isInteger(value) && value >= 0;
const isId = (value) => isText(value) || Number.isInteger(value);
const isShown = (value) => value === null || isNumber(value);
const isObject = (value) => typeof value === "object" && value !== null && !Array.isArray(value);
const listOf = (check) => (value) => Array.isArray(value) && value.every(check);
const tuple = (...checks) => (value) => Array.isArray(value) && value.length === checks.length && checks.every((check, at) => check(value[at]));
const fields = (checks) => (value) => isObject(value) && Object.entries(checks).every(([name, check]) => check(value[name]));

const stages = listOf(fields({ name: isText, layers: tuple(isCount, isCount) }));
const stay = { stage: isCount, arrived_s: isNumber, started_s: isNumber, ended_s: isNumber, left_s: isNumber, alive: isCount, dead: isCount, dropped: isCount };
const device = { name: isText, memory_bytes: isShown, temperature_c: isShown, queued: isShown, done: isShown, running_s: isShown, present: (value) => typeof value === "boolean" };

const KINDS = {
  stages: { stages },
  lost: { silent_s: isNumber },
  begin: { request: isId, prompt_tokens: isCount, reused: isCount, text: isText },
  root: { request: isId, node: isId, token: isText },
  nodes: { request: isId, nodes: listOf(tuple(isId, (value) => value === null || isId(value), isText, isNumber)) },
  sent: { segment: isId, parts: listOf(tuple(isId, listOf(isId))), prompt_rows: isCount },
  trip: { segment: isId, sent_s: isNumber, back_s: isNumber, stays: listOf(fields(stay)) },
  draft: { drafter: isId, started_s: isNumber, ended_s: isNumber },
  tokens: { request: isId, nodes: listOf(tuple(isId, isText)) },
  dead: { request: isId, nodes: listOf(isId) },
  end: { request: isId, reason: isText, statistics: isObject },
  devices: { devices: listOf(fields(device)) },
  figures: { tokens_per_s: isShown, S: isShown, rho: isShown, acceptance: isShown, busy: listOf(isShown), dropped_rows: isShown },
};

export class RecordingError extends Error {}

// The recording in `text`; raises a RecordingError, whose message is one line, where it is none. Frames of unknown kinds are left out.
export function readRecording(text, name) {
  let found;
  try {
    found = JSON.parse(text);
  } catch {
    throw new RecordingError(`${name}: expected a FlowSpec recording, which is JSON; this is not, or its end is missing`);
  }
  if (!isObject(found) || found.format !== "flowspec-recording") {
    throw new RecordingError(`${name}: expected a FlowSpec recording ("format": "flowspec-recording"); this is another JSON file`);
  }
  if (found.version !== 1) throw new RecordingError(`${name}: expected a recording of version 1, got ${JSON.stringify(found.version)?.slice(0, 40)}`);
  const head = { world: isText, model: isText, method: isText, drafters: listOf(isText), stages, frames: Array.isArray };
  for (const [field, check] of Object.entries(head)) {
    if (!check(found[field])) throw new RecordingError(`${name}: this recording is broken: "${field}" is missing or wrong`);
  }
  found.frames.forEach((frame, index) => checkFrame(frame, index, index ? found.frames[index - 1].t : 0, name));
  if (!found.frames.length) throw new RecordingError(`${name}: there is nothing in this recording`);
  return { ...found, frames: found.frames.filter((frame) => Object.hasOwn(KINDS, frame.kind)) };
}

function checkFrame(frame, index, beforeS, name) {
  const broken = (what) => new RecordingError(`${name}: this recording is broken: frame ${index} ${what}`);
  if (!isObject(frame) || !isText(frame.kind) || !isNumber(frame.t)) throw broken("has no kind or no instant");
  if (frame.t < beforeS) throw broken("is earlier than the one before it");
  if (!Object.hasOwn(KINDS, frame.kind)) return;
  for (const [field, check] of Object.entries(KINDS[frame.kind])) {
    if (!check(frame[field])) throw broken(`(${frame.kind}) has no right "${field}"`);
  }
}

export async function readFile(file) {
  if (file.size > SIZE_MAX) throw new RecordingError(`${file.name}: expected at most 256 MiB, got ${Math.round(file.size / 2 ** 20)} MiB`);
  return readRecording(await file.text(), file.name);
}
