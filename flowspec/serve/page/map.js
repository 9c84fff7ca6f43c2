// The map: the head, the devices in the order in which a token passes them, and those that are not in use;
// what each holds, and how it does.

import { NONE, layersOf, made, put, share } from "./elements.js";

const HOT_C = 85;

function bytes(value) {
  if (value === null || value === undefined) return NONE;
  return value >= 2 ** 30 ? `${(value / 2 ** 30).toFixed(1)} GiB` : `${Math.round(value / 2 ** 20)} MiB`;
}

// What each link took of late, in ms: of hop 0 to the first stage, of the last hop back to the head.
function linksMs(timeline, nowS, stages) {
  const found = new Array(stages + 1).fill(null);
  const trip = timeline
    .within(timeline.trips, nowS - 2, nowS)
    .findLast((each) => each.t <= nowS && each.stays.length === stages);
  if (!trip) return found;
  let leftS = trip.sent_s;
  trip.stays.forEach((stay, at) => {
    found[at] = 1000 * (stay.arrived_s - leftS);
    leftS = stay.left_s;
  });
  found[stages] = 1000 * (trip.back_s - leftS);
  return found;
}

const asMs = (ms) => (ms === null ? "" : ms < 0.95 ? "<1 ms" : `${Math.round(ms)} ms`);

// The cards that there are to be: {name, state, kind, layers, memory, heat, isHot, busy, link}.
function cards(world, timeline, nowS) {
  const known = new Map(world.devices.map((device) => [device.name, device]));
  const doing = world.lost ? "waits" : world.running.length ? "working" : "idle";
  const links = linksMs(timeline, nowS, world.stages.length);
  const card = (name, layers, busy, link) => {
    const device = known.get(name);
    const celsius = device?.temperature_c ?? null;
    const isHot = Boolean(device?.throttled) || (celsius !== null && celsius >= HOT_C);
    const isGone = device && !device.present;
    let [kind, state] = [layers ? doing : "spare", layers ? doing : "stands by"];
    if (isGone) [kind, state] = ["gone", "lost"];
    else if (device?.loading)
      [kind, state] = ["loading", `${device.loading.doing} ${share(device.loading.share)}`];
    else if (layers && world.isBack(name)) [kind, state] = ["back", "back"];
    return {
      name,
      kind,
      state,
      layers: layers ? layersOf(layers) : "no layers",
      memory: device && !isGone ? bytes(device.memory_bytes) : "",
      heat:
        celsius === null || isGone
          ? ""
          : `${Math.round(celsius)} °C${device.throttled ? ", slowed down" : ""}`,
      isHot,
      busy: isGone ? null : busy,
      link,
    };
  };
  const staged = world.stages.map((stage, at) =>
    card(stage.name, stage.layers, world.figures?.busy[at] ?? null, asMs(links[at])),
  );
  const used = new Set(world.stages.map((stage) => stage.name));
  const spare = world.devices
    .filter((device) => !used.has(device.name))
    .map((device) => card(device.name, null, null, ""));
  const drafter = world.drafters.filter((name) => name !== "none").length
    ? "guesses ahead and shows the answer"
    : "shows the answer";
  const head = {
    name: "head",
    kind: "head",
    state: "",
    layers: drafter,
    memory: "",
    heat: "",
    isHot: false,
    busy: null,
    link: "",
  };
  return [head, ...staged, { ...head, kind: "home", layers: "", link: asMs(links.at(-1)) }, ...spare];
}

// A device of which only is known how far it is with its layers.
const loadingCard = ({ device, doing, share: done }) => ({
  name: device,
  kind: done < 1 ? "loading" : "back",
  state: doing,
  layers: "",
  memory: "",
  heat: "",
  isHot: false,
  busy: done,
  of: "",
  link: "",
});

export class DeviceMap {
  constructor(list) {
    this.list = list;
    this.rows = [];
  }

  show(world, timeline, nowS) {
    const known = world.stages.length ? cards(world, timeline, nowS) : [];
    const wanted = world.loading ? world.loading.filter((step) => step.device).map(loadingCard) : known;
    while (this.rows.length > wanted.length) this.rows.pop().element.remove();
    while (this.rows.length < wanted.length) this.rows.push(this._row());
    wanted.forEach((each, at) => this._fill(this.rows[at], each));
    this.list.classList.toggle("apart", Boolean(world.loading));
    this.list.classList.toggle("flows", world.running.length > 0 && !world.lost);
  }

  _row() {
    const element = made("li", "", this.list);
    const link = made("span", "between", element);
    const box = made("div", "device", element);
    const head = made("p", "name", box);
    const [name, state] = [made("strong", "", head), made("span", "state", head)];
    const [layers, more, heat] = [made("p", "layers", box), made("p", "more", box), made("span", "heat")];
    const memory = made("span", "memory", more);
    more.append(heat);
    const load = made("p", "load", box);
    const bar = made("i", "", made("span", "bar", load));
    return { element, link, name, state, layers, memory, heat, load, bar, busy: made("span", "busy", load) };
  }

  _fill(row, found) {
    row.element.dataset.kind = found.kind;
    put(row.link, found.link);
    put(row.name, found.name);
    put(row.state, found.state);
    put(row.layers, found.layers);
    put(row.memory, found.memory);
    put(row.heat, found.heat);
    row.heat.classList.toggle("hot", found.isHot);
    row.load.hidden = found.busy === null;
    put(row.busy, found.busy === null ? "" : `${share(found.busy)} ${found.of ?? "busy"}`);
    const width = found.busy === null ? "0" : share(found.busy);
    if (row.bar.style.width !== width) row.bar.style.width = width;
  }
}
