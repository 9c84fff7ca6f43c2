// What the frames of a recording say: the timeline (what each device did when), and the world (requests,
// their trees, figures) at an instant.

const KEPT_S = 45; // of the timeline, while it is live
const PATH_KEPT = 24; // committed nodes that a tree keeps above its root
const ENDED_KEPT = 3; // requests that are over and can still be looked at
const PASSES_KEPT = 64; // by which plain decoding is reckoned,
const PASSES_LEAST = 4;
const PASS_QUANTILE = 0.2; // of them: those of few rows, which nothing else held up
const PLAIN = "ar"; // the method that guesses nothing
const UNAIDED_TOKENS = 6; // so many in a row that were no guesses, and none in the tree
const BACK_S = 6; // for so long a device that came back is said to be

// The first index in `list`, sorted by `key`, whose key is at least `value`.
export function firstFrom(list, value, key) {
  let low = 0;
  let high = list.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (key(list[middle]) < value) low = middle + 1;
    else high = middle;
  }
  return low;
}

// Trips, drafts, commits and losses, each in the order in which they became known.
export class Timeline {
  constructor(stages = []) {
    this.names = stages.map((stage) => stage.name); // of the stages, from the last frame that told them
    this.trips = []; // each with the names of its stages: later ones may be others
    this.drafts = [];
    this.commits = [];
    this.losses = [];
    this.longestS = 0; // a trip or a draft: what is known by then began at most so long before
    this.recentS = 0; // trips of late, smoothed
    this.passes = []; // what trips took without their waits in queues, of those that ran at every stage
    this.lastS = 0;
  }

  add(frame) {
    if (frame.kind === "trip") {
      const tookS = frame.back_s - frame.sent_s;
      this.trips.push({ ...frame, names: this.names });
      this.longestS = Math.max(this.longestS, tookS);
      this.recentS = this.recentS ? this.recentS + 0.1 * (tookS - this.recentS) : tookS;
      if (frame.stays.length && frame.stays.every((stay) => stay.alive + stay.dead > 0))
        this.passes.push({
          t: frame.t,
          tookS: tookS - frame.stays.reduce((sum, stay) => sum + stay.started_s - stay.arrived_s, 0),
        });
    } else if (frame.kind === "draft") {
      this.drafts.push(frame);
      this.longestS = Math.max(this.longestS, frame.ended_s - frame.started_s);
    } else if (frame.kind === "tokens") {
      this.commits.push({
        t: frame.t,
        count: frame.nodes.length,
        text: frame.nodes.map((node) => node[1]).join(""),
      });
    } else if (frame.kind === "stages") {
      this.names = frame.stages.map((stage) => stage.name);
      return;
    } else if (frame.kind === "lost") {
      const text = frame.silent_s > 0 ? "device lost" : "layers shared out anew";
      this.losses.push({ t: frame.t, text, isTold: false });
    } else if (frame.kind === "note") {
      const last = this.losses.at(-1); // what is told first of a loss says who it was
      const what = frame.text.replace(/^device /, "").split(" (")[0];
      if (last && !last.isTold) Object.assign(last, { text: what, isTold: true });
      return;
    } else {
      return;
    }
    this.lastS = Math.max(this.lastS, frame.t);
  }

  // What a token would take without guesses, by the trips until `nowS`: each would wait for the trip of the
  // one before. Null before enough is known.
  plainS(nowS) {
    const until = firstFrom(this.passes, nowS + 1e-9, (pass) => pass.t);
    const took = this.passes
      .slice(Math.max(0, until - PASSES_KEPT), until)
      .map((pass) => pass.tookS)
      .sort((one, other) => one - other);
    return took.length < PASSES_LEAST ? null : took[Math.floor(PASS_QUANTILE * took.length)];
  }

  forgetOld() {
    const since = this.lastS - KEPT_S;
    for (const list of [this.trips, this.drafts, this.commits, this.passes]) {
      if (list.length > 64 && list[0].t < since - KEPT_S)
        list.splice(
          0,
          firstFrom(list, since, (each) => each.t),
        );
    }
  }

  // Those of `list` that may be seen between two instants.
  within(list, startS, endS) {
    const found = [];
    for (let index = firstFrom(list, startS, (each) => each.t); index < list.length; index += 1) {
      if (list[index].t > endS + this.longestS) break;
      found.push(list[index]);
    }
    return found;
  }
}

