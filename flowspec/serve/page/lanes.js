// The timeline: the drafters, each stage and the tokens that come out as lanes, segments on the links as
// lines between them.

import { Surface, colours } from "./colours.js";
import { layersOf } from "./elements.js";

const LANE_PX = 34;
const LANE_LEAST_PX = 20;
const LANES_PX = 330; // all of them, where there are many
const LABEL_PX = 15; // of a lane, above its bars, where there is no room beside them
const LABELS_MOST = 0.3; // of the width, beside the bars
const AXIS_PX = 18;
const NARROW_PX = 560;
const WIDE_PX = 800; // from here on so many trips are shown:
const BAR_TOP = 0.2; // parts of a lane, downwards; above it are waits and drops
const BAR_BOTTOM = 0.88;
const TRIPS_SHOWN = 16;
const WINDOW_S = [1.5, 12]; // chosen by itself: at least and at most
const TICKS_S = [0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20];
const TEXT_LEAST_PX = 18; // tokens are written where they have so much room,
const LETTERS_LEAST = 3; // and can be told by so many letters, if not whole,
const TEXTS_LEAST = 1 / 3; // and if so many of them can be: single ones look like a fault
const SHARES_PX = [34, 64]; // at the right, in a narrow view and in a wide one
const LINKS_LEAST_PX = 5; // and links where they have so much each: closer they would be a grey area
const FEW_PX = 0.75; // bars are drawn at least so wide

export class Lanes {
  constructor(canvas, resized) {
    this.surface = new Surface(canvas, resized);
    this.windowS = 0; // 0: by itself
    this.size = "";
  }

  // How much is shown before now, at this speed of a replay (1: live).
  spanS(timeline, speed) {
    if (this.windowS > 0) return this.windowS;
    const wanted = Math.min(
      WINDOW_S[1],
      Math.max(WINDOW_S[0], TRIPS_SHOWN * timeline.recentS * Math.min(1, this.surface.width / WIDE_PX)),
    );
    return wanted * Math.min(1, speed);
  }

  // Draws what happened from `startS` until `nowS`; the right edge is `endS`, and instants are told from
  // `originS` on.
  draw(timeline, world, { nowS, startS, endS = nowS, originS = 0 }) {
    const trips = timeline.within(timeline.trips, startS, nowS).filter((trip) => trip.sent_s < nowS);
    const firstStage = Math.max(1, world.drafters.length);
    const devices = lanesOf(
      world,
      trips.filter((trip) => trip.t > startS),
    );
    const names = namesOf(world, devices);
    const { context, width, height } = this.surface;
    const narrow = width < NARROW_PX;
    const size = `${names.length} ${narrow}`;
    if (size !== this.size) {
      this.size = size;
      this.lanePx =
        Math.max(LANE_LEAST_PX, Math.min(LANE_PX, LANES_PX / names.length)) + (narrow ? LABEL_PX : 0);
      this.surface.canvas.style.height = `${names.length * this.lanePx + AXIS_PX}px`;
      return; // it is drawn when it has its size
    }
    const isLow = this.lanePx < 26;
    const left = narrow ? 0 : labelsPx(context, names, isLow, width);
    const view = {
      context,
      left,
      end: width - SHARES_PX[narrow ? 0 : 1],
      names,
      nowS,
      startS,
      endS,
      originS,
      spanS: endS - startS,
      lanePx: this.lanePx,
    };
    view.x = (t) => left + ((t - startS) / view.spanS) * (view.end - left);
    view.barTop = narrow ? (LABEL_PX + 4) / this.lanePx : BAR_TOP;
    view.waitAt = view.barTop - 3 / this.lanePx;
    view.firstStage = firstStage;
    view.laneOf = new Map(devices.map(({ name }, at) => [name, firstStage + at]));
    view.isEmpty = timeline.lastS === 0;
    this.surface.ready();
    context.clearRect(0, 0, width, height);
    drawLanes(view, narrow);
    context.save();
    context.beginPath();
    context.rect(left, 0, view.end - left, height);
    context.clip();
    if (trips.length * LINKS_LEAST_PX < view.end - left) drawLinks(view, trips);
    drawDrafts(view, timeline.within(timeline.drafts, startS, nowS), world);
    const busyS = drawStays(view, trips);
    drawCommits(
      view,
      timeline.within(timeline.commits, startS, nowS).filter((commit) => commit.t <= nowS),
    );
    drawLosses(view, timeline.losses);
    context.restore();
    if (nowS < endS)
      stroke(context, colours.text, 1.5, [[view.x(nowS), 0, view.x(nowS), names.length * this.lanePx]]);
    drawNames(view, narrow, isLow);
    if (!view.isEmpty) drawShares(view, busyS, narrow);
  }
}

