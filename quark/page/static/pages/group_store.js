// @ts-check
/** The curves of sides that the page of comparisons shows: of metrics in sight only. */

import { readCurves } from "../data/curves.js";
import { decodePack } from "../data/pack.js";
import { ask, isPassing } from "./connection.js";
import { WantedCurves } from "./wanted_curves.js";

/** @typedef {import("../data/curves.js").Curve} Curve */
/** @typedef {{ x: string, low: number | null, high: number | null, members: boolean, entries: number }} GroupView */
/** @typedef {{ curves: Curve[], asked: string, message: string }} KeptGroup */

const MOST_KEYS = 12;
const GATHER_MS = 8;
const AGAIN_MS = 2000;

/** What was asked for as x stands where a chart looks for it. @param {Curve} curve @param {string} x @returns {Curve} */
function placeCurve(curve, x) {
  return x === "relative" ? { ...curve, time: curve.step } : x === "epoch" ? { ...curve, epoch: curve.step } : curve;
}

/** @extends {WantedCurves<KeptGroup, GroupView>} */
export class GroupStore extends WantedCurves {
  /** @param {string[]} sides ids of each, parted by commas @param {GroupView} view @param {() => void} changed */
  constructor(sides, view, changed) {
    super(view, changed);
    this.sides = sides;
    this.times = 0;
  }

  get asked() {
    return JSON.stringify([this.view, this.times]);
  }

  /** What is in sight is read anew: its runs have gone on. */
  refresh() {
    this.times += 1;
    this.restart();
  }

  gather() {
    clearTimeout(this.timer);
    this.timer = setTimeout(() => {
      const keys = [...this.wanted.keys()].filter((key) => this.kept.get(key)?.asked !== this.asked);
      for (let at = 0; at < keys.length; at += MOST_KEYS) this.fetch(keys.slice(at, at + MOST_KEYS));
    }, GATHER_MS);
  }

  /** @param {string[]} keys */
  async fetch(keys) {
    const { view, asked } = this;
    const { signal } = this.turn;
    try {
      const answer = await ask("api/compare/curves", {
        side: this.sides, key: keys, x: view.x, low: view.low, high: view.high,
        members: view.members ? 1 : 0, entries: view.entries,
      }, signal);
      const curves = readCurves(decodePack(await answer.arrayBuffer())).map((curve) => placeCurve(curve, view.x));
      if (signal.aborted) return;
      for (const key of keys) this.kept.set(key, { curves: curves.filter((curve) => curve.key === key), asked, message: "" });
    } catch (error) {
      if (signal.aborted) return;
      const message = error instanceof Error ? error.message : String(error);
      const kept = isPassing(error) ? "" : asked;
      // A server that is busy or lost is asked again, for what is still in sight.
      if (!kept) this.timer = setTimeout(() => this.gather(), AGAIN_MS);
      for (const key of keys) this.kept.set(key, { curves: this.kept.get(key)?.curves ?? [], asked: kept, message });
    }
    this.changed();
  }
}
