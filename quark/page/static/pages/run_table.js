// @ts-check
/** The table of runs: only the rows in sight are in the document, however many there are. */

import { html } from "../data/html.js";
import { Component } from "../vendor/preact.js";
import { useEffect } from "../vendor/hooks.js";
import { HealthBadge, StateBadge } from "./badges.js";
import { makeLink } from "./links.js";
import { Gap, useRowWindow } from "./row_window.js";
import { Sparkline } from "./sparkline.js";
import { writeAge, writeCount, writeNumber, writeStep, writeTime, writeValue } from "./texts.js";

export const ROW_PX = 34;

/** @typedef {{ text: string, title: string, order: string, isNumber: boolean }} Column */

const FIXED = [
  { text: "health", order: "" }, { text: "run", order: "name" }, { text: "worst finding", order: "" },
  { text: "state", order: "state" },
  { text: "started", order: "created" }, { text: "step", order: "step" },
];

/** The worst that was found, where it is worth a word. @param {{ run: string, finding: any }} props */
function Worst({ run, finding }) {
  if (!finding || finding.severity === "info") return null;
  const since = finding.step === null ? "" : `since ${writeStep(finding.step)}`;
  return html`<a href=${makeLink(["run", run], {}, `alert-${finding.id}`)}>${finding.title}</a>${" "}
    <small>${finding.culprit ? `in ${finding.culprit} ` : ""}${since}</small>`;
}

/** Why a run broke off. @param {{ ending: any }} props */
function Ending({ ending }) {
  return ending && html`<small title=${ending.message}>${ending.message}</small>`;
}

/** One row; drawn anew only where what it shows is another. */
class Row extends Component {
  /** @param {any} next */
  shouldComponentUpdate(next) {
    const props = /** @type {any} */ (this.props);
    return Object.keys(next).some((key) => next[key] !== props[key]);
  }

  /** @param {any} props */
  render({ row, index, standing, spark, isChosen, choose, project, columns }) {
    const name = row.name || row.id;
    // Where each run's points would have to be read for them, they come with the rows in sight.
    const values = row.values ?? standing?.values ?? columns.map(() => null);
    const main = row.main ?? standing?.main;
    return html`<tr aria-rowindex=${index + 2} data-run=${row.id}>
      <td><input type="checkbox" aria-label=${`Choose ${name}`} checked=${isChosen}
        onChange=${() => choose(row.id)} /></td>
      <td>${standing && html`<${HealthBadge} health=${standing.health} />`}</td>
      <th scope="row"><a href=${makeLink(["run", row.id])} title=${row.id}>${name}</a>
        ${!project && html` <small>${row.project}</small>`}</th>
      <td><${Worst} run=${row.id} finding=${standing?.worst} /></td>
      <td><${StateBadge} state=${row.state} /> <${Ending} ending=${row.ending ?? standing?.ending} /></td>
      <td title=${writeTime(row.created_at)}>${writeAge(row.created_at)}</td>
      <td class="number">${writeCount(row.newest_step)}</td>
      ${values.map((/** @type {unknown} */ value, /** @type {number} */ place) => html`
        <td key=${place} class=${typeof value === "number" || value === "NaN" ? "number" : ""}>
          ${Array.isArray(value) ? value.join(", ") : writeValue(value)}</td>`)}
      <td class="number" title=${main?.name}>${main && writeNumber(main.last ?? (main.non_finite ? "NaN" : null))}
        ${main && html` <small>${main.name}</small>`}</td>
      <td><${Sparkline} curve=${spark} name=${main?.name ?? ""} /></td>
    </tr>`;
  }
}

/**
 * @param {{ rows: any[], count: number | null, columns: Column[], order: string,
 *   standings: Map<string, any>, sparks: Map<string, any>, chosen: Set<string>,
 *   choose: (id: string) => void, sort: (order: string) => void,
 *   see: (first: number, last: number) => void, project: string | null, hasMore: boolean }} props
 */
export function RunTable(props) {
  const { rows, columns, order, see, sort, hasMore } = props;
  const { box, range, look } = useRowWindow(ROW_PX, rows.length);
  const total = Math.max(props.count ?? 0, rows.length);
  useEffect(() => see(range.first, range.last), [range, rows]);

  const shown = rows.slice(range.first, range.last);
  const above = Math.min(range.first, rows.length);
  const below = Math.max(0, total - above - shown.length);
  /** @param {string} title @param {string} key @param {boolean} [isNumber] */
  const head = (title, key, isNumber = false) => {
    const way = order === key ? "ascending" : order === `-${key}` ? "descending" : undefined;
    const next = way === undefined ? key : way === "ascending" ? `-${key}` : "";
    return html`<th key=${title} scope="col" aria-sort=${way} class=${isNumber ? "number" : ""}>
      ${key ? html`<button class="plain" onClick=${() => sort(next)}>${title}
        <span aria-hidden="true">${way === "ascending" ? "▲" : way === "descending" ? "▼" : ""}</span>
      </button>` : title}</th>`;
  };
  return html`
    <div class="table-box" ref=${box} onScroll=${look} tabindex="0" role="region"
      aria-label="Table of runs">
      <table class="runs" aria-rowcount=${total + 1}>
        <thead><tr aria-rowindex="1"><th scope="col"><span class="hidden">chosen</span></th>
          ${FIXED.map(({ text, order: key }) => head(text, key, text === "step"))}
          ${columns.map((column) => head(column.title, column.order, column.isNumber))}
          <th scope="col" class="number">loss or objective</th><th scope="col">curve</th></tr></thead>
        <tbody>
          <${Gap} rows=${above} height_px=${ROW_PX} />
          ${shown.map((row, place) => html`<${Row} key=${row.id} row=${row}
            index=${range.first + place} standing=${props.standings.get(row.id)}
            spark=${props.sparks.get(row.id)} isChosen=${props.chosen.has(row.id)}
            choose=${props.choose} project=${props.project} columns=${columns} />`)}
          <${Gap} rows=${below} height_px=${ROW_PX} />
        </tbody>
      </table>
    </div>
    <p class="quiet">${writeShown(range, rows.length, props.count, hasMore, box.current)}</p>`;
}

/**
 * @param {{ first: number, last: number }} range @param {number} loaded
 * @param {number | null} count @param {boolean} hasMore @param {HTMLElement | null} box
 */
function writeShown(range, loaded, count, hasMore, box) {
  if (!loaded) return "";
  const first = box ? Math.floor(box.scrollTop / ROW_PX) : range.first;
  const seen = box ? Math.floor(box.clientHeight / ROW_PX) : range.last;
  const whole = count === null ? `${writeStep(loaded)}${hasMore ? " and more" : ""}` : writeStep(count);
  return `${first + 1}–${Math.min(first + seen, count ?? loaded)} of ${whole}`;
}
