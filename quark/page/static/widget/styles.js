// @ts-check
/** Style sheets as text, for what has no page of its own; put in when the widget is linked. */

export const STYLES = "";
