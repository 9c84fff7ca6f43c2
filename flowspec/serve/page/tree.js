// The token tree of a request: the committed path from the left, guesses to its right, the likelier the more
// opaque; wrong ones fade out in red.

import { count } from "./elements.js";
import { Surface, colours } from "./colours.js";
import { clipped, visible } from "./lanes.js";

const ROW_PX = 26;
const CHIP_PX = 20;
const CHIP_WIDTH_PX = [30, 150]; // at least and at most: a column is as wide as its widest token
const PAD_PX = 6;
const PATH_SHARE = 0.3; // of the width, for the end of the answer
const GAP_PX = 14;
const MORE_PX = 18; // at the bottom right: the count of what there is no room for
const FONT = `12px ui-monospace, "DejaVu Sans Mono", monospace`;
const FADE_MS = 550;
const EASE_MS = 90; // a node covers most of its way in so long
const SETTLED_PX = 0.4;

export class Tree {
  constructor(canvas, resized, still) {
    this.surface = new Surface(canvas, resized);
    this.still = still; // asks whether the person wants little motion
    this.forget();
  }

  // Starts from nothing, without fading what was there: another request, or a jump in time.
  forget() {
    this.shown = new Map(); // id -> {x, y, toX, toY, node, leftMs, wrong}
    this.laid = null;
    this.seenMs = 0;
    this.moving = false;
    this.drawn = null;
  }

  draw(request, nowMs) {
    const isEmptied = this.surface.ready();
    const { context, width, height } = this.surface;
    const state = `${request?.id} ${request?.version} ${width} ${height} ${colours.panel}`;
    if (!isEmptied && state === this.drawn && request === this.request && !this.moving) return; // as it is
    this.drawn = state;
    const passedMs = Math.min(100, nowMs - this.seenMs);
    this.seenMs = nowMs;
    if (request !== this.request) {
      this.forget();
      this.request = request;
    }
    if (
      request &&
      (this.laid?.version !== request.version || this.laid.width !== width || this.laid.height !== height)
    )
      this._aim(request, nowMs);
    this._move(nowMs, this.still() ? Infinity : passedMs, request?.running ?? false);
    context.clearRect(0, 0, width, height);
    if (!request) return;
    this._lines(context);
    const all = [...this.shown.values()];
    const here = all.filter((each) => each.leftMs === null);
    const drawn = [...here];
    for (const each of all
      .filter((one) => one.leftMs !== null)
      .sort((one, other) => other.leftMs - one.leftMs)) {
      if (drawn.some((other) => covers(other, each))) continue; // the newest are seen
      this._chip(context, each, nowMs);
      drawn.push(each);
    }
    for (const each of here) this._chip(context, each, nowMs);
    if (this.laid?.hidden) this._more(context, width, height);
  }

  _aim(request, nowMs) {
    const { width, height } = this.surface;
    this.surface.context.font = FONT;
    const measure = (node) =>
      Math.min(
        CHIP_WIDTH_PX[1],
        Math.max(
          CHIP_WIDTH_PX[0],
          Math.ceil(this.surface.context.measureText(visible(node.token)).width) + 2 * PAD_PX,
        ),
      );
    this.laid = { ...layout(request, width, height, measure), version: request.version, width, height };
    const known = request.path.findLast((id) => this.shown.has(id));
    // What is new moves along with the rest.
    const shift = known === undefined ? 0 : this.shown.get(known).x - this.laid.places.get(known).x;
    for (const [id, { x, y, room }] of this.laid.places) {
      const before = this.shown.get(id);
      if (before) Object.assign(before, { toX: x, toY: y, room, node: request.nodes.get(id), leftMs: null });
      else
        this.shown.set(id, {
          x: x + shift,
          y,
          toX: x,
          toY: y,
          room,
          node: request.nodes.get(id),
          leftMs: null,
        });
    }
    for (const [id, each] of this.shown) {
      if (this.laid.places.has(id) || each.leftMs !== null) continue;
      each.leftMs = nowMs;
      each.wrong = request.running && !each.node.committed && !request.nodes.has(id);
      each.toX -= shift;
    }
  }

  // Once the answer is over, what was wrong at last stays.
  _move(nowMs, passedMs, isRunning) {
    const part = 1 - Math.exp(-passedMs / EASE_MS);
    this.moving = false;
    for (const [id, each] of this.shown) {
      const fade = this.still() ? 0 : FADE_MS;
      if (each.wrong && !isRunning && each.leftMs !== null) each.leftMs = nowMs;
      if (each.leftMs !== null && nowMs - each.leftMs >= (each.wrong ? fade : fade / 3)) {
        this.shown.delete(id);
        continue;
      }
      each.x += part * (each.toX - each.x);
      each.y += part * (each.toY - each.y);
      if (
        (each.leftMs !== null && (isRunning || !each.wrong)) ||
        Math.abs(each.toX - each.x) + Math.abs(each.toY - each.y) > SETTLED_PX
      )
        this.moving = true;
    }
  }

  _lines(context) {
    context.lineWidth = 1.4;
    for (const { x, y, node, leftMs } of this.shown.values()) {
      const parent = this.shown.get(node.parent);
      if (!parent || x < 0 || leftMs !== null || parent.leftMs !== null) continue;
      const from = parent.x + parent.room;
      context.strokeStyle = node.committed
        ? colours.committed
        : `rgb(${colours.guess} / ${0.25 + 0.6 * node.value})`;
      context.beginPath();
      context.moveTo(from, parent.y);
      context.bezierCurveTo(from + GAP_PX / 2, parent.y, x - GAP_PX / 2, y, x, y);
      context.stroke();
    }
  }

