// @ts-check
/** Trials as lines over parallel axes, on a canvas: what fits in colours by how good it is. */

import { INKS } from "./inks.js";

// From what is worst to what is best: the best stands out most from either ground.
const RAMPS = { light: ["#c9d3de", "#6fa3cf", "#00427a"], dark: ["#39424e", "#3f86bd", "#a6dcff"] };
const MARKS = { light: { best: "#d55e00", live: "#00694b" }, dark: { best: "#ff8c42", live: "#45cf9f" } };
const SHADES = 24;
const LIVE_DASH = [6, 4];

/** @typedef {{ places: (number | null)[], rate: number | null, isFit: boolean, isLive: boolean, isBest: boolean, isChosen: boolean }} TrialLine */

/** The colour of a trial that is so good. @param {number} rate from 0 to 1 @param {import("../data/colours.js").Theme} theme */
export function shadeRate(rate, theme) {
  const stops = RAMPS[theme];
  const at = Math.max(0, Math.min(1, rate)) * (stops.length - 1);
  const below = Math.min(stops.length - 2, Math.floor(at));
  const parts = [1, 3, 5].map((place) => {
    const [from, to] = [stops[below], stops[below + 1]].map((stop) => parseInt(stop.slice(place, place + 2), 16));
    return Math.round(from + (to - from) * (at - below));
  });
  return `rgb(${parts.join(" ")})`;
}

/** Colours of what is marked. @param {import("../data/colours.js").Theme} theme */
export function listMarks(theme) {
  return MARKS[theme];
}

/**
 * @param {HTMLCanvasElement} canvas @param {TrialLine[]} lines
 * @param {{ xs: number[], top: number, height: number, theme: import("../data/colours.js").Theme }} frame in CSS pixels
 */
export function paintTrials(canvas, lines, { xs, top, height, theme }) {
  const scale = devicePixelRatio || 1;
  const [wide, tall] = [Math.round(canvas.clientWidth * scale), Math.round(canvas.clientHeight * scale)];
  if (canvas.width !== wide || canvas.height !== tall) [canvas.width, canvas.height] = [wide, tall];
  const context = /** @type {CanvasRenderingContext2D} */ (canvas.getContext("2d"));
  context.setTransform(scale, 0, 0, scale, 0, 0);
  context.clearRect(0, 0, canvas.clientWidth, canvas.clientHeight);
  context.lineJoin = "round";
  /** @param {TrialLine[]} some @param {string} colour @param {number} width @param {number} alpha @param {number[]} [dash] */
  const stroke = (some, colour, width, alpha, dash = []) => {
    if (!some.length) return;
    context.beginPath();
    for (const line of some) traceLine(context, line.places, xs, top, height);
    context.strokeStyle = colour;
    context.lineWidth = width;
    context.globalAlpha = alpha;
    context.setLineDash(dash);
    context.stroke();
  };
  const fit = lines.filter((line) => line.isFit);
  stroke(lines.filter((line) => !line.isFit), INKS[theme].grid, 1, 0.8);
  stroke(fit.filter((line) => line.rate === null && !line.isLive), INKS[theme].muted, 1, 0.35, [2, 3]);
  /** @type {TrialLine[][]} */
  const shades = Array.from({ length: SHADES }, () => []);
  for (const line of fit) if (line.rate !== null) shades[Math.min(SHADES - 1, Math.floor(line.rate * SHADES))].push(line);
  // Of hundreds what is worse is fainter, or nothing would be seen of the best, which are painted last.
  const faint = Math.min(1, 250 / Math.max(1, fit.length));
  shades.forEach((some, at) => {
    const rate = at / (SHADES - 1);
    stroke(some, shadeRate(rate, theme), 1.3, 0.85 * (faint + (1 - faint) * rate ** 4));
  });
  stroke(fit.filter((line) => line.isLive), MARKS[theme].live, 1.8, 1, LIVE_DASH);
  stroke(lines.filter((line) => line.isBest), MARKS[theme].best, 2.8, 1);
  stroke(lines.filter((line) => line.isChosen), INKS[theme].ink, 2.6, 1);
  context.globalAlpha = 1;
  context.setLineDash([]);
}

/** @param {CanvasRenderingContext2D} context @param {(number | null)[]} places @param {number[]} xs @param {number} top @param {number} height */
function traceLine(context, places, xs, top, height) {
  let isDown = false;
  places.forEach((place, at) => {
    if (place === null) return void (isDown = false);
    const y = top + (1 - place) * height;
    if (isDown) context.lineTo(xs[at], y);
    else context.moveTo(xs[at], y);
    // A value between two that are missing is a dash of its own.
    if (!isDown && (places[at + 1] ?? null) === null) context.lineTo(xs[at] + 4, y);
    isDown = true;
  });
}

/**
 * Which line is nearest to a point, or -1 where none is near.
 * @param {TrialLine[]} lines @param {number[]} xs @param {number} x @param {number} y @param {number} top @param {number} height @param {number} [reach] in pixels
 */
export function findLine(lines, xs, x, y, top, height, reach = 8) {
  let right = xs.findIndex((each) => each >= x);
  if (right === 0) right = 1;
  if (right < 0 || xs.length < 2) return -1;
  const share = (x - xs[right - 1]) / (xs[right] - xs[right - 1]);
  let [found, nearest] = [-1, reach];
  lines.forEach((line, at) => {
    const [from, to] = [line.places[right - 1], line.places[right]];
    if (!line.isFit || from === null || to === null) return;
    const apart = Math.abs(top + (1 - (from + (to - from) * share)) * height - y);
    if (apart <= nearest) [found, nearest] = [at, apart];
  });
  return found;
}
