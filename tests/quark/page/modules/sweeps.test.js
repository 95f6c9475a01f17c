// @ts-check
import { brushTrials, followBest, listColumns, makeAxis, placeBrush, rateTrial, readBrushes, readTrials, sortTrials, writeBrush } from "../../../../quark/page/static/data/trial_axes.js";
import { findLine } from "../../../../quark/page/static/charts/trial_lines.js";
import { equal, holds } from "./curve_maker.js";

const DATA = {
  names: ["lr", "optimizer", "__proto__"],
  sweep: { space: { lr: { type: "uniform", low: 1e-5, high: 0.1, log: true }, optimizer: { type: "choices" } }, metrics: [{ name: "acc", mode: "max" }, { name: "loss", mode: "min" }] },
};
const FIELDS = ["number", "state", "values", "constraints", "settled_at", "budget", "rung", "parameters"];

/** @param {any[][]} rows parameters and values @param {string} [state] */
function make(rows, state = "completed") {
  return readTrials(FIELDS, rows.map(([parameters, values], number) => [number, state, values, null, `2026-01-01T00:00:${String(number % 60).padStart(2, "0")}Z`, null, null, parameters]));
}

const TRIALS = make([[[1e-5, "adam", 1], [0.5, 2]], [[1e-3, "sgd", 2], [0.9, 1]], [[0.1, "adam", null], null]]);
const COLUMNS = listColumns(DATA, TRIALS);
const find = (/** @type {string} */ id) => /** @type {any} */ (COLUMNS.find((column) => column.id === id));

Deno.test("columns are what is varied and what is measured, by any name", () => {
  equal(COLUMNS.map((column) => column.id), ["p:lr", "p:optimizer", "p:__proto__", "m:acc", "m:loss"]);
  equal(find("p:__proto__").range, null);
  const rungs = TRIALS.map((trial) => ({ ...trial, budget: 3, rung: 1 }));
  equal(listColumns(DATA, rungs).map((column) => column.id).slice(3, 4), ["budget"]);
});

Deno.test("an axis of factors is logarithmic, one of names has them in their order", () => {
  const lr = makeAxis(find("p:lr"), TRIALS);
  holds(lr.isLog, "as its space says");
  equal([1e-5, 1e-3, 0.1].map((value) => Math.round(100 * Number(lr.place(value)))), [0, 50, 100]);
  equal(lr.place(null), null);
  equal(lr.place("NaN"), null);
  equal(Number(Number(lr.read(0.5)).toPrecision(6)), 1e-3);
  const optimizer = makeAxis(find("p:optimizer"), TRIALS);
  equal(optimizer.names, ["adam", "sgd"]);
  equal(["adam", "sgd", "lion", null].map(optimizer.place), [0, 1, null, null]);
  equal(optimizer.read(0.6), "sgd");
});

Deno.test("an axis of whole numbers has no tick between them", () => {
  const column = { ...find("p:lr"), range: { type: "integers", low: 1, high: 3 } };
  const axis = makeAxis(column, make([[[1], null], [[3], null], [[2], null]]));
  equal(axis.ticks.map((tick) => tick.text), ["1", "2", "3"]);
});

Deno.test("choices that are numbers stand evenly and in their order, other values by their text", () => {
  const column = { ...find("p:lr"), range: { type: "choices" } };
  equal(makeAxis(column, make([[[128], null], [[16], null], [[32], null]])).names, ["16", "32", "128"]);
  equal(makeAxis(column, make([[[true], null], [["a"], null], [[1], null]])).names, ["1", "a", "true"]);
  const one = makeAxis(column, make([[[5], null]]));
  equal(one.place(5), 0.5);
});

Deno.test("a metric that has diverged presses nobody into a line, and stands at the edge", () => {
  const values = [...Array.from({ length: 20 }, (_, at) => 1 + at / 20), 1e9, "NaN"];
  const loss = makeAxis(find("m:loss"), make(values.map((value) => [[0.1], [0, value]])));
  holds(loss.high < 2, "the axis ends with most of them");
  equal([loss.above, loss.place(1e9), loss.place("NaN")], [1, 1, null]);
  // What is far on the good side is what was looked for.
  const good = makeAxis(find("m:acc"), make([...Array(20).fill(0.1), 0.9].map((value, at) => [[0.1], [value + at / 1000, 0]])));
  equal(good.above, 0);
  holds(good.high > 0.9, "the best is on the axis");
  equal(makeAxis(find("m:loss"), []).place(0.5), 0.5);
});

