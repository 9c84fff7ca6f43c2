// The style sheet's colours for what is drawn on a canvas; read again when the person's scheme changes.

const NAMES = [
  "text",
  "muted",
  "edge",
  "panel",
  "lane",
  "alive-a",
  "alive-b",
  "dead",
  "drafting",
  "waiting",
  "link",
  "tokens",
  "wrong",
  "committed",
  "on-committed",
  "guess",
  "on-guess",
  "right",
  "on-right",
];

export const colours = {};

function read() {
  const style = getComputedStyle(document.documentElement);
  for (const name of NAMES) colours[name] = style.getPropertyValue(`--${name}`).trim();
  colours.font = style.fontFamily;
}

// Calls `changed` after each change of the scheme.
export function watchColours(changed) {
  read();
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
    read();
    changed();
  });
}

// A canvas that keeps its size in points in step with the page's layout, without asking for it while drawing.
// A new size empties a canvas, so it is taken only when the next picture is drawn.
export class Surface {
  constructor(canvas, resized) {
    this.canvas = canvas;
    this.context = canvas.getContext("2d");
    this.width = 0;
    this.height = 0;
    this.isStale = false;
    this.resized = resized;
    new ResizeObserver(([entry]) => this._fit(entry.contentRect)).observe(canvas);
  }

  _fit({ width, height }) {
    this.width = width;
    this.height = height;
    this.isStale = true;
    this.resized();
  }

  // To be called before a picture is drawn; returns whether the last one is gone.
  ready() {
    if (!this.isStale) return false;
    this.isStale = false;
    const scale = Math.min(2, devicePixelRatio || 1);
    this.canvas.width = Math.round(this.width * scale);
    this.canvas.height = Math.round(this.height * scale);
    this.context.setTransform(scale, 0, 0, scale, 0, 0);
    return true;
  }
}
