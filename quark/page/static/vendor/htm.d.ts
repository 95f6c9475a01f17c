// What these pages use of htm, for the type checker. Written for Quark; not a vendored file.
type Tag<T> = (parts: TemplateStringsArray, ...values: unknown[]) => T;
export const htm: {
  bind<T>(h: (type: unknown, props: object | null, ...children: never[]) => T): Tag<T>;
};
