"use strict";
// The data, and what of it is shown: filters, peer, order, open rows. All of that lives in the address's hash.

const NUMBERS = [
  "error",
  "ms",
  "ms_low",
  "ms_high",
  "flops",
  "bytes",
  "gbps",
  "tflops",
  "roof",
  "intensity",
  "clock",
  "power",
  "temperature",
  "registers",
  "spills",
  "shared",
];
const DATA = JSON.parse(byId("data").textContent);
const CANDIDATES = DATA.tunes.flatMap((tune) => tune.rows);
const EVERY_ROW = [...DATA.rows, ...CANDIDATES];
DATA.rows.forEach((row, index) => (row.index = index));
EVERY_ROW.forEach((row) => {
  for (const name of NUMBERS) if (typeof row[name] === "string") row[name] = Number(row[name]); // "NaN", "Infinity"
  const words = [row.op, row.kernel, row.case, row.status, row.reason, row.config, row.device, row.dtype];
  row.text = words.filter(Boolean).join(" ").toLowerCase();
});
const LANGUAGES = Object.fromEntries(DATA.languages.map((language) => [language.name, language]));

function distinct(name) {
  return [...new Set(EVERY_ROW.map((row) => row[name]).filter(Boolean))];
}

const CHOICES = {
  op: distinct("op"),
  device: distinct("device"),
  status: distinct("status"),
  inputs: distinct("inputs"),
  run: DATA.runs.map((run) => run.id),
  peer: DATA.peers,
  along: [...new Set(DATA.tunes.flatMap((tune) => tune.fields))],
};
const SEVERAL = { device: CHOICES.device.length > 1, run: CHOICES.run.length > 1, inputs: CHOICES.inputs.length > 1 };
const EVERYTHING = {
  q: "",
  op: "",
  device: "",
  status: "",
  inputs: "",
  run: "",
  language: [],
  peer: DATA.peers[0] ?? "",
  along: "", // the config's field that candidates stand along; none: in the order of their times
  sort: "",
  row: [],
};
let state = readHash();

/** Values that this page does not have are dropped: a link may come from another report. */
function readHash() {
  const given = new URLSearchParams(location.hash.slice(1));
  const read = { ...EVERYTHING, q: given.get("q") ?? "", sort: given.get("sort") ?? "" };
  for (const [name, choices] of Object.entries(CHOICES)) {
    if (choices.includes(given.get(name))) read[name] = given.get(name);
  }
  const list = (name) => (given.get(name) ?? "").split(",").filter(Boolean);
  read.language = list("language").filter((name) => name in LANGUAGES);
  read.row = list("row")
    .map(Number)
    .filter((index) => DATA.rows[index]);
  return read;
}

function writeHash() {
  const said = new URLSearchParams();
  for (const [name, value] of Object.entries(state)) {
    if (String(value) !== String(EVERYTHING[name])) said.set(name, String(value));
  }
  const hash = said.toString().replaceAll("%2C", ",").replaceAll("%3A", ":");
  history.replaceState(null, "", hash ? `#${hash}` : location.pathname + location.search);
}

function change(changes) {
  state = { ...state, ...changes };
  writeHash();
  draw();
}

function passes(row) {
  const words = state.q.toLowerCase().split(/\s+/).filter(Boolean);
  return (
    words.every((word) => row.text.includes(word)) &&
    ["op", "device", "status", "inputs"].every((name) => !state[name] || row[name] === state[name]) &&
    (!state.run || DATA.runs[row.run].id === state.run) &&
    (!state.language.length || state.language.includes(row.language))
  );
}

function isKernel(row) {
  return !row.kernel.includes(":");
}

function ratioOf(row) {
  return row.ratios[state.peer] ?? null;
}

/** Of each case the row with the best ratio to the chosen peer. */
function bestPerCell(rows) {
  const best = new Map();
  for (const row of rows) {
    const held = best.get(row.cell);
    if (ratioOf(row) && (!held || ratioOf(row)[0] > ratioOf(held)[0])) best.set(row.cell, row);
  }
  return [...best.values()];
}

/** The cold ones, or all where none is cold: no mean is of both. */
function ofOneKind(rows) {
  const cold = rows.filter((row) => row.inputs !== "warm");
  return cold.length ? cold : rows;
}

function colour(row) {
  return LANGUAGES[row.language] ? `var(--language-${LANGUAGES[row.language].number})` : "var(--muted)";
}

DATA.languages.forEach((language, i) => {
  language.number = i;
  document.documentElement.style.setProperty(`--language-${i}`, `light-dark(${language.light}, ${language.dark})`);
});
