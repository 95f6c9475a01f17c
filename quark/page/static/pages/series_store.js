// @ts-check
/**
 * The curves that a run's page shows: only those in sight are read, what comes later is put
 * behind them, and base and tail meet exactly, since each reply says how far it went.
 */

import { joinCurves, readCurves } from "../data/curves.js";
import { decodePack } from "../data/pack.js";
import { Refused, ask, isAtOnce } from "./connection.js";
import { WantedCurves } from "./wanted_curves.js";

/** @typedef {import("../data/curves.js").Curve} Curve */
/** @typedef {{ x: string, low: number | null, high: number | null, ranks: string, attempts: string,
 *   entries: number }} View */
/** @typedef {{ curves: Curve[], cursor: string | null, view: string, state: "good" | "missing" | "failed",
 *   message: string }} Kept */

const MOST_KEYS = 50;
const MOST_ENTRIES = 4000;
const GATHER_MS = 8;
// Readings of different moments are asked about one by one; more than so many become one again. One
// is of what the page was told of the run.
const MOST_CURSORS = 3;

/** @extends {WantedCurves<Kept, View>} */
export class SeriesStore extends WantedCurves {
  /** @param {string} run @param {View} view @param {() => void} changed */
  constructor(run, view, changed) {
    super(view, changed);
    this.run = run;
    /** @type {Set<string>} */
    this.underWay = new Set();
    // Up to where the page was told of the run, be it by answers to curves.
    this.pageCursor = /** @type {string | null} */ (null);
  }

  restart() {
    this.turn.abort();
    this.turn = new AbortController();
    this.underWay.clear();
    this.fetchMissing();
  }

  /** Read these before anybody is known to see them. @param {string[]} keys */
  fetchFirst(keys) {
    if (keys.length) this.fetch(keys.slice(0, MOST_KEYS));
  }

  gather() {
    // Before the page is printed nothing comes that takes a while.
    queueMicrotask(() => isAtOnce() && this.fetchMissing());
    this.timer ||= setTimeout(() => {
      this.timer = 0;
      this.fetchMissing();
    }, GATHER_MS);
  }

  fetchMissing() {
    const view = JSON.stringify(this.view);
    const keys = [...this.wanted.keys()].filter((key) => (
      this.kept.get(key)?.view !== view && !this.underWay.has(key)));
    for (let at = 0; at < keys.length; at += MOST_KEYS) this.fetch(keys.slice(at, at + MOST_KEYS));
  }

  /** @param {string[]} keys */
  async fetch(keys) {
    const { view, turn } = this;
    const name = JSON.stringify(view);
    for (const key of keys) this.underWay.add(key);
    try {
      const answer = await ask(`api/runs/${encodeURIComponent(this.run)}/series`, {
        key: keys, entries: Math.min(MOST_ENTRIES, view.entries), low: view.low, high: view.high,
        x: view.x, ranks: view.ranks, attempts: view.attempts, extremes: 1,
      }, turn.signal);
      const pack = decodePack(await answer.arrayBuffer());
      if (turn.signal.aborted) return;
      const curves = groupByKey(readCurves(pack));
      const cursor = pack.head.cursor ?? null;
      for (const key of keys) {
        const found = curves.get(key) ?? [];
        this.kept.set(key, { curves: found, cursor, view: name, state: found.length ? "good" : "missing", message: "" });
      }
    } catch (error) {
      if (turn.signal.aborted) return;
      const refused = error instanceof Refused && error.status !== 503;
      for (const key of keys) {
        if (!this.kept.has(key) || refused) {
          this.kept.set(key, { curves: this.kept.get(key)?.curves ?? [], cursor: null, state: "failed",
            view: refused ? name : "", message: error instanceof Error ? error.message : String(error) });
        }
      }
    } finally {
      if (!turn.signal.aborted) for (const key of keys) this.underWay.delete(key);
    }
    this.changed();
  }