class Request {
  constructor(id) {
    this.id = id;
    this.prompt = "";
    this.promptTokens = 0;
    this.reused = 0;
    this.read = 0; // tokens of the prompt that went through all stages
    this.said = []; // the answer's tokens: {text, guessed, t}
    this.guessed = 0; // of them, those that were on their way as guesses when they became known
    this.wrong = 0; // guesses that were dropped
    this.isReading = true; // what is known goes through the stages, and no token has come since
    this.wasPaused = false; // for the stages were given up
    this.running = true;
    this.end = null;
    this.nodes = new Map(); // id -> {id, parent, token, value, sent, committed}
    this.children = new Map();
    this.path = [];
    this.root = null;
    this.version = 0; // counts changes, so that what is drawn from it is worked out once for each
  }

  begin(frame) {
    this.prompt = frame.text;
    this.promptTokens = frame.prompt_tokens;
    this.reused = frame.reused;
  }

  get tokens() {
    return this.said.length;
  }

  get text() {
    return this.said.map((token) => token.text).join("");
  }

  get guesses() {
    return [...this.nodes.values()].filter((node) => !node.committed);
  }

  // Whether nothing is guessed of late, though it could be: the head found that it would not pay.
  get isUnaided() {
    const last = this.said.slice(-UNAIDED_TOKENS);
    return last.length === UNAIDED_TOKENS && !last.some((token) => token.guessed) && !this.guesses.length;
  }

  // Tokens per second since the first one; null before there are two instants.
  get rate() {
    const [first, last] = [this.said[0]?.t, this.said.at(-1)?.t];
    return last > first ? this.said.filter((token) => token.t > first).length / (last - first) : null;
  }

  plant(id, token) {
    this.nodes.clear();
    this.children.clear();
    this.path = [];
    this._insert(id, null, token, 1);
    this._commit(id);
    this.version += 1;
  }

  grow(nodes) {
    for (const [id, parent, token, value] of nodes) {
      if (!this.nodes.has(id)) this._insert(id, this.nodes.has(parent) ? parent : this.root, token, value);
    }
    this.version += 1;
  }

  send(ids) {
    for (const id of ids) {
      const node = this.nodes.get(id);
      if (node && !node.committed) node.sent = true; // what is known already was no guess
    }
    this.version += 1;
  }

  pause() {
    this.isReading = true; // again
    this.wasPaused = true;
  }

  commit(nodes, t) {
    this.isReading = false;
    for (const [id, text] of nodes) {
      if (!this.nodes.has(id)) this._insert(id, this.root, text, 1);
      const guessed = this.nodes.get(id).sent;
      this._commit(id);
      this.said.push({ text, guessed, t });
      this.guessed += guessed ? 1 : 0;
    }
    this._keepBelowRoot();
    this.version += 1;
  }

  drop(ids) {
    for (const id of ids) this._remove(id);
    this.version += 1;
  }

  finish(frame) {
    this.running = false;
    this.end = frame;
    const wrong = this.wrong;
    for (const id of [...this.nodes.keys()]) if (!this.nodes.get(id)?.committed) this._remove(id);
    this.wrong = wrong; // what is behind the answer's end was never looked at
    this.version += 1;
  }

  _insert(id, parent, token, value) {
    this.nodes.set(id, { id, parent, token, value, sent: false, committed: false });
    if (parent === null) return;
    const siblings = this.children.get(parent);
    if (siblings) siblings.push(id);
    else this.children.set(parent, [id]);
  }

  _commit(id) {
    this.nodes.get(id).committed = true;
    this.path.push(id);
    this.root = id;
  }

  _keepBelowRoot() {
    const alive = new Set();
    const waiting = [this.root];
    while (waiting.length) {
      const id = waiting.pop();
      alive.add(id);
      waiting.push(...(this.children.get(id) ?? []));
    }
    this.path = this.path.slice(-PATH_KEPT);
    const path = new Set(this.path);
    for (const [id, node] of this.nodes) {
      if (alive.has(id) || path.has(id)) continue;
      this.wrong += node.committed ? 0 : 1;
      this.nodes.delete(id);
    }
    for (const [id, below] of this.children) {
      if (this.nodes.has(id))
        this.children.set(
          id,
          below.filter((child) => this.nodes.has(child)),
        );
      else this.children.delete(id);
    }
  }

  // A guess and what is below it.
  _remove(id) {
    const first = this.nodes.get(id);
    if (!first || first.committed) return;
    const siblings = this.children.get(first.parent);
    if (siblings)
      this.children.set(
        first.parent,
        siblings.filter((each) => each !== id),
      );
    const waiting = [id];
    while (waiting.length) {
      const next = waiting.pop();
      waiting.push(...(this.children.get(next) ?? []));
      this.children.delete(next);
      this.wrong += this.nodes.delete(next) ? 1 : 0;
    }
  }
}

