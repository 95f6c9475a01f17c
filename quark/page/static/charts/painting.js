// @ts-check
/** Bands, lines, dots, triangles, carets and marks on a canvas, in its own pixels. */

import { writeStep } from "../pages/texts.js";
import { FONT } from "./inks.js";
import { findShown, findWide } from "./fitting.js";

/** @typedef {import("./lines.js").Line} Line */
/** @typedef {import("./fitting.js").Caret} Caret */
/** @typedef {import("../data/colours.js").LineStyle} LineStyle */
/** @typedef {{ left: number, top: number, width: number, height: number }} Box */

/**
 * Where values lie on a canvas.
 * @typedef {object} Frame
 * @property {CanvasRenderingContext2D} context
 * @property {Box} box
 * @property {number} scale canvas pixels a CSS pixel
 * @property {number} low of x
 * @property {number} high of x
 * @property {boolean} isLog
 * @property {(x: number) => number} toX
 * @property {(y: number) => number} toY NaN where a log axis has no place
 */

const FAR_PX = 1e5;
const FONT_PX = 11;
const DOT_PX = 2.6;
// Where entries are so far apart, each is a dot besides.
const DOTTED_PX = 12;
const CARET_PX = 5;

/**
 * @param {CanvasRenderingContext2D} context @param {Box} box @param {number} scale
 * @param {[number, number]} x @param {[number, number]} y @param {boolean} isLog
 * @returns {Frame}
 */
export function makeFrame(context, box, scale, x, y, isLog) {
  const wide = box.width / (x[1] - x[0] || 1);
  const bottom = isLog ? Math.log10(y[0]) : y[0];
  const tall = box.height / ((isLog ? Math.log10(y[1]) : y[1]) - bottom || 1);
  const ground = box.top + box.height;
  return {
    context, box, scale, low: x[0], high: x[1], isLog,
    toX: (value) => box.left + (value - x[0]) * wide,
    toY: (value) => {
      if (isLog && value <= 0) return NaN;
      const at = ground - ((isLog ? Math.log10(value) : value) - bottom) * tall;
      return at > FAR_PX ? FAR_PX : at < -FAR_PX ? -FAR_PX : at;
    },
  };
}

/** Draw with the box as the bounds. @param {Frame} frame @param {() => void} paint */
export function paintInside({ context, box }, paint) {
  context.save();
  context.beginPath();
  context.rect(box.left, box.top, box.width, box.height);
  context.clip();
  paint();
  context.restore();
}

/** From low to high of each entry. @param {Frame} frame @param {Line} line @param {LineStyle} style */
export function paintBand(frame, line, style) {
  if (!line.low || !line.high) return;
  const { context, toX, toY, scale, box } = frame;
  const ground = box.top + box.height;
  const [first, last] = findShown(line, frame.low, frame.high);
  context.fillStyle = style.colour;
  context.globalAlpha = 0.22;
  for (let start = first; start < last;) {
    if (Number.isNaN(toY(line.high[start]))) {
      start++;
      continue;
    }
    let end = start;
    context.beginPath();
    for (; end < last && !Number.isNaN(toY(line.high[end])); end++) context.lineTo(toX(line.xs[end]), toY(line.high[end]));
    for (let i = end - 1; i >= start; i--) {
      const y = toY(line.low[i]);
      context.lineTo(toX(line.xs[i]), Number.isNaN(y) ? ground : y);
    }
    context.fill();
    start = end;
  }
  context.globalAlpha = 0.75;
  context.strokeStyle = style.colour;
  context.lineWidth = scale;
  context.beginPath();
  for (const i of findWide(line, first, last, frame.isLog)) {
    const low = toY(line.low[i]);
    context.moveTo(toX(line.xs[i]), Number.isNaN(low) ? ground : low);
    context.lineTo(toX(line.xs[i]), toY(line.high[i]));
  }
  context.stroke();
  context.globalAlpha = 1;
}

/**
 * Values as a line that ends where one is not finite; what has no neighbour is a dot.
 * @param {Frame} frame @param {Line} line @param {ArrayLike<number>} values @param {LineStyle} style
 * @param {{ width: number, alpha: number, isDotted?: boolean }} look
 */
