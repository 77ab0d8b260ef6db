"use strict";
// Every row; sorted by any column, opened to its details.

const FEW_ROWS = 250;
let everyRow = false; // was asked for

const COLUMNS = [
  { name: "op", words: "op", value: (row) => row.op },
  { name: "case", words: "case", value: (row) => row.case, class: "case" },
  { name: "kernel", words: "kernel", value: (row) => row.kernel, show: kernelWords },
  { name: "status", words: "status", value: (row) => row.status, show: statusWords },
  { name: "ms", words: "time", value: (row) => row.ms, show: (row) => time(row.ms) },
  {
    name: "half",
    words: "± 95 %",
    value: (row) => (row.ms_high - row.ms_low) / 2 / row.ms,
    show: (row, half) => (isNumber(half) ? `${(100 * half).toFixed(1)} %` : ""),
  },
  { name: "gbps", words: "GB/s", value: (row) => row.gbps, show: (row) => digits(row.gbps, 4) },
  { name: "tflops", words: "TFLOP/s", value: (row) => row.tflops, show: (row) => digits(row.tflops) },
  { name: "roof", words: "roof", value: (row) => row.roof, show: (row) => percent(row.roof) },
  { name: "ratio", words: "× peer", value: (row) => ratioOf(row)?.[0], show: (row, ratio) => times(ratio) },
  { name: "error", words: "error", value: (row) => row.error, show: (row) => exponent(row.error) },
  { name: "registers", words: "regs", value: (row) => row.registers },
  { name: "spills", words: "spills", value: (row) => row.spills },
  { name: "shared", words: "shared", value: (row) => row.shared },
  { name: "inputs", words: "inputs", value: (row) => row.inputs, only: () => SEVERAL.inputs },
  { name: "device", words: "device", value: (row) => row.device, only: () => SEVERAL.device },
  { name: "run", words: "run", value: (row) => DATA.runs[row.run].id, only: () => SEVERAL.run },
  { name: "reason", words: "reason", value: (row) => row.reason, class: "reason" },
].filter((column) =>
  column.only ? column.only() : DATA.rows.some((row) => isSaid(column.value(row))) || column.name === "ratio",
);

function isSaid(value) {
  return value !== undefined && value !== null && value !== "";
}

function statusWords(row) {
  return html(
    "span",
    { class: `status ${row.status}` },
    row.status,
    row.arch && row.status === "compiled" ? ` ${row.arch}` : "",
  );
}

function kernelWords(row) {
  const known = LANGUAGES[row.language];
  return [known ? swatch(known) : null, row.kernel];
}

function buildTable() {
  const head = COLUMNS.map((column) =>
    html(
      "th",
      { scope: "col", id: `column-${column.name}`, class: isNumeric(column) ? "number" : null },
      html(
        "button",
        { type: "button", onclick: () => sortBy(column.name) },
        html("span", {}, column.words),
        html("i", { "aria-hidden": "true" }),
      ),
    ),
  );
  const table = html(
    "table",
    { class: "rows", "aria-labelledby": "rows-title" },
    html("thead", {}, html("tr", {}, head)),
    html("tbody", { id: "table-body" }),
  );
  byId("rows").append(
    html(
      "div",
      { class: "section-head" },
      html("h2", { id: "rows-title" }, "Rows"),
      html("p", { class: "words", id: "row-count", role: "status" }),
    ),
    html("div", { class: "scroll tall", tabindex: "0", role: "region", "aria-label": "Table of rows, scrolls" }, table),
    html("button", {
      type: "button",
      class: "more",
      id: "every-row",
      hidden: true,
      onclick: () => {
        everyRow = true;
        drawTable(DATA.rows.filter(passes));
      },
    }),
  );
}

function isNumeric(column) {
  return DATA.rows.some((row) => typeof column.value(row) === "number");
}

function sortBy(name) {
  change({ sort: state.sort === name ? `-${name}` : name });
}

/** What has no value comes last, whichever way. */
function ordered(rows) {
  const falling = state.sort.startsWith("-");
  const column = COLUMNS.find((one) => one.name === state.sort.replace("-", ""));
  if (!column) return rows;
  const known = (value) => isSaid(value) && !Number.isNaN(value);
  const compare = (a, b) =>
    typeof a === "number" ? a - b : String(a).localeCompare(String(b), "en", { numeric: true });
  return rows
    .map((row) => [column.value(row), row])
    .sort(([a], [b]) => {
      if (!known(a) || !known(b)) return known(b) - known(a);
      return falling ? compare(b, a) : compare(a, b);
    })
    .map(([, row]) => row);
}

function drawTable(rows) {
  for (const column of COLUMNS) {
    const way = state.sort === column.name ? "ascending" : state.sort === `-${column.name}` ? "descending" : "none";
    byId(`column-${column.name}`).setAttribute("aria-sort", way);
  }
  byId("column-ratio").querySelector("span").textContent = `× ${peerName(state.peer) || "peer"}`;
  const sorted = ordered(rows);
  const opened = new Set(state.row);
  const shown = everyRow ? sorted : sorted.filter((row, i) => i < FEW_ROWS || opened.has(row.index));
  byId("row-count").textContent =
    rows.length === DATA.rows.length
      ? count(rows.length, "row")
      : `${rows.length} of ${count(DATA.rows.length, "row")}`;
  byId("table-body").replaceChildren(
    ...shown.flatMap((row) => (opened.has(row.index) ? [line(row, true), detailsLine(row)] : [line(row, false)])),
  );
  byId("every-row").hidden = shown.length === sorted.length;
  byId("every-row").textContent = `Show all ${sorted.length} rows`;
}

function line(row, isOpen) {
  const cells = COLUMNS.map((column, i) => {
    const value = column.value(row);
    const words = column.show ? column.show(row, value) : isSaid(value) ? String(value) : "";
    const content = i
      ? words
      : html(
          "button",
          { type: "button", class: "opener", "aria-expanded": String(isOpen), "aria-controls": `details-${row.index}` },
          html("i", { "aria-hidden": "true" }),
          words,
        );
    return html(
      "td",
      {
        class: [isNumeric(column) && "number", column.class].filter(Boolean).join(" ") || null,
        title: column.class ? value : null,
      },
      content,
    );
  });
  const toggled = () => getSelection().isCollapsed && toggle(row);
  return html("tr", { id: `row-${row.index}`, class: `line${isKernel(row) ? "" : " peer"}`, onclick: toggled }, cells);
}

function detailsLine(row) {
  return html(
    "tr",
    { class: "opened", id: `details-${row.index}` },
    html("td", { colspan: COLUMNS.length }, details(row)),
  );
}

/** In place: drawing the table anew would take the focus away. */
function toggle(row) {
  const isOpen = state.row.includes(row.index);
  const own = byId(`row-${row.index}`);
  if (isOpen) byId(`details-${row.index}`).remove();
  else own.after(detailsLine(row));
  own.querySelector(".opener").setAttribute("aria-expanded", String(!isOpen));
  state = { ...state, row: isOpen ? state.row.filter((index) => index !== row.index) : [...state.row, row.index] };
  writeHash();
}

/** From a chart to its row. */
function openRow(row) {
  hideTip();
  if (!state.row.includes(row.index)) change({ row: [...state.row, row.index] });
  const opener = byId(`row-${row.index}`)?.querySelector(".opener");
  opener?.scrollIntoView({
    block: "center",
    behavior: matchMedia("(prefers-reduced-motion: reduce)").matches ? "auto" : "smooth",
  });
  opener?.focus({ preventScroll: true });
}
