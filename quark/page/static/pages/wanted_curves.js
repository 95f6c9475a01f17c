// @ts-check
/** What is kept of the metrics of a page, of which those in sight are wanted. */

/** @template {{ curves: import("../data/curves.js").Curve[] }} Kept @template View */
export class WantedCurves {
  /** @param {View} view @param {() => void} changed */
  constructor(view, changed) {
    this.view = view;
    this.changed = changed;
    /** @type {Map<string, Kept>} */
    this.kept = new Map();
    /** @type {Map<string, number>} */
    this.wanted = new Map();
    this.timer = 0;
    this.turn = new AbortController();
  }

  close() {
    clearTimeout(this.timer);
    this.turn.abort();
  }

  /** What there is of a metric, in the old view until the new one has come. @param {string} key */
  read(key) {
    return this.kept.get(key);
  }

  /** A metric is in sight until the function that is returned is called. @param {string} key */
  want(key) {
    this.wanted.set(key, (this.wanted.get(key) ?? 0) + 1);
    this.gather();
    return () => {
      const left = (this.wanted.get(key) ?? 1) - 1;
      if (left) this.wanted.set(key, left);
      else this.wanted.delete(key);
    };
  }

  /** Look at another part, or at it in another way. @param {View} view */
  show(view) {
    if (JSON.stringify(view) === JSON.stringify(this.view)) return;
    this.view = view;
    this.restart();
  }

  restart() {
    this.turn.abort();
    this.turn = new AbortController();
    this.gather();
  }

  /** Ask for what is in sight and is not there. */
  gather() {}
}
