// Playing a recording: a clock that can be stopped, hurried and set, and the world as it was then.

import { Timeline, World, firstFrom } from "./model.js";

const LEAD_S = 0.2; // shown after the last frame
// Of the person's clock between two looks at it: a tab that slept goes on where it was.
const JUMP_MAX_S = 0.25;
const SLOWLY_S = 12; // a slow replay takes at least so long,
const SLOWLY_TIMES = 4; // and so many times as long as the answer did,
const SLOWLY_MOST_S = 60; // unless that is longer than this

export class Replay {
  constructor(recording) {
    this.recording = recording;
    this.frames = recording.frames.flatMap(singly);
    this.startS = this.frames[0].t;
    this.endS = this.frames.at(-1).t + LEAD_S;
    this.timeline = new Timeline(recording.stages);
    for (const frame of recording.frames) this.timeline.add(frame);
    this.speed = this.slow;
    this.playing = false;
    this.seenMs = null;
    this._rewind();
    this.seek(this.startS);
  }

  // The speed at which anybody can follow; never faster than it was.
  get slow() {
    const tookS = this.endS - this.startS;
    return Math.min(1, tookS / Math.max(SLOWLY_S, Math.min(SLOWLY_TIMES * tookS, SLOWLY_MOST_S)));
  }

  get atEnd() {
    return this.nowS >= this.endS;
  }

  play() {
    if (this.atEnd) this._rewind();
    this.playing = true;
    this.seenMs = null;
  }

  pause() {
    this.playing = false;
  }

  // Moves on by the person's clock.
  advance(nowMs) {
    if (!this.playing) return;
    if (this.seenMs !== null)
      this.seek(this.nowS + this.speed * Math.min(JUMP_MAX_S, (nowMs - this.seenMs) / 1000));
    this.seenMs = nowMs;
    if (this.atEnd) this.pause();
  }

  seek(toS) {
    const wanted = Math.min(this.endS, Math.max(this.startS, toS));
    if (wanted < this.nowS) this._rewind();
    this.nowS = wanted;
    this._apply(firstFrom(this.frames, wanted + 1e-9, (frame) => frame.t));
  }

  // To the next token, or the one before; to the end, or the beginning, where there is none.
  step(forwards) {
    this.pause();
    const isToken = (frame) => frame.kind === "tokens";
    const at = forwards
      ? this.frames.findIndex((frame, index) => index >= this.next && isToken(frame))
      : this.frames.slice(0, Math.max(0, this._last(isToken))).findLastIndex(isToken);
    if (at < 0) {
      this.seek(forwards ? this.endS : this.startS);
      return;
    }
    if (at < this.next) this._rewind();
    this._apply(at + 1);
    this.nowS = this.frames[at].t;
  }

  _last(wanted) {
    return this.frames.slice(0, this.next).findLastIndex(wanted);
  }

  _apply(until) {
    for (; this.next < until; this.next += 1) this.world.apply(this.frames[this.next]);
  }

  _rewind() {
    const chosen = this.world?.chosen ?? null;
    this.world = new World(this.recording);
    this.world.chosen = chosen;
    this.next = 0;
    this.nowS = this.startS;
  }
}

// Tokens that were committed together, one by one: so they are stepped through.
function singly(frame) {
  return frame.kind === "tokens" && frame.nodes.length > 1
    ? frame.nodes.map((node) => ({ ...frame, nodes: [node] }))
    : [frame];
}