export function paintLine(frame, line, values, style, { width, alpha, isDotted = true }) {
  const { context, toX, toY, scale } = frame;
  const [first, last] = findShown(line, frame.low, frame.high);
  context.globalAlpha = alpha;
  context.strokeStyle = style.colour;
  context.fillStyle = style.colour;
  context.lineWidth = width * scale;
  context.lineJoin = "round";
  context.setLineDash(style.dash.map((part) => part * scale));
  context.beginPath();
  let isOpen = false;
  const lonely = [];
  for (let i = first; i < last; i++) {
    const y = toY(values[i]);
    if (!Number.isFinite(y)) {
      isOpen = false;
      continue;
    }
    if (isOpen) context.lineTo(toX(line.xs[i]), y);
    else context.moveTo(toX(line.xs[i]), y);
    const isNext = i + 1 < last && Number.isFinite(toY(values[i + 1]));
    if (!isOpen && !isNext) lonely.push(i);
    isOpen = true;
  }
  context.stroke();
  context.setLineDash([]);
  const isSparse = isDotted && (last - first) * DOTTED_PX * scale < frame.box.width;
  for (const i of isSparse ? count(first, last) : lonely) {
    const y = toY(values[i]);
    if (Number.isFinite(y)) paintDot(frame, toX(line.xs[i]), y, lonely.includes(i) ? DOT_PX * 1.4 : DOT_PX);
  }
  context.globalAlpha = 1;
}

/** @param {number} first @param {number} last */
function count(first, last) {
  return Array.from({ length: Math.max(0, last - first) }, (_, i) => first + i);
}

/** @param {Frame} frame @param {number} x @param {number} y @param {number} radius */
export function paintDot({ context, scale }, x, y, radius) {
  context.beginPath();
  context.arc(x, y, radius * scale, 0, 2 * Math.PI);
  context.fill();
}

/** @param {CanvasRenderingContext2D} context @param {number} x @param {number} y of its point @param {number} size @param {number} down 1 or -1 */
function paintTriangle(context, x, y, size, down) {
  context.beginPath();
  context.moveTo(x, y);
  context.lineTo(x - size, y - down * size * 1.5);
  context.lineTo(x + size, y - down * size * 1.5);
  context.fill();
}

/**
 * Triangles on the ground where values are not finite; those that would overlap are one.
 * @param {Frame} frame @param {Line[]} lines @param {{ bad: string, ground: string }} inks
 * @returns {{ x: number, text: string }[]} where they stand and what they say, in canvas pixels
 */
export function paintBad(frame, lines, inks) {
  const { context, box, scale, toX } = frame;
  /** @type {{ x: number, count: number, step: number, last: number }[]} */
  const places = [];
  const all = lines.flatMap((line) => line.bad).filter(({ x }) => x >= frame.low && x <= frame.high);
  all.sort((a, b) => a.x - b.x);
  for (const { x, step, count } of all) {
    const before = places.at(-1);
    if (before && toX(x) - before.x < CARET_PX * scale) {
      before.count += count;
      before.last = step;
    } else places.push({ x: toX(x), count, step, last: step });
  }
  context.fillStyle = inks.bad;
  for (const { x } of places) paintTriangle(context, x, box.top + box.height - 7 * scale, CARET_PX * scale, -1);
  return places.map(({ x, count, step, last }) => ({
    x, text: `${count === 1 ? "not finite" : `${count} not finite`} at ${writeStep(step)}${last > step ? ` to ${writeStep(last)}` : ""}`,
  }));
}

/**
 * Carets at the edge, and beside the furthest of each side what it is.
 * @param {Frame} frame @param {Caret[]} carets @param {{ ink: string, ground: string }} inks
 * @param {(caret: Caret) => string} say
 * @returns {(Caret & { left: number, top: number, text: string })[]} in canvas pixels
 */
export function paintCarets(frame, carets, inks, say) {
  const { context, box, scale, toX } = frame;
  const placed = carets.map((caret) => {
    const isAbove = caret.side === "above";
    const left = toX(caret.x);
    const top = isAbove ? box.top + 1.5 * scale : box.top + box.height - 1.5 * scale;
    context.fillStyle = inks.ink;
    paintTriangle(context, left, top, CARET_PX * scale, isAbove ? -1 : 1);
    return { ...caret, left, top, text: say(caret) };
  });
  for (const side of ["above", "below"]) {
    const own = placed.filter((caret) => caret.side === side);
    if (own.length === 0) continue;
    const furthest = own.reduce((a, b) => ((side === "above" ? b.value > a.value : b.value < a.value) ? b : a));
    const more = own.length > 1 ? `  (${own.length} places)` : "";
    paintText(frame, furthest.text + more, furthest.left, side === "above" ? box.top + 7 * scale : box.top + box.height - 7 * scale, inks);
  }
  return placed;
}

