"use strict";
// What was tuned: per problem a picture of every candidate, those without a time at the upper edge, and their table.

const FEW_TUNES = 12;
const TUNE_BAND = 46; // room above the picture for candidates that have no time
let everyTune = false; // was asked for

DATA.tunes.forEach((tune, i) => tune.rows.forEach((row, j) => (row.place = `candidate-${i}-${j}`)));

function buildLandscapes() {
  if (!DATA.tunes.length) return;
  byId("tunes").append(
    html(
      "div",
      { class: "section-head" },
      html("h2", { id: "tunes-title" }, "Tuned"),
      html("p", { class: "words" }, "Every candidate that was tried; what is wrong, or was left out, has no time. Times are as beside the winner."),
      CHOICES.along.length > 0 && choice("along", "Along", "time, fastest first"),
    ),
    html("div", { id: "landscapes" }),
    html("button", {
      type: "button",
      class: "more",
      id: "every-tune",
      hidden: true,
      onclick: () => {
        everyTune = true;
        drawLandscapes();
      },
    }),
  );
}

function drawLandscapes() {
  if (!DATA.tunes.length) return;
  const tunes = DATA.tunes
    .map((tune) => ({ ...tune, all: tune.rows, rows: tune.rows.filter(passes) }))
    .filter((tune) => tune.rows.length);
  const shown = everyTune ? tunes : tunes.slice(0, FEW_TUNES);
  byId("tunes").hidden = !tunes.length;
  byId("every-tune").hidden = shown.length === tunes.length;
  byId("every-tune").textContent = `Show all ${tunes.length} tuned problems`;
  byId("landscapes").replaceChildren(...shown.map(landscapeParts));
  document.querySelectorAll(".landscape .plot").forEach((holder, i) => drawLandscape(holder, shown[i]));
}

function landscapeParts(tune) {
  const run = SEVERAL.run ? DATA.runs[tune.run].id : "";
  const where = [SEVERAL.device && tune.device, run].filter(Boolean).join(" · ");
  return html(
    "section",
    { class: "landscape panel" },
    html("h3", {}, html("b", {}, tune.op), ` ${caseWords(tune.rows[0])}`),
    html("p", { class: "words" }, [winnerWords(tune.all), where].filter(Boolean).join(" · ")),
    html("div", { class: "pair" }, html("div", { class: "plot" }), candidateTable(tune)),
  );
}

function winnerWords(rows) {
  const winner = rows.find((row) => row.rank === 0);
  if (!winner) return "No candidate won.";
  const isReference = winner.gain?.every((end) => end === 1);
  const gain = !winner.gain ? "" : isReference ? ", the reference itself" : `, ${interval(winner.gain)} of the reference`;
  return `${winner.kernel} (${configWords(winner)}) won with ${time(winner.ms)}${gain}.`;
}

function drawLandscape(holder, tune) {
  const timed = tune.rows.filter((row) => row.timed);
  const others = tune.rows.filter((row) => !row.timed);
  const along = tune.fields.includes(state.along) ? state.along : "";
  const places = along ? placesAlong(tune.rows, along) : placesInOrder(timed, others);
  const y = timed.length
    ? spread(
        timed.map((row) => row.ms),
        1.25,
      )
    : [1, 10];
  const made = frame(holder, {
    height: 300 + (others.length ? TUNE_BAND : 0),
    x: places.range,
    y,
    xScale: linearScale,
    top: others.length ? TUNE_BAND : 22,
    label: `Candidates of ${tune.op}, ${along ? `along ${along}` : "fastest first"}`,
    xTicks: places.ticks,
    yTicks: timed.length ? timeTicks(...y) : [],
    xWords: along || "candidates, fastest first",
    yWords: "time",
  });
  if (others.length) drawBand(made);
  const at = (row) => [made.toX(places.of.get(row)), row.timed ? made.toY(row.ms) : TUNE_BAND / 2 - 6];
  made.drawn.append(
    ...tune.rows.flatMap((row) => distinction(row, ...at(row))),
    ...tune.rows.map((row) => candidateMark(row, ...at(row))),
  );
  roving(made.drawn, ".mark");
}

/** Decades are too few where candidates lie within a factor of three. */
function timeTicks(low, high) {
  const inside = ticks(low, high);
  const values = inside.length > 1 ? inside : [0, 1 / 3, 2 / 3, 1].map((part) => low * (high / low) ** part);
  return values.map((value) => [value, time(value, 2)]);
}

/** Timed ones by their time; the others spread over the same width. */
function placesInOrder(timed, others) {
  const of = new Map(timed.map((row, i) => [row, i + 1]));
  const width = Math.max(timed.length, 1);
  others.forEach((row, i) => of.set(row, 0.5 + ((i + 0.5) / others.length) * width));
  const step = Math.max(1, Math.ceil(timed.length / 8));
  const numbers = timed.map((_, i) => i + 1).filter((n) => n === 1 || n % step === 0);
  return { of, range: [0.5, width + 0.5], ticks: numbers.map((n) => [n, String(n)]) };
}

/** A column per value of the field, in it side by side by their times; a config without the field has a column too. */
function placesAlong(rows, field) {
  const groups = new Map();
  for (const row of rows) groups.set(row.fields[field], [...(groups.get(row.fields[field]) ?? []), row]);
  const values = [...groups.keys()].sort((a, b) =>
    a === undefined || b === undefined
      ? (a === undefined) - (b === undefined)
      : String(a).localeCompare(String(b), "en", { numeric: true }),
  );
  const of = new Map();
  values.forEach((value, column) => {
    const members = groups.get(value);
    members.forEach((row, i) => of.set(row, column + ((i + 0.5) / members.length - 0.5) * 0.7));
  });
  const words = values.map((value, column) => [column, value === undefined ? "none" : String(value)]);
  return { of, range: [-0.5, values.length - 0.5], ticks: words };
}

function drawBand({ drawn, box }) {
  const line = TUNE_BAND - 12;
  drawn.append(
    svg("line", { class: "roof copy", x1: box.left, x2: box.right, y1: line, y2: line }),
    svg("text", { class: "tick", x: box.left - 8, y: TUNE_BAND / 2 - 2, "text-anchor": "end" }, "no time"),
  );
}

/** A ring and a word for what must be found at once. */
function distinction(row, x, y) {
  const words = [row.rank === 0 && "winner", row.default && row.timed && "default"].filter(Boolean).join(", ");
  if (!words) return [];
  const ring = { class: row.rank === 0 ? "ring winner" : "ring", cx: x, cy: y, r: 9 };
  return [
    svg("circle", ring),
    svg("text", { class: "roof-words ring-words", x, y: y - 13, "text-anchor": "middle" }, words),
  ];
}

function candidateMark(row, x, y) {
  const failed = row.status === "fail";
  const drawn = svg("path", {
    class: failed ? "mark failed" : row.timed ? "mark" : "mark peer",
    d: failed ? "M-4,-4L4,4M-4,4L4,-4" : markerPath(row.language, row.timed ? 4.5 : 3.5),
    transform: `translate(${x.toFixed(1)},${y.toFixed(1)})`,
    style: { color: colour(row) },
    role: "img",
    "aria-label": candidateWords(row).filter(Boolean).join(", "),
  });
  return explained(drawn, () => candidateWords(row), row, showCandidate);
}

function candidateWords(row) {
  return [
    row.kernel,
    configWords(row),
    row.timed && time(row.ms),
    row.gain && `${interval(row.gain)} of the reference`,
    row.rank === 0 && "the winner",
    row.default && "its kernel's default",
    !row.timed && row.status,
    row.reason,
  ];
}