// The width of the labels beside the lanes: as wide as they are, if that is not too much.
function labelsPx(context, names, isLow, width) {
  const widths = names.map(({ name, more }) => {
    context.font = `600 12px ${colours.font}`;
    const first = context.measureText(name).width;
    context.font = `11px ${colours.font}`;
    return isLow ? first : Math.max(first, context.measureText(more).width);
  });
  return Math.ceil(Math.min(LABELS_MOST * width, Math.max(...widths)) + 12);
}

// The devices that are stages, or were one of these trips', in the order in which a token passes them.
export function lanesOf({ stages, devices }, trips) {
  const found = stages.map(({ name, layers }) => ({ name, more: layersOf(layers) }));
  const isGone = (name) => devices.some((device) => device.name === name && !device.present);
  for (const names of new Set(trips.map((trip) => trip.names))) {
    names.forEach((name, at) => {
      if (found.some((each) => each.name === name)) return;
      const before = at ? found.findIndex((each) => each.name === names[at - 1]) : -1;
      found.splice(before + 1, 0, { name, more: isGone(name) ? "lost" : "no layers" });
    });
  }
  return found;
}

function namesOf(world, devices) {
  const drafters = world.drafters.length ? world.drafters : ["drafter"];
  return [
    ...drafters.map((name) => ({ name, more: "guesses ahead" })),
    ...devices,
    { name: "answer", more: "its tokens" },
  ];
}

function fill(context, colour, boxes) {
  if (!boxes.length) return;
  context.fillStyle = colour;
  context.beginPath();
  for (const [x, y, width, height] of boxes) context.rect(x, y, width, height);
  context.fill();
}

function stroke(context, colour, width, lines) {
  if (!lines.length) return;
  context.strokeStyle = colour;
  context.lineWidth = width;
  context.beginPath();
  for (const [x1, y1, x2, y2] of lines) {
    context.moveTo(x1, y1);
    context.lineTo(x2, y2);
  }
  context.stroke();
}

function drawLanes(view, narrow) {
  const { context, left, end, names, lanePx, startS, endS, originS, spanS, x, barTop } = view;
  fill(
    context,
    colours.lane,
    names
      .slice(0, -1)
      .map((_, lane) => [left, (lane + barTop) * lanePx, end - left, (BAR_BOTTOM - barTop) * lanePx]),
  );
  if (view.isEmpty) return; // there is no time yet that anybody could ask about
  const bottom = names.length * lanePx;
  const step = TICKS_S.find((each) => spanS / each <= (narrow ? 4 : 8)) ?? TICKS_S.at(-1);
  const decimals = Math.max(0, Math.min(2, Math.ceil(-Math.log10(step))));
  context.font = `11px ${colours.font}`;
  context.fillStyle = colours.muted;
  context.textAlign = "center";
  const lines = [];
  for (
    let number = Math.max(0, Math.ceil((startS - originS) / step));
    originS + number * step <= endS;
    number += 1
  ) {
    const at = x(originS + number * step);
    lines.push([at, 0, at, bottom]);
    if (at > left + 14 && at < end - 14)
      context.fillText(`${(number * step).toFixed(decimals)} s`, at, bottom + 14);
  }
  stroke(context, colours.edge, 1, lines);
}

