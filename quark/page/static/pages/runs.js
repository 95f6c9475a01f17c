// @ts-check
/** The list of runs: those that live and what is wrong with them first, then all that fit a search. */

import { readCurves } from "../data/curves.js";
import { html } from "../data/html.js";
import { decodePack } from "../data/pack.js";
import { useEffect, useMemo, useRef, useState } from "../vendor/hooks.js";
import { CopyButton, HealthBadge, SeverityBadge, StateBadge } from "./badges.js";
import { Refused, ask, askJson, poll } from "./connection.js";
import { takeKeys } from "./keyboard.js";
import { change, go, makeLink } from "./links.js";
import { ROW_PX, RunTable } from "./run_table.js";
import { SearchBox } from "./search_box.js";
import { Account } from "./session.js";
import { Sparkline } from "./sparkline.js";
import { quoteName, spell, writeCount, writeDuration, writeMany, writeNumber, writeStep } from "./texts.js";

// Which columns the table of runs has beside those that every run has.

const MOST = 100;
const FIELDS = ["tags", "groups", "notes", "duration", "attempt", "git_commit", "ended"];

/**
 * @param {{ project: string | null, columns: string[], choose: (columns: string[]) => void }} props
 */
export function ColumnChooser({ project, columns, choose }) {
  const [isOpen, setOpen] = useState(false);
  const [prefix, setPrefix] = useState("");
  const [names, setNames] = useState(/** @type {any} */ (null));
  useEffect(() => {
    if (!isOpen) return;
    const ended = new AbortController();
    askJson("api/names", { project, prefix, limit: MOST }, ended.signal)
      .then(setNames, () => undefined);
    return () => ended.abort();
  }, [isOpen, project, prefix]);
  /** @param {string} text */
  const turn = (text) => {
    choose(columns.includes(text) ? columns.filter((item) => item !== text) : [...columns, text]);
  };
  /** @param {string} text @param {unknown} label */
  const box = (text, label) => html`<label key=${text}><input type="checkbox"
    checked=${columns.includes(text)} onChange=${() => turn(text)} /> ${label}</label>`;
  const wanted = prefix.toLowerCase();
  return html`<details class="chooser" open=${isOpen}
    onToggle=${(/** @type {any} */ event) => setOpen(event.currentTarget.open)}>
    <summary>Columns</summary>
    ${isOpen && html`<div class="panel">
      <label>Find a column <input type="text" value=${prefix}
        onInput=${(/** @type {any} */ event) => setPrefix(event.currentTarget.value)} /></label>
      ${columns.length > 0 && html`<fieldset><legend>Shown</legend>
        ${columns.map((text) => box(text, text))}</fieldset>`}
      <fieldset><legend>Metrics</legend>
        ${(names?.metrics ?? []).map((/** @type {any} */ metric) => {
          const name = quoteName(metric.name);
          return html`<div class="figures" key=${metric.key}><span>${metric.name}</span>
            ${box(name, "last")} ${box(`min(${name})`, "min")} ${box(`max(${name})`, "max")}</div>`;
        })}</fieldset>
      <fieldset><legend>Configuration</legend>
        ${(names?.config ?? []).map((/** @type {any} */ entry) => (
          box(entry.written, entry.key)))}</fieldset>
      <fieldset><legend>Run</legend>
        ${FIELDS.filter((field) => field.includes(wanted)).map((field) => box(field, field))}
      </fieldset>
    </div>`}
  </details>`;
}

const PAGE_ROWS = 200;
const MOST_SEEN = 50;
const SETTLE_MS = 120;
const LOOK_EVERY_MS = 2000;
const MOST_LIVE = 20;
const MOST_COMPARED = 50;
const ARCHIVED = "archived != null";

/** @typedef {{ rows: any[], count: number | null, next: string | null, columns: any[] }} Found */

/** @type {Found} */
const NOTHING = { rows: [], count: null, next: null, columns: [] };