Deno.test("brushes keep what lies within them, and are kept in the address", () => {
  const axes = COLUMNS.map((column) => makeAxis(column, TRIALS));
  const numbers = (/** @type {any[]} */ brushes) => brushTrials(TRIALS, axes, brushes).map((trial) => trial.number);
  equal(numbers([]), [0, 1, 2]);
  equal(numbers([{ id: "p:lr", low: 1e-4, high: 0.1 }]), [1, 2]);
  equal(numbers([{ id: "p:optimizer", low: "adam", high: "adam" }]), [0, 2]);
  equal(numbers([{ id: "p:optimizer", low: "adam", high: "adam" }, { id: "m:acc", low: 0, high: 1 }]), [0]);
  // An axis that is not shown, or names that are gone, narrow nothing.
  equal(numbers([{ id: "p:gone", low: 0, high: 1 }, { id: "p:optimizer", low: "x", high: "y" }]), [0, 1, 2]);
  const odd = [{ id: 'p:"],[<script>', low: 1 / 3, high: "a\u202e" }];
  equal(readBrushes(odd.map(writeBrush)), [{ ...odd[0], low: 0.333333 }]);
  equal(readBrushes(["", "{}", "[1,2,3]", '["a"]', "[", '["a",null]']), []);
  equal(placeBrush(axes[0], { id: "p:lr", low: 0.1, high: 1e-5 }), { low: 0, high: 1 });
});

Deno.test("trials are sorted by any column, and what lacks it stands last either way", () => {
  const order = (/** @type {string} */ id, /** @type {boolean} */ isFalling) => sortTrials(TRIALS, id === "number" ? null : find(id), isFalling).map((trial) => trial.number);
  equal(order("m:acc", false), [0, 1, 2]);
  equal(order("m:acc", true), [1, 0, 2]);
  equal(order("p:optimizer", true), [1, 0, 2]);
  equal(order("p:__proto__", true), [1, 0, 2]);
  equal(order("number", true), [2, 1, 0]);
});

Deno.test("the best so far is of what had the whole budget and keeps its constraints", () => {
  const rows = /** @type {any[]} */ ([[0.5, 9], [0.9, 1], [0.7, 9], [0.6, 9], [0.8, 9]]);
  const trials = rows.map(([value, budget], number) => ({ number, state: "completed", values: [value], constraints: number === 4 ? [1] : null, settled_at: `2026-01-01T00:00:0${9 - number}Z`, budget, parameters: [] }));
  const steps = followBest(trials, { id: "m:acc", title: "acc", kind: "metric", at: 0, mode: "max" });
  equal(steps.map((step) => step.trial.number), [4, 3, 2, 1, 0]);
  equal(steps.map((step) => step.isBest), [false, true, true, false, false]);
  equal(steps.map((step) => step.best), [NaN, 0.6, 0.7, 0.7, 0.7]);
  const low = followBest(trials, { id: "m:acc", title: "acc", kind: "metric", at: 0, mode: "min" });
  equal(low.map((step) => step.best), [NaN, 0.6, 0.6, 0.6, 0.5]);
  equal(followBest(make([[[1], ["NaN"]], [[1], null]]), find("m:acc")), []);
});

Deno.test("how good a trial is follows the way its metric is better", () => {
  equal([0, 1, 2].map((at) => rateTrial(makeAxis(find("m:acc"), TRIALS), TRIALS[at])), [0, 1, null]);
  equal([0, 1, 2].map((at) => rateTrial(makeAxis(find("m:loss"), TRIALS), TRIALS[at])), [0, 1, null]);
});

Deno.test("the nearest line is found among those that fit", () => {
  const line = (/** @type {(number | null)[]} */ places, isFit = true) => ({ places, rate: 1, isFit, isLive: false, isBest: false, isChosen: false });
  const lines = [line([0, 1]), line([0.5, 0.5], false), line([1, 0]), line([null, 0.2])];
  equal(findLine(lines, [0, 100], 10, 90, 0, 100), 0);
  equal(findLine(lines, [0, 100], 10, 10, 0, 100), 2);
  equal(findLine(lines, [0, 100], 10, 50, 0, 100), -1);
  equal(findLine(lines, [0, 100], 120, 50, 0, 100), -1);
  equal(findLine([line([0.5])], [50], 50, 50, 0, 100), -1);
});
