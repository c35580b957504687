const { layers: L, heads: H, tokens, probabilities, scores, steps } = JSON.parse($("data").textContent);
const T = tokens.length;
const MEAN = H; // number after the last head: the mean of all heads of the layer
const THUMBNAIL_SIZE = Math.min(T, 48); // cells per side, each showing the largest weight that it covers
const MAX_LARGEST = Math.min(T, 10); // length of the list of largest weights
const MAX_LABELED = 36; // tokens that fit as labels along the matrix
const LONG_TEXT = 120; // a text of more tokens gets a separate column

// Data: float16, little-endian, (L, H, T, T)
const maps = float16Codes($("maps").textContent);
// Maps of the same text at earlier steps: uint8, 255 times the square root of a weight, (steps, L, H, T, T)
const earlier = Uint8Array.from(atob($("earlier").textContent), (c) => c.charCodeAt(0));
let frame = steps.length; // number of the step that is shown; after the last one: the checkpoint

function matrixOf(layer, head) {
  const heads = head === MEAN ? [...Array(H).keys()] : [head], matrix = new Float32Array(T * T);
  for (const h of heads) {
    const start = (layer * H + h) * T * T, first = frame * L * H * T * T + start;
    const valueOf = (i) => (frame < steps.length ? (earlier[first + i] / 255) ** 2 : VALUE[maps[start + i]]);
    for (let i = 0; i < T * T; i++) matrix[i] += valueOf(i) / heads.length;
  }
  return matrix;
}
const nameOf = (layer, head) => (head === MEAN ? `L${layer}, mean of all heads` : `L${layer}H${head}`);

const numbered = (t) => [element("span", "number", `${t}`), ...visibleText(tokens[t])];
function paint(canvas, size, colorAt) {
  canvas.width = canvas.height = size;
  const context = canvas.getContext("2d"), image = context.createImageData(size, size);
  for (let i = 0; i < size * size; i++) image.data.set([...colorAt(i), 255], 4 * i);
  context.putImageData(image, 0, 0);
}

// Summary of every head
const isLarger = (a, b) => !Number.isNaN(b) && !(Math.abs(a) <= Math.abs(b)); // NaN counts as the largest
function summarize(layer, head) {
  const matrix = matrixOf(layer, head), n = THUMBNAIL_SIZE, largestWeights = new Float32Array(n * n), leaks = new Uint8Array(n * n);
  const above = { weight: 0, layer, head, row: 0, column: 0 };
  for (let row = 0; row < T; row++) {
    for (let column = 0; column < T; column++) {
      const w = matrix[row * T + column], cell = Math.floor((row * n) / T) * n + Math.floor((column * n) / T);
      largestWeights[cell] = Math.max(largestWeights[cell], w); // NaN stays
      if (column <= row || w === 0) continue;
      leaks[cell] = 1;
      if (isLarger(w, above.weight)) Object.assign(above, { weight: w, row, column });
    }
  }
  return { layer, head, largestWeights, leaks, above, button: null };
}
const summaries = [...Array(L).keys()].flatMap((layer) => [...Array(H + 1).keys()].map((head) => summarize(layer, head)));
function describeUpperTriangle() {
  const heads = summaries.filter((summary) => summary.head !== MEAN).map((summary) => summary.above);
  const worst = heads.reduce((a, b) => (isLarger(b.weight, a.weight) ? b : a));
  const where = `the largest weight above the diagonal, in all ${L * H} heads,`;
  $("above").className = worst.weight === 0 ? "" : "leaks";
  $("above").textContent = worst.weight === 0
    ? `The upper triangle is empty because the model is causal: ${where} is 0.`
    : `The upper triangle is not empty: ${where} is ${weightText(worst.weight)} (${nameOf(worst.layer, worst.head)}, token ${worst.row}`
      + ` attends to token ${worst.column}, which comes later). This model sees the future.`;
}