  /**
   * Ask what came since, and put it behind the curves in sight.
   * @param {AbortSignal} signal
   * @param {string | null} cursor of the page, where no curve is in sight
   * @returns {Promise<Record<string, any> | null>} what came of the run since the head before; null where nothing did
   */
  async follow(signal, cursor) {
    const view = JSON.stringify(this.view);
    this.fetchMissing();
    this.pageCursor ??= cursor;
    const turn = this.turn;
    // A cursor knows what the run had to tell when it was made, and answers to it tell only what is
    // new since: that of curves which were read anew does not do for the page.
    const told = this.pageCursor;
    /** @type {Map<string, string[]>} */
    const byCursor = new Map(told === null ? [] : [[told, []]]);
    for (const key of this.wanted.keys()) {
      const kept = this.kept.get(key);
      if (kept?.view !== view || kept.cursor === null) continue;
      byCursor.set(kept.cursor, [...byCursor.get(kept.cursor) ?? [], key]);
    }
    if (byCursor.size > MOST_CURSORS) {
      const keys = [...byCursor.values()].flat();
      for (let at = 0; at < keys.length; at += MOST_KEYS) await this.fetch(keys.slice(at, at + MOST_KEYS));
      return null;
    }
    const parts = [...byCursor].flatMap(([at, some]) => cut(some, MOST_KEYS).map((keys) => ({ at, keys })));
    /** @type {Record<string, any> | null} */
    let heard = null;
    // Kept only with what was heard: a later request that fails takes back all that earlier ones have told.
    let next = told;
    for (const { at, keys } of parts) {
      const answer = await ask(`api/runs/${encodeURIComponent(this.run)}/changes`, {
        cursor: at, key: keys, x: this.view.x, ranks: this.view.ranks, attempts: this.view.attempts,
      }, signal);
      if (turn.signal.aborted) break;
      if (answer.status === 204) {
        if (next !== told) next = at;
        continue;
      }
      const pack = decodePack(await answer.arrayBuffer());
      if (turn.signal.aborted) break;
      heard = joinHeads(heard, pack.head);
      if (at === told || next !== told) next = pack.head.cursor;
      if (pack.head.reset && keys.length) await this.fetch(keys);
      else this.append(keys, view, at, pack);
    }
    this.pageCursor = next;
    if (heard) this.changed();
    return heard;
  }

  /** @param {string[]} keys @param {string} view @param {string} cursor @param {import("../data/pack.js").Pack} pack */
  append(keys, view, cursor, pack) {
    const came = groupByKey(readCurves(pack));
    const high = this.view.high ?? Infinity;
    for (const key of keys) {
      const kept = this.kept.get(key);
      // Read anew meanwhile: its own cursor says what it lacks.
      if (!kept || kept.view !== view || kept.cursor !== cursor) continue;
      const since = came.get(key) ?? [];
      const curves = since.length
        ? joinCurves(kept.curves, since, { high: this.view.x === "step" ? high : Infinity, entries: this.view.entries })
        : kept.curves;
      this.kept.set(key, { ...kept, curves, cursor: pack.head.cursor, state: curves.length ? "good" : kept.state });
    }
  }
}

/**
 * What two answers say of the run; each tells what is new since another cursor.
 * @param {Record<string, any> | null} before @param {Record<string, any>} head the later one
 * @returns {Record<string, any>}
 */
function joinHeads(before, head) {
  return {
    ...head, reset: before?.reset || head.reset, analysis: before?.analysis || head.analysis,
    metrics: head.metrics?.length ? head.metrics : before?.metrics ?? [],
  };
}

/** @param {Curve[]} curves */
function groupByKey(curves) {
  /** @type {Map<string, Curve[]>} */
  const grouped = new Map();
  for (const curve of curves) grouped.set(curve.key, [...grouped.get(curve.key) ?? [], curve]);
  return grouped;
}

/** In parts, of which there is one also of nothing. @template T @param {T[]} items @param {number} size */
function cut(items, size) {
  return Array.from({ length: Math.ceil(items.length / size) || 1 }, (_, at) => items.slice(at * size, (at + 1) * size));
}