/** @param {{ place: import("./links.js").Place }} props */
export function RunsPage({ place }) {
  const query = place.query;
  const project = query.get("project");
  const where = query.get("find") ?? "";
  const order = query.get("order") ?? "";
  const columns = useMemo(() => query.getAll("column"), [query.getAll("column").join("\n")]);
  const chosen = useMemo(() => new Set((query.get("chosen") ?? "").split(",").filter(Boolean)),
    [query.get("chosen")]);
  const [about, setAbout] = useState(/** @type {any} */ (null));
  const runs = useRuns({ project, where, order, columns });
  const seen = useSeen(columns);
  const live = useMemo(() => runs.live.filter((row) => row.state === "running").slice(0, MOST_LIVE),
    [runs.live]);

  useEffect(() => {
    document.title = project ? spell(`${project} · Quark`) : "Runs · Quark";
  }, [project]);
  // All projects are counted for it: the rows come first.
  const isAnswered = runs.isReady || runs.mistake !== null;
  useEffect(() => {
    if (isAnswered) askJson("api/about").then(setAbout, () => undefined);
  }, [isAnswered]);
  useEffect(() => seen.look(live.map((row) => row.id), true), [live]);
  useEffect(() => takeKeys(makeKeys()), []);

  // Which live ones stand above is not said twice, unless somebody searches or sorts.
  const rows = useMemo(() => {
    if (where || order) return runs.found.rows;
    const above = new Set(live.map((row) => row.id));
    return runs.found.rows.filter((row) => !above.has(row.id));
  }, [runs.found.rows, live, where, order]);
  const count = runs.found.count === null ? null
    : runs.found.count - (runs.found.rows.length - rows.length);
  /** @param {string} id */
  const choose = (id) => {
    const next = new Set(chosen);
    if (!next.delete(id)) next.add(id);
    change({ chosen: [...next].join(",") }, { replace: true });
  };
  /** @param {string[]} next */
  const setColumns = (next) => {
    const url = new URL(location.href);
    url.searchParams.delete("column");
    for (const column of next) url.searchParams.append("column", column);
    go(url.href);
  };
  return html`
    <header class="top"><a class="brand" href=${makeLink([])}>quark</a>
      <${ProjectChooser} about=${about} project=${project} />
      <${SweepsLink} about=${about} project=${project} />
      <span class="quiet place">${about?.place ?? ""}</span><${Account} /></header>
    <main id="main">
      <h1 class="hidden">Runs${project ? ` of ${project}` : ""}</h1>
      ${about?.preparing && html`<p class="notice-line">${about.preparing}</p>`}
      ${(about?.notes ?? []).map((/** @type {string} */ note) => html`<p key=${note} class="quiet">${note}</p>`)}
      ${live.length > 0 && html`<${LiveRuns} rows=${live} seen=${seen} project=${project} />`}
      <div class="bar">
        <${SearchBox} value=${where} project=${project} mistake=${runs.mistake}
          find=${(/** @type {string} */ text) => change({ find: text })} />
        <button class="plain" onClick=${() => change({ find: where === ARCHIVED ? null : ARCHIVED })}>${where === ARCHIVED ? "All runs" : "Archived"}</button>
        <${ColumnChooser} project=${project} columns=${columns} choose=${setColumns} />
      </div>
      ${chosen.size > 0 && html`<${Chosen} chosen=${chosen} />`}
      ${runs.isReady && rows.length === 0 && live.length === 0 && runs.mistake === null
        ? html`<${Empty} isSearch=${where !== ""} />`
        : html`<${RunTable} rows=${rows} count=${count} columns=${describeColumns(runs.found.columns, columns)}
          order=${order} standings=${seen.standings} sparks=${seen.sparks} chosen=${chosen}
          choose=${choose} project=${project} hasMore=${runs.found.next !== null}
          sort=${(/** @type {string} */ next) => change({ order: next })}
          see=${(/** @type {number} */ first, /** @type {number} */ last) => {
            runs.fill(last);
            seen.look(rows.slice(first, last).map((row) => row.id));
          }} />`}
    </main>`;
}

