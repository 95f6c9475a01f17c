// @ts-check
import { chooseCurves, nameEvidence, readLimit } from "../../../../quark/page/static/charts/evidence_chart.js";
import { fitRange, findCarets, findWide, needsLog } from "../../../../quark/page/static/charts/fitting.js";
import { chooseScale, fillRows, findEmpty, findFurthest, listGroups, listShown, mapColumns, measureCells, nameGroup, shadePixels, suggestMode } from "../../../../quark/page/static/charts/heat_cells.js";
import { findNearest, makeLine, nameLines, placeStep } from "../../../../quark/page/static/charts/lines.js";
import { groupMarks, makeFrame } from "../../../../quark/page/static/charts/painting.js";
import { findSpread, measureDensity } from "../../../../quark/page/static/charts/ridges.js";
import { clampWindow, frameRange, moveWindow } from "../../../../quark/page/static/charts/zooming.js";
import { BAD, listDiverging, packColour, styleLine } from "../../../../quark/page/static/data/colours.js";
import { labelDecade, labelTicks, placeDecades, placeDurations, placeTicks } from "../../../../quark/page/static/data/ticks.js";
import { equal, holds, makeCurve } from "./curve_maker.js";

/** One point of 400 in a million, as 451 entries. */
function makeSpike() {
  const count = 451;
  const mean = Array.from({ length: count }, (_, i) => 2 * Math.exp(-i / 100) + 0.3);
  const step = Float64Array.from(mean, (_, i) => i * 2217);
  const high = Float64Array.from(mean, (value, i) => (i === 284 ? 400 : value + 0.2));
  const highStep = step.map((value, i) => (i === 284 ? 630_000 : value + 5));
  return makeCurve(mean, { step, high, low: Float64Array.from(mean, (value) => value - 0.1), highStep, lowStep: step, exact: false, points: 1e6 });
}

Deno.test("y fits the means and the usual band; one point far beyond is a caret with its value and step", () => {
  const lines = [makeLine(makeSpike())];
  const window = { low: 0, high: 1e6 };
  const [bottom, top] = fitRange(lines, window);
  holds(top < 3 && top > 2.3, `top ${top}`);
  const carets = findCarets(lines, { ...window, bottom, top, near: 0 });
  equal(carets.map(({ value, step, side }) => [value, step, side]), [[400, 630_000, "above"]]);
  const [, full] = fitRange(lines, { ...window, isFull: true });
  holds(full >= 400, `full range ${full}`);
  equal(findWide(lines[0], 0, 451), [284]);
});

Deno.test("carets that are near are one, the furthest", () => {
  const lines = [makeLine(makeCurve([1, 9, 1, 7, 1, 8]))];
  const found = findCarets(lines, { low: 0, high: 5, bottom: 0, top: 2, near: 2 });
  equal(found.map(({ value, count }) => [value, count]), [[9, 2], [8, 1]]);
  equal(findCarets(lines, { low: 0, high: 5, bottom: 0, top: 2, near: 1 }).length, 3);
});

Deno.test("a range has a size, also of what is flat, empty, not finite or below zero", () => {
  for (const values of [[], [5], [0, 0], [NaN], [3e-4, 3e-4], [-2, -1], [1e300, 1e301]]) {
    for (const isLog of [false, true]) {
      const [bottom, top] = fitRange([makeLine(makeCurve(values))], { low: -1, high: 9, isLog });
      holds(bottom < top && Number.isFinite(bottom) && Number.isFinite(top), `${values} ${isLog}: ${bottom} ${top}`);
      holds(!isLog || bottom > 0, `${values}: a log axis begins above zero`);
    }
  }
});

Deno.test("a log axis has decades only, a short one its bounds", () => {
  equal(placeDecades(0.002, 50), [0.01, 0.1, 1, 10]);
  equal(placeDecades(1e-12, 1e24).length <= 8, true);
  holds(placeDecades(2, 3).length > 0, "ticks within one decade");
  equal([1e-4, 0.01, 1, 100, 1e24].map(labelDecade), ["1e-4", "0.01", "1", "100", "1e24"]);
  equal(needsLog([makeLine(makeCurve([1, 1e4]))]), true);
});

Deno.test("a log axis is for what spans more than three decades above zero, also where it has died since", () => {
  const spans = (/** @type {number[]} */ values, more = {}) => needsLog([makeLine(makeCurve(values, more))]);
  equal(spans([1, 1e4]), true);
  equal(spans([1, 999, NaN, Infinity]), false);
  equal(spans([1, 1e4, 0, 0, 0]), true, "what exploded and died");
  equal(spans([0, 1e4]), false, "one value and zero");
  equal(spans([-1, 1, 1e4]), false, "what is below zero has no place");
  equal(spans([0, 0]) || spans([NaN]) || spans([]), false, "nothing above zero");
  equal(spans([1, 10], { low: Float32Array.of(0.5, 1), high: Float32Array.of(1, 5e3) }), true, "an extreme within an entry");
  equal(spans([1, 1e4], { low: Float32Array.of(-1, 1), high: Float32Array.of(1, 1e4) }), false);
});