// Who each lane is. In a narrow view names stand above the bars, where lines cross: these end around them.
function drawNames({ context, left, end, names, lanePx }, narrow, isLow) {
  context.textBaseline = "middle";
  context.textAlign = "left";
  names.forEach(({ name, more }, lane) => {
    const top = lane * lanePx;
    const middle = top + (narrow ? LABEL_PX / 2 + 1 : (0.54 - (isLow ? 0 : 0.2)) * lanePx);
    context.font = `600 12px ${colours.font}`;
    const shown = clipped(context, name, (narrow ? end * 0.6 : left) - 10);
    const used = context.measureText(shown).width + 8;
    context.font = `11px ${colours.font}`;
    const besides = isLow && !narrow ? "" : clipped(context, more, narrow ? end - used : left - 10);
    if (narrow) {
      context.fillStyle = colours.panel;
      context.fillRect(0, top + 1, used + context.measureText(besides).width + 4, LABEL_PX);
    }
    context.fillStyle = colours.muted;
    if (narrow) context.fillText(besides, used, middle);
    else context.fillText(besides, 0, middle + 0.4 * lanePx);
    context.font = `600 12px ${colours.font}`;
    context.fillStyle = colours.text;
    context.fillText(shown, 0, middle);
  });
  context.textBaseline = "alphabetic";
}

// The longest beginning of `text` that fits, with a sign where it is cut.
export function clipped(context, text, room) {
  if (room <= 0) return "";
  if (context.measureText(text).width <= room) return text;
  let end = Math.min(text.length, Math.floor(room / 4));
  while (end > 0 && context.measureText(`${text.slice(0, end)}…`).width > room) end -= 1;
  return end ? `${text.slice(0, end)}…` : "";
}

function drawLinks({ context, x, names, lanePx, firstStage, laneOf, nowS, barTop }, trips) {
  const lines = [];
  const answer = names.length - 1;
  const add = (fromS, toS, fromLane, toLane) => {
    if (fromS >= nowS || toS < fromS || toLane <= fromLane) return;
    const toY = (toLane + (toLane === answer ? 0 : barTop)) * lanePx;
    lines.push([x(fromS), (fromLane + BAR_BOTTOM) * lanePx, x(toS), toY]);
  };
  for (const { sent_s: sentS, back_s: backS, stays, names: stages } of trips) {
    const lanes = stays.map((stay) => laneOf.get(stages[stay.stage]));
    if (!stays.length || lanes.includes(undefined)) continue;
    if (stays[0].alive + stays[0].dead + stays[0].dropped > 0)
      add(sentS, stays[0].arrived_s, firstStage - 1, lanes[0]);
    for (let at = 0; at < stays.length; at += 1) {
      if (!stays[at].alive) break;
      const last = at === stays.length - 1;
      add(stays[at].left_s, last ? backS : stays[at + 1].arrived_s, lanes[at], last ? answer : lanes[at + 1]);
    }
  }
  stroke(context, colours.link, 1, lines);
}

function drawDrafts({ context, x, lanePx, nowS, barTop }, drafts, world) {
  const boxes = [];
  for (const draft of drafts) {
    const lane = draft.drafter;
    if (draft.started_s >= nowS || lane >= Math.max(1, world.drafters.length)) continue;
    const from = x(draft.started_s);
    boxes.push([
      from,
      (lane + barTop) * lanePx,
      Math.max(FEW_PX, x(Math.min(nowS, draft.ended_s)) - from),
      (BAR_BOTTOM - barTop) * lanePx,
    ]);
  }
  fill(context, colours.drafting, boxes);
}