/** @param {any[]} found @param {string[]} texts */
function describeColumns(found, texts) {
  const shown = found.length ? found : texts.map((text) => ({ text }));
  return shown.map((column) => {
    const name = column.name ?? column.text;
    const isLast = column.scope === "metric" && column.statistic === "last";
    const title = isLast ? name : column.text;
    return { text: column.text, title, order: ["tags", "groups"].includes(column.text) ? "" : column.text, isNumber: column.scope === "metric" };
  });
}

/**
 * The rows that fit, read page by page as far as somebody looks, and kept current.
 * @param {{ project: string | null, where: string, order: string, columns: string[] }} wanted
 */
function useRuns({ project, where, order, columns }) {
  const query = { project, where: where || null, order: order || null, column: columns, limit: PAGE_ROWS };
  const [found, setFound] = useState(NOTHING);
  const [live, setLive] = useState(/** @type {any[]} */ ([]));
  const [mistake, setMistake] = useState(/** @type {string | null} */ (null));
  const [isReady, setReady] = useState(false);
  const current = useRef({ found: NOTHING, isFilling: false, turn: 0 });
  const key = JSON.stringify(query);
  const isPlain = !where && !order;

  /** @param {Found} next */
  const keep = (next) => {
    current.current.found = next;
    setFound(next);
  };
  useEffect(() => {
    const turn = current.current.turn += 1;
    current.current.isFilling = false;
    let isFirst = true;
    /** @param {AbortSignal} signal */
    const look = async (signal) => {
      try {
        const page = await askJson("api/runs", query, signal);
        if (turn !== current.current.turn) return;
        const old = isFirst ? NOTHING : current.current.found;
        isFirst = false;
        keep(mergePage(old, page));
        setMistake(null);
        if (isPlain) setLive(keepSame(page.rows));
        else {
          const newest = await askJson("api/runs", { project, limit: MOST_LIVE }, signal);
          if (turn === current.current.turn) setLive(keepSame(newest.rows));
        }
      } catch (error) {
        if (!(error instanceof Refused) || turn !== current.current.turn) throw error;
        setMistake(error.message);
        // What is busy or gone may be there again at the next look; what was shown stays.
        if (error.status === 503) throw error;
        keep(NOTHING);
        return false;
      } finally {
        if (turn === current.current.turn) setReady(true);
      }
    };
    const ended = new AbortController();
    let stop = () => {};
    look(ended.signal).then(
      (goesOn) => {
        if (goesOn !== false && !ended.signal.aborted) stop = poll(look, LOOK_EVERY_MS);
      },
      () => {
        if (!ended.signal.aborted) stop = poll(look, LOOK_EVERY_MS);
      },
    );
    return () => {
      ended.abort();
      stop();
    };
  }, [key]);

  /** @param {number} last so many rows are wanted */
  const fill = async (last) => {
    const state = current.current;
    const turn = state.turn;
    // Before the first answer is kept, there is nothing to go on from.
    if (state.isFilling || !state.turn) return;
    state.isFilling = true;
    try {
      while (turn === state.turn && state.found.next !== null
          && state.found.rows.length < last + PAGE_ROWS / 2) {
        const page = await askJson("api/runs", { ...query, after: state.found.next });
        if (turn !== state.turn) return;
        const known = new Set(state.found.rows.map((row) => row.id));
        const more = page.rows.filter((/** @type {any} */ row) => !known.has(row.id));
        keep({ ...state.found, rows: [...state.found.rows, ...more], next: page.next, count: page.count ?? state.found.count });
      }
    } catch {
      // The next look at the table asks again.
    } finally {
      if (turn === state.turn) state.isFilling = false;
    }
  };
  return { found, live, mistake, isReady, fill };
}

/** @type {Map<string, { text: string, row: any }>} */
const sameRows = new Map();

/** Rows that say the same as before stay the same objects, so that nothing is drawn anew. */
function keepSame(/** @type {any[]} */ rows) {
  return rows.map((row) => {
    const text = JSON.stringify(row);
    const known = sameRows.get(row.id);
    if (known?.text === text) return known.row;
    sameRows.set(row.id, { text, row });
    return row;
  });
}