/** Text right of a place, or left of it where there is no room, on a ground of its own. @param {Frame} frame @param {string} text @param {number} x @param {number} y @param {{ ink: string, ground: string }} inks */
export function paintText({ context, box, scale }, text, x, y, inks) {
  context.font = `${FONT_PX * scale}px ${FONT}`;
  context.textBaseline = "middle";
  context.textAlign = "left";
  const width = context.measureText(text).width;
  const gap = (CARET_PX + 3) * scale;
  const isRight = x + gap + width < box.left + box.width;
  const left = isRight ? x + gap : Math.max(box.left, x - gap - width);
  context.globalAlpha = 0.85;
  context.fillStyle = inks.ground;
  context.fillRect(left - 2 * scale, y - 7 * scale, width + 4 * scale, 14 * scale);
  context.globalAlpha = 1;
  context.fillStyle = inks.ink;
  context.fillText(text, left, y);
}

/** @typedef {{ x: number, text: string, severity: string, ids: string[] }} MarkGroup x in canvas pixels */

/**
 * Marks whose labels would touch are one: "3 findings".
 * @param {{ x: number, text: string, severity: string, id?: string }[]} marks x in canvas pixels
 * @param {number} near
 * @returns {MarkGroup[]}
 */
export function groupMarks(marks, near) {
  const ranks = ["critical", "error", "warning", "info"];
  /** @type {(MarkGroup & { count: number })[]} */
  const groups = [];
  for (const mark of [...marks].sort((a, b) => a.x - b.x)) {
    const before = groups.at(-1);
    if (!before || mark.x - before.x > near) {
      groups.push({ x: mark.x, text: mark.text, severity: mark.severity, ids: [mark.id ?? ""], count: 1 });
      continue;
    }
    before.count++;
    before.ids.push(mark.id ?? "");
    before.text = `${before.count} findings`;
    if (ranks.indexOf(mark.severity) < ranks.indexOf(before.severity)) before.severity = mark.severity;
  }
  return groups;
}

/** @param {Frame} frame @param {MarkGroup[]} groups @param {Record<string, string>} inks */
export function paintMarks(frame, groups, inks) {
  const { context, box, scale } = frame;
  context.font = `${FONT_PX * scale}px ${FONT}`;
  context.textBaseline = "bottom";
  context.textAlign = "left";
  groups.forEach(({ x, text, severity }, at) => {
    const colour = inks[severity] ?? inks.muted;
    context.strokeStyle = colour;
    context.fillStyle = colour;
    context.lineWidth = scale;
    context.setLineDash([3 * scale, 3 * scale]);
    context.beginPath();
    context.moveTo(x, box.top - 2 * scale);
    context.lineTo(x, box.top + box.height);
    context.stroke();
    context.setLineDash([]);
    paintTriangle(context, x, box.top + scale, 3.5 * scale, 1);
    const room = (groups[at + 1]?.x ?? box.left + box.width) - x - 8 * scale;
    const width = context.measureText(text).width;
    const before = x - (groups[at - 1]?.x ?? box.left);
    if (room >= width) context.fillText(text, x + 6 * scale, box.top - 2 * scale);
    else if (!groups[at + 1] && before > width + 8 * scale) context.fillText(text, x - width - 6 * scale, box.top - 2 * scale);
    else context.fillText(cutText(context, text, Math.max(room, 0)), x + 6 * scale, box.top - 2 * scale);
  });
}

/** @param {CanvasRenderingContext2D} context @param {string} text @param {number} width */
export function cutText(context, text, width) {
  if (context.measureText(text).width <= width) return text;
  let kept = text.length;
  while (kept > 0 && context.measureText(`${text.slice(0, kept)}…`).width > width) kept--;
  return kept > 0 ? `${text.slice(0, kept)}…` : "";
}
