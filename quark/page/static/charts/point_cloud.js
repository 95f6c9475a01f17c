// @ts-check
/** Points in space on a canvas: turned by dragging or arrow keys, nearer by the wheel or + and -. */

import { INKS } from "./inks.js";
import { readTheme, watchTheme } from "./theme.js";
import { spell } from "../pages/texts.js";

/** @typedef {{ count: number, x: Float32Array, y: Float32Array, z: Float32Array, value: Float32Array | null, colour: Uint8Array | null }} Points */

const MOST_HEAD = 4096;
const MOST_DRAWN = 60_000;
const HEIGHT = 420;
const TURN = 0.01;
const KEY_TURN = 0.15;
const ZOOM = 1.15;
const FAR = 3;
const SIZES = new Map([["float", 4], ["uchar", 1]]);

/** A binary PLY file as Quark writes it, thinned evenly. @param {ArrayBuffer} buffer @returns {Points} @throws {Error} it is another file */
export function readPly(buffer) {
  const head = new TextDecoder("latin1").decode(buffer.slice(0, MOST_HEAD));
  const end = head.indexOf("end_header\n");
  const count = Number(/^element vertex (\d{1,9})$/m.exec(head)?.[1]);
  if (!head.startsWith("ply\nformat binary_little_endian") || end < 0 || !Number.isInteger(count)) throw new Error("this is no binary PLY file");
  const fields = [...head.slice(0, end).matchAll(/^property (\w+) (\w+)$/gm)].map(([, kind, name]) => ({ kind, name, at: 0 }));
  let stride = 0;
  for (const field of fields) {
    field.at = stride;
    stride += SIZES.get(field.kind) ?? NaN;
  }
  const start = end + "end_header\n".length;
  if (!(stride > 0) || buffer.byteLength < start + stride * count) throw new Error("this PLY file has unsupported properties or is incomplete");
  const view = new DataView(buffer, start);
  const step = Math.max(1, Math.ceil(count / MOST_DRAWN));
  const drawn = Math.ceil(count / step);
  /** @param {string} name */
  const read = (name) => {
    const field = fields.find((one) => one.name === name && one.kind === "float");
    if (!field) return null;
    return Float32Array.from({ length: drawn }, (_, i) => view.getFloat32(i * step * stride + field.at, true));
  };
  const shades = ["red", "green", "blue"].map((name) => fields.find((one) => one.name === name && one.kind === "uchar"));
  let colour = null;
  if (shades.every(Boolean)) {
    colour = new Uint8Array(drawn * 3);
    for (let i = 0; i < drawn; i++) shades.forEach((shade, c) => { /** @type {Uint8Array} */ (colour)[i * 3 + c] = view.getUint8(i * step * stride + /** @type {any} */ (shade).at); });
  }
  const [x, y, z] = ["x", "y", "z"].map(read);
  if (!x || !y || !z) throw new Error("this PLY file has no x, y and z");
  return { count, x, y, z, value: read("value"), colour };
}

/** Least and greatest of some numbers. @param {Float32Array} values @returns {[number, number]} */
function findRange(values) {
  let low = Infinity;
  let high = -Infinity;
  for (const value of values) {
    if (value < low) low = value;
    if (value > high) high = value;
  }
  return low <= high ? [low, high] : [0, 1];
}

export class PointCloud {
  /** @param {HTMLElement} host @param {Points} points @param {string} name */
  constructor(host, points, name) {
    this.points = points;
    this.turn = 0.6;
    this.tilt = 0.4;
    this.scale = 1;
    this.canvas = document.createElement("canvas");
    this.canvas.className = "points";
    this.canvas.tabIndex = 0;
    this.canvas.setAttribute("role", "img");
    this.canvas.setAttribute("aria-label", `${spell(name)}: ${points.count} points; arrow keys turn them, plus and minus zoom`);
    const ranges = [points.x, points.y, points.z].map(findRange);
    this.middle = ranges.map(([low, high]) => (low + high) / 2);
    this.extent = Math.max(...ranges.map(([low, high]) => high - low)) || 1;
    this.shades = points.value ? findRange(points.value) : ranges[2];
    host.replaceChildren(this.canvas);
    this.listen();
    this.watcher = new ResizeObserver(() => this.paint());
    this.watcher.observe(host);
    this.unwatch = watchTheme(() => this.paint());
    this.paint();
  }

