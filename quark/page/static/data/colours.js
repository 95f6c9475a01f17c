// @ts-check
/** Colours that all eyes can tell apart; what is more than eight has dashes besides. */

// Okabe and Ito, without their black and yellow: neither is seen on both grounds.
const LINES = {
  light: ["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#b38600", "#6a51a3", "#555555"],
  dark: ["#56b4e9", "#ff8c42", "#2fc79a", "#e19ac4", "#7fa8ff", "#e6b422", "#b3a0e8", "#b8b8b8"],
};
const DASHES = [[], [7, 4], [2, 3], [9, 3, 2, 3]];

// Cividis at nine places (Nuñez, Anderton and Renslow 2018).
const CIVIDIS = ["#00224e", "#123570", "#3b496c", "#575d6d", "#707173", "#8a8678", "#a59c74", "#c3b369", "#fee838"];
const FALLS = { light: ["#fafafa", "#a6cbe3", "#4393c3", "#12507b"], dark: ["#17191d", "#2b5f86", "#5aa9dd", "#bfe3ff"] };
const GROWS = { light: ["#fafafa", "#f7c08a", "#e1701a", "#8a3100"], dark: ["#17191d", "#8f4a17", "#f0852d", "#ffdcb8"] };
const SHADES = 256;

/** Not a number, in a map. */
export const BAD = "#e8112d";

/** @typedef {"light" | "dark"} Theme */
/** @typedef {{ colour: string, dash: number[] }} LineStyle */

/** How the line with this number is drawn. @param {number} index @param {Theme} theme @returns {LineStyle} */
export function styleLine(index, theme) {
  const colours = LINES[theme];
  return {
    colour: colours[index % colours.length],
    dash: DASHES[Math.floor(index / colours.length) % DASHES.length],
  };
}

/** 256 colours as 0xAABBGGRR, for a canvas. @param {string[]} stops @returns {Uint32Array} */
function blendStops(stops) {
  const shades = new Uint32Array(SHADES);
  const parts = stops.map((stop) => [1, 3, 5].map((at) => parseInt(stop.slice(at, at + 2), 16)));
  for (let i = 0; i < SHADES; i++) {
    const place = (i / (SHADES - 1)) * (stops.length - 1);
    const below = Math.min(stops.length - 2, Math.floor(place));
    const [red, green, blue] = [0, 1, 2].map((part) =>
      Math.round(parts[below][part] + (parts[below + 1][part] - parts[below][part]) * (place - below)));
    shades[i] = ((255 << 24) | (blue << 16) | (green << 8) | red) >>> 0;
  }
  return shades;
}

/** From low to high, of one quantity. @returns {Uint32Array} */
export function listSequential() {
  return blendStops(CIVIDIS);
}

/** Blue for less, orange for more, the ground for no change. @param {Theme} theme @returns {Uint32Array} */
export function listDiverging(theme) {
  return blendStops([...FALLS[theme].slice().reverse(), ...GROWS[theme].slice(1)]);
}

/** A colour as 0xAABBGGRR. @param {string} colour such as #e8112d */
export function packColour(colour) {
  const [red, green, blue] = [1, 3, 5].map((at) => parseInt(colour.slice(at, at + 2), 16));
  return ((255 << 24) | (blue << 16) | (green << 8) | red) >>> 0;
}