Deno.test("ticks are round, and their labels tell them apart", () => {
  equal(placeTicks(0, 1, 5), [0, 0.2, 0.4, 0.6, 0.8, 1]);
  equal(placeTicks(0, 3, 10, 1), [0, 1, 2, 3], "steps are whole");
  equal(labelTicks(placeTicks(0, 1e6, 5)), ["0", "200k", "400k", "600k", "800k", "1000k"].map((text) => text === "0" ? text : (Number.parseInt(text) / 1000).toFixed(1) + "M"));
  equal(labelTicks([2.9e-4, 3e-4, 3.1e-4]), ["2.9e-4", "3.0e-4", "3.1e-4"]);
  equal(placeDurations(0, 18000, 5), [0, 3600, 7200, 10800, 14400, 18000]);
  for (const [low, high] of [[0, 0], [NaN, 1], [1e15, 1e15 + 2], [-1e-9, 1e-9], [0, Infinity]]) {
    const labels = labelTicks(placeTicks(low, high, 6));
    holds(labels.length < 20, `${low} to ${high}: ${labels}`);
  }
  const close = labelTicks(placeTicks(999_000, 1_000_200, 4));
  equal(new Set(close).size, close.length, `${close}`);
});

Deno.test("steps that go back are put in order, and attempts are lines of their own", () => {
  const line = makeLine(makeCurve([1, 2, 3, 4], { step: Float64Array.of(0, 10, 5, NaN) }));
  equal([line.xs, line.mean], [[0, 5, 10], [1, 3, 2]]);
  const curves = [makeCurve([1], { attempt: 0 }), makeCurve([2], { attempt: 1 })];
  equal(nameLines(curves), ["attempt 0", "attempt 1"]);
  equal(nameLines([makeCurve([1])]), ["train/loss"]);
});

Deno.test("x is a step, an epoch, a time, seconds since the start, or another metric", () => {
  const curve = makeCurve([1, 2], { step: Float64Array.of(0, 10), time: Float64Array.of(100, 160), epoch: Float64Array.of(0, 1) });
  equal(makeLine(curve, { x: { kind: "time" } }).xs, [100, 160]);
  equal(makeLine(curve, { x: { kind: "relative" }, start_s: 90 }).xs, [10, 70]);
  equal(makeLine(curve, { x: { kind: "epoch" } }).xs, [0, 1]);
  const rate = makeCurve([0.1, 0.3], { step: Float64Array.of(0, 8) });
  equal(makeLine(curve, { x: { kind: "metric", curve: rate } }).xs, [0.1, 0.3]);
  equal(makeLine(makeCurve([1, 2]), { x: { kind: "time" } }).xs.length, 0, "no times");
  equal(placeStep([makeLine(curve, { x: { kind: "time" } })], 10, false), 160);
});

Deno.test("what is not finite has its own step", () => {
  const line = makeLine(makeCurve([1, NaN, 2], { step: Float64Array.of(0, 100, 200), bad: Float32Array.of(2, 1, 0), badStep: Float64Array.of(50, 100, NaN), nonFinite: 3 }));
  equal(line.bad, [{ x: 50, step: 50, count: 2 }, { x: 100, step: 100, count: 1 }]);
  equal(makeLine(makeCurve([1, NaN])).bad, [{ x: 1, step: 1, count: 1 }]);
});

Deno.test("the nearest entry", () => {
  const places = [0, 10, 20];
  equal([-5, 4, 6, 16, 99].map((place) => findNearest(places, place)), [0, 0, 1, 2, 2]);
  equal(findNearest([], 3), -1);
});

Deno.test("marks that would touch share a label, and its gravest severity", () => {
  const marks = [100, 110, 300].map((x, at) => ({ x, text: `m${at}`, severity: at === 1 ? "critical" : "warning", id: `${at}` }));
  equal(groupMarks(marks, 50).map(({ text, severity, ids }) => [text, severity, ids]), [["2 findings", "critical", ["0", "1"]], ["m2", "warning", ["2"]]]);
});

Deno.test("values have their place on a canvas, and none below zero on a log axis", () => {
  const frame = makeFrame(/** @type {any} */ (null), { left: 10, top: 0, width: 100, height: 50 }, 1, [0, 10], [1, 100], true);
  equal([frame.toX(5), frame.toY(1), frame.toY(10), frame.toY(100)], [60, 50, 25, 0]);
  equal([frame.toY(0), frame.toY(-1)], [NaN, NaN]);
  holds(Number.isFinite(makeFrame(/** @type {any} */ (null), frame.box, 1, [0, 1], [0, 1], false).toY(1e300)), "far values stay numbers");
});