/** The first page anew, and what was read behind it. @param {Found} old @param {any} page */
function mergePage(old, page) {
  const rows = keepSame(page.rows);
  if (page.next === null || old.rows.length <= rows.length) {
    return { rows, count: page.count, next: page.next, columns: page.columns };
  }
  const fresh = new Set(rows.map((row) => row.id));
  const rest = old.rows.slice(rows.length).filter((row) => !fresh.has(row.id));
  return { rows: [...rows, ...rest], count: page.count, next: old.next, columns: page.columns };
}

/** What is only asked for rows in sight: how they stand, and their curve. */
function useSeen(/** @type {string[]} */ columns) {
  const [standings, setStandings] = useState(/** @type {Map<string, any>} */ (new Map()));
  const [sparks, setSparks] = useState(/** @type {Map<string, any>} */ (new Map()));
  const timer = useRef(0);
  const known = useRef(/** @type {Set<string>} */ (new Set()));
  /** @param {string[]} ids @param {boolean} isLive */
  const read = async (ids, isLive) => {
    const wanted = (isLive ? ids : ids.filter((id) => !known.current.has(id))).slice(0, MOST_SEEN);
    if (!wanted.length) return;
    for (const id of wanted) known.current.add(id);
    try {
      const [said, curves] = await Promise.all([
        askJson("api/standings", { run: wanted, column: columns }),
        ask("api/sparks", { run: wanted }).then((answer) => answer.status === 204 ? null : answer.arrayBuffer()),
      ]);
      setStandings((old) => new Map([...old, ...Object.entries(said.standings)]));
      const drawn = curves ? readCurves(decodePack(curves)) : [];
      setSparks((old) => new Map([...old, ...drawn.map((curve) => /** @type {[string, any]} */ ([curve.run, curve]))]));
    } catch {
      for (const id of wanted) known.current.delete(id);
    }
    if (!isLive && ids.length > MOST_SEEN) look(ids);
  };
  /** @param {string[]} ids @param {boolean} [isLive] */
  const look = (ids, isLive = false) => {
    if (isLive) return void read(ids, true);
    clearTimeout(timer.current);
    timer.current = setTimeout(() => read(ids, false), SETTLE_MS);
  };
  return { standings, sparks, look };
}

/** @param {{ about: any, project: string | null }} props */
function SweepsLink({ about, project }) {
  return about?.capabilities.sweeps ? html`<a href=${makeLink(["sweeps"], { project })}>Sweeps</a>` : null;
}

/** @param {{ about: any, project: string | null }} props */
function ProjectChooser({ about, project }) {
  const projects = about?.projects ?? [];
  return html`<label class="project">project
    <select value=${project ?? ""}
      onChange=${(/** @type {any} */ event) => change({ project: event.currentTarget.value, chosen: null })}>
      <option value="">all</option>
      ${project && !projects.some((/** @type {any} */ item) => item.name === project)
        && html`<option value=${project}>${project}</option>`}
      ${projects.map((/** @type {any} */ item) => html`<option key=${item.name} value=${item.name}>
        ${item.name}${item.runs === null || item.runs === undefined ? "" : ` (${item.runs})`}</option>`)}
    </select></label>`;
}

/** @param {{ rows: any[], seen: any, project: string | null }} props */
function LiveRuns({ rows, seen, project }) {
  return html`<section class="live" aria-labelledby="live-title"><h2 id="live-title">Live</h2>
    <ul>${rows.map((row) => html`<${LiveRun} key=${row.id} row=${row} project=${project} standing=${seen.standings.get(row.id)}
      spark=${seen.sparks.get(row.id)} />`)}</ul></section>`;
}

