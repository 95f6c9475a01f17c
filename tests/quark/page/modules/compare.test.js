// @ts-check
import { readPlaces, subtractCurve } from "../../../../quark/page/static/data/differences.js";
import { equal, holds, makeCurve } from "./curve_maker.js";

Deno.test("a curve is read between its entries, and nowhere beyond them", () => {
  const curve = makeCurve([0, 10, NaN, 40], { step: Float64Array.from([0, 10, 20, 30]) });
  equal([...readPlaces(curve, Float64Array.from([-1, 0, 5, 10, 20, 30, 31]))], [NaN, 0, 5, 10, 25, 40, NaN]);
  const empty = makeCurve([], { step: Float64Array.from([]) });
  equal([...readPlaces(empty, Float64Array.from([0, 1]))], [NaN, NaN]);
});

Deno.test("the difference to a curve moves value and band, and leaves both curves as they are", () => {
  const base = makeCurve([1, 3], { step: Float64Array.from([0, 10]) });
  const curve = makeCurve([2, 2, 2, 2], { step: Float64Array.from([0, 5, 10, 20]), low: Float64Array.from([1, 1, 1, 1]), high: Float64Array.from([4, 4, 4, 4]) });
  const less = subtractCurve(curve, base);
  equal([...less.mean], [1, 0, -1, NaN]);
  equal([...less.low ?? []], [0, -1, -2, NaN]);
  equal([...less.high ?? []], [3, 2, 1, NaN]);
  equal([...curve.mean], [2, 2, 2, 2]);
  holds(less.step === curve.step, "its places stay");
});

Deno.test("a curve less itself is nothing", () => {
  const curve = makeCurve([1.5, -2, 8], { step: Float64Array.from([0, 3, 7]) });
  equal([...subtractCurve(curve, curve).mean], [0, 0, 0]);
});
