// @ts-check
/** Curves as they came in packs, and what came since put behind them. */

/** @typedef {import("./pack.js").Pack} Pack */
/** @typedef {Float32Array | Float64Array} Floats */

/**
 * Entries of one metric or field in the order of logging: of one attempt and one rank, or of what
 * readers see by default. `low` and `high` are those of each entry, and null where each is one point.
 * @typedef {object} Curve
 * @property {string} key
 * @property {string} name decoded, to be shown
 * @property {string} run
 * @property {string} field
 * @property {string} kind
 * @property {string} summary
 * @property {number | null} rank
 * @property {number | null} attempt
 * @property {number} points how many points stand behind the entries
 * @property {boolean} exact whether each entry is one point
 * @property {number} nonFinite how many points are NaN or infinite
 * @property {[number, number] | null} lowest value and step
 * @property {[number, number] | null} highest value and step
 * @property {string} unit `step` or `epoch`
 * @property {Float64Array} step
 * @property {Floats} mean
 * @property {Floats | null} low
 * @property {Floats | null} high
 * @property {Float64Array | null} time seconds since 1970
 * @property {Float64Array | null} epoch
 * @property {Float64Array | null} lowStep
 * @property {Float64Array | null} highStep
 * @property {Float32Array | null} bad how many points of each entry are not finite
 * @property {Float64Array | null} badStep step of the first of them
 * @property {number} side which side of a comparison it is of
 * @property {number} runs how many runs it is the mean of; then low and high are those of runs
 * @property {Floats | null} count of the runs that have a value at each entry
 * @property {number} [coarse] so many entries stand for several points each, behind which came others
 * @property {number} [size] for how many points each of these stands, about
 */

const COLUMNS = /** @type {const} */ ([
  ["step", "step"], ["mean", "mean"], ["low", "low"], ["high", "high"], ["time", "time"],
  ["epoch", "epoch"], ["low_step", "lowStep"], ["high_step", "highStep"], ["non_finite", "bad"],
  ["non_finite_step", "badStep"], ["count", "count"],
]);

/** Of which side it is, and of how many runs. @param {Record<string, any>} said */
function readGroup({ side = 0, runs = 1 }) {
  return { side, runs };
}

/** All curves of a pack, in its order. @param {Pack} pack @returns {Curve[]} */
export function readCurves({ head, columns }) {
  return (head.curves ?? []).map((/** @type {Record<string, any>} */ said, /** @type {number} */ index) => {
    /** @type {Record<string, any>} */
    const curve = {
      key: said.key ?? "", name: said.name ?? said.key ?? "", run: said.run ?? "",
      field: said.field ?? "", kind: said.kind ?? "", summary: said.summary ?? "",
      rank: said.rank ?? null, attempt: said.attempt ?? null,
      points: said.points ?? 0, exact: said.exact ?? true, nonFinite: said.non_finite ?? 0,
      lowest: said.low ?? null, highest: said.high ?? null, unit: said.unit ?? "step",
      ...readGroup(said),
    };
    for (const [column, name] of COLUMNS) curve[name] = columns.get(`${index}.${column}`) ?? null;
    curve.step ??= new Float64Array(0);
    curve.mean ??= new Float64Array(0);
    return /** @type {Curve} */ (curve);
  });
}

/** What makes two curves the same one, grown. @param {Curve} curve */
export function identifyCurve(curve) {
  return JSON.stringify([curve.run, curve.kind, curve.key, curve.name, curve.field, curve.summary,
    curve.rank, curve.attempt]);
}

/**
 * A curve with what came since behind it. Neither of the two is changed.
 * @param {Curve} base
 * @param {Curve} since exact points, or entries of several
 * @param {number} [high] points beyond this step are left out
 * @returns {Curve}
 */
export function appendCurve(base, since, high = Infinity) {
  const kept = [];
  for (let i = 0; i < since.step.length; i++) if (!(since.step[i] > high)) kept.push(i);
  if (kept.length === 0) return base;
  const joined = { ...base, ...joinExtremes(base, since, kept), points: base.points + (kept.length === since.step.length ? since.points : kept.length), exact: base.exact && since.exact };
  const hasBand = base.low !== null || since.low !== null;
  for (const [, name] of COLUMNS) {
    const sides = [base, since].map((curve) => readColumn(curve, name, hasBand));
    if (sides[0] !== null || sides[1] !== null) /** @type {any} */ (joined)[name] = joinColumn(base, since, name, sides, kept);
  }
  return joined;
}

/** @typedef {"step" | "mean" | "low" | "high" | "time" | "epoch" | "lowStep" | "highStep" | "bad" | "badStep" | "count"} ColumnName */

/** A column, where points stand for their own band. @param {Curve} curve @param {ColumnName} name @param {boolean} hasBand */
function readColumn(curve, name, hasBand) {
  return curve[name] ?? (hasBand && (name === "low" || name === "high") ? curve.mean : null);
}

/**
 * One column of both. Where a side says nothing, the step of an extreme is that of its entry, and nothing is bad.
 * @param {Curve} base @param {Curve} since @param {ColumnName} name @param {(Floats | null)[]} sides @param {number[]} kept
 */
function joinColumn(base, since, name, [before, after], kept) {
  const isStep = name === "lowStep" || name === "highStep";
  const empty = name === "bad" ? 0 : NaN;
  const length = base.step.length;
  const isShort = [before, after].every((side) => side === null || side instanceof Float32Array);
  const values = isShort ? new Float32Array(length + kept.length) : new Float64Array(length + kept.length);
  const first = before ?? (isStep ? base.step : null);
  const second = after ?? (isStep ? since.step : null);
  if (first) values.set(first);
  else values.fill(empty, 0, length);
  for (let i = 0; i < kept.length; i++) values[length + i] = second ? second[kept[i]] : empty;
  return values;
}