  _chip(context, each, nowMs) {
    const { x, y, room, node, leftMs, wrong } = each;
    const isGhost = wrong && leftMs !== null;
    if (x < (isGhost ? 0 : -room)) return;
    const left = leftMs === null ? 1 : Math.max(0, 1 - (nowMs - leftMs) / FADE_MS);
    context.globalAlpha = wrong ? 0.85 * left : left;
    context.beginPath();
    context.roundRect(x, y - CHIP_PX / 2, room, CHIP_PX, 5);
    context.fillStyle = colours.panel;
    context.fill();
    if (isGhost) {
      context.strokeStyle = colours.wrong;
      context.lineWidth = 1.2;
      context.stroke();
    } else if (node.committed) {
      context.fillStyle = node.sent ? colours.right : colours.committed;
      context.fill();
    } else {
      context.fillStyle = `rgb(${colours.guess} / ${node.sent ? 0.12 + 0.5 * node.value : 0.1 * node.value})`;
      context.fill();
      context.strokeStyle = `rgb(${colours.guess} / ${0.35 + 0.65 * node.value})`;
      context.lineWidth = 1.3;
      context.setLineDash(node.sent ? [] : [3, 3]);
      context.stroke();
      context.setLineDash([]);
    }
    context.font = FONT;
    context.textAlign = "center";
    context.textBaseline = "middle";
    context.fillStyle = isGhost
      ? colours.wrong
      : node.committed
        ? colours[node.sent ? "on-right" : "on-committed"]
        : colours["on-guess"];
    if (leftMs === null && !node.committed) context.globalAlpha = 0.7 + 0.3 * node.value;
    const text = clipped(context, visible(node.token), room - PAD_PX);
    context.fillText(text, x + room / 2, y + 0.5);
    if (isGhost) {
      const half = context.measureText(text).width / 2;
      context.fillRect(x + room / 2 - half, y, 2 * half, 1.2);
    }
    context.globalAlpha = 1;
    context.textBaseline = "alphabetic";
  }

  _more(context, width, height) {
    context.font = `11px ${colours.font}`;
    context.fillStyle = colours.muted;
    context.textAlign = "right";
    const text = `and ${count(this.laid.hidden, "more guess", "more guesses")}`;
    const left = width - context.measureText(text).width - 6;
    const isTaken = ({ x, y, room }) => x + room > left && y + CHIP_PX / 2 > height - MORE_PX;
    if (![...this.shown.values()].some(isTaken)) context.fillText(text, width - 2, height - 4);
  }
}

// Whether a token would hide what is left of another one, or be hidden by it.
function covers(one, other) {
  return (
    Math.abs(one.y - other.y) < CHIP_PX + 2 &&
    one.x < other.x + other.room + 2 &&
    other.x < one.x + one.room + 2
  );
}

// Places for the end of the committed path and for the most valuable guesses that there is room for.
function layout(request, width, height, measure) {
  const places = new Map();
  const rooms = request.path.map((id) => measure(request.nodes.get(id)));
  const leaves = request.guesses.length ? PATH_SHARE * width : width;
  let kept = 1;
  let usedPx = rooms.at(-1) ?? 0;
  while (kept < rooms.length && usedPx + rooms[rooms.length - kept - 1] + GAP_PX <= leaves) {
    kept += 1;
    usedPx += rooms[rooms.length - kept] + GAP_PX;
  }
  let x = usedPx;
  for (let at = request.path.length - 1; at >= 0; at -= 1) {
    // those before have left to the left, and are drawn while they go
    x -= rooms[at];
    places.set(request.path[at], { x, y: ROW_PX / 2, room: rooms[at] });
    x -= GAP_PX;
  }
  const rows = Math.max(1, Math.floor(height / ROW_PX));
  const { children, guesses } = chosen(request, Math.floor(width / (CHIP_WIDTH_PX[0] + GAP_PX)), rows);
  const columns = [];
  const survey = (id, depth) =>
    (children.get(id) ?? []).forEach((child) => {
      columns[depth] = Math.max(columns[depth] ?? 0, measure(request.nodes.get(child)));
      survey(child, depth + 1);
    });
  if (request.root !== null) survey(request.root, 0);
  const starts = [];
  columns.forEach(
    (room, depth) =>
      (starts[depth] = depth ? starts[depth - 1] + columns[depth - 1] + GAP_PX : usedPx + GAP_PX),
  );
  let free = 1;
  let placed = 0;
  const place = (id, depth, row) =>
    (children.get(id) ?? []).forEach((child, index) => {
      if (starts[depth] + columns[depth] > width) return;
      const at = index === 0 ? row : free++;
      places.set(child, { x: starts[depth], y: (at + 0.5) * ROW_PX, room: columns[depth] });
      placed += 1;
      place(child, depth + 1, at);
    });
  if (request.root !== null) place(request.root, 0, 0);
  return { places, hidden: guesses - placed };
}

// By parent, the guesses to show: in order of value while the rows and columns suffice.
function chosen(request, columns, rows) {
  const depths = new Map([[request.root, 0]]);
  const children = new Map();
  const guesses = request.guesses;
  const ordered = [...guesses].sort((one, other) => other.value - one.value);
  let used = 1;
  let again = ordered;
  while (again.length) {
    const waiting = [];
    for (const node of again) {
      const depth = depths.get(node.parent);
      if (depth === undefined) {
        waiting.push(node);
        continue;
      }
      const siblings = children.get(node.parent);
      if (depth >= columns || (siblings && used >= rows)) continue;
      if (siblings) {
        siblings.push(node.id);
        used += 1;
      } else {
        children.set(node.parent, [node.id]);
      }
      depths.set(node.id, depth + 1);
    }
    if (waiting.length === again.length) break;
    again = waiting;
  }
  return { children, guesses: guesses.length };
}