// Bars, split at the height that the living rows are of all; returns for how long of the window each lane
// worked.
function drawStays({ context, x, lanePx, laneOf, startS, nowS, barTop, waitAt }, trips) {
  const alive = [[], []];
  const dead = [];
  const waits = [];
  const crosses = [];
  const busyS = new Map([...laneOf.values()].map((lane) => [lane, 0]));
  const height = (BAR_BOTTOM - barTop) * lanePx;
  for (const { segment, stays, names } of trips) {
    for (const stay of stays) {
      const lane = laneOf.get(names[stay.stage]);
      if (lane === undefined || stay.arrived_s >= nowS) continue;
      const top = lane * lanePx;
      if (stay.dropped) crosses.push([x(Math.min(nowS, stay.started_s)), top + waitAt * lanePx]);
      const rows = stay.alive + stay.dead;
      if (!rows) continue;
      if (stay.started_s - stay.arrived_s > 1e-4)
        waits.push([
          x(stay.arrived_s),
          top + waitAt * lanePx,
          x(Math.min(nowS, stay.started_s)),
          top + waitAt * lanePx,
        ]);
      if (stay.started_s >= nowS) continue;
      const from = x(stay.started_s);
      const width = Math.max(FEW_PX, x(Math.min(nowS, stay.ended_s)) - from);
      const lost = (height * stay.dead) / rows;
      if (stay.dead) dead.push([from, top + barTop * lanePx, width, lost]);
      if (stay.alive) alive[segment % 2].push([from, top + barTop * lanePx + lost, width, height - lost]);
      const spentS = Math.max(0, Math.min(nowS, stay.ended_s) - Math.max(startS, stay.started_s));
      busyS.set(lane, busyS.get(lane) + spentS);
    }
  }
  fill(context, colours["alive-a"], alive[0]);
  fill(context, colours["alive-b"], alive[1]);
  fill(context, colours.dead, dead);
  stroke(context, colours.waiting, 2, waits);
  stroke(
    context,
    colours.dead,
    1.6,
    crosses.flatMap(([at, y]) => [
      [at - 2.5, y - 2.5, at + 2.5, y + 2.5],
      [at - 2.5, y + 2.5, at + 2.5, y - 2.5],
    ]),
  );
  return busyS;
}

// A line for each instant at which tokens became known, and their text where there is room: nothing else, or
// a count would be taken for a token.
function drawCommits({ context, x, end, lanePx, names, barTop }, commits) {
  const top = (names.length - 1 + barTop) * lanePx;
  const height = (1 - barTop) * lanePx;
  stroke(
    context,
    colours.tokens,
    1.6,
    commits.map((commit) => [x(commit.t), top, x(commit.t), top + 0.3 * height]),
  );
  context.font = `11px ${colours.font}`;
  context.fillStyle = colours.tokens;
  context.textAlign = "left";
  context.textBaseline = "top";
  const texts = commits.map((commit, index) => {
    const room = (index + 1 < commits.length ? x(commits[index + 1].t) - 5 : end) - x(commit.t);
    const text = visible(commit.text);
    const shown = room < TEXT_LEAST_PX ? "" : clipped(context, text, room);
    return shown === text || shown.length > LETTERS_LEAST ? shown : "";
  });
  if (texts.filter(Boolean).length >= TEXTS_LEAST * texts.length)
    texts.forEach((text, index) => context.fillText(text, x(commits[index].t), top + 0.36 * height));
  context.textBaseline = "alphabetic";
}

// A token as it is shown on a canvas: blanks and line breaks can be seen.
export function visible(token) {
  return token
    .replace(/\n/g, "⏎")
    .replace(/\t/g, "⇥")
    .replace(/^ +$/, (blanks) => "␣".repeat(blanks.length))
    .trim();
}

// What happened at each loss, up to the next one, over whatever is there.
function drawLosses({ context, x, end, startS, nowS, names, lanePx, barTop }, losses) {
  const seen = losses.filter(({ t }) => t > startS && t <= nowS);
  const ats = seen.map(({ t }) => x(t));
  stroke(
    context,
    colours.wrong,
    2,
    ats.map((at) => [at, 0, at, names.length * lanePx]),
  );
  context.font = `600 11px ${colours.font}`;
  context.textAlign = "left";
  context.lineJoin = "round";
  context.lineWidth = 4;
  context.strokeStyle = colours.panel;
  context.fillStyle = colours.wrong;
  seen.forEach(({ text }, index) => {
    const from = ats[index] + 5;
    const shown = clipped(context, text, (ats[index + 1] ?? end) - from - 2);
    for (const write of ["strokeText", "fillText"]) context[write](shown, from, barTop * lanePx + 13);
  });
}

function drawShares({ context, end, lanePx, startS, nowS, barTop }, busyS, narrow) {
  const spanS = Math.max(1e-6, nowS - startS);
  context.font = `11px ${colours.font}`;
  context.fillStyle = colours.muted;
  context.textAlign = "left";
  context.textBaseline = "middle";
  busyS.forEach((each, lane) =>
    context.fillText(
      `${Math.min(100, Math.round((100 * each) / spanS))}%${narrow ? "" : " busy"}`,
      end + 6,
      (lane + (barTop + BAR_BOTTOM) / 2) * lanePx,
    ),
  );
  context.textBaseline = "alphabetic";
}
