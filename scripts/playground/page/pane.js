"use strict";
// One model of the page: its text, its heads, and what the selected token was drawn from
const MEAN_NAME = (layer) => `L${layer}, mean of all heads`;
const N_LARGEST = 6; // length of the list of largest weights
const N_BINS = 40; // of a strip, each showing the largest weight that it covers
const FRAME = 16; // milliseconds between two drawings while tokens arrive
const CONTROL = /([\x00-\x1f\x7f])/;

/** The text of a token as in the running text: only control characters become symbols. */
function runningText({ text, name }) {
  if (text === "") return [element("span", "mark", name === "" || name.includes("\ufffd") ? "⋯" : name)]; // a part of a character, or a special token
  const mark = (c) => element("span", "mark", symbol(c) + (c === "\n" ? "\n" : ""));
  return text.split(CONTROL).map((part, i) => (i % 2 ? mark(part) : part));
}
const tokenName = (name) => (name === "" ? [element("span", "mark", "(empty)")] : visibleText(name));
const shareText = (p) => (p === 0 ? "0" : percentText(p)); // 0: a filter removed the token
/** Arrow keys move the focus between the buttons of a grid; Tab leaves it. */
function moveWithArrows(grid, columns) {
  const buttons = [...grid.querySelectorAll("button")];
  const hold = (button) => buttons.forEach((other) => (other.tabIndex = other === button ? 0 : -1));
  hold(buttons[0]);
  grid.addEventListener("focusin", (event) => hold(event.target));
  grid.addEventListener("keydown", (event) => {
    const by = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -columns, ArrowDown: columns }[event.key];
    if (by === undefined) return;
    event.preventDefault();
    buttons[buttons.indexOf(event.target) + by]?.focus();
  });
}

class Pane {
  /** settings(): those of the form, or null if they cannot be read; report(text): shows an error; changed(): a run started or ended. */
  constructor(model, index, { settings, report, changed }) {
    Object.assign(this, { model, index, settings, report, changed });
    this.root = $("pane").content.cloneNode(true).firstElementChild;
    this.find = (selector) => this.root.querySelector(selector);
    this.off = new Set(); // names of heads
    this.head = [model.layers - 1, model.heads]; // the chosen head; model.heads: the mean of its layer
    this.whole = null; // the last run with all heads
    this.running = null;
    this.clear({});
    this.find(".model").textContent = model.name;
    const heads = model.heads ? `${model.layers} layers of ${model.heads} heads` : `${model.layers} layers without attention`;
    this.find(".facts").textContent = `${heads}, ${model.parameters.toLocaleString("en")} parameters, context of ${model.context} tokens`;
    if (model.heads) this.buildGrids();
    else for (const section of this.root.querySelectorAll(".switches, .attention")) section.hidden = true;
    this.listen();
  }

  buildGrids() {
    const { layers, heads } = this.model, switches = this.find(".switches .grid"), strips = this.find(".strips");
    for (const [grid, names] of [[switches, []], [strips, ["mean"]]]) {
      grid.style.gridTemplateColumns = `max-content repeat(${heads + names.length}, minmax(0, 4rem))`;
      grid.append(...["", ...Array.from({ length: heads }, (_, h) => `H${h}`), ...names].map((name) => element("span", "", name)));
    }
    this.strips = [];
    for (let layer = 0; layer < layers; layer++) {
      for (const grid of [switches, strips]) grid.append(element("span", "", `L${layer}`));
      for (let head = 0; head <= heads; head++) {
        const name = head === heads ? MEAN_NAME(layer) : `L${layer}H${head}`;
        if (head < heads) switches.append(this.button(name, "switch", "true", () => this.toggle(name)));
        const strip = this.button(name, "strip", "false", () => this.choose(layer, head), element("canvas"));
        this.strips.push({ layer, head, name, button: strip });
        strips.append(strip);
      }
    }
    moveWithArrows(switches, heads);
    moveWithArrows(strips, heads + 1);
    this.find(".restore").addEventListener("click", () => this.toggle(null));
    this.choose(...this.head);
  }

  button(name, className, pressed, click, ...children) {
    const button = element("button", className, ...children);
    button.type = "button";
    button.title = name;
    button.setAttribute("aria-label", name);
    button.setAttribute("aria-pressed", pressed);
    button.addEventListener("click", click);
    return button;
  }

