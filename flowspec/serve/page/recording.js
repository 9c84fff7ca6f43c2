// Reading a recording: wrong ones are refused with one line that says what was expected.

const SIZE_MAX = 64 * 2 ** 20;
const FRAMES_MAX = 500000;
const TEXT_MAX = 1e6;
const LIST_MAX = 1e6;
const SECONDS_MAX = 1e7;

const isText = (value) => typeof value === "string" && value.length <= TEXT_MAX;
const within = (least, most) => (value) => typeof value === "number" && value >= least && value <= most;
const isCount = (value) => Number.isSafeInteger(value) && value >= 0;
const isSeconds = within(0, SECONDS_MAX);
const isShare = within(0, 1);
const isFlag = (value) => typeof value === "boolean";
const isObject = (value) => typeof value === "object" && value !== null && !Array.isArray(value);
const orMissing = (check) => (value) => value === undefined || check(value);
const orNull = (check) => (value) => value === null || check(value);
const listOf = (check) => (value) => Array.isArray(value) && value.length <= LIST_MAX && value.every(check);
const row =
  (...checks) =>
  (value) =>
    Array.isArray(value) && value.length === checks.length && checks.every((check, at) => check(value[at]));
const record = (checks) => (value) =>
  isObject(value) && Object.entries(checks).every(([name, check]) => check(value[name]));
const each = (names, check) => Object.fromEntries(names.map((name) => [name, check]));

const isLayers = (value) => row(isCount, isCount)(value) && value[0] < value[1];
const stages = listOf(record({ name: isText, layers: isLayers }));
const stay = record({
  ...each(["stage", "alive", "dead", "dropped"], isCount),
  ...each(["arrived_s", "started_s", "ended_s", "left_s"], isSeconds),
});
const device = record({
  name: isText,
  temperature_c: orNull(within(-300, 1000)),
  running_s: isSeconds,
  present: isFlag,
  throttled: orMissing(orNull(isFlag)),
  loading: orMissing(orNull(record({ doing: isText, share: isShare }))),
  ...each(["memory_bytes", "queued", "done"], isCount),
});

const HEAD = {
  world: isText,
  model: isText,
  method: isText,
  drafters: listOf(isText),
  stages,
  created: isText,
};
const KINDS = {
  stages: { stages },
  lost: { silent_s: isSeconds },
  failed: { text: isText },
  note: { text: isText },
  missed: {},
  begin: { request: isCount, prompt_tokens: isCount, reused: isCount, text: isText },
  root: { request: isCount, node: isCount, token: isText, position: isCount },
  nodes: { request: isCount, nodes: listOf(row(isCount, isCount, isText, isShare)) },
  sent: { segment: isCount, parts: listOf(row(isCount, listOf(isCount))), prompt_rows: isCount },
  trip: { segment: isCount, sent_s: isSeconds, back_s: isSeconds, stays: listOf(stay) },
  draft: { drafter: isCount, started_s: isSeconds, ended_s: isSeconds },
  tokens: { request: isCount, nodes: listOf(row(isCount, isText)) },
  dead: { request: isCount, nodes: listOf(isCount) },
  end: { request: isCount, reason: isText, statistics: isObject },
  devices: { devices: listOf(device) },
  figures: {
    ...each(["tokens_per_s", "S", "acceptance"], within(0, 1e9)),
    rho: isShare,
    busy: listOf(isShare),
    dropped_rows: isCount,
  },
};

export class RecordingError extends Error {}

// The recording in `text`; raises a RecordingError, whose message is one line, where it is none.
export function readRecording(text, name) {
  let found;
  try {
    found = JSON.parse(text);
  } catch {
    throw new RecordingError(
      `${name}: expected a FlowSpec recording, which is JSON; this is not, or its end is missing`,
    );
  }
  if (!isObject(found) || found.format !== "flowspec-recording") {
    throw new RecordingError(
      `${name}: expected a FlowSpec recording ("format": "flowspec-recording"); this is another JSON file`,
    );
  }
  if (found.version !== 1)
    throw new RecordingError(
      `${name}: expected a recording of version 1, got ${String(JSON.stringify(found.version)).slice(0, 40)}`,
    );
  for (const [field, check] of Object.entries(HEAD)) {
    if (!check(found[field]))
      throw new RecordingError(`${name}: this recording is broken: "${field}" is missing or wrong`);
  }
  const { frames } = found;
  if (!Array.isArray(frames) || frames.length > FRAMES_MAX)
    throw new RecordingError(`${name}: this recording is broken: expected at most ${FRAMES_MAX} "frames"`);
  if (!frames.length) throw new RecordingError(`${name}: there is nothing in this recording`);
  frames.forEach((frame, index) => checkFrame(frame, index, index ? frames[index - 1].t : 0, name));
  return found;
}

function checkFrame(frame, index, beforeS, name) {
  const broken = (what) => new RecordingError(`${name}: this recording is broken: frame ${index} ${what}`);
  if (!isObject(frame) || !isText(frame.kind) || !isSeconds(frame.t))
    throw broken("has no kind or no instant");
  if (!Object.hasOwn(KINDS, frame.kind))
    throw broken(`is of the unknown kind ${JSON.stringify(frame.kind.slice(0, 40))}`);
  if (frame.t < beforeS) throw broken("is earlier than the one before it");
  for (const [field, check] of Object.entries(KINDS[frame.kind])) {
    if (!check(frame[field])) throw broken(`(${frame.kind}) has no right "${field}"`);
  }
}

export async function readFile(file) {
  if (file.size > SIZE_MAX)
    throw new RecordingError(
      `${file.name}: expected at most ${SIZE_MAX / 2 ** 20} MiB, got ${Math.ceil(file.size / 2 ** 20)} MiB`,
    );
  return readRecording(await file.text(), file.name);
}
