// @ts-check
/** The code that a run was made of: which files are kept, the text of one, and what two runs' code differs in. */

import { html } from "../data/html.js";
import { useEffect, useState } from "../vendor/hooks.js";
import { askJson } from "./connection.js";
import { makeLink } from "./links.js";
import { usePages } from "./run_tabs.js";
import { writeBytes, writeMany } from "./texts.js";

const DIGITS = 12;

/**
 * What the server says to a question, or why it says nothing; asked anew when the question is another.
 * @param {string} path @param {Record<string, any>} query @param {unknown} version
 */
function useAnswer(path, query, version) {
  const key = JSON.stringify([path, query]);
  const [found, setFound] = useState(/** @type {{ key: string, said: any, mistake: string } | null} */ (null));
  useEffect(() => {
    const ended = new AbortController();
    askJson(path, query, ended.signal).then(
      (said) => setFound({ key, said, mistake: "" }),
      (error) => ended.signal.aborted || setFound({ key, said: null, mistake: error instanceof Error ? error.message : String(error) }));
    return () => ended.abort();
  }, [key, version]);
  return found?.key === key ? found : null;
}

/** @param {{ run: string, query: URLSearchParams, change: (changes: Record<string, string>) => void, isRunning: boolean }} props */
export function Sources({ run, query, change, isRunning }) {
  const text = query.get("text") ?? "";
  const attempt = /^[0-9]+$/.test(query.get("attempt") ?? "") ? query.get("attempt") : null;
  const path = `api/runs/${encodeURIComponent(run)}/sources`;
  const { rows, next, mistake, isReady, more } = usePages(path, { text: text || null, attempt }, "files", "after", isRunning);
  const about = useAnswer(path, { attempt, limit: 1 }, isRunning)?.said;
  return html`<div class="bar"><label>path <input id="find-source" type="text" value=${text}
      onInput=${(/** @type {any} */ event) => change({ text: event.currentTarget.value })} /></label>
      <${Choices} about=${about} change=${change} /></div>
    ${mistake && html`<p class="mistake" role="alert">${mistake}</p>`}
    <${About} about=${about} />
    ${isReady && !rows.length && text && html`<p class="notice-line">No file matches.</p>`}
    <${ShownSource} run=${run} shown=${query.get("source")} attempt=${attempt} close=${() => change({ source: "" })} />
    ${rows.length > 0 && html`<${FileTable} rows=${rows} change=${change} />`}
    ${next && html`<button class="plain more" onClick=${more}>more</button>`}
    <${LeftOut} about=${about} />`;
}

/** Which attempt, and git's diff. @param {{ about: any, change: (changes: Record<string, string>) => void }} props */
function Choices({ about, change }) {
  const attempts = about?.attempts ?? [];
  return html`${attempts.length > 1 && html`<label>attempt <select value=${String(about.attempt)} onChange=${(/** @type {any} */ event) => change({ attempt: event.currentTarget.value })}>
      ${attempts.map((/** @type {number} */ number) => html`<option key=${number} value=${String(number)}>${number}</option>`)}</select></label>`}
    ${about?.has_git_diff && html`<button class="plain" onClick=${() => change({ source: "git" })}>git diff</button>`}`;
}

/** @param {{ about: any }} props */
function About({ about }) {
  if (!about) return null;
  if (about.note) return html`<p class="notice-line">${about.note}</p>`;
  return html`<p class="quiet" id="about-sources">${writeMany(about.total, "file")}, ${writeBytes(about.size_bytes)}, digest <code>${about.digest.slice(0, DIGITS)}</code>, from ${about.root}, started as ${about.entry}.</p>`;
}

/** @param {{ rows: any[], change: (changes: Record<string, string>) => void }} props */
function FileTable({ rows, change }) {
  return html`<div class="scrolls" tabindex="0" role="region" aria-label="Source files of the run"><table class="plain-table sources"><thead><tr>
      <th scope="col">file</th><th scope="col" class="number">size</th><th scope="col">SHA-256</th><th scope="col">remarks</th></tr></thead>
    <tbody>${rows.map((row) => html`<tr key=${row.id}><th scope="row">${row.is_kept
      ? html`<button class="plain" onClick=${() => change({ source: `=${row.path}` })}>${row.path}</button>` : row.path}</th>
      <td class="number">${writeBytes(row.size_bytes)}</td><td><code>${row.sha256.slice(0, DIGITS)}</code></td><td>${tellRemarks(row)}</td></tr>`)}</tbody></table></div>`;
}

/** @param {{ about: any }} props */
function LeftOut({ about }) {
  const { left_out: leftOut = [], outside = [] } = about ?? {};
  return html`${leftOut.length > 0 && html`<section aria-labelledby="left-out"><h2 id="left-out">Not kept</h2><table class="plain-table"><tbody>
      ${leftOut.map((/** @type {any} */ row) => html`<tr key=${row.name}><th scope="row">${row.name}</th><td>${row.reason}</td></tr>`)}</tbody></table></section>`}
    ${outside.length > 0 && html`<p class="quiet">Imported from elsewhere, not stored: ${outside.join(", ")}</p>`}`;
}