  listen() {
    const { canvas } = this;
    canvas.addEventListener("pointerdown", (event) => canvas.setPointerCapture(event.pointerId));
    canvas.addEventListener("pointermove", (event) => {
      if (event.buttons & 1) this.rotate(event.movementX * TURN, event.movementY * TURN);
    });
    canvas.addEventListener("wheel", (event) => {
      event.preventDefault();
      this.zoom(event.deltaY < 0 ? ZOOM : 1 / ZOOM);
    }, { passive: false });
    canvas.addEventListener("keydown", (event) => {
      /** @type {Record<string, () => void>} */
      const keys = { ArrowLeft: () => this.rotate(-KEY_TURN, 0), ArrowRight: () => this.rotate(KEY_TURN, 0), ArrowUp: () => this.rotate(0, -KEY_TURN),
        ArrowDown: () => this.rotate(0, KEY_TURN), "+": () => this.zoom(ZOOM), "-": () => this.zoom(1 / ZOOM) };
      const act = keys[event.key];
      if (!act) return;
      event.preventDefault();
      act();
    });
  }

  /** @param {number} turn @param {number} tilt */
  rotate(turn, tilt) {
    this.turn += turn;
    this.tilt = Math.max(-Math.PI / 2, Math.min(Math.PI / 2, this.tilt + tilt));
    this.paint();
  }

  /** @param {number} by */
  zoom(by) {
    this.scale = Math.max(0.1, Math.min(50, this.scale * by));
    this.paint();
  }

  destroy() {
    this.watcher.disconnect();
    this.unwatch();
  }

  paint() {
    const { canvas, points, middle, extent } = this;
    const ratio = devicePixelRatio || 1;
    const width = Math.max(160, canvas.parentElement?.clientWidth ?? 0);
    canvas.width = Math.round(width * ratio);
    canvas.height = Math.round(HEIGHT * ratio);
    const context = /** @type {CanvasRenderingContext2D} */ (canvas.getContext("2d"));
    context.scale(ratio, ratio);
    const inks = INKS[readTheme()];
    context.fillStyle = inks.ground;
    context.fillRect(0, 0, width, HEIGHT);
    const [sinA, cosA, sinB, cosB] = [Math.sin(this.turn), Math.cos(this.turn), Math.sin(this.tilt), Math.cos(this.tilt)];
    const size = Math.min(width, HEIGHT) * 0.62 * this.scale / extent;
    const [low, high] = this.shades;
    const shade = points.value ?? points.z;
    const dot = points.x.length > 5000 ? 1.5 : 2.5;
    for (let i = 0; i < points.x.length; i++) {
      const x = points.x[i] - middle[0];
      const y = points.y[i] - middle[1];
      const z = points.z[i] - middle[2];
      const across = x * cosA - y * sinA;
      const deep = x * sinA + y * cosA;
      const up = z * cosB - deep * sinB;
      const near = FAR / (FAR + (deep * cosB + z * sinB) / extent);
      if (points.colour) context.fillStyle = `rgb(${points.colour[i * 3]} ${points.colour[i * 3 + 1]} ${points.colour[i * 3 + 2]})`;
      else context.fillStyle = `hsl(${250 - 210 * (high > low ? (shade[i] - low) / (high - low) : 0.5)} 70% 50%)`;
      context.fillRect(width / 2 + across * size * near, HEIGHT / 2 - up * size * near, dot, dot);
    }
  }
}
