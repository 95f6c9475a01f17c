// What these pages use of Preact, for the type checker. Written for Quark; not a vendored file.
export type Key = string | number;
export type Child = VNode | string | number | boolean | null | undefined | Child[];
export interface VNode {
  type: unknown;
  props: Record<string, unknown>;
  key: Key | null;
}
// deno-lint-ignore no-explicit-any
type Any = any;
export type Drawn = (props: Any) => Child;
export class Component {
  constructor(props?: Any);
  props: Any;
  state: Any;
  setState(change: object): void;
  render(props?: Any, state?: Any): unknown;
}
export function h(type: unknown, props: object | null, ...children: Child[]): VNode;
export function render(node: Child, into: Element | DocumentFragment): void;
export function createContext<T>(value: T): { Provider: Drawn; __default: T };
export function createRef<T>(): { current: T | null };
export const Fragment: Drawn;