export class World {
  constructor(recording) {
    this.model = recording.model;
    this.method = recording.method;
    this.drafters = recording.drafters;
    this.kind = recording.world;
    this.stages = recording.stages;
    this.requests = new Map();
    this.order = []; // ids, the newest last
    this.setAside = 0; // answers that are over, whose number the head has given again
    this.chosen = null; // by the person; else the newest that runs
    this.figures = null;
    this.devices = [];
    this.loading = null; // while the server loads its model: [{device, doing, share}]
    this.away = new Set(); // devices that were lost and run no layers since
    this.returned = new Map(); // when devices ran layers again, by name
    this.note = ""; // what was told first of the last loss
    this.prompts = new Map(); // rows of prompts on their way, by segment
    this.lost = false;
    this.failed = ""; // why nothing is answered any more
    this.t = 0;
  }

  apply(frame) {
    this.t = frame.t;
    switch (frame.kind) {
      case "stages":
        this.stages = frame.stages;
        this.lost = false;
        this._welcome();
        break;
      case "lost":
        this.lost = true;
        this.note = "";
        this.prompts.clear();
        for (const id of this.running) this.requests.get(id).pause();
        break;
      case "failed":
        this.failed = frame.text;
        break;
      case "note":
        this.note ||= frame.text;
        break;
      case "missed":
        for (const id of this.running) this._forget(id);
        break;
      case "begin":
        this._new(frame.request).begin(frame);
        break;
      case "root":
        this._of(frame.request).plant(frame.node, frame.token);
        break;
      case "nodes":
        this._of(frame.request).grow(frame.nodes);
        break;
      case "sent":
        this._send(frame);
        break;
      case "trip":
        this._arrive(frame.segment);
        break;
      case "tokens":
        this._of(frame.request).commit(frame.nodes, frame.t);
        break;
      case "dead":
        this.requests.get(frame.request)?.drop(frame.nodes);
        break;
      case "end":
        this._of(frame.request).finish(frame);
        break;
      case "devices":
        this._look(frame.devices);
        break;
      case "figures":
        this.figures = frame;
        break;
      default: // drafts are the timeline's
    }
  }

  // The request that is shown: the chosen one, else the first of those that run, else the last one that ran.
  get shown() {
    if (this.chosen !== null && this.requests.has(this.chosen)) return this.requests.get(this.chosen);
    const running = this.order.find((id) => this.requests.get(id).running);
    return this.requests.get(running ?? this.order.at(-1)) ?? null;
  }

  get running() {
    return this.order.filter((id) => this.requests.get(id).running);
  }

  // Whether nothing is guessed.
  get isPlain() {
    return this.method === PLAIN;
  }

  // Whether a device was lost and is here again since a moment ago.
  isBack(name) {
    return this.t - (this.returned.get(name) ?? -Infinity) < BACK_S;
  }

  _look(devices) {
    this.devices = devices;
    for (const device of devices) if (!device.present) this.away.add(device.name);
    this._welcome();
  }

  // Who is there and has layers is back, if it was away.
  _welcome() {
    const here = new Set(this.devices.filter((device) => device.present).map((device) => device.name));
    for (const { name } of this.stages) {
      if (here.has(name) && this.away.delete(name)) this.returned.set(name, this.t);
    }
  }

  _send({ segment, parts, prompt_rows: rows }) {
    for (const [request, ids] of parts) this.requests.get(request)?.send(ids);
    const reading = parts
      .map(([request]) => this.requests.get(request))
      .find((request) => request?.running && request.isReading);
    if (rows && reading) this.prompts.set(segment, { reading, rows });
  }

  _arrive(segment) {
    const known = this.prompts.get(segment);
    if (!known) return;
    this.prompts.delete(segment);
    known.reading.read += known.rows;
    known.reading.version += 1;
  }

  _new(id) {
    const request = new Request(id);
    const earlier = this.requests.get(id);
    if (earlier) {
      this._forget(id);
      if (!earlier.running) this._setAside(earlier);
    }
    this.requests.set(id, request);
    this.order.push(id);
    const ended = this.order.filter((each) => !this.requests.get(each).running && each !== this.chosen);
    for (const old of ended.slice(0, -ENDED_KEPT)) this._forget(old);
    return request;
  }

  // A head gives a number again once its answer is over; that one is looked at under a number of its own.
  _setAside(request) {
    if (this.chosen === request.id) this.chosen = -1 - this.setAside;
    this.setAside += 1;
    request.id = -this.setAside;
    this.requests.set(request.id, request);
    this.order.push(request.id);
  }

  _forget(id) {
    this.requests.delete(id);
    this.order.splice(this.order.indexOf(id), 1);
  }

  // A request whose beginning was not seen, for the page was opened later, is taken as it comes.
  _of(id) {
    return this.requests.get(id) ?? this._new(id);
  }
}
