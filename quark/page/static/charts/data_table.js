// @ts-check
/** The figures of a chart as a table, for those who do not see it and those who copy it. */

import { spell, writeNumber, writeStep } from "../pages/texts.js";

/** @typedef {import("./lines.js").Line} Line */

// More rows than these are of no use to a reader; the range and the zoom choose which.
const MOST_ROWS = 200;

/** @param {string} tag @param {string} [text] @param {string} [name] */
export function makeElement(tag, text = "", name = "") {
  const element = document.createElement(tag);
  if (text) element.textContent = spell(text);
  if (name) element.className = name;
  return element;
}

/**
 * Rows of what is in a window, evenly thinned.
 * @param {Line} line @param {number} low @param {number} high
 * @returns {{ rows: number[], count: number }} indices of entries
 */
export function listRows(line, low, high) {
  const found = [];
  for (let i = 0; i < line.xs.length; i++) if (line.xs[i] >= low && line.xs[i] <= high) found.push(i);
  const every = Math.ceil(found.length / MOST_ROWS) || 1;
  return { rows: found.filter((_, at) => at % every === 0), count: found.length };
}

/** @param {string} title @param {Line[]} lines @param {number} low @param {number} high @param {string} xName */
export function makeTable(title, lines, low, high, xName) {
  const box = makeElement("div", "", "chart-table");
  box.tabIndex = 0;
  for (const line of lines) {
    const { rows, count } = listRows(line, low, high);
    const hasBand = line.low !== null && line.high !== null;
    const names = [xName, hasBand ? "mean" : "value", ...(hasBand ? ["low", "high"] : [])];
    const all = rows.map((i) => [line.xs[i], line.mean[i], ...(hasBand ? [line.low?.[i], line.high?.[i]] : [])].map(writeCell));
    const said = rows.length < count ? `: ${rows.length} of ${count} entries` : "";
    box.append(fillTable(`${title}${lines.length > 1 ? `, ${line.name}` : ""}${said}`, names, all));
  }
  return box;
}

/** @param {unknown} value */
function writeCell(value) {
  return typeof value === "number" && Number.isInteger(value) ? writeStep(value) : writeNumber(value);
}

/** @param {string} title @param {string[]} names @param {string[][]} rows */
export function fillTable(title, names, rows) {
  const table = document.createElement("table");
  table.append(makeElement("caption", title));
  const head = table.createTHead().insertRow();
  for (const name of names) {
    const cell = makeElement("th", name);
    cell.setAttribute("scope", "col");
    head.append(cell);
  }
  const body = table.createTBody();
  for (const row of rows) {
    const line = body.insertRow();
    for (const text of row) line.insertCell().textContent = spell(text);
  }
  return table;
}
