// @ts-check
/** A picture with its caption, and over it boxes and masks that can be taken away. */

import { html } from "../data/html.js";
import { useEffect, useRef, useState } from "../vendor/hooks.js";
import { root } from "./links.js";
import { spell, writeNumber, writeStep } from "./texts.js";

const COLOURS = [[230, 85, 0], [0, 114, 178], [0, 158, 115], [204, 121, 167], [240, 180, 0], [86, 180, 233], [150, 60, 180], [120, 120, 0]];
const MASK_ALPHA = 130;
const LETTER_PX = 12;

/** @param {number} at */
function chooseColour(at) {
  return COLOURS[((at % COLOURS.length) + COLOURS.length) % COLOURS.length];
}

/** @param {any} label @param {Record<string, string>} labels */
function nameClass(label, labels) {
  return label === undefined ? "" : labels[String(label)] ?? String(label);
}

/** A number for a class: its own, or one that is always the same for a text. @param {any} label */
function placeClass(label) {
  const number = Number(label);
  if (label !== undefined && Number.isInteger(number)) return number;
  return [...String(label ?? "")].reduce((sum, letter) => sum + letter.charCodeAt(0), 0);
}

/** @param {CanvasRenderingContext2D} context @param {any[]} boxes @param {Record<string, string>} labels @param {number} scale pixels of the picture in one of the screen */
function paintBoxes(context, boxes, labels, scale) {
  context.lineWidth = 2 * scale;
  context.font = `600 ${LETTER_PX * scale}px system-ui, sans-serif`;
  context.textBaseline = "top";
  for (const { box, label, score } of boxes) {
    const [left, top, right, bottom] = box;
    const colour = `rgb(${chooseColour(placeClass(label)).join(" ")})`;
    const text = spell([nameClass(label, labels), score === undefined ? "" : writeNumber(score)].filter(Boolean).join(" "));
    context.strokeStyle = colour;
    context.strokeRect(left, top, right - left, bottom - top);
    if (!text) continue;
    const height = (LETTER_PX + 4) * scale;
    const above = top >= height ? top - height : top;
    context.fillStyle = colour;
    context.fillRect(left, above, context.measureText(text).width + 6 * scale, height);
    context.fillStyle = "#fff";
    context.fillText(text, left + 3 * scale, above + 2 * scale);
  }
}

/** @param {CanvasRenderingContext2D} context @param {HTMLImageElement} image @param {string} encoding */
function paintMask(context, image, encoding) {
  const { width, height } = context.canvas;
  const own = document.createElement("canvas");
  [own.width, own.height] = [width, height];
  const inner = /** @type {CanvasRenderingContext2D} */ (own.getContext("2d", { willReadFrequently: true }));
  inner.imageSmoothingEnabled = false;
  inner.drawImage(image, 0, 0, width, height);
  const pixels = inner.getImageData(0, 0, width, height);
  const { data } = pixels;
  for (let i = 0; i < data.length; i += 4) {
    const found = encoding === "RGB" ? data[i] + 256 * data[i + 1] : data[i];
    const [red, green, blue] = chooseColour(found);
    data[i] = red;
    data[i + 1] = green;
    data[i + 2] = blue;
    data[i + 3] = found === 0 ? 0 : MASK_ALPHA;
  }
  inner.putImageData(pixels, 0, 0);
  context.drawImage(own, 0, 0);
}

/** @param {string} address @returns {Promise<HTMLImageElement>} */
async function loadImage(address) {
  const image = new Image();
  image.src = address;
  await image.decode();
  return image;
}

/** @param {{ run: string, row: any }} props an answer of `images` */
export function Picture({ run, row }) {
  const groups = Object.entries(row.boxes ?? {}).filter(([, boxes]) => boxes.length);
  const masks = row.masks ?? [];
  const [hidden, setHidden] = useState(/** @type {string[]} */ ([]));
  const [isReady, setReady] = useState(0);
  const picture = useRef(/** @type {HTMLImageElement | null} */ (null));
  const over = useRef(/** @type {HTMLCanvasElement | null} */ (null));
  useEffect(() => {
    const [canvas, image] = [over.current, picture.current];
    if (!canvas || !image?.naturalWidth) return;
    let isOver = false;
    [canvas.width, canvas.height] = [image.naturalWidth, image.naturalHeight];
    const context = /** @type {CanvasRenderingContext2D} */ (canvas.getContext("2d"));
    const paint = async () => {
      for (const mask of masks) {
        if (hidden.includes(`mask ${mask.name}`)) continue;
        const found = await loadImage(new URL(`artifacts/${encodeURIComponent(run)}/${mask.sha256}`, root).href).catch(() => null);
        if (isOver) return;
        if (found) paintMask(context, found, mask.encoding);
      }
      const scale = image.naturalWidth / Math.max(1, image.clientWidth);
      for (const [name, boxes] of groups) if (!hidden.includes(`boxes ${name}`)) paintBoxes(context, boxes, row.labels ?? {}, scale);
      canvas.dataset.painted = "1";
    };
    paint();
    return () => {
      isOver = true;
    };
  }, [row.sha256, row.id, hidden.join(), isReady]);
  const toggles = [...masks.map((/** @type {any} */ mask) => `mask ${mask.name}`), ...groups.map(([name]) => `boxes ${name}`)];
  const classes = [...new Set(groups.flatMap(([, boxes]) => boxes.map((/** @type {any} */ box) => nameClass(box.label, row.labels ?? {}))))].filter(Boolean);
  return html`<figure><div class="picture"><img ref=${picture} loading="lazy" alt=${row.facts?.caption ?? `picture ${row.name}${row.step === null ? "" : ` at step ${row.step}`}`}
      src=${new URL(row.url, root).href} onLoad=${() => setReady((count) => count + 1)} />
      ${toggles.length > 0 && html`<canvas ref=${over} role="img" aria-label=${`${groups.reduce((sum, [, boxes]) => sum + boxes.length, 0)} boxes${classes.length ? ` of ${classes.slice(0, 20).join(", ")}` : ""}, ${masks.length} masks`}></canvas>`}</div>
    <figcaption>${row.facts?.caption && html`<span class="free">${row.facts.caption}</span> `}<span class=${row.facts?.caption ? "quiet" : ""}>${row.name}${row.step === null ? "" : ` · step ${writeStep(row.step)}`}</span>
      ${toggles.map((name) => html`<label key=${name} class="toggle"><input type="checkbox" checked=${!hidden.includes(name)}
        onChange=${() => setHidden((old) => (old.includes(name) ? old.filter((one) => one !== name) : [...old, name]))} /> ${name.replace(/^(\w+) \1$/, "$1")}</label>`)}</figcaption></figure>`;
}