// What is shown: a head, a token (query), and a cell [row, column]. A pinned query stays while the pointer moves.
const state = { layer: 0, head: 0, query: T - 1, cell: [T - 1, T - 1], pinned: false };
let matrix;
function selectHead(layer, head) {
  Object.assign(state, { layer, head });
  [$("layer").value, $("head").value] = [layer, head];
  matrix = matrixOf(layer, head);
  paint($("canvas"), T, (i) => color(matrix[i], i % T > Math.floor(i / T)));
  for (const summary of summaries) {
    const selected = summary.layer === layer && summary.head === head;
    summary.button.setAttribute("aria-pressed", selected);
    summary.button.tabIndex = selected ? 0 : -1;
  }
  for (const heading of all(".name")) heading.textContent = nameOf(layer, head);
  showScores(layer, head);
  show();
}
function showScores(layer, head) {
  $("scores").replaceChildren(...(head === MEAN ? [] : scores).map(({ name, meaning, values }) => {
    const value = values[layer][head];
    const score = element("span", "", `${name} `, element("b", "", value === null ? "-" : value.toFixed(3)));
    score.title = meaning;
    return score;
  }));
}
function pointAtToken(t) {
  pointAtCell(state.pinned ? state.query : t, t);
}
function pointAtCell(row, column) {
  if (!state.pinned) state.query = row;
  state.cell = [row, column];
  show();
}
function pin(row, column = row) {
  state.pinned = !(state.pinned && state.query === row);
  state.query = row;
  state.cell = [row, column];
  show();
}
function show() {
  const { query, cell: [row, column], pinned } = state, weights = matrix.subarray(query * T, (query + 1) * T);
  const largest = Math.max(...weights.filter(Number.isFinite));
  spans.forEach((span, t) => {
    const w = weights[t], seen = w !== 0 && color(w, t > query) !== leak;
    const names = { later: t > query, leak: w !== 0 && !seen, query: t === query, key: t === column && t !== query };
    span.className = ["token", ...Object.keys(names).filter((name) => names[name])].join(" ");
    fill(span, seen ? w / largest : null);
    span.title = `weight ${weightText(w)}`;
    span.tabIndex = t === column ? 0 : -1;
  });
  $("pinned").className = pinned ? "on" : "";
  for (const code of all("code.query")) code.replaceChildren(...numbered(query));
  showWeight(row, column);
  listLargest(weights, query);
  listNext(query);
  setPosition($("row"), { top: query, height: 1 });
  setPosition($("cell"), { top: row, left: column, height: 1, width: 1 });
  [...$("rows").children].forEach((label, t) => label.classList.toggle("on", t === query));
  [...$("columns").children].forEach((label, t) => label.classList.toggle("on", t === column));
}
function setPosition(box, sides) {
  for (const [side, n] of Object.entries(sides)) box.style[side] = `${(100 * n) / T}%`;
}
function showWeight(row, column) {
  const w = matrix[row * T + column], later = column > row ? ", which comes later," : "";
  for (const output of all("output.weight")) {
    const weight = element("b", "", weightText(w));
    const [from, to] = [row, column].map((t) => element("code", "", ...numbered(t)));
    output.replaceChildren(from, " attends to ", to, later, " with weight ", weight);
  }
}
function listLargest(weights, query) {
  const order = [...weights.keys()].filter((t) => weights[t] !== 0).sort((a, b) => weights[b] - weights[a]).slice(0, MAX_LARGEST);
  const entry = (t, w) => ({ label: numbered(t), part: w, text: weightText(w), className: t > query ? "leak" : "" });
  bars($("largest"), order.map((t) => entry(t, weights[t])));
}
function listNext(query) {
  const after = probabilities[query], actual = tokens[query + 1];
  const rest = 1 - after.reduce((sum, [, p]) => sum + p, 0);
  const entry = ([token, p]) => ({ label: visibleText(token), part: p, text: percentText(p), className: token === actual ? "actual" : "" });
  const entries = after.map(entry);
  if (rest > 0.0005) entries.push({ label: ["all others"], part: rest, text: percentText(rest), className: "rest" });
  bars($("next"), entries);
  if (actual === undefined) return $("follows").replaceChildren("The text ends here.");
  const among = after.some(([token]) => token === actual);
  const where = among ? ", marked above." : ", not among these.";
  $("follows").replaceChildren("In the text follows ", element("code", "", ...visibleText(actual)), where);
}

