"use strict";
// Shared by the pages that draw attention: attention.html and scripts/playground
const $ = (id) => document.getElementById(id);
const all = (selector) => [...document.querySelectorAll(selector)];

// Weights are float16, little-endian, in base64
const VALUE = Float32Array.from({ length: 65536 }, (_, bits) => {
  const exponent = (bits >> 10) & 31, fraction = bits & 1023, sign = bits >> 15 ? -1 : 1;
  if (exponent === 31) return fraction ? NaN : sign * Infinity;
  return sign * (exponent ? (1024 + fraction) * 2 ** (exponent - 25) : fraction * 2 ** -24);
});
function float16Codes(base64) {
  const bytes = atob(base64), codes = new Uint16Array(bytes.length / 2);
  for (let i = 0; i < codes.length; i++) codes[i] = bytes.charCodeAt(2 * i) | (bytes.charCodeAt(2 * i + 1) << 8);
  return codes;
}

// Text
const SYMBOLS = { " ": "·", "\n": "↵", "\t": "→" };
const symbol = (c) => SYMBOLS[c] ?? String.fromCharCode(c === "\x7f" ? 0x2421 : 0x2400 + c.charCodeAt(0)); // other control characters
function element(name, className = "", ...children) {
  const node = document.createElement(name);
  node.className = className;
  node.append(...children);
  return node;
}
/** The token as text nodes, with symbols for whitespace; `breaks` starts a new line after a newline, as in the text. */
function visibleText(token, breaks = false) {
  const mark = (c) => element("span", "mark", symbol(c) + (breaks && c === "\n" ? "\n" : ""));
  return token.split(/([\x00- \x7f])/).map((part, i) => (i % 2 ? mark(part) : part));
}
const weightText = (w) => (w === 0 ? "0" : Math.abs(w) < 0.001 ? w.toExponential(1) : w.toFixed(3));
const percentText = (p) => (p === null ? "not a number" : p > 0 && p < 0.001 ? "< 0.1%" : `${(100 * p).toFixed(1)}%`);

// Colors: interpolated between three colors of the style sheet, by the square root of the weight
let empty, leak, shades;
function readColors() {
  const style = getComputedStyle(document.documentElement);
  const rgb = (name) => [1, 3, 5].map((i) => parseInt(style.getPropertyValue(name).trim().slice(i, i + 2), 16));
  const stops = ["--low", "--mid", "--high"].map(rgb);
  [empty, leak] = [rgb("--empty"), rgb("--leak")];
  shades = Array.from({ length: 256 }, (_, i) => {
    const low = i < 128 ? 0 : 1, part = i / 127.5 - low;
    return stops[low].map((c, k) => Math.round(c + part * (stops[low + 1][k] - c)));
  });
}
const shade = (w) => shades[Math.round(255 * Math.sqrt(Math.min(1, w)))];
const color = (w, above) => (w === 0 ? empty : above || !(w > 0 && w < Infinity) ? leak : shade(w));
/** Colors a token by its share of the largest weight; null: no color. */
function fill(span, share) {
  const [r, g, b] = share === null ? empty : shades[Math.round(255 * share)];
  span.style.backgroundColor = share === null ? "" : `rgb(${r} ${g} ${b})`;
  span.style.color = share === null ? "" : 0.299 * r + 0.587 * g + 0.114 * b > 140 ? "#000" : "#fff";
}
function bars(list, entries) {
  list.replaceChildren(...entries.flatMap(({ label, part, text, className = "" }) => {
    const bar = element("i");
    bar.style.width = `${100 * Math.min(1, Math.max(0, part))}%`;
    return [element("span", className, ...label), element("span", `track ${className}`, bar), element("span", className, text)];
  }));
}