  listen() {
    const text = this.find(".text"), indexOf = (event) => event.target.closest("[role=button]")?.dataset.token;
    for (const kind of ["pointerover", "focusin"]) {
      text.addEventListener(kind, (event) => {
        if (indexOf(event) === undefined || this.pinned !== null) return;
        this.pointed = true;
        this.select(Number(indexOf(event)));
      });
    }
    text.addEventListener("click", (event) => {
      if (indexOf(event) !== undefined) this.pin(Number(indexOf(event)));
    });
    text.addEventListener("keydown", (event) => {
      if (indexOf(event) === undefined) return;
      const t = Number(indexOf(event)), last = this.tokens.length - 1;
      const to = { ArrowLeft: Math.max(0, t - 1), ArrowRight: Math.min(last, t + 1), Home: 0, End: last }[event.key];
      if (event.key === "Enter" || event.key === " ") this.pin(t);
      else if (to === undefined) return;
      else this.spans[this.given.length + to].focus();
      event.preventDefault();
    });
  }

  // Runs
  toggle(name) {
    if (name === null) this.off.clear();
    else if (!this.off.delete(name)) this.off.add(name);
    for (const button of this.root.querySelectorAll(".switch")) button.setAttribute("aria-pressed", !this.off.has(button.title));
    for (const { button, name } of this.strips) button.classList.toggle("off", this.off.has(name));
    this.find(".restore").disabled = this.off.size === 0;
    this.run();
  }

  clear(request) {
    const key = JSON.stringify({ ...request, remove_heads: [] });
    this.key = key;
    this.removed = request.remove_heads ?? [];
    this.reference = this.removed.length && this.whole?.key === key ? this.whole.tokens : null;
    this.differs = null; // number of the first token that is not that of the reference
    Object.assign(this, { given: [], tokens: [], spans: [], selected: null, pointed: false });
    this.pinned ??= null;
    this.find(".text").replaceChildren();
    for (const part of [".status", ".whole"]) this.find(part).textContent = "";
    this.root.classList.add("empty");
  }

  /** Generates with the settings of the form. A run that goes on ends. */
  async run() {
    this.stop();
    const settings = this.settings(), abort = new AbortController(), start = performance.now();
    const request = { model: this.index, ...settings, remove_heads: [...this.off] };
    this.clear(request);
    this.running = abort;
    this.report("");
    this.changed();
    let status, shown = start;
    try {
      for await (const line of answer(request, abort.signal)) {
        if (abort.signal.aborted) return;
        this.receive(line);
        if (performance.now() - shown < FRAME) continue;
        this.follow();
        await new Promise((resume) => setTimeout(resume)); // the browser draws, and hears a click, if tokens arrive faster
        shown = performance.now();
      }
      if (abort.signal.aborted) return;
      if (!this.removed.length) this.whole = { key: this.key, tokens: this.tokens };
      const seconds = (performance.now() - start) / 1000, n = this.tokens.length;
      status = `${n} tokens, ${Math.round(n / seconds)} per second` + (this.tokens.at(-1)?.ended ? "; the text ended" : "");
    } catch (error) {
      if (abort.signal.aborted) return;
      this.report(error.message);
      status = "";
    }
    this.running = null;
    this.finish(status);
    this.changed();
  }

  stop() {
    if (this.running === null) return;
    this.running.abort();
    this.running = null;
    this.finish(`${this.tokens.length} tokens, stopped`);
    this.changed();
  }

  receive(line) {
    if (line.prompt) {
      this.given = line.prompt;
      this.spans = this.given.map((token) => element("span", "token given", ...runningText(token)));
      return this.find(".text").append(...this.spans);
    }
    const t = this.tokens.length, span = element("span", "token", ...runningText(line));
    line.codes = float16Codes(line.attention);
    delete line.attention; // as text it is larger than the numbers
    this.tokens.push(line);
    span.setAttribute("role", "button");
    span.dataset.token = t;
    span.tabIndex = t === 0 ? 0 : -1;
    if (this.reference && this.differs === null && this.reference[t]?.id !== line.id) {
      this.differs = t;
      this.compare();
    }
    if (this.differs !== null) span.classList.add("differs");
    this.spans.push(span);
    this.find(".text").append(span, element("wbr"));
  }

  /** While tokens arrive, shows the newest, or the pinned one. */
  follow() {
    const newest = this.tokens.length - 1;
    if (this.pinned === null && !this.pointed) this.selected = newest;
    else if (this.selected === null && this.pinned <= newest) this.selected = this.pinned;
    this.show();
  }

  finish(status) {
    if (this.pinned !== null && this.pinned >= this.tokens.length) this.pinned = null;
    if (this.tokens.length) this.follow();
    if (this.reference && this.differs === null && this.tokens.length) this.find(".whole").textContent = "The same text as with all heads.";
    this.find(".status").textContent = status;
  }

