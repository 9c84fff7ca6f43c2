// The bar under which a replay is played: its buttons, the slider, the speed, and the keys.

import { byId, put } from "./elements.js";

const EVERY_MS = 100;
const TYPED = "input:not([type=range]), textarea, select";

export class Player {
  // `changed` is called when there is something else to draw, `left` when the person is done with the replay.
  constructor(changed, left) {
    this.changed = changed;
    this.replay = null;
    this.toldMs = 0;
    byId("play").addEventListener("click", () => this.toggle());
    byId("step").addEventListener("click", () => this._step(true));
    byId("step-back").addEventListener("click", () => this._step(false));
    byId("back").addEventListener("click", left);
    byId("scrub").addEventListener("input", () => {
      this.replay.pause();
      this.replay.seek(Number(byId("scrub").value));
      changed();
    });
    byId("speed").addEventListener("change", () => this._hurry());
  }

  open(replay) {
    this.replay = replay;
    this._hurry();
    Object.assign(byId("scrub"), { min: replay.startS, max: replay.endS });
    byId("replay").hidden = false;
    byId("play").focus();
  }

  close() {
    this.replay = null;
    byId("replay").hidden = true;
  }

  toggle(play = !this.replay.playing) {
    if (play) this.replay.play();
    else this.replay.pause();
    this.show(performance.now());
    this.changed();
  }

  // Whether the key was the player's.
  press(event) {
    if (!this.replay || event.target.closest(TYPED)) return false;
    if (event.key === " " && !event.target.closest("button, a, summary")) this.toggle();
    else if (event.key === "ArrowLeft" || event.key === "ArrowRight") this._step(event.key === "ArrowRight");
    else return false;
    return true;
  }

  // The bar as it is at this instant, now and then while it plays.
  tick(nowMs) {
    if (!this.replay.playing || nowMs - this.toldMs > EVERY_MS) this.show(nowMs);
  }

  show(nowMs) {
    this.toldMs = nowMs;
    const { playing, nowS, startS, endS } = this.replay;
    put(byId("play"), playing ? "Pause" : "Play");
    byId("scrub").value = nowS;
    const instant = `${(nowS - startS).toFixed(2)} of ${(endS - startS).toFixed(2)} s`;
    put(byId("instant"), instant);
    byId("scrub").setAttribute("aria-valuetext", instant);
  }

  _step(forwards) {
    this.replay.step(forwards);
    this.show(performance.now());
    this.changed();
  }

  _hurry() {
    if (this.replay) this.replay.speed = Number(byId("speed").value) || this.replay.slow;
    this.changed();
  }
}