/** What the address asks to show: `git`, or `=` and a path. @param {{ run: string, shown: string | null, attempt: string | null, close: () => void }} props */
function ShownSource({ run, shown, attempt, close }) {
  if (shown === "git") return html`<${SourceText} run=${run} query=${{ git_diff: 1, attempt }} close=${close} />`;
  return shown?.startsWith("=") ? html`<${SourceText} run=${run} query=${{ path: shown.slice(1), attempt }} close=${close} />` : null;
}

/** @param {any} row */
function tellRemarks(row) {
  return [row.is_main ? "the main script" : "", row.is_changed ? "changed during the run: this is the first version" : "", row.reason ?? ""]
    .filter(Boolean).join("; ");
}

/** @param {{ run: string, query: Record<string, any>, close: () => void }} props */
function SourceText({ run, query, close }) {
  const found = useAnswer(`api/runs/${encodeURIComponent(run)}/source`, query, 0);
  const said = found?.said;
  return html`<section class="source-text" aria-labelledby="source-title" aria-busy=${!found}><div class="bar"><h2 id="source-title">${query.path ?? "git.diff"}</h2>
      <button class="plain" onClick=${close}>Close</button></div>
    ${found?.mistake && html`<p class="mistake" role="alert">${found.mistake}</p>`}
    ${said?.reason && html`<p class="notice-line">${said.reason}</p>`}
    ${said && said.text !== null && html`<pre class="payload" tabindex="0" role="region" aria-label=${`Text of ${said.path}`}>${query.git_diff ? html`<${DiffLines} lines=${said.text.split("\n")} />` : said.text}</pre>`}
    ${said?.is_cut && html`<p class="quiet">The beginning of ${writeBytes(said.size_bytes)}; quark sources shows all.</p>`}</section>`;
}

/** @param {{ lines: string[] }} props */
function DiffLines({ lines }) {
  return lines.map((line, number) => html`<span key=${number} class=${findKind(line)}>${line}${"\n"}</span>`);
}

/** @param {string} line */
function findKind(line) {
  if (/^(---|\+\+\+) /.test(line)) return "line-file";
  return { "+": "line-added", "-": "line-removed", "@": "line-place" }[line.slice(0, 1)] ?? "";
}

/** The differences in the code of two sides. @param {{ judged: string, baseline: string, names: [string, string], version: number }} props */
export function SourceDiffs({ judged, baseline, names, version }) {
  const side = [judged, baseline];
  const found = useAnswer("api/compare/sources", { side }, version);
  if (!found) return html`<p class="quiet" aria-busy="true">…</p>`;
  if (found.mistake) return html`<p class="mistake" role="alert">${found.mistake}</p>`;
  const { said } = found;
  if (said.state === "failed") return html`<p class="notice-line">${said.note}</p>`;
  const isOfMany = side.some((ids) => ids.includes(","));
  return html`<section class="source-diffs" aria-labelledby="code-title"><h2 id="code-title">Changes in the code of ${names[0]} differs in from that of ${names[1]}</h2>
    ${isOfMany && html`<p class="quiet">From the first run of each side: <a href=${makeLink(["run", said.judged], { tab: "code" })}>${said.judged}</a> and <a href=${makeLink(["run", said.baseline], { tab: "code" })}>${said.baseline}</a>.</p>`}
    <p id="code-count">${said.count ? `${writeMany(said.count, "file")} ${said.count === 1 ? "differs" : "differ"}, ${said.same_count} are the same.` : `The code is the same: ${writeMany(said.same_count, "file")}.`}</p>
    ${said.files.map((/** @type {any} */ file) => html`<${FileDiff} key=${file.path} file=${file} side=${side} />`)}
    ${said.count > said.files.length && html`<p class="quiet">The first ${said.files.length} of ${said.count}; quark sources --diff shows all.</p>`}</section>`;
}

/** @param {{ file: any, side: string[] }} props */
function FileDiff({ file, side }) {
  const [isOpen, setOpen] = useState(false);
  return html`<details class="file-diff" data-kind=${file.kind} onToggle=${(/** @type {any} */ event) => setOpen(event.currentTarget.open)}><summary><strong>${file.path}</strong> ${file.kind}${
      file.kind === "moved" ? ` from ${file.old_path}` : ""}</summary>
    ${isOpen && html`<${FileLines} path=${file.path} side=${side} />`}</details>`;
}

/** @param {{ path: string, side: string[] }} props */
function FileLines({ path, side }) {
  const found = useAnswer("api/compare/source", { side, path }, 0);
  if (!found) return html`<p class="quiet" aria-busy="true">…</p>`;
  if (found.mistake) return html`<p class="mistake" role="alert">${found.mistake}</p>`;
  const { lines, note, is_cut: isCut } = found.said;
  return html`${note && html`<p class="notice-line">${note}</p>`}
    ${lines.length > 0 && html`<pre class="payload" tabindex="0" role="region" aria-label=${`Lines of ${path}`}><${DiffLines} lines=${lines} /></pre>`}
    ${isCut && html`<p class="quiet">Only a part is shown; quark sources --diff shows the rest.</p>`}`;
}
