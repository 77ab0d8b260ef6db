"use strict";
// The table beside a picture of candidates.

const FEW_CANDIDATES = 10;
const shownCandidates = new Set(); // problems whose every candidate was asked for

function candidateTable(tune) {
  const key = tune.all[0].place;
  const shown = shownCandidates.has(key) ? tune.rows : tune.rows.slice(0, FEW_CANDIDATES);
  const winner = tune.all.find((row) => row.rank === 0);
  const columns = ["", "kernel", "time", "× winner", "config", "error", "regs", "why not"];
  const table = html(
    "table",
    { class: "rows candidates" },
    html("caption", { class: "hidden-words" }, `Candidates of ${tune.op} ${tune.case}`),
    html("thead", {}, html("tr", {}, columns.map((words) => html("th", { scope: "col" }, words)))),
    html("tbody", {}, shown.map((row) => candidateLine(row, winner))),
  );
  const more = () => {
    shownCandidates.add(key);
    drawLandscapes();
    byId(tune.rows[FEW_CANDIDATES].place)?.focus();
  };
  return html(
    "div",
    { class: "candidate-list" },
    html("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "Candidates, scrolls" }, table),
    shown.length < tune.rows.length &&
      html("button", { type: "button", class: "more", onclick: more }, `Show all ${tune.rows.length} candidates`),
  );
}

function candidateLine(row, winner) {
  const marks = [row.rank === 0 && "winner", row.default && "default"].filter(Boolean).join(", ");
  const cells = [
    html("td", { class: "candidate-mark" }, marks),
    html("td", {}, kernelWords(row)),
    html("td", { class: "number" }, row.timed ? time(row.ms) : ""),
    html("td", { class: "number" }, row.timed && winner?.timed ? times(winner.ms / row.ms) : ""),
    html("td", { class: "case" }, configWords(row)),
    html("td", { class: "number" }, exponent(row.error)),
    html("td", { class: "number" }, isNumber(row.registers) ? String(row.registers) : ""),
    html("td", { class: "reason", title: row.reason ?? null }, row.timed ? "" : [statusWords(row), ` ${row.reason ?? ""}`]),
  ];
  return html("tr", { class: row.rank === 0 ? "line chosen" : "line", id: row.place, tabindex: "-1" }, cells);
}

function configWords(row) {
  const words = Object.entries(row.fields).map(([name, value]) => `${name}\u00a0${value}`);
  return words.length ? words.join(" · ") : (row.config ?? "");
}

/** From the picture to the line of its table. */
function showCandidate(row) {
  hideTip();
  if (!byId(row.place)) {
    const tune = DATA.tunes.find((one) => one.rows.includes(row));
    shownCandidates.add(tune.rows[0].place);
    drawLandscapes();
  }
  byId(row.place).scrollIntoView({ block: "nearest" });
  byId(row.place).focus({ preventScroll: true });
}
