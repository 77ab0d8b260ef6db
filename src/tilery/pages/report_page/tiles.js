"use strict";
// The sums of a device. Means, wins and losses are of the best kernel of each case.

function sums(rows) {
  const timed = rows.filter((row) => row.timed && isKernel(row));
  const best = ofOneKind(bestPerCell(timed)).sort((a, b) => ratioOf(b)[0] - ratioOf(a)[0]);
  return {
    kernels: new Set(timed.map((row) => `${row.op} ${row.kernel}`)).size,
    cases: new Set(timed.map((row) => row.cell)).size,
    mean: geometricMean(best.map((row) => ratioOf(row)[0])),
    best: best[0],
    worst: best.at(-1),
    won: best.filter((row) => ratioOf(row)[1] > 1).length,
    compared: best.length,
    failures: rows.filter((row) => row.status === "fail").length,
  };
}

function tile(name, label, value, words, row) {
  const cover = { type: "button", class: "cover", "aria-label": `${label}: open its row`, onclick: () => openRow(row) };
  return html(
    "li",
    { class: `tile ${name}` },
    html("p", { class: "label" }, label),
    html("p", { class: "figure" }, value),
    html("p", { class: "words" }, words),
    row && html("button", cover),
  );
}

function drawTiles(holder, rows) {
  const found = sums(rows);
  const peer = peerName(state.peer);
  const named = (row) => [html("b", {}, row.kernel), ` ${row.op}`, html("br"), caseWords(row)];
  const lost = found.worst && ratioOf(found.worst)[0] < 1;
  holder.replaceChildren(
    ...[
      tile("mean lead", `Best kernel × ${peer}`, found.mean ? times(found.mean) : "–", "geometric mean over cases"),
      tile(
        "won",
        "Cases won",
        found.compared ? percent(found.won / found.compared) : "–",
        `${found.won} of ${found.compared}, interval wholly above 1`,
      ),
      found.best && tile("best", "Best win", times(ratioOf(found.best)[0]), named(found.best), found.best),
      found.worst &&
        tile(
          lost ? "worst lost" : "worst",
          lost ? "Worst loss" : "Least win",
          times(ratioOf(found.worst)[0]),
          named(found.worst),
          found.worst,
        ),
      tile("kernels", "Kernels timed", found.kernels, `on ${count(found.cases, "case")}`),
      tile(
        "cases",
        "Cases",
        found.cases,
        `of ${count(new Set(rows.filter((row) => row.timed).map((row) => row.op)).size, "op")}`,
      ),
      tile(
        found.failures ? "failures lost" : "failures",
        "Failures",
        found.failures,
        found.failures ? "wrong, or did not build" : "all were right",
      ),
    ].filter(Boolean),
  );
}
