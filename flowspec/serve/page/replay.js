// Playing a recording: a clock that can be stopped, hurried and set, and the world as it was then.

import { Timeline, World, firstFrom } from "./model.js";

const LEAD_S = 0.2; // shown after the last frame
const JUMP_MAX_S = 0.25; // of the person's clock between two looks at it: a tab that slept goes on where it was

export class Replay {
  constructor(recording) {
    this.recording = recording;
    this.frames = recording.frames;
    this.startS = this.frames[0].t;
    this.endS = this.frames.at(-1).t + LEAD_S;
    this.timeline = new Timeline();
    for (const frame of this.frames) this.timeline.add(frame);
    this.speed = 1;
    this.playing = false;
    this.seenMs = null;
    this._rewind();
    this.seek(this.startS);
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
    if (this.seenMs !== null) this.seek(this.nowS + this.speed * Math.min(JUMP_MAX_S, (nowMs - this.seenMs) / 1000));
    this.seenMs = nowMs;
    if (this.atEnd) this.pause();
  }

  seek(toS) {
    const wanted = Math.min(this.endS, Math.max(this.startS, toS));
    if (wanted < this.nowS) this._rewind();
    this.nowS = wanted;
    const until = firstFrom(this.frames, wanted + 1e-9, (frame) => frame.t);
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
