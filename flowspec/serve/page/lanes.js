// The timeline: the drafters, each stage and the tokens that come out as lanes, segments on the links as lines between them.

import { Surface, colours } from "./colours.js";

const LANE_PX = 30;
const LANE_LEAST_PX = 20;
const LANES_PX = 330; // all of them, where there are many
const AXIS_PX = 18;
const NARROW_PX = 560;
const WIDE_PX = 800; // from here on so many trips are shown:
const BAR_TOP = 0.2; // parts of a lane, downwards; above it are waits and drops
const BAR_BOTTOM = 0.88;
const WAIT_AT = 0.11;
const TRIPS_SHOWN = 16;
const WINDOW_S = [1.5, 12]; // chosen by itself: at least and at most
const TICKS_S = [0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20];
const FEW_PX = 0.75; // bars are drawn at least so wide

export class Lanes {
  constructor(canvas, resized) {
    this.surface = new Surface(canvas, resized);
    this.windowS = 0; // 0: by itself
    this.lanes = 0;
  }

  spanS(timeline, speed) {
    if (this.windowS) return this.windowS;
    const wanted = Math.min(WINDOW_S[1], Math.max(WINDOW_S[0], TRIPS_SHOWN * timeline.recentS * Math.min(1, this.surface.width / WIDE_PX)));
    return wanted * Math.min(1, speed);
  }

  // Draws what happened until `nowS`, which is at the right edge.
  draw(timeline, world, nowS, speed) {
    const names = namesOf(world);
    if (names.length !== this.lanes) {
      this.lanes = names.length;
      this.lanePx = Math.max(LANE_LEAST_PX, Math.min(LANE_PX, LANES_PX / names.length));
      this.surface.canvas.style.height = `${names.length * this.lanePx + AXIS_PX}px`;
      return; // it is drawn when it has its size
    }
    const { context, width, height } = this.surface;
    const narrow = width < NARROW_PX;
    const left = narrow ? 66 : 132;
    const right = narrow ? 34 : 44;
    const spanS = this.spanS(timeline, speed);
    const startS = nowS - spanS;
    const view = { context, left, end: width - right, names, nowS, startS, spanS, lanePx: this.lanePx };
    view.x = (t) => left + ((t - startS) / spanS) * (view.end - left);
    view.firstStage = Math.max(1, world.drafters.length);
    context.clearRect(0, 0, width, height);
    drawLanes(view, world, narrow);
    context.save();
    context.beginPath();
    context.rect(left, 0, view.end - left, height);
    context.clip();
    const trips = timeline.within(timeline.trips, startS, nowS).filter((trip) => trip.sent_s < nowS);
    drawLinks(view, trips);
    drawDrafts(view, timeline.within(timeline.drafts, startS, nowS), world);
    const busyS = drawStays(view, trips, world.stages.length);
    drawCommits(view, timeline.within(timeline.commits, startS, nowS).filter((commit) => commit.t <= nowS));
    drawLosses(view, timeline.losses);
    context.restore();
    drawShares(view, busyS);
  }
}

