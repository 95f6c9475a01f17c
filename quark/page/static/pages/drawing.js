// @ts-check
/** Charts in the page: made as their place is there, updated as what they show changes, and ended with it. */

import { useEffect, useRef, useState } from "../vendor/hooks.js";
import { watchSight } from "./sight.js";

/**
 * The place of a chart, for `ref`.
 * @param {new (host: HTMLElement, props: any) => { update: (props: any) => void, destroy: () => void }} Kind
 * @param {() => any} describe - What it shows; nothing where it is not drawn yet.
 * @param {unknown[]} depends - What it is described anew for.
 */
export function useDrawn(Kind, describe, depends) {
  const host = useRef(/** @type {HTMLElement | null} */ (null));
  const drawn = useRef(/** @type {any} */ (null));
  useEffect(() => {
    const props = host.current && describe();
    if (!props) return;
    if (drawn.current) drawn.current.update(props);
    else drawn.current = new Kind(/** @type {HTMLElement} */ (host.current), props);
  }, depends);
  useEffect(() => () => drawn.current?.destroy(), []);
  return host;
}

/** The place of a chart that is made as it comes near to being seen; what is drawn there ends with it. */
export function useTile() {
  const host = useRef(/** @type {HTMLElement | null} */ (null));
  const drawn = useRef(/** @type {any} */ (null));
  const width = useRef(0);
  const [isNear, setNear] = useState(false);
  useEffect(() => host.current ? watchSight(host.current, (isSeen, wide) => {
    width.current = wide;
    setNear(isSeen);
  }) : undefined, []);
  useEffect(() => () => {
    drawn.current?.destroy();
    drawn.current = null;
  }, []);
  return { host, drawn, width, isNear };
}
