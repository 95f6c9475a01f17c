// @ts-check
/** Colours and letters of what is drawn on a canvas, where style sheets do not reach. */

export const INKS = {
  light: { ink: "#1c2128", muted: "#59636e", grid: "#e4e7eb", ground: "#ffffff", bad: "#c8102e", shade: "#d55e0024",
    critical: "#b4141f", error: "#b4141f", warning: "#8a5a00", info: "#59636e" },
  dark: { ink: "#e6e9ee", muted: "#9aa4b0", grid: "#2b3038", ground: "#14171c", bad: "#ff5c6c", shade: "#ff8c4230",
    critical: "#ff7b86", error: "#ff7b86", warning: "#e6b422", info: "#9aa4b0" },
};
export const FONT = "system-ui, sans-serif";