  /** Says what followed with all heads, from the first token that differs. */
  compare() {
    const rest = this.reference.slice(this.differs).map((token) => token.text).join("");
    const label = this.differs ? `The first ${this.differs} tokens are the same. With all heads followed: ` : "With all heads the text is: ";
    this.find(".whole").replaceChildren(label, element("q", "", rest));
  }

  // The selected token
  select(t) {
    this.selected = t;
    this.show();
  }

  pin(t) {
    this.pinned = this.pinned === t ? null : t;
    this.select(t);
  }

  choose(layer, head) {
    this.head = [layer, head];
    for (const strip of this.strips) strip.button.setAttribute("aria-pressed", strip.layer === layer && strip.head === head);
    this.show();
  }

  /** The weights of a head over the tokens of the context, or their mean over the heads of a layer. */
  weights(token, layer, head) {
    const { layers, heads } = this.model, size = token.codes.length / (layers * heads), weights = new Float32Array(size);
    const chosen = head === heads ? [...Array(heads).keys()] : [head];
    for (const h of chosen) {
      for (let i = 0; i < size; i++) weights[i] += VALUE[token.codes[(layer * heads + h) * size + i]] / chosen.length;
    }
    return weights;
  }

  show() {
    const token = this.tokens[this.selected];
    if (token === undefined) return;
    this.root.classList.remove("empty");
    const query = this.given.length + this.selected;
    this.spans.forEach((span, i) => {
      span.classList.toggle("query", i === query);
      span.classList.toggle("pinned", i === query && this.pinned === this.selected);
      span.classList.toggle("later", i > query || i < token.n_dropped);
      if (i >= this.given.length) span.tabIndex = i === query ? 0 : -1;
    });
    for (const code of this.root.querySelectorAll("code.query")) code.replaceChildren(...tokenName(token.name));
    this.showCandidates(token);
    if (this.model.heads) this.showAttention(token, query);
  }

  showCandidates(token) {
    const same = this.reference !== null && (this.differs === null || this.selected <= this.differs); // after the same text
    const before = new Map(same ? this.reference[this.selected]?.candidates.map((c) => [c.id, c.drawn_from]) : []);
    this.root.classList.toggle("compares", same);
    const rows = token.candidates.map((candidate) => {
      const drawn = candidate.id === token.id, bar = element("i");
      bar.style.width = `${100 * (candidate.drawn_from ?? 0)}%`;
      const name = element("th", "", drawn ? element("span", "arrow", "▸") : "", ...tokenName(candidate.name));
      name.scope = "row";
      if (drawn) name.append(element("span", "hidden", " (drawn)"));
      const cells = [candidate.drawn_from, candidate.model].map((p) => element("td", "", shareText(p)));
      const other = before.has(candidate.id) ? shareText(before.get(candidate.id)) : "–";
      return element("tr", drawn ? "drawn" : "", name, element("td", "share", element("div", "track", bar)), ...cells, element("td", "before", other));
    });
    this.find(".candidates tbody").replaceChildren(...rows);
  }

  showAttention(token, query) {
    const weights = this.weights(token, ...this.head), largest = Math.max(...weights.filter(Number.isFinite)), [layer, head] = this.head;
    this.spans.forEach((span, i) => {
      const w = weights[i - token.n_dropped];
      fill(span, i < query && w > 0 ? w / largest : null);
      span.title = w === undefined ? "" : `weight ${weightText(w)}`;
    });
    this.find(".name").textContent = head === this.model.heads ? MEAN_NAME(layer) : `L${layer}H${head}`;
    for (const strip of this.strips) this.paint(strip.button.firstChild, this.weights(token, strip.layer, strip.head));
    const order = [...weights.keys()].filter((i) => weights[i] > 0).sort((a, b) => weights[b] - weights[a]).slice(0, N_LARGEST);
    const label = (i) => [element("span", "number", `${i - query}`), ...tokenName((this.given[i] ?? this.tokens[i - this.given.length]).name)];
    bars(this.find(".list"), order.map((k) => ({ label: label(k + token.n_dropped), part: weights[k] / largest, text: weightText(weights[k]) })));
  }

  paint(canvas, weights) {
    const n = Math.min(weights.length, N_BINS), most = new Float32Array(n);
    weights.forEach((w, i) => {
      const bin = Math.floor((i * n) / weights.length);
      most[bin] = Math.max(most[bin], w);
    });
    [canvas.width, canvas.height] = [n, 1];
    const context = canvas.getContext("2d"), image = context.createImageData(n, 1);
    most.forEach((w, i) => image.data.set([...color(w, false), 255], 4 * i));
    context.putImageData(image, 0, 0);
  }
}
