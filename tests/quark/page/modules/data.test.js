// @ts-check
import { appendCurve, identifyCurve, joinCurves, readCurves, reduceCurve } from "../../../../quark/page/static/data/curves.js";
import { decodePack, readNumber } from "../../../../quark/page/static/data/pack.js";
import { smoothValues } from "../../../../quark/page/static/charts/lines.js";
import { writeAge, writeBytes, writeDuration, writeNumber, writeSeconds, writeStep, writeTime } from "../../../../quark/page/static/pages/texts.js";
import { equal, holds, makeCurve, makePack } from "./curve_maker.js";

const GOLDEN = new URL("../golden/", import.meta.url);

Deno.test("durations, sizes and values are written as Python writes them", () => {
  const cases = JSON.parse(Deno.readTextFileSync(new URL("../../formats.json", import.meta.url)));
  const now = Date.parse("2026-11-30T12:00:00Z");
  const ago = (/** @type {number} */ age_s) => writeAge(new Date(now - 1000 * age_s).toISOString(), now);
  const forms = { span: writeDuration, value: writeNumber, bytes: writeBytes, seconds: writeSeconds, age: ago };
  equal(Object.keys(cases), Object.keys(forms));
  for (const [form, write] of Object.entries(forms)) {
    for (const [given, text] of cases[form]) equal(write(given), text, `${form} of ${given}`);
  }
});

Deno.test("golden packs hold what their JSON says", () => {
  const names = [...Deno.readDirSync(GOLDEN)].map(({ name }) => name).filter((name) => name.endsWith(".pack"));
  holds(names.length > 0, "there are golden packs");
  for (const name of names) {
    const { head, columns } = decodePack(Deno.readFileSync(new URL(name, GOLDEN)).buffer);
    const said = JSON.parse(Deno.readTextFileSync(new URL(name.replace(".pack", ".json"), GOLDEN)));
    equal(Object.keys(said.columns).sort(), [...columns.keys()].sort(), name);
    for (const [column, values] of Object.entries(said.columns)) {
      const read = /** @type {unknown[]} */ (values).map((value) => readNumber(value) ?? NaN);
      const typed = columns.get(column);
      equal(typed instanceof Float32Array ? Float32Array.from(read) : read, typed instanceof Float32Array ? typed : [...typed ?? []], `${name} ${column}`);
    }
    for (const [key, value] of Object.entries(said.head)) if (key !== "cols") equal(head[key], value, `${name} head.${key}`);
  }
});

Deno.test("columns are views of the bytes, of each type", () => {
  const buffer = makePack({ a: "ü" }, [["x", "f8", [1, NaN]], ["y", "f4", [0.5]], ["z", "u1", [1, 2, 3]], ["w", "i4", [-7]]]);
  const { head, columns } = decodePack(buffer);
  equal(head.a, "ü");
  equal([...columns].map(([name, values]) => [name, values]), [["x", [1, NaN]], ["y", [0.5]], ["z", [1, 2, 3]], ["w", [-7]]]);
  holds(columns.get("x")?.buffer === buffer, "nothing is copied");
});

Deno.test("a pack that is cut is refused in words", () => {
  const whole = makePack({}, [["x", "f8", [1, 2]]]);
  for (const size of [0, 3, 6, whole.byteLength - 1]) {
    let said = "";
    try {
      decodePack(whole.slice(0, size));
    } catch (error) {
      said = String(error);
    }
    holds(said.startsWith("RangeError: The "), `${size} bytes: ${said}`);
  }
});

Deno.test("curves are read with the columns that they have", () => {
  const curves = [{ key: "a", name: "ä", points: 3, exact: false, non_finite: 1, low: [0, 5], attempt: 1 }, { key: "b" }];
  const pack = decodePack(makePack({ curves }, [
    ["0.step", "f8", [0, 5]], ["0.mean", "f4", [1, 2]], ["0.low", "f4", [0, 2]], ["0.high", "f4", [2, 2]], ["0.non_finite", "f4", [0, 1]],
    ["1.step", "f8", []], ["1.mean", "f4", []],
  ]));
  const [a, b] = readCurves(pack);
  equal([a.name, a.attempt, a.nonFinite, a.lowest, a.low, a.bad, a.time], ["ä", 1, 1, [0, 5], [0, 2], [0, 1], null]);
  equal([b.name, b.rank, b.step, b.low], ["b", null, [], null]);
});