/** @param {{ row: any, standing: any, spark: any, project: string | null }} props */
function LiveRun({ row, standing, spark, project }) {
  const progress = standing?.progress;
  return html`<li data-run=${row.id}>
    <span class="live-name"><${StateBadge} state="running" />
      <a href=${makeLink(["run", row.id])}>${row.name || row.id}</a>
      ${!project && html`<small>${row.project}</small>`}</span>
    <span class="live-step">step ${writeCount(progress?.step ?? row.newest_step)}${progress?.of ? `/${writeCount(progress.of)}` : ""}
      ${progress?.told ? html` <span>${progress.told}</span>` : progress?.eta_s ? html` <span>ETA ${writeDuration(progress.eta_s)}</span>` : ""}</span>
    <${HealthBadge} health=${standing?.health} />
    <span class="live-says"><${LiveSays} id=${row.id} standing=${standing} /></span>
    <span class="live-main">${row.main && html`<small>${row.main.name}</small> ${writeNumber(row.main.last)}`}
      <${Sparkline} curve=${spark} name=${row.main?.name ?? ""} /></span>
  </li>`;
}

/** The worst finding, else the phase and the pace. @param {{ id: string, standing: any }} props */
function LiveSays({ id, standing }) {
  const worst = standing?.worst;
  if (worst && worst.severity !== "info") {
    const place = `${worst.culprit ? ` in ${worst.culprit}` : ""}${worst.step === null ? "" : ` since ${writeStep(worst.step)}`}`;
    return html`<${SeverityBadge} severity=${worst.severity} />
      <a href=${makeLink(["run", id], {}, `alert-${worst.id}`)}>${worst.title}${place}</a>`;
  }
  const progress = standing?.progress;
  const share = progress?.data_share;
  const said = share === null || share === undefined ? "" : `, data ${Math.round(share * 100)} %`;
  return html`<span>${standing?.phase?.title ?? ""}</span>
    ${progress?.ms_per_step ? html`<span class="quiet">${writeNumber(progress.ms_per_step)} ms/step${said}</span>` : ""}`;
}

/** @param {{ chosen: Set<string> }} props */
function Chosen({ chosen }) {
  const ids = [...chosen];
  const only = `id in (${ids.map((id) => `'${id.replace(/[\\']/g, "\\$&")}'`).join(", ")})`;
  return html`<p class="chosen"><b>${writeMany(ids.length, "run")} chosen</b>
    <a class="button" href=${makeLink(["compare"], { run: ids.slice(0, MOST_COMPARED), group: ids.length > 2 ? "seed" : null })}>Compare${
      ids.length > MOST_COMPARED ? ` the first ${MOST_COMPARED}` : ""}</a>
    <button class="plain" onClick=${() => change({ find: only })}>Show only these</button>
    <${CopyButton} text=${ids.join("\n")}>Copy their IDs<//>
    <button class="plain" onClick=${() => change({ chosen: null }, { replace: true })}>Choose none</button></p>`;
}

/** @param {{ isSearch: boolean }} props */
function Empty({ isSearch }) {
  return html`<p class="notice-line">${isSearch ? "No run matches this search."
    : "There are no runs yet. quark.start_run() creates one."}</p>`;
}

/** `/` finds, `j` and `k` go through the rows; Enter opens the one that has the focus. */
function makeKeys() {
  /** @param {number} step */
  const move = (step) => {
    const box = document.querySelector(".table-box");
    const links = [...document.querySelectorAll("#main tbody th a, .live-name a")];
    const order = links.sort((a, b) => a.getBoundingClientRect().top - b.getBoundingClientRect().top);
    const at = order.indexOf(/** @type {Element} */ (document.activeElement));
    const next = /** @type {HTMLElement | undefined} */ (order[at < 0 ? (step > 0 ? 0 : order.length - 1) : at + step]);
    if (!next) return;
    next.focus({ preventScroll: true });
    const row = next.closest("tr");
    if (!row || !box) return next.scrollIntoView({ block: "nearest" });
    const inside = row.getBoundingClientRect();
    const outside = box.getBoundingClientRect();
    if (inside.bottom > outside.bottom - ROW_PX) box.scrollTop += ROW_PX;
    else if (inside.top < outside.top + 2 * ROW_PX) box.scrollTop -= ROW_PX;
  };
  return [
    { key: "/", says: "search", act: () => document.getElementById("find")?.focus() },
    { key: "j", says: "next run", act: () => move(1) },
    { key: "k", says: "previous run", act: () => move(-1) },
  ];
}
