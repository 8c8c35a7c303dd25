"use strict";
// Everything a model wrote reaches the page as text (textContent), never as markup.

const records = JSON.parse(document.getElementById("records").textContent);
const PAGE = 200; // rows of the list that are made at once
const DEEPEST = 5; // a log-prob of -5 (0.7 %) has the full colour
const DECADES = 3; // a difference 1000 times smaller than the scale has no colour
const STRONGEST = 0.75; // the opacity of the full colour
const RED = "220, 38, 38", BLUE = "37, 99, 235";
const RANGES = ["reward", "length", "version"];
const CONTROLS = ["step", "source", "group", "reward_min", "reward_max", "length_min", "length_max", "version_min",
  "version_max", "text", "sort", "colour"];
const at = (id) => document.getElementById(id);

let shown = [];
let numRows = PAGE;
let chosen = null;

function element(tag, className, text) {
  const made = document.createElement(tag);
  if (className) made.className = className;
  if (text !== undefined) made.textContent = text;
  return made;
}

function difference(record, i) {
  const training = record.log_probs && record.log_probs[i];
  const rollout = record.rollout_log_probs && record.rollout_log_probs[i];
  return typeof training === "number" && typeof rollout === "number" ? training - rollout : null;
}

for (const record of records) {
  const gaps = record.tokens.map((_, i) => Math.abs(difference(record, i) ?? 0));
  record.gap = record.log_probs && record.rollout_log_probs ? gaps.reduce((a, b) => Math.max(a, b), 0) : null;
  record.text = record.prompt + "\n" + record.tokens.join("");
}

const number = (value, digits) => (typeof value === "number" ? value.toFixed(digits) : "none");
const small = (value) => (typeof value === "number" ? value.toExponential(1) : "none");

function versions(record) {
  const all = record.versions.map((run) => run[0]);
  const low = Math.min(...all), high = Math.max(...all);
  return low === high ? String(low) : `${low}-${high}`;
}

function versionOf(record, i) {
  let first = 0;
  for (const [version, count] of record.versions) {
    first += count;
    if (i < first) return version;
  }
  return null;
}

// Filters

function limit(id) {
  const text = at(id).value.trim();
  const isBad = text !== "" && !Number.isFinite(Number(text));
  at(id).classList.toggle("bad", isBad);
  return text === "" || isBad ? null : Number(text);
}

function within(value, low, high) {
  if (low === null && high === null) return true;
  return typeof value === "number" && (low === null || value >= low) && (high === null || value <= high);
}

function filtered() {
  const [step, source, group, text] = ["step", "source", "group", "text"].map((id) => at(id).value);
  const ranges = Object.fromEntries(RANGES.map((name) => [name, [limit(`${name}_min`), limit(`${name}_max`)]]));
  const found = records.filter((record) =>
    (step === "all" || String(record.step) === step) &&
    (source === "all" || record.data_source === source) &&
    (group.trim() === "" || record.uid === group.trim()) &&
    within(record.reward, ...ranges.reward) &&
    within(record.length, ...ranges.length) &&
    record.versions.some((run) => within(run[0], ...ranges.version)) &&
    (text === "" || record.text.includes(text)));
  const sort = at("sort").value;
  if (sort !== "none") found.sort((a, b) => (b[sort] ?? -Infinity) - (a[sort] ?? -Infinity));
  return found;
}

// The list

function row(record) {
  const made = element("tr", record === chosen ? "chosen" : "");
  const cells = [record.step, record.uid, number(record.reward, 2), record.length, versions(record), small(record.gap)];
  for (const cell of cells) made.append(element("td", "", cell));
  made.addEventListener("click", () => choose(record));
  return made;
}

function draw() {
  at("rows").replaceChildren(...shown.slice(0, numRows).map(row));
  at("more").hidden = shown.length <= numRows;
  at("count").textContent = `${shown.length} of ${records.length} samples`;
  drawSample();
}

function update() {
  shown = filtered();
  numRows = PAGE;
  if (!shown.includes(chosen)) chosen = shown[0] ?? null;
  const state = new URLSearchParams();
  for (const id of CONTROLS) if (at(id).value !== at(id).dataset.plain) state.set(id, at(id).value);
  history.replaceState(null, "", `#${state}`);
  draw();
}

function choose(record) {
  chosen = record;
  draw();
}

// One sample

// The largest difference of the samples shown, rounded up to 1, 2 or 5 times a power of ten.
function differenceScale() {
  const largest = shown.reduce((most, record) => Math.max(most, record.gap ?? 0), 0);
  if (largest === 0) return 0;
  const power = 10 ** Math.floor(Math.log10(largest));
  return power * [1, 2, 5, 10].find((factor) => largest <= factor * power * (1 + 1e-9));
}

const tint = (rgb, strength) => `rgba(${rgb}, ${STRONGEST * Math.min(1, Math.max(0, strength))})`;

// Differences are coloured by their order of magnitude, so that one large one does not hide the others.
function colour(record, i, kind, scale) {
  if (kind === "difference") {
    const value = difference(record, i);
    if (value === null) return null;
    return tint(value < 0 ? RED : BLUE, value === 0 ? 0 : 1 + Math.log10(Math.abs(value) / scale) / DECADES);
  }
  const value = record[kind] && record[kind][i];
  return typeof value === "number" ? tint(RED, -value / DEEPEST) : null;
}