Deno.test("windows zoom, pan and stay within the whole", () => {
  const whole = /** @type {[number, number]} */ ([0, 1000]);
  equal(moveWindow(null, whole, "w"), { low: 250, high: 750 });
  equal(moveWindow({ low: 250, high: 750 }, whole, "s"), null);
  equal(moveWindow({ low: 0, high: 100 }, whole, "a"), { low: 0, high: 100 });
  equal(moveWindow({ low: 0, high: 100 }, whole, "d"), { low: 25, high: 125 });
  equal(moveWindow({ low: 1, high: 2 }, whole, "0"), null);
  equal(clampWindow({ low: 990, high: 1090 }, whole), { low: 900, high: 1000 });
  equal(frameRange(155, 295, [0, 299]), { low: 15, high: 299 });
  equal(frameRange(10, 290, [0, 299]), null);
});

Deno.test("the ninth line has dashes, and no two of the first 32 are alike", () => {
  equal([styleLine(7, "light").dash, styleLine(8, "light").dash.length > 0], [[], true]);
  for (const theme of /** @type {const} */ (["light", "dark"])) {
    const all = Array.from({ length: 32 }, (_, index) => JSON.stringify(styleLine(index, theme)));
    equal(new Set(all).size, 32, theme);
  }
});

/** @param {string[]} names @param {number[][]} cells */
function makeGrid(names, cells) {
  const bins = cells[0].length;
  const flat = Float32Array.from(cells.flat());
  return {
    rows: names.map((name) => ({ name })), step: Float64Array.from({ length: bins }, (_, i) => i * 10), last: (bins - 1) * 10,
    cells: flat, bad: new Uint8Array(flat.length), base: Float32Array.from(cells, (row) => row[0]), marks: [], exact: true, rowCount: names.length,
  };
}

Deno.test("each row against its own beginning, in decades", () => {
  const grid = makeGrid(["a", "b", "c"], [[1, 10, 0.1], [200, 200, 2000], [0, 0, 5]]);
  equal([...measureCells(grid, "relative")].map((value) => Math.round(value * 1000) / 1000), [0, 1, -1, 0, 0, 1, 0, 0, Infinity]);
  equal(measureCells(grid, "absolute"), grid.cells);
  equal(chooseScale(measureCells(grid, "relative"), "relative"), { low: -1, high: 1, isLog: true });
  equal(findFurthest(grid, measureCells(grid, "relative"), 0, "relative").step, 10);
});

Deno.test("a scale of figures is in decades where they span many, and of shares from 0 to 1", () => {
  equal(chooseScale(Float32Array.of(1e-7, 0, 0.5), "absolute"), { low: -7, high: 0, isLog: true });
  equal(chooseScale(Float32Array.of(0.1, 0.3), "absolute", true), { low: 0, high: 1, isLog: false });
  equal(chooseScale(Float32Array.of(2, 50), "absolute"), { low: 0, high: 50, isLog: false });
  equal(chooseScale(Float32Array.of(NaN), "absolute"), { low: 0, high: 1, isLog: false });
});

Deno.test("a row that has no value is there among those that have", () => {
  const grid = { ...makeGrid(["b", "c"], [[1, 2], [3, 4]]), marks: [{ row: 1, step: 10, finding: "x" }] };
  const filled = fillRows(grid, ["a", "b", "c"].map((name) => ({ name })));
  equal([filled.cells, filled.base, filled.marks[0].row], [[NaN, NaN, 1, 2, 3, 4], [NaN, 1, 3], 2]);
  equal([...findEmpty(filled)], [0]);
  holds(fillRows(grid, [{ name: "c" }]) === grid, "others are left as they are");
});

Deno.test("rows that are far apart from the beginning and hardly change are shown as recorded", () => {
  equal(suggestMode(makeGrid(["a", "b"], [[1e-7, 1e-7], [1, 2]])), "absolute");
  equal(suggestMode(makeGrid(["a", "b"], [[1e-7, 1e-2], [1, 2]])), "relative");
  equal(suggestMode(makeGrid(["a", "b"], [[1, 1], [2, 2]])), "relative");
  equal(suggestMode(makeGrid(["a", "b"], [[0, 0], [NaN, NaN]])), "relative");
});