Deno.test("base and tail meet: no point twice, none missing", () => {
  const all = Array.from({ length: 57 }, (_, i) => Math.sin(i));
  let curves = [makeCurve(all.slice(0, 10))];
  for (let from = 10; from < all.length; from += 7) {
    const some = all.slice(from, from + 7);
    curves = joinCurves(curves, [makeCurve(some, { step: Float64Array.from(some, (_, i) => from + i) })]);
  }
  equal(curves.length, 1);
  equal(curves[0].step, all.map((_, i) => i));
  equal(curves[0].mean, all);
  equal([curves[0].points, curves[0].exact], [57, true]);
});

Deno.test("points behind a reduced curve have themselves as band, and keep what is known of extremes", () => {
  const base = makeCurve([1, 2], { low: Float64Array.of(0, 1), high: Float64Array.of(3, 4), exact: false, points: 200,
    step: Float64Array.of(0, 100), lowStep: Float64Array.of(7, 104), highStep: Float64Array.of(8, 105), lowest: [0, 7], highest: [4, 105] });
  const joined = appendCurve(base, makeCurve([9, NaN], { step: Float64Array.of(200, 201), bad: Float32Array.of(0, 1) }));
  equal(joined.low, [0, 1, 9, NaN]);
  equal(joined.high, [3, 4, 9, NaN]);
  equal(joined.highStep, [8, 105, 200, 201]);
  equal([joined.points, joined.nonFinite, joined.highest, joined.lowest, joined.exact], [202, 1, [9, 200], [0, 7], false]);
  equal(joined.bad, [0, 0, 0, 1]);
  equal(base.mean, [1, 2], "the base");
});

Deno.test("entries of several points behind a curve count all of them, and bring their extremes", () => {
  const since = makeCurve([5], { step: Float64Array.of(2), low: Float64Array.of(-7), high: Float64Array.of(9), exact: false, points: 40 });
  const joined = appendCurve(makeCurve([1, 2]), since);
  equal([joined.points, joined.exact, joined.lowest, joined.highest], [42, false, [-7, 2], [9, 2]]);
  equal([joined.low, joined.high], [[1, 2, -7], [1, 2, 9]]);
});

Deno.test("points beyond the window are left out", () => {
  const joined = appendCurve(makeCurve([1, 2]), makeCurve([3, 4], { step: Float64Array.of(2, 3) }), 2);
  equal([joined.step, joined.points], [[0, 1, 2], 3]);
});

Deno.test("attempts, ranks and fields are curves of their own", () => {
  const ids = [makeCurve([1]), makeCurve([1], { attempt: 1 }), makeCurve([1], { rank: 0 }), makeCurve([1], { field: "norm" })].map(identifyCurve);
  equal(new Set(ids).size, 4);
  equal(joinCurves([makeCurve([1])], [makeCurve([5], { attempt: 1 })]).map((curve) => curve.mean), [[1], [5]]);
});

Deno.test("a reduced curve keeps low, high, their steps and what is not finite", () => {
  const values = Array.from({ length: 1000 }, (_, i) => (i === 630 ? 400 : i === 70 ? -9 : i === 500 ? NaN : 1));
  const reduced = reduceCurve(makeCurve(values), 50);
  equal(reduced.step.length, 50);
  equal(Math.max(.../** @type {any} */ (reduced.high)), 400);
  equal(Math.min(.../** @type {any} */ (reduced.low)), -9);
  equal([reduced.highStep?.[31], reduced.lowStep?.[3], reduced.bad?.[25], reduced.badStep?.[25]], [630, 70, 1, 500]);
  equal([reduced.mean[0], reduced.exact, reduced.points], [1, false, 1000]);
  const live = joinCurves([makeCurve(values.slice(0, 90))], [makeCurve(values.slice(90), { step: Float64Array.from(values.slice(90), (_, i) => 90 + i) })], { entries: 100 });
  holds(live[0].step.length <= 200, "a curve that grows is reduced");
  equal(Math.max(.../** @type {any} */ (live[0].high)), 400);
});