function namesOf(world) {
  const drafters = world.drafters.length ? world.drafters : ["drafter"];
  const stages = world.stages.map((stage) => ({ name: stage.name, more: `layers ${stage.layers[0]}–${stage.layers[1] - 1}` }));
  return [...drafters.map((name) => ({ name, more: "drafter" })), ...stages, { name: "tokens", more: "out" }];
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

function drawLanes({ context, left, end, names, lanePx, startS, nowS, spanS, x }, world, narrow) {
  const inner = names.slice(0, -1).map((_, lane) => [left, (lane + BAR_TOP) * lanePx, end - left, (BAR_BOTTOM - BAR_TOP) * lanePx]);
  fill(context, colours.lane, inner);
  context.textBaseline = "middle";
  context.textAlign = "left";
  names.forEach(({ name, more }, lane) => {
    const middle = (lane + 0.54) * lanePx;
    context.fillStyle = colours.text;
    context.font = `600 12px ${colours.font}`;
    const room = left - 10;
    const shown = clipped(context, name, narrow || lanePx < 26 ? room : room * 0.55);
    context.fillText(shown, 0, middle);
    if (narrow || lanePx < 26) return;
    const used = context.measureText(shown).width + 6;
    context.font = `11px ${colours.font}`;
    context.fillStyle = colours.muted;
    context.fillText(clipped(context, more, room - used), used, middle);
  });
  context.textBaseline = "alphabetic";
  const bottom = names.length * lanePx;
  const step = TICKS_S.find((each) => spanS / each <= (narrow ? 4 : 8)) ?? TICKS_S.at(-1);
  const decimals = Math.max(0, Math.min(2, Math.ceil(-Math.log10(step))));
  context.font = `11px ${colours.font}`;
  context.fillStyle = colours.muted;
  context.textAlign = "center";
  const lines = [];
  for (let number = Math.max(0, Math.ceil(startS / step)); number * step <= nowS; number += 1) {
    const at = x(number * step);
    lines.push([at, 0, at, bottom]);
    if (at > left + 14 && at < end - 14) context.fillText(`${(number * step).toFixed(decimals)} s`, at, bottom + 14);
  }
  stroke(context, colours.edge, 1, lines);
}

// The longest beginning of `text` that fits, with a sign where it is cut.
export function clipped(context, text, room) {
  if (room <= 0) return "";
  if (context.measureText(text).width <= room) return text;
  let end = Math.min(text.length, Math.floor(room / 4));
  while (end > 0 && context.measureText(`${text.slice(0, end)}…`).width > room) end -= 1;
  return end ? `${text.slice(0, end)}…` : "";
}

function drawLinks({ context, x, names, lanePx, firstStage, nowS }, trips) {
  const lines = [];
  const add = (fromS, toS, lane, last) => {
    if (fromS >= nowS || toS < fromS) return;
    lines.push([x(fromS), (lane + BAR_BOTTOM) * lanePx, x(toS), (lane + 1 + (last ? 0 : BAR_TOP)) * lanePx]);
  };
  for (const { sent_s: sentS, back_s: backS, stays } of trips) {
    if (!stays.length) continue;
    if (stays[0].alive + stays[0].dead + stays[0].dropped > 0) add(sentS, stays[0].arrived_s, firstStage - 1, false);
    for (let at = 0; at < stays.length; at += 1) {
      if (!stays[at].alive) break;
      const last = at === stays.length - 1;
      add(stays[at].left_s, last ? backS : stays[at + 1].arrived_s, firstStage + at, last && firstStage + at === names.length - 2);
    }
  }
  stroke(context, colours.link, 1, lines);
}

function drawDrafts({ context, x, lanePx, nowS }, drafts, world) {
  const boxes = [];
  for (const draft of drafts) {
    const lane = draft.drafter;
    if (draft.started_s >= nowS || lane >= Math.max(1, world.drafters.length)) continue;
    const from = x(draft.started_s);
    boxes.push([from, (lane + BAR_TOP) * lanePx, Math.max(FEW_PX, x(Math.min(nowS, draft.ended_s)) - from), (BAR_BOTTOM - BAR_TOP) * lanePx]);
  }
  fill(context, colours.drafting, boxes);
}

// Bars, split at the height that the living rows are of all; returns for how long of the window each lane worked.
function drawStays({ context, x, lanePx, firstStage, startS, nowS }, trips, stages) {
  const alive = [[], []];
  const dead = [];
  const waits = [];
  const crosses = [];
  const busyS = new Array(stages).fill(0);
  const height = (BAR_BOTTOM - BAR_TOP) * lanePx;
  for (const { segment, stays } of trips) {
    for (const stay of stays) {
      if (stay.stage >= stages || stay.arrived_s >= nowS) continue;
      const top = (firstStage + stay.stage) * lanePx;
      if (stay.dropped) crosses.push([x(Math.min(nowS, stay.started_s)), top + WAIT_AT * lanePx]);
      const rows = stay.alive + stay.dead;
      if (!rows) continue;
      if (stay.started_s - stay.arrived_s > 1e-4) waits.push([x(stay.arrived_s), top + WAIT_AT * lanePx, x(Math.min(nowS, stay.started_s)), top + WAIT_AT * lanePx]);
      if (stay.started_s >= nowS) continue;
      const from = x(stay.started_s);
      const width = Math.max(FEW_PX, x(Math.min(nowS, stay.ended_s)) - from);
      const lost = (height * stay.dead) / rows;
      if (stay.dead) dead.push([from, top + BAR_TOP * lanePx, width, lost]);
      if (stay.alive) alive[segment % 2].push([from, top + BAR_TOP * lanePx + lost, width, height - lost]);
      busyS[stay.stage] += Math.max(0, Math.min(nowS, stay.ended_s) - Math.max(startS, stay.started_s));
    }
  }
  fill(context, colours["alive-a"], alive[0]);
  fill(context, colours["alive-b"], alive[1]);
  fill(context, colours.dead, dead);
  stroke(context, colours.waiting, 2, waits);
  stroke(context, colours.dead, 1.6, crosses.flatMap(([at, y]) => [[at - 2.5, y - 2.5, at + 2.5, y + 2.5], [at - 2.5, y + 2.5, at + 2.5, y - 2.5]]));
  return busyS;
}

function drawCommits({ context, x, end, lanePx, names }, commits) {
  const top = (names.length - 1) * lanePx;
  stroke(context, colours.tokens, 1.6, commits.map((commit) => [x(commit.t), top + 1, x(commit.t), top + 0.4 * lanePx]));
  context.font = `11px ${colours.font}`;
  context.fillStyle = colours.tokens;
  context.textAlign = "left";
  context.textBaseline = "top";
  commits.forEach((commit, index) => {
    const at = x(commit.t);
    const room = (index + 1 < commits.length ? x(commits[index + 1].t) - 4 : end) - at;
    const text = visible(commit.text);
    if (context.measureText(text).width <= room) context.fillText(text, at, top + 0.44 * lanePx);
    else if (room >= 7) context.fillText(String(commit.count), at, top + 0.44 * lanePx);
  });
  context.textBaseline = "alphabetic";
}

// A token as it is shown on a canvas: blanks and line breaks can be seen.
export function visible(token) {
  return token.replace(/\n/g, "⏎").replace(/\t/g, "⇥").replace(/^ +$/, (blanks) => "␣".repeat(blanks.length)).trim();
}

function drawLosses({ context, x, startS, nowS, names, lanePx }, losses) {
  const seen = losses.filter((at) => at > startS && at <= nowS);
  stroke(context, colours.wrong, 2, seen.map((at) => [x(at), 0, x(at), names.length * lanePx]));
  context.font = `600 11px ${colours.font}`;
  context.fillStyle = colours.wrong;
  context.textAlign = "left";
  for (const at of seen) context.fillText("stage lost", x(at) + 4, 11);
}

function drawShares({ context, end, lanePx, firstStage, spanS }, busyS) {
  context.font = `11px ${colours.font}`;
  context.fillStyle = colours.muted;
  context.textAlign = "left";
  context.textBaseline = "middle";
  busyS.forEach((each, stage) => context.fillText(`${Math.min(100, Math.round((100 * each) / spanS))}%`, end + 6, (firstStage + stage + 0.54) * lanePx));
  context.textBaseline = "alphabetic";
}