Deno.test("nothing is lost between pixels: what is not finite is red, else the furthest is seen", () => {
  const rows = Array.from({ length: 100 }, () => Array.from({ length: 1000 }, () => 1));
  rows[37][333] = 1000;
  const grid = makeGrid(rows.map((_, i) => `layers.${i}.w`), rows);
  grid.bad[61 * 1000 + 812] = 1;
  grid.cells[61 * 1000 + 812] = NaN;
  const values = measureCells(grid, "relative");
  const palette = listDiverging("light");
  const red = packColour(BAD);
  for (const [width, height] of [[50, 10], [333, 77], [1000, 100], [1700, 100]]) {
    const pixels = shadePixels(grid, values, listShown(grid.rows, new Set()), {
      width, height, window: [0, 9990], mode: "relative", scale: { low: -3, high: 3, isLog: true }, palette, bad: red, none: 0,
    });
    holds(pixels.includes(red), `${width} x ${height}: red`);
    holds(pixels.includes(palette[255]), `${width} x ${height}: the greatest`);
    holds(pixels.filter((pixel) => pixel === red).length <= Math.ceil(width / 1000 + 1) * Math.ceil(height / 100 + 1), "and no more red than there is");
  }
});

Deno.test("bins lie at their steps, and nothing lies beyond the last", () => {
  const grid = makeGrid(["a"], [[1, 2, 3]]);
  grid.step = Float64Array.of(0, 50, 60);
  grid.last = 60;
  const { first, final } = mapColumns(grid, [0, 200], 20);
  equal([...first], [0, 0, 0, 0, 0, 1, 2, 2, 2, ...Array(11).fill(-1)]);
  equal([...first].filter((_, x) => final[x] < first[x]), []);
});

Deno.test("rows fold by block, and are found by name", () => {
  equal(["blocks.12.mlp.fc1", "encoder.proj", "head", "0", "model.layers.3.w"].map(nameGroup), ["blocks.12", "encoder", "", "", "model.layers.3"]);
  const rows = ["embed", "blocks.0.a", "blocks.0.b", "blocks.1.a"].map((name) => ({ name }));
  equal(listGroups(rows), ["blocks.0"]);
  equal(listShown(rows, new Set(["blocks.0"])).map(({ name, rows: members }) => [name, members.length]), [["embed", 1], ["blocks.0", 2], ["blocks.1.a", 1]]);
  equal(listShown(rows, new Set(), "B").map(({ name }) => name), ["embed", "blocks.0.a", "blocks.0.b", "blocks.1.a"]);
  equal(listShown(rows, new Set(), ".a").length, 2);
  equal([...findEmpty(makeGrid(["a", "b"], [[NaN, NaN], [NaN, 1]]))], [0]);
  equal(listShown(rows, new Set(), "", new Set([0, 1])).length, 2);
  equal(listShown(["__proto__.x.y", "constructor.x"].map((name) => ({ name })), new Set(["__proto__"])).length, 2);
});

Deno.test("a histogram is drawn by counts over widths", () => {
  const ridge = { parameter: "w", type: "value", step: 0, edges: [0, 1, 3], counts: [2, 4] };
  equal(measureDensity(ridge), [1, 1]);
  equal(findSpread([ridge, { ...ridge, edges: [-5, -4, 3], counts: [0, 1] }]), [-4, 3]);
  equal([findSpread([]), measureDensity({ ...ridge, counts: [0, 0] })], [null, [0, 0]]);
});

Deno.test("a threshold is drawn where what was observed is a point of the curve", () => {
  const lines = [makeLine(makeCurve([1, 2, 439445.15625]))];
  equal(readLimit({ observed: 439445.2, threshold: 2.6 }, lines), 2.6);
  equal(readLimit({ observed: 11.75, threshold: 0.5 }, lines), null, "of a ratio");
  equal(readLimit({ observed: 29, threshold: 6 }, lines), null, "of a count");
  equal(readLimit({ observed: 2, threshold: "Infinity" }, lines), null);
  equal(readLimit({ observed: 0, threshold: 0.1 }, [makeLine(makeCurve([0, 1]))]), null, "nothing is a value of all");
  const banded = makeLine(makeCurve([1], { low: Float64Array.of(0), high: Float64Array.of(400) }));
  equal(readLimit({ observed: 400, threshold: 10 }, [banded]), 10, "of a band");
});

Deno.test("evidence that does not say which statistics it is of is drawn by what the finding is about", () => {
  const curves = ["activation", "gradient"].map((summary) => makeCurve([1], { summary, field: "norm", name: "2" }));
  const finding = { title: "Gradients explode", fact: "The activation …" };
  equal(chooseCurves(curves, {}, finding).map(({ summary }) => summary), ["gradient"]);
  equal(chooseCurves(curves, { statistics: "activation" }, finding).map(({ summary }) => summary), ["activation"]);
  equal(chooseCurves(curves.slice(0, 1), {}, finding).length, 1);
  equal(nameEvidence({ name: "2" }, curves.slice(1)), "gradient norm of 2");
  equal(nameEvidence({ name: "train/loss" }, [makeCurve([1])]), "train/loss");
});
