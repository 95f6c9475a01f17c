// @ts-check
/** Markdown as elements: headings, lists, code, quotes, tables, emphasis, links. HTML in it stays text. */

import { html } from "./html.js";

const MOST_LINES = 5000;
const MOST_DEPTH = 8;
const MOST_TEXT = 20_000;
const INLINE = /`([^`\n]+)`|\*\*(.+?)\*\*|__(.+?)__|\*([^*\s][^*\n]*?)\*|~~(.+?)~~|!?\[([^\]\n]*)\]\(([^()\s]+)\)/;

/** The elements of a text. @param {string} text @returns {any[]} */
export function renderMarkdown(text) {
  return renderBlocks(text.replaceAll("\r\n", "\n").split("\n").slice(0, MOST_LINES), 0);
}

/** @typedef {{ block: any, end: number }} Taken what a block is, and the line after it */

const FENCE = /^ {0,3}(```+|~~~+)/;
const HEADING = /^ {0,3}(#{1,6})\s+(.*?)\s*#*$/;
const RULE = /^ {0,3}([-*_])( *\1){2,}\s*$/;
const QUOTE = /^ {0,3}>/;
const ITEM = /^( {0,3}(?:[-*+]|\d{1,9}[.)])\s+)(.*)$/;
const RULER = /^[\s|:-]*-[\s|:-]*$/;

/**
 * What may begin at a line, and how it is taken from there; the first that begins counts.
 * @type {{ begins: (line: string, next: string) => boolean, take: (lines: string[], at: number, depth: number) => Taken }[]}
 */
const BLOCKS = [
  { begins: (line) => FENCE.test(line), take: renderFence },
  { begins: (line) => HEADING.test(line), take: renderHeading },
  { begins: (line) => RULE.test(line), take: (_, at) => ({ block: html`<hr />`, end: at + 1 }) },
  { begins: (line) => QUOTE.test(line), take: renderQuote },
  { begins: (line) => ITEM.test(line), take: renderList },
  { begins: (line, next) => line.includes("|") && next.includes("|") && RULER.test(next), take: renderTable },
];

/** @param {string[]} lines @param {number} depth @returns {any[]} */
function renderBlocks(lines, depth) {
  if (depth > MOST_DEPTH) return [lines.join("\n")];
  const blocks = [];
  let at = 0;
  while (at < lines.length) {
    if (!lines[at].trim()) {
      at += 1;
      continue;
    }
    const kind = BLOCKS.find(({ begins }) => begins(lines[at], lines[at + 1] ?? ""));
    const { block, end } = (kind?.take ?? renderParagraph)(lines, at, depth);
    blocks.push(block);
    at = end;
  }
  return blocks;
}

/** How far lines go on. @param {string[]} lines @param {number} at @param {(line: string) => boolean} goesOn */
function findEnd(lines, at, goesOn) {
  let end = at + 1;
  while (end < lines.length && goesOn(lines[end])) end += 1;
  return end;
}

/** @param {string[]} lines @param {number} at @returns {Taken} */
function renderFence(lines, at) {
  const fence = FENCE.exec(lines[at])?.[1] ?? "";
  const end = findEnd(lines, at, (line) => !line.trim().startsWith(fence));
  return { block: html`<pre class="payload" tabindex="0">${lines.slice(at + 1, end).join("\n")}</pre>`, end: end + 1 };
}

/** Below the headings of the page itself. @param {string[]} lines @param {number} at @returns {Taken} */
function renderHeading(lines, at) {
  const [, signs, text] = /** @type {RegExpExecArray} */ (HEADING.exec(lines[at]));
  return { block: html`<${`h${Math.min(6, signs.length + 2)}`}>${renderInline(text, 0)}<//>`, end: at + 1 };
}

/** @param {string[]} lines @param {number} at @param {number} depth @returns {Taken} */
function renderQuote(lines, at, depth) {
  const end = findEnd(lines, at, (line) => QUOTE.test(line));
  const inner = lines.slice(at, end).map((line) => line.replace(/^ {0,3}> ?/, ""));
  return { block: html`<blockquote>${renderBlocks(inner, depth + 1)}</blockquote>`, end };
}

/** @param {string[]} lines @param {number} at @returns {Taken} */
function renderParagraph(lines, at) {
  const end = findEnd(lines, at, (line) => line.trim() !== "" && ![FENCE, HEADING, QUOTE, ITEM].some((one) => one.test(line)));
  return { block: html`<p>${renderInline(lines.slice(at, end).join("\n"), 0)}</p>`, end };
}

/** @param {string[]} lines @param {number} at @param {number} depth @returns {Taken} */
function renderList(lines, at, depth) {
  const isNumbered = /^ {0,3}\d/.test(lines[at]);
  /** @type {string[][]} */
  const items = [];
  let end = at;
  for (; end < lines.length; end++) {
    const item = ITEM.exec(lines[end]);
    if (item) items.push([item[2]]);
    else if (/^(\s{2,}|\t)/.test(lines[end])) items[items.length - 1].push(lines[end].replace(/^(\t| {2,4})/, ""));
    else break;
  }
  const parts = items.map((item) => html`<li>${item.length === 1 ? renderInline(item[0], 0) : renderBlocks(item, depth + 1)}</li>`);
  return { end, block: isNumbered ? html`<ol>${parts}</ol>` : html`<ul>${parts}</ul>` };
}

/** @param {string[]} lines @param {number} at @returns {Taken} */
function renderTable(lines, at) {
  const end = findEnd(lines, at, (line) => line.includes("|"));
  const [head, , ...rows] = lines.slice(at, end).map((line) => line.trim().replace(/^\||\|$/g, "").split("|").map((cell) => cell.trim()));
  return { end, block: html`<table class="plain-table"><thead><tr>${head.map((cell) => html`<th scope="col">${renderInline(cell, 0)}</th>`)}</tr></thead>
    <tbody>${rows.map((row) => html`<tr>${head.map((_, column) => html`<td>${renderInline(row[column] ?? "", 0)}</td>`)}</tr>`)}</tbody></table>` };
}

/** @param {string} text @param {number} depth @returns {any[]} */
function renderInline(text, depth) {
  const parts = [];
  let rest = text.slice(0, MOST_TEXT);
  while (rest && depth <= MOST_DEPTH) {
    const found = INLINE.exec(rest);
    if (!found) break;
    parts.push(rest.slice(0, found.index), renderSpan(found, depth + 1));
    rest = rest.slice(found.index + found[0].length);
  }
  return [...parts, rest];
}

/** @param {RegExpExecArray} found @param {number} depth */
function renderSpan(found, depth) {
  const [whole, code, strong, strongToo, emphasis, gone, label, target] = found;
  if (code !== undefined) return html`<code>${code}</code>`;
  if (strong ?? strongToo) return html`<strong>${renderInline(strong ?? strongToo, depth)}</strong>`;
  if (emphasis !== undefined) return html`<em>${renderInline(emphasis, depth)}</em>`;
  if (gone !== undefined) return html`<s>${renderInline(gone, depth)}</s>`;
  // A picture would be asked for by itself, so that whoever serves it learns who reads this.
  if (whole.startsWith("!")) return html`<span class="quiet">[picture ${label}: ${target}]</span>`;
  return /^https?:\/\//i.test(target) ? html`<a href=${target} rel="noopener noreferrer nofollow" target="_blank">${label}</a>` : html`<span>${label} (${target})</span>`;
}