function legend(kind, scale) {
  const made = element("div", "legend");
  if (kind === "none") return made;
  const isDifference = kind === "difference";
  if (isDifference && scale === 0) {
    made.append("both engines give these samples the same log-probs");
    return made;
  }
  const powers = [...Array(DECADES).keys()].map((i) => (scale / 10 ** i).toExponential(0));
  const marks = isDifference
    ? [...powers.map((power) => `-${power}`), "0", ...powers.reverse()]
    : [...Array(DEEPEST + 1).keys()].map((depth) => String(-depth));
  const colours = isDifference ? [tint(RED, 1), "white", tint(BLUE, 1)] : ["white", tint(RED, 1)];
  const bar = element("div", "scale");
  bar.style.background = `linear-gradient(90deg, ${colours.join(", ")})`;
  const ticks = element("div", "ticks");
  for (const mark of marks) ticks.append(element("span", "", mark));
  made.append(isDifference ? "training - rollout log-prob" : "log-prob; 0 is certain", bar, ticks);
  return made;
}

function fact(name, value) {
  const made = element("span", "", `${name} `);
  made.append(element("b", "", value));
  return made;
}

const turnOf = (record, i) => (record.turns ?? []).findIndex(([begin, end]) => begin <= i && i < end);
const isGiven = (record, i) => record.turns !== undefined && turnOf(record, i) < 0;

function turns(record) {
  return (record.turns ?? []).map(([begin, end, reward], k) =>
    fact(`turn ${k + 1}`, `${end - begin} tokens, reward ${number(reward, 3)}`));
}

function tell(record, i) {
  const value = (name) => number(record[name] && record[name][i], 7);
  if (isGiven(record, i)) {
    at("token").textContent = `token ${i + 1}  ${JSON.stringify(record.tokens[i])}  given to the model`;
    return;
  }
  at("token").textContent = `token ${i + 1}  ${JSON.stringify(record.tokens[i])}  rollout ${value("rollout_log_probs")}` +
    `  training ${value("log_probs")}  difference ${small(difference(record, i))}  version ${versionOf(record, i)}`;
}

function response(record, kind, scale) {
  const made = element("div", "text");
  made.id = "response";
  record.tokens.forEach((text, i) => {
    const token = element("span", text === "" ? "token waiting" : "token", text);
    const background = kind === "none" ? "transparent" : colour(record, i, kind, scale);
    if (isGiven(record, i)) token.classList.add("given");
    else if (background === null) token.classList.add("unknown");
    else token.style.backgroundColor = background;
    token.addEventListener("mouseenter", () => tell(record, i));
    made.append(token);
  });
  return made;
}

function drawSample() {
  const place = at("sample");
  if (chosen === null) {
    place.replaceChildren(element("p", "legend", "no sample passes the filters"));
    return;
  }
  const kind = at("colour").value, scale = differenceScale();
  const facts = element("div", "facts");
  const group = fact("group", chosen.uid);
  group.className = "group";
  group.title = "show only this group";
  group.addEventListener("click", () => { at("group").value = chosen.uid; update(); });
  facts.append(fact("step", chosen.step), group, fact("source", chosen.data_source),
    fact("reward", number(chosen.reward, 3)), fact("advantage", number(chosen.advantage, 3)),
    fact("length", chosen.length), fact("version", versions(chosen)), fact("ended by", chosen.finish_reason ?? "unknown"));
  for (const [name, value] of Object.entries(chosen.parts)) if (value !== null) facts.append(fact(name, number(value, 3)));
  for (const [part, seconds] of Object.entries(chosen.seconds ?? {})) facts.append(fact(part, `${number(seconds, 2)} s`));
  const ofTurns = element("div", "facts");
  ofTurns.append(...turns(chosen));
  const told = element("div", "", "point at a token");
  told.id = "token";
  place.replaceChildren(facts, element("h2", "", "Prompt"), element("div", "text", chosen.prompt),
    element("h2", "", "Ground truth"), element("div", "text", chosen.ground_truth),
    element("h2", "", "Response"), ofTurns, legend(kind, scale), response(chosen, kind, scale), told);
}

// Start

function fill(id, values) {
  for (const value of ["all", ...values]) {
    const option = element("option", "", value);
    option.value = String(value);
    at(id).append(option);
  }
}

fill("step", [...new Set(records.map((record) => record.step))].sort((a, b) => b - a));
fill("source", [...new Set(records.map((record) => record.data_source))].sort());
const asked = new URLSearchParams(location.hash.slice(1));
for (const id of CONTROLS) {
  at(id).dataset.plain = at(id).value;
  if (asked.has(id)) at(id).value = asked.get(id);
  at(id).addEventListener("input", update);
}
at("filters").addEventListener("submit", (event) => event.preventDefault());
at("clear").addEventListener("click", () => {
  for (const id of CONTROLS) at(id).value = at(id).dataset.plain;
  update();
});
at("more").addEventListener("click", () => { numRows += PAGE; draw(); });
document.addEventListener("keydown", (event) => {
  const move = { j: 1, k: -1 }[event.key];
  if (move === undefined || event.target.matches("input, select")) return;
  const next = shown[shown.indexOf(chosen) + move];
  if (next) choose(next);
});
update();