// The elements that depend on the data
const spans = tokens.map((token, t) => {
  const span = element("span", "token", ...visibleText(token, true));
  span.dataset.token = t;
  span.setAttribute("role", "button");
  $("text").append(span, element("wbr"));
  return span;
});
for (let layer = 0; layer < L; layer++) $("layer").append(new Option(layer, layer));
for (let head = 0; head < H; head++) $("head").append(new Option(head, head));
$("head").append(new Option("mean of all", MEAN));
$("overview").style.gridTemplateColumns = `max-content repeat(${H + 1}, minmax(0, 4rem))`;
const headings = ["", ...Array.from({ length: H }, (_, head) => `H${head}`), "mean"];
$("overview").append(...headings.map((heading) => element("span", "", heading)));
for (const summary of summaries) {
  if (summary.head === 0) $("overview").append(element("span", "", `L${summary.layer}`));
  summary.button = element("button", "", element("canvas"));
  summary.button.title = nameOf(summary.layer, summary.head);
  summary.button.setAttribute("aria-label", summary.button.title);
  summary.button.addEventListener("click", () => selectHead(summary.layer, summary.head));
  $("overview").append(summary.button);
}
document.querySelector("main").classList.toggle("long", T > LONG_TEXT);
if (T <= MAX_LABELED) {
  $("matrix").className = "labeled";
  for (const labels of [$("rows"), $("columns")]) labels.append(...tokens.map((token) => element("span", "", ...visibleText(token))));
}
for (const tick of [0.01, 0.1, 0.25, 0.5, 1]) {
  const label = element("span", "", `${tick}`);
  label.style.left = `${100 * Math.sqrt(tick)}%`;
  $("scale").append(label);
}
function draw() {
  readColors();
  for (const summary of summaries) {
    paint(summary.button.firstChild, THUMBNAIL_SIZE, (i) => (summary.leaks[i] ? leak : color(summary.largestWeights[i], false)));
  }
  selectHead(state.layer, state.head);
}
function selectFrame(number) {
  frame = number;
  for (const summary of summaries) Object.assign(summary, summarize(summary.layer, summary.head), { button: summary.button });
  $("at").textContent = frame < steps.length ? `step ${steps[frame].toLocaleString("en")}` : "this checkpoint";
  draw();
}

// Input
function scrollToQuery() { // for a query that was chosen in the matrix
  const box = $("text"), { offsetTop } = spans[state.query];
  if (offsetTop < box.scrollTop || offsetTop + 24 > box.scrollTop + box.clientHeight) box.scrollTop = offsetTop - box.clientHeight / 2;
}
const tokenAt = (event) => event.target.closest(".token")?.dataset.token;
const step = (i, by, size) => Math.min(size - 1, Math.max(0, i + by));
const ARROWS = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] };
for (const kind of ["pointerover", "focusin"]) {
  $("text").addEventListener(kind, (event) => {
    if (tokenAt(event) !== undefined) pointAtToken(Number(tokenAt(event)));
  });
}
$("text").addEventListener("click", (event) => {
  if (tokenAt(event) !== undefined) pin(Number(tokenAt(event)));
});
$("text").addEventListener("keydown", (event) => {
  const t = Number(tokenAt(event));
  const to = { ArrowLeft: t - 1, ArrowRight: t + 1, Home: 0, End: T - 1 }[event.key];
  if (event.key === "Enter" || event.key === " ") pin(t);
  else if (to === undefined) return;
  else spans[step(to, 0, T)].focus();
  event.preventDefault();
});
function cellAt(event) {
  const { left, top, width, height } = $("canvas").getBoundingClientRect();
  return [step(Math.floor(((event.clientY - top) / height) * T), 0, T), step(Math.floor(((event.clientX - left) / width) * T), 0, T)];
}
$("square").addEventListener("pointermove", (event) => {
  pointAtCell(...cellAt(event));
  scrollToQuery();
});
$("square").addEventListener("click", (event) => pin(...cellAt(event)));
$("square").addEventListener("keydown", (event) => {
  const [row, column] = state.cell;
  if (event.key === "Enter" || event.key === " ") pin(row, column);
  else if (!ARROWS[event.key]) return;
  else pointAtCell(step(row, ARROWS[event.key][0], T), step(column, ARROWS[event.key][1], T));
  scrollToQuery();
  event.preventDefault();
});
$("overview").addEventListener("keydown", (event) => {
  if (!ARROWS[event.key]) return;
  selectHead(step(state.layer, ARROWS[event.key][0], L), step(state.head, ARROWS[event.key][1], H + 1));
  summaries[state.layer * (H + 1) + state.head].button.focus();
  event.preventDefault();
});
for (const name of ["layer", "head"]) {
  $(name).addEventListener("change", () => selectHead(Number($("layer").value), Number($("head").value)));
}
if (steps.length) $("step").addEventListener("input", () => selectFrame(Number($("step").value)));
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape" && state.pinned) pin(state.query, state.cell[1]);
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
describeUpperTriangle();
draw();
scrollToQuery();
