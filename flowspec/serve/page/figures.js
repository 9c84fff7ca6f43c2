// The tiles and the table of devices.

const NONE = "–";
const HOT_C = 85;

const share = (value) => (value === null || value === undefined ? NONE : `${Math.round(100 * value)}%`);
const number = (value, digits) => (value === null || value === undefined ? NONE : value.toFixed(digits));
const mean = (values) => {
  const known = values.filter((value) => value !== null);
  return known.length ? known.reduce((sum, value) => sum + value, 0) / known.length : null;
};

const TILES = [
  { name: "tokens_per_s", title: "Tokens/s", value: (found) => number(found.tokens_per_s, found.tokens_per_s < 100 ? 1 : 0), note: () => "committed, last seconds" },
  { name: "S", title: "S", value: (found) => number(found.S, 2), note: () => "tokens per useful segment" },
  { name: "rho", title: "ρ (rho)", value: (found) => share(found.rho), note: () => "tokens already in flight" },
  { name: "acceptance", title: "Acceptance", value: (found) => number(found.acceptance, 2), note: () => "tokens per segment" },
  { name: "busy", title: "Busy share", value: (found) => share(mean(found.busy)), note: (found) => found.busy.map(share).join(" · ") || "of the stages" },
  { name: "dropped_rows", title: "Dropped rows", value: (found) => number(found.dropped_rows, 0), note: () => "dead ones, last seconds" },
];

function put(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

function made(tag, className, parent) {
  const found = document.createElement(tag);
  found.className = className;
  parent.append(found);
  return found;
}

export class Figures {
  constructor(tiles, rows) {
    this.rows = rows;
    this.figures = undefined;
    this.tiles = TILES.map((about) => {
      const tile = made("div", "tile", tiles);
      made("dt", "", tile).textContent = about.title;
      const value = made("dd", "value", tile);
      value.dataset.figure = about.name;
      return { about, value, note: made("dd", "note", tile) };
    });
  }

  show(world) {
    if (world.figures !== this.figures || !world.figures) this._tiles(world.figures);
    this._devices(world);
  }

  _tiles(figures) {
    this.figures = figures;
    for (const { about, value, note } of this.tiles) {
      put(value, figures ? about.value(figures) : NONE);
      put(note, figures ? about.note(figures) : about.note({ busy: [] }));
    }
  }

  _devices(world) {
    const known = new Map(world.devices.map((device) => [device.name, device]));
    const staged = world.stages.map((stage, at) => ({ name: stage.name, layers: stage.layers, busy: world.figures?.busy[at] ?? null, device: known.get(stage.name) }));
    const used = new Set(world.stages.map((stage) => stage.name));
    const spare = world.devices.filter((device) => !used.has(device.name)).map((device) => ({ name: device.name, layers: null, busy: null, device }));
    const wanted = [...staged, ...spare];
    while (this.rows.children.length > wanted.length) this.rows.lastElementChild.remove();
    while (this.rows.children.length < wanted.length) {
      const row = made("tr", "", this.rows);
      made("th", "", row).scope = "row";
      for (let cell = 0; cell < 5; cell += 1) made("td", "", row);
    }
    const state = world.lost ? "waiting" : world.running.length ? "working" : "idle";
    wanted.forEach((each, at) => this._row(this.rows.children[at].children, each, state));
  }

  _row([name, layers, memory, temperature, busy, state], found, doing) {
    const { device } = found;
    put(name, found.name);
    put(layers, found.layers ? `${found.layers[0]}–${found.layers[1] - 1}` : NONE);
    put(memory, device ? bytes(device.memory_bytes) : NONE);
    const celsius = device?.temperature_c ?? null;
    put(temperature, celsius === null ? NONE : `${Math.round(celsius)} °C`);
    temperature.className = device?.throttled || (celsius !== null && celsius >= HOT_C) ? "gone" : "";
    put(busy, share(found.busy));
    const gone = device && !device.present;
    const queued = device?.queued && doing === "working" ? `, ${device.queued} queued` : "";
    put(state, gone ? "lost" : found.layers ? `${doing}${queued}` : "not used");
    state.className = gone ? "gone" : found.layers && doing === "working" ? "working" : "";
  }
}

function bytes(value) {
  if (value === null || value === undefined) return NONE;
  return value >= 2 ** 30 ? `${(value / 2 ** 30).toFixed(1)} GiB` : `${Math.round(value / 2 ** 20)} MiB`;
}

// The answer so far, in words: its text, which request is shown where there are several, and what it took once it is over.
export class Answer {
  constructor(chosen) {
    const byId = (id) => document.getElementById(id);
    this.parts = [byId("strip-prompt"), byId("strip-text"), byId("strip-new")];
    this.summary = byId("summary");
    this.which = byId("which");
    this.select = byId("request");
    this.select.addEventListener("change", () => chosen(this.select.value));
    this.listed = "";
    this.request = null;
    this.version = "";
  }

  show(world) {
    this._list(world);
    const request = world.shown;
    const version = `${request?.version} ${world.lost}`;
    if (request === this.request && version === this.version) return;
    this.request = request;
    this.version = version;
    const fresh = request?.running ? request.fresh : "";
    const before = request ? request.text.slice(0, request.text.length - fresh.length) : "";
    put(this.parts[0], request ? request.prompt : "");
    put(this.parts[1], before.length > 1200 ? `…${before.slice(-1200)}` : before);
    put(this.parts[2], fresh);
    put(this.summary, request ? summaryOf(request, world.lost) : "No answer has run yet.");
  }

  _list(world) {
    const ids = world.order.length > 1 ? world.order : [];
    const listed = JSON.stringify([ids, ids.map((id) => world.requests.get(id).running), world.chosen]);
    if (listed === this.listed) return;
    this.listed = listed;
    this.which.hidden = !ids.length;
    const option = (value, text) => Object.assign(document.createElement("option"), { value, textContent: text });
    const each = ids.map((id) => option(JSON.stringify(id), `${id}${world.requests.get(id).running ? ", running" : ""}`));
    this.select.replaceChildren(option("", "the newest"), ...each);
    this.select.value = world.chosen === null ? "" : JSON.stringify(world.chosen);
  }
}

function summaryOf(request, lost) {
  if (request.running && lost) return `${request.tokens} tokens committed. A stage is lost: the answer goes on when others have its layers.`;
  const guesses = [...request.nodes.values()].filter((node) => !node.committed).length;
  if (request.running) return `${request.tokens} tokens committed, ${guesses} guesses in the tree.`;
  const { reason, statistics } = request.end;
  const seconds = statistics.decode_s;
  const parts = [`${request.tokens} tokens, ended by ${reason}`];
  if (Number.isFinite(seconds) && seconds > 0 && request.tokens > 1) parts.push(`${((request.tokens - 1) / seconds).toFixed(1)} tokens/s`);
  if (Number.isFinite(statistics.tokens_per_commit)) parts.push(`S ${statistics.tokens_per_commit.toFixed(2)}`);
  if (Number.isFinite(statistics.share_in_flight)) parts.push(`ρ ${share(statistics.share_in_flight)}`);
  if (statistics.recoveries) parts.push(`stages lost and replaced ${statistics.recoveries} time(s)`);
  return `${parts.join("; ")}.`;
}