/** @param {Curve} base @param {Curve} since @param {number[]} kept */
function joinExtremes(base, since, kept) {
  let { nonFinite, lowest, highest } = base;
  for (const i of kept) {
    const low = since.low?.[i] ?? since.mean[i];
    const high = since.high?.[i] ?? since.mean[i];
    nonFinite += countBad(since, i);
    if (Number.isFinite(low) && (lowest === null || low < lowest[0])) lowest = [low, since.step[i]];
    if (Number.isFinite(high) && (highest === null || high > highest[0])) highest = [high, since.step[i]];
  }
  return { nonFinite, lowest, highest };
}

/** How many points of an entry are not finite. @param {Curve} curve @param {number} i */
function countBad(curve, i) {
  return curve.bad ? curve.bad[i] : Number.isFinite(curve.mean[i]) ? 0 : 1;
}

/**
 * A curve of at most so many entries: neighbours become one, with the lowest and the highest of all.
 * @param {Curve} curve
 * @param {number} entries
 * @returns {Curve}
 */
export function reduceCurve(curve, entries) {
  const size = Math.ceil(curve.step.length / Math.max(1, entries));
  return size > 1 ? gather(curve, 0, size, Math.ceil(curve.step.length / size)) : curve;
}

/**
 * A curve in which neighbours are one entry, from one on; those before and behind are as they were.
 * @param {Curve} curve @param {number} from @param {number} size of them are one @param {number} made so many are made
 * @returns {Curve}
 */
function gather(curve, from, size, made) {
  const end = Math.min(curve.step.length, from + made * size);
  const starts = Array.from({ length: from + made + curve.step.length - end }, (_, at) => (
    at <= from ? at : at < from + made ? from + (at - from) * size : end + at - from - made));
  return sumAll(curve, [...starts, curve.step.length]);
}

/** @param {Curve} curve @param {number[]} edges of the entries to be, in those that there are @returns {Curve} */
function sumAll(curve, edges) {
  const count = edges.length - 1;
  /** @type {Curve} */
  const made = {
    ...curve, exact: false, bad: new Float32Array(count), badStep: new Float64Array(count).fill(NaN),
    time: curve.time && new Float64Array(count), epoch: curve.epoch && new Float64Array(count),
    step: new Float64Array(count), mean: new Float64Array(count), low: new Float64Array(count), high: new Float64Array(count),
    lowStep: new Float64Array(count), highStep: new Float64Array(count),
  };
  for (let entry = 0; entry < count; entry++) {
    const start = edges[entry];
    const found = sumEntries(curve, start, edges[entry + 1]);
    for (const [name, value] of Object.entries(found)) /** @type {any} */ (made)[name][entry] = value;
    if (made.time && curve.time) made.time[entry] = curve.time[start];
    if (made.epoch && curve.epoch) made.epoch[entry] = curve.epoch[start];
  }
  return made;
}

/** Entries from one index up to another as one. @param {Curve} curve @param {number} start @param {number} end */
function sumEntries(curve, start, end) {
  const [lows, highs] = [curve.low ?? curve.mean, curve.high ?? curve.mean];
  const sum = { step: curve.step[start], mean: 0, low: NaN, high: NaN, lowStep: NaN, highStep: NaN, bad: 0, badStep: NaN };
  let finite = 0;
  for (let i = start; i < end; i++) {
    const bad = countBad(curve, i);
    if (bad && !sum.bad) sum.badStep = curve.badStep?.[i] ?? curve.step[i];
    sum.bad += bad;
    if (Number.isFinite(curve.mean[i])) {
      sum.mean += curve.mean[i];
      finite++;
    }
    if (Number.isFinite(lows[i]) && !(lows[i] >= sum.low)) {
      sum.low = lows[i];
      sum.lowStep = curve.lowStep?.[i] ?? curve.step[i];
    }
    if (Number.isFinite(highs[i]) && !(highs[i] <= sum.high)) {
      sum.high = highs[i];
      sum.highStep = curve.highStep?.[i] ?? curve.step[i];
    }
  }
  sum.mean = finite ? sum.mean / finite : NaN;
  return sum;
}

/**
 * What came behind entries of several points, in such entries too as soon as there are enough: else a
 * chart shows what was as a band, and what came as single points.
 * @param {Curve} joined @param {Curve} base @returns {Curve}
 */
function coarsen(joined, base) {
  if (base.exact || !base.step.length) return joined;
  const isKnown = base.coarse !== undefined && base.coarse <= base.step.length;
  const [coarse, size] = isKnown ? [Number(base.coarse), Number(base.size)]
    : [base.step.length, Math.round(base.points / base.step.length)];
  const made = Math.floor((joined.step.length - coarse) / Math.max(1, size));
  return { ...size > 1 && made ? gather(joined, coarse, size, made) : joined, coarse: coarse + (size > 1 ? made : 0), size };
}

/**
 * What came, put behind the curves that it is of; a curve that is new is added.
 * @param {Curve[]} curves
 * @param {Curve[]} since
 * @param {{ high?: number, entries?: number }} [options] a curve of more than twice the entries is reduced
 */
export function joinCurves(curves, since, { high = Infinity, entries = 2000 } = {}) {
  const grown = new Map(curves.map((curve) => [identifyCurve(curve), curve]));
  for (const addition of since) {
    const id = identifyCurve(addition);
    const base = grown.get(id);
    const joined = base ? coarsen(appendCurve(base, addition, high), base) : addition;
    grown.set(id, joined.step.length > 2 * entries ? reduceCurve(joined, entries) : joined);
  }
  return [...grown.values()];
}
