"use strict";
// The form, the requests, and the panes
const FIELDS = ["temperature", "top_k", "top_p", "repetition_penalty", "seed", "max_new_tokens"];
let panes = [];

/** The settings of the form. An empty field is null, and what is not a number stays text, which the server refuses. */
function settings() {
  const value = (id) => ($(id).validity.badInput ? "not a number" : $(id).value === "" ? null : Number($(id).value));
  return { prompt: $("prompt").value.toWellFormed(), ...Object.fromEntries(FIELDS.map((id) => [id, value(id)])) };
}
function report(text) {
  $("error").textContent = text;
}
/** The lines of the server's answer, each as soon as it arrives. */
async function* answer(request, signal) {
  const options = { method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(request), signal };
  const response = await fetch("/generate", options).catch((error) => {
    throw signal.aborted ? error : new Error("The server does not answer. Start it again with tril play.");
  });
  if (response.status === 400) throw new Error((await response.json()).error);
  if (!response.ok) throw new Error(`The server failed (status ${response.status}). Its terminal says why.`);
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  for (let rest = ""; ; ) {
    const { value, done } = await reader.read();
    if (done) return;
    const complete = (rest + value).split("\n");
    rest = complete.pop();
    yield* complete.map((line) => JSON.parse(line));
  }
}
function changed() {
  $("stop").disabled = panes.every((pane) => pane.running === null);
}
function runAll() {
  for (const pane of panes) pane.run();
}

async function start() {
  readColors();
  const { models, prompt, repetition_penalty } = await (await fetch("/models")).json();
  Object.assign($("prompt"), { value: prompt, rows: Math.min(12, Math.max(2, prompt.split("\n").length)) });
  $("repetition_penalty").value = repetition_penalty;
  panes = models.map((model, index) => new Pane(model, index, { settings, report, changed }));
  $("panes").append(...panes.map((pane) => pane.root));
  $("panes").classList.toggle("several", panes.length > 1);
  $("form").addEventListener("submit", (event) => {
    event.preventDefault();
    runAll();
  });
  $("stop").addEventListener("click", () => panes.forEach((pane) => pane.stop()));
  $("prompt").addEventListener("keydown", (event) => {
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) runAll();
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
    readColors();
    panes.forEach((pane) => pane.show());
  });
}
start();
