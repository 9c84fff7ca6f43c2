// Recordings that the page carries with it, where it is a file of its own and no server's: packed, in
// elements of it.

import { readRecording } from "./recording.js";

export const shelf = [...document.querySelectorAll("script[type='application/gzip']")].map((element) => ({
  title: element.dataset.title,
  read: async () => {
    const packed = Uint8Array.from(atob(element.textContent.trim()), (letter) => letter.charCodeAt(0));
    const whole = new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"));
    return readRecording(await new Response(whole).text(), element.dataset.title);
  },
}));
