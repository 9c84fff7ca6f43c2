// The frames of the last answer, or of those that were under way together, so that it can be replayed at
// once.

const FRAMES_MAX = 200000; // of more nothing is kept
const BESIDE = ["devices", "figures", "note"]; // not kept when the answer is over

export class Kept {
  constructor(document) {
    this.document = document;
    this.frames = [];
  }

  // A frame that `world` does not have yet.
  take(frame, world) {
    const isOver = world.running.length === 0;
    if (frame.kind === "begin" && isOver) {
      const t = frame.t;
      this.frames = [
        { t, kind: "stages", stages: world.stages },
        { t, kind: "devices", devices: world.devices },
      ];
    }
    if (!this.frames.length || (isOver && BESIDE.includes(frame.kind))) return;
    if (frame.kind === "missed" || this.frames.length > FRAMES_MAX) this.frames = [];
    else this.frames.push(frame);
  }

  // When it began; 0 before there was any.
  get startS() {
    return this.frames[0]?.t ?? 0;
  }

  // The recording up to the end of the last answer; null where nothing is kept.
  recording() {
    const end = this.frames.findLastIndex((frame) => frame.kind === "end");
    return end < 0 ? null : { ...this.document, frames: this.frames.slice(0, end + 1) };
  }
}
