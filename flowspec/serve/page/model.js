// What the frames of a recording say: the timeline (what each device did when), and the world (requests, their trees, figures) at an instant.

const KEPT_S = 45; // of the timeline, while it is live
const PATH_KEPT = 24; // committed nodes that a tree keeps above its root
const ENDED_KEPT = 3; // requests that are over and can still be looked at

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
  constructor() {
    this.trips = [];
    this.drafts = [];
    this.commits = [];
    this.losses = [];
    this.longestS = 0; // a trip or a draft: what is known by then began at most so long before
    this.recentS = 0; // trips of late, smoothed
    this.lastS = 0;
  }

  add(frame) {
    if (frame.kind === "trip") {
      const tookS = frame.back_s - frame.sent_s;
      this.trips.push(frame);
      this.longestS = Math.max(this.longestS, tookS);
      this.recentS = this.recentS ? this.recentS + 0.1 * (tookS - this.recentS) : tookS;
    } else if (frame.kind === "draft") {
      this.drafts.push(frame);
      this.longestS = Math.max(this.longestS, frame.ended_s - frame.started_s);
    } else if (frame.kind === "tokens") {
      this.commits.push({ t: frame.t, count: frame.nodes.length, text: frame.nodes.map((node) => node[1]).join("") });
    } else if (frame.kind === "lost") {
      this.losses.push(frame.t);
    } else {
      return;
    }
    this.lastS = Math.max(this.lastS, frame.t);
  }

  forgetOld() {
    const since = this.lastS - KEPT_S;
    for (const list of [this.trips, this.drafts, this.commits]) {
      if (list.length > 64 && list[0].t < since - KEPT_S) list.splice(0, firstFrom(list, since, (each) => each.t));
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
    this.text = "";
    this.fresh = ""; // what was committed last
    this.tokens = 0;
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
      if (node) node.sent = true;
    }
    this.version += 1;
  }

  commit(nodes) {
    for (const [id, token] of nodes) {
      if (!this.nodes.has(id)) this._insert(id, this.root, token, 1);
      this._commit(id);
      this.text += token;
      this.tokens += 1;
    }
    this.fresh = nodes.map((node) => node[1]).join("");
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
    for (const id of [...this.nodes.keys()]) if (!this.nodes.get(id)?.committed) this._remove(id);
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
    for (const id of this.nodes.keys()) if (!alive.has(id) && !path.has(id)) this.nodes.delete(id);
    for (const [id, below] of this.children) {
      if (this.nodes.has(id)) this.children.set(id, below.filter((child) => this.nodes.has(child)));
      else this.children.delete(id);
    }
  }

  // A guess and what is below it.
  _remove(id) {
    const first = this.nodes.get(id);
    if (!first || first.committed) return;
    const siblings = this.children.get(first.parent);
    if (siblings) this.children.set(first.parent, siblings.filter((each) => each !== id));
    const waiting = [id];
    while (waiting.length) {
      const next = waiting.pop();
      waiting.push(...(this.children.get(next) ?? []));
      this.children.delete(next);
      this.nodes.delete(next);
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
    this.chosen = null; // by the person; else the newest that runs
    this.figures = null;
    this.devices = [];
    this.lost = false;
    this.t = 0;
  }

  apply(frame) {
    this.t = frame.t;
    switch (frame.kind) {
      case "stages":
        this.stages = frame.stages;
        this.lost = false;
        break;
      case "lost":
        this.lost = true;
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
        for (const [request, ids] of frame.parts) this.requests.get(request)?.send(ids);
        break;
      case "tokens":
        this._of(frame.request).commit(frame.nodes);
        break;
      case "dead":
        this.requests.get(frame.request)?.drop(frame.nodes);
        break;
      case "end":
        this._of(frame.request).finish(frame);
        break;
      case "devices":
        this.devices = frame.devices;
        break;
      case "figures":
        this.figures = frame;
        break;
      default: // trips and drafts are the timeline's
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

  _new(id) {
    const request = new Request(id);
    this.requests.set(id, request);
    this.order = [...this.order.filter((each) => each !== id), id];
    const ended = this.order.filter((each) => !this.requests.get(each).running && each !== this.chosen);
    for (const old of ended.slice(0, -ENDED_KEPT)) this._forget(old);
    return request;
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
