// What these pages use of Preact's hooks, for the type checker. Written for Quark; not a vendored file.
type Update<T> = T | ((before: T) => T);
type Effect = () => void | (() => void);
export function useState<T>(first: T | (() => T)): [T, (next: Update<T>) => void];
export function useReducer<S, A>(reduce: (state: S, action: A) => S, first: S): [S, (action: A) => void];
export function useEffect(effect: Effect, inputs?: readonly unknown[]): void;
export function useLayoutEffect(effect: Effect, inputs?: readonly unknown[]): void;
export function useRef<T>(first: T): { current: T };
export function useMemo<T>(make: () => T, inputs?: readonly unknown[]): T;
// deno-lint-ignore no-explicit-any
export function useCallback<F extends (...args: any[]) => unknown>(call: F, inputs?: readonly unknown[]): F;
export function useContext<T>(context: { __default: T }): T;
export function useErrorBoundary(caught?: (error: Error) => void): [Error | undefined, () => void];
