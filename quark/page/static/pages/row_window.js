// @ts-check
/** Which rows of a long table are in sight: only these, and a few more, are in the document. */

import { html } from "../data/html.js";
import { useEffect, useRef, useState } from "../vendor/hooks.js";

const MORE_ROWS = 8;

/**
 * The rows in sight of a box that scrolls, as it is scrolled.
 * @param {number} height_px of a row
 * @param {unknown} version differs whenever there may be more or fewer rows
 */
export function useRowWindow(height_px, version) {
  const box = useRef(/** @type {HTMLDivElement | null} */ (null));
  const [range, setRange] = useState(() => ({ first: 0, last: Math.ceil(innerHeight / height_px) }));
  const look = () => {
    const element = box.current;
    if (!element) return;
    const at = Math.floor(element.scrollTop / height_px / MORE_ROWS) * MORE_ROWS;
    const seen = Math.ceil(element.clientHeight / height_px);
    const first = Math.max(0, at - MORE_ROWS);
    const last = at + seen + 2 * MORE_ROWS;
    setRange((old) => old.first === first && old.last === last ? old : { first, last });
  };
  // After the first rows are painted: what it asks has the whole table laid out.
  useEffect(look, [version]);
  useEffect(() => {
    const watcher = new ResizeObserver(look);
    if (box.current) watcher.observe(box.current);
    return () => watcher.disconnect();
  }, []);
  return { box, range, look };
}

/** Rows that are not in sight, as one that is as high. @param {{ rows: number, height_px: number }} props */
export function Gap({ rows, height_px }) {
  if (rows <= 0) return null;
  return html`<tr aria-hidden="true" class="gap"><td style=${{ height: `${rows * height_px}px` }}></td></tr>`;
}