Deno.test("what comes behind entries of several points becomes such entries too", () => {
  const noise = (/** @type {number} */ i) => Math.sin(7 * i) + (i === 1013 ? 50 : 0);
  const points = Array.from({ length: 1035 }, (_, i) => noise(i));
  const whole = reduceCurve(makeCurve(points.slice(0, 1000)), 100);
  let curves = [{ ...whole, points: 1000 }];
  for (let i = 1000; i < 1035; i++) {
    curves = joinCurves(curves, [makeCurve([points[i]], { step: Float64Array.from([i]) })], { entries: 100 });
  }
  const [{ step, low, high, mean, points: count, highest }] = /** @type {any} */ (curves);
  equal([step.length, count, step[100], step[102], step[103]], [108, 1035, 1000, 1020, 1030]);
  // A band as before, and single points only until there are enough of them.
  for (let entry = 0; entry < 103; entry++) holds(high[entry] - low[entry] > 1, `entry ${entry} has a band`);
  for (let entry = 103; entry < 108; entry++) equal([low[entry], high[entry]], [mean[entry], mean[entry]]);
  holds(highest[0] > 49 && high[101] === highest[0], "a spike is kept");
  equal(reduceCurve(curves[0], 50).step.length, 36);
});

Deno.test("how often a curve was sampled does not change how smooth it is", () => {
  const wave = (/** @type {number} */ x) => 1 + x / 1000 + Math.sin(x / 40);
  const every = (/** @type {number} */ gap) => Float64Array.from({ length: 1000 / gap + 1 }, (_, i) => i * gap);
  const [fine, coarse] = [1, 4].map((gap) => {
    const places = every(gap);
    return [places, smoothValues(places, places.map(wave), 0.97, 1000)];
  });
  for (let i = 25; i < coarse[0].length; i++) {
    const other = fine[1][fine[0].indexOf(coarse[0][i])];
    holds(Math.abs(coarse[1][i] - other) < 0.06, `at ${coarse[0][i]}: ${coarse[1][i]} and ${other}`);
  }
});

Deno.test("smoothing has no bias at its beginning, and gaps stay gaps", () => {
  equal([...smoothValues([0, 1, 2], [5, 5, 5], 0.9, 2)].map((value) => Math.round(value * 1e9) / 1e9), [5, 5, 5]);
  const smoothed = smoothValues([0, 1, 2, 3], [1, NaN, Infinity, 1], 0.9, 3);
  equal([smoothed[0], smoothed[1], smoothed[2]], [1, NaN, NaN]);
  holds(Math.abs(smoothed[3] - 1) < 1e-9, "a value after a gap");
  equal([...smoothValues([0, 1], [1, 3], 0, 1)], [1, 3], "no smoothing");
});

Deno.test("steps are parted by commas as the language of the page has it", () => {
  for (const value of [0, 7, -7, 999, 1000, -1000, 31_000, 1_234_567, Number.MAX_SAFE_INTEGER, 1234.5, 1e21]) {
    equal(writeStep(value), value.toLocaleString("en"));
  }
  equal(writeStep(null), "");
});

Deno.test("times are local and say their zone", () => {
  const at = new Date(2026, 0, 5, 3, 4, 9);
  const ahead = -at.getTimezoneOffset();
  const text = writeTime(at.toISOString());
  holds(text.startsWith("5 Jan 2026, 03:04:09 UTC"), "it begins with the day");
  equal(text.endsWith("UTC"), ahead === 0);
  equal(writeTime("never"), "");
});
